"""What an audit finds, and the statistics that judge it: is the engine's output law the target's?

Three parts: greedy texts compared token by token with plain decoding; frequencies of short sampled texts against the
target's exact law; and the same comparison for an engine that is wrong on purpose, which must fail. Knows nothing of
models, engines or Ray: it is given texts, laws and counts.

An *outcome* is what a request of a few tokens came out as: token ids, with `END` behind them where the text ended
before its length; () if the engine failed. A law of outcomes is a tree: the next token's law after every prefix that
is likely enough to be looked behind. What is not looked behind counts as one outcome, whatever follows.

V is the vocabulary.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

END = -1  # in an outcome: the text ended here
_OTHER = -2  # in a cell: one of the unlikely tokens
Outcome = tuple[int, ...]

ALPHA = 1e-5  # chance at most, over a whole audit, that a right engine fails its sampled part; 1e-4 is what is promised
MIN_EXPECTED = 10.0  # cells expected less often are counted together: there G is not chi-square far out in the tail
LOOKBACK = 0.05  # an outcome at least this probable is looked behind
LIKELY = 1e-4  # a token at least this probable is an outcome of its own

# Logits: two tokens closer than this may come out either way. In float32, sums in another order move logits by 1e-5
# to 1e-4. 16-bit logits are moved by a few of their own steps (2^-4 from 8 to 16 in bfloat16) whenever the batch's
# shape chooses another kernel; seen with a real model: differences of up to two steps, at one token in a hundred.
TIES = {"float32": 1e-3, "float16": 0.0625, "bfloat16": 0.5}
# The same as a relative error of one token's probability, root mean square.
NOISE = {"float32": 1e-4, "float16": 0.01, "bfloat16": 0.06}


# --- greedy texts


@dataclass(frozen=True, slots=True)
class Difference:
    """A token of a greedy text that is not the reference's likeliest one behind the same tokens.

    `margin` is by how much the reference's logit of its own choice is above that of the engine's; infinite where
    the reference rules the engine's token out. `END` stands for the end of the text.
    """

    position: int  # generated tokens before it
    expected: int
    got: int
    margin: float


@dataclass(frozen=True, slots=True)
class GreedyText:
    """One document's text under temperature 0. `compared` counts its tokens, an end of text among them."""

    document: str
    task: str
    compared: int
    differences: tuple[Difference, ...]
    error: str | None = None  # the engine could not answer


@dataclass(frozen=True, slots=True)
class GreedyAudit:
    """All texts; differences with a margin of `tie` logits and more are failures."""

    texts: tuple[GreedyText, ...]
    tie: float
    drafted: int
    accepted: int

    @property
    def equal(self) -> int:
        """Texts that plain decoding gives as well, to the last token."""
        return sum(not text.differences and text.error is None for text in self.texts)

    @property
    def rate(self) -> float:
        """The share of tokens that differ."""
        compared = sum(text.compared for text in self.texts)
        return sum(len(text.differences) for text in self.texts) / compared if compared else 0.0

    @property
    def failure(self) -> str | None:
        for text in self.texts:
            where = f"document {text.document}, task {text.task}"
            if text.error is not None:
                return f"greedy: {where}: {text.error}"
            for found in text.differences:
                if not found.margin < self.tie:
                    return (
                        f"greedy: {where}, token {found.position}: {_named(found.got)} where plain decoding has "
                        f"{_named(found.expected)}, {_margin(found.margin)}, which is no near-tie (below {self.tie:g})"
                    )
        return None


# --- laws of short texts


@dataclass(frozen=True)
class NextToken:
    """The next token's law after one prefix.

    Probabilities are those among the tokens that certainly belong to the law. `doubtful` ones lie on the border of
    a filter: whether they belong to it is decided by rounding, and outcomes with them are left out of a test, which
    leaves the others in their proportions.
    """

    likely: Mapping[int, float]  # token or END → probability; all that exceed LIKELY, and END
    rest: float  # probability of all others together
    possible_V: npt.NDArray[np.bool_]  # the tokens that certainly belong to it
    doubtful: frozenset[int] = frozenset()

    def has(self, token: int) -> bool:
        if token == END:
            return END in self.likely
        return 0 <= token < len(self.possible_V) and bool(self.possible_V[token])


Law = Mapping[Outcome, NextToken]  # by prefix; () is there


def behind(law: NextToken, mass: float) -> list[int]:
    """The tokens that are worth looking behind, after a prefix of probability `mass`."""
    return [token for token, p in law.likely.items() if token != END and p * mass >= LOOKBACK]


@dataclass(frozen=True, slots=True)
class LawTest:
    """Counts of outcomes after one prefix, or several together, compared with their law."""

    name: str
    samples: int
    drafted: int
    accepted: int
    doubtful: int  # samples left out: on the border of a filter
    impossible: int  # samples that the law does not have
    cells: int  # outcomes told apart
    statistic: float  # G with Williams' correction, less what the arithmetic's rounding explains
    p_value: float


@dataclass(frozen=True)
class Drawn:
    """What an engine made of many requests with one prefix."""

    outcomes: Counter[Outcome]
    drafted: int
    accepted: int

    def __add__(self, more: Drawn) -> Drawn:
        return Drawn(self.outcomes + more.outcomes, self.drafted + more.drafted, self.accepted + more.accepted)


@dataclass(frozen=True, slots=True)
class LawAudit:
    """Tests of all prefixes, and one of their sum; `threshold` is what each p-value is held against."""

    tests: tuple[LawTest, ...]
    together: LawTest
    threshold: float

    @property
    def worst(self) -> LawTest:
        return min((*self.tests, self.together), key=lambda test: test.p_value)

    @property
    def rejected(self) -> bool:
        """The frequencies are not those of the target's law."""
        return self.worst.p_value < self.threshold


def compare(
    names: Sequence[str], laws: Sequence[Law], drawn: Sequence[Drawn], noise: float, looks: int
) -> LawAudit:
    """Test every prefix's outcomes against its law. `looks` is how often an audit may do so with growing samples."""
    counted = [_count(law, d.outcomes) for law, d in zip(laws, drawn, strict=True)]
    tests = [_test(n, (c,), (d,), noise) for n, c, d in zip(names, counted, drawn, strict=True)]
    return LawAudit(tuple(tests), _test("together", counted, drawn, noise), ALPHA / (looks * (len(tests) + 1)))


@dataclass(frozen=True)
class _Counted:
    """Outcomes in cells: (observed, expected)."""

    cells: list[tuple[int, float]]
    doubtful: int
    impossible: int
    tokens: int  # of the longest outcome: how often rounding had a say


def _count(law: Law, outcomes: Mapping[Outcome, int]) -> _Counted:
    observed: Counter[Outcome] = Counter()
    doubtful = impossible = 0
    for outcome, count in outcomes.items():
        cell = _cell(law, outcome)
        if cell is None:
            doubtful += count
        elif not cell:
            impossible += count
        else:
            observed[cell] += count
    total = observed.total()
    cells = [(observed[cell], total * mass) for cell, mass in _masses(law, (), 1.0)]
    return _Counted(_lumped(cells), doubtful, impossible, max(map(len, law)) + 1)


def _cell(law: Law, outcome: Outcome) -> Outcome | None:
    """Where an outcome is counted; None if it is doubtful, () if it is impossible."""
    prefix: Outcome = ()
    for token in outcome:
        after = law[prefix]
        if token in after.doubtful:
            return None
        if not after.has(token):
            return ()
        if token not in after.likely:
            return (*prefix, _OTHER)
        prefix = (*prefix, token)
        if prefix not in law:
            return prefix
    return prefix


def _masses(law: Law, prefix: Outcome, mass: float) -> Iterable[tuple[Outcome, float]]:
    """Every cell behind a prefix, with its probability; the likelier ones first, so that like stands beside like."""
    after = law[prefix]
    for token, p in sorted(after.likely.items(), key=lambda entry: (-entry[1], entry[0])):
        longer = (*prefix, token)
        yield from _masses(law, longer, mass * p) if longer in law else [(longer, mass * p)]
    yield (*prefix, _OTHER), mass * after.rest


def _lumped(cells: Iterable[tuple[int, float]]) -> list[tuple[int, float]]:
    """Cells that are expected often enough; neighbours among the others are added up until they are."""
    kept, rare = [], (0, 0.0)
    for observed, expected in cells:
        if expected >= MIN_EXPECTED:
            kept.append((observed, expected))
            continue
        rare = rare[0] + observed, rare[1] + expected
        if rare[1] >= MIN_EXPECTED:
            kept.append(rare)
            rare = (0, 0.0)
    if rare[1] > 0 and kept:
        smallest = min(range(len(kept)), key=lambda i: kept[i][1])
        kept[smallest] = kept[smallest][0] + rare[0], kept[smallest][1] + rare[1]
    return kept


def _test(name: str, counted: Sequence[_Counted], drawn: Sequence[Drawn], noise: float) -> LawTest:
    statistic, freedom = 0.0, 0
    for c in counted:
        statistic += max(0.0, g_statistic(c.cells) - c.tokens * noise**2 * sum(o for o, _ in c.cells))
        freedom += max(len(c.cells) - 1, 0)
    impossible = sum(c.impossible for c in counted)
    return LawTest(
        name=name,
        samples=sum(d.outcomes.total() for d in drawn),
        drafted=sum(d.drafted for d in drawn),
        accepted=sum(d.accepted for d in drawn),
        doubtful=sum(c.doubtful for c in counted),
        impossible=impossible,
        cells=sum(len(c.cells) for c in counted),
        statistic=statistic,
        p_value=0.0 if impossible else chi_square_tail(statistic, freedom),
    )


def g_statistic(cells: Sequence[tuple[int, float]]) -> float:
    """2 Σ o ln(o / e) over (observed, expected) cells, with Williams' correction (1976, Biometrika 63, 33 to 37).

    Without the correction G is too large where few are expected, and its p-values too small.
    """
    if len(cells) < 2:
        return 0.0
    raw = 2.0 * sum(observed * math.log(observed / expected) for observed, expected in cells if observed)
    total = sum(expected for _, expected in cells)
    inverse = sum(total / expected for _, expected in cells)
    return max(raw, 0.0) / (1.0 + (inverse - 1.0) / (6.0 * total * (len(cells) - 1)))


def chi_square_tail(statistic: float, freedom: int) -> float:
    """P(X > statistic) for a chi-square variable of whole degrees of freedom: Abramowitz and Stegun 26.4.4, 26.4.5."""
    if freedom < 1 or statistic <= 0:
        return 1.0
    half = statistic / 2.0
    odd = freedom % 2
    first = 0.5 if odd else 0.0
    tail = math.erfc(math.sqrt(half)) if odd else 0.0
    for i in range((freedom - odd) // 2):
        tail += math.exp((i + first) * math.log(half) - half - math.lgamma(i + first + 1.0))
    return min(tail, 1.0)


# --- the whole


@dataclass(frozen=True, slots=True)
class Audit:
    """All that an audit found; `failure` says in one line which part failed."""

    rule: str
    draft: str
    dtype: str
    greedy: GreedyAudit
    sampled: LawAudit
    wrong: LawAudit
    wrong_engine: str  # what is wrong with it
    notes: tuple[str, ...]
    seconds: float

    @property
    def failure(self) -> str | None:
        if self.greedy.failure is not None:
            return self.greedy.failure
        if self.sampled.rejected:
            worst = self.sampled.worst
            return (
                f"sampled law: {worst.name}: p = {worst.p_value:.1e} is below {self.sampled.threshold:.1e}"
                + (f", {worst.impossible} samples that the target never gives" if worst.impossible else "")
            )
        if not self.wrong.rejected:
            return (
                f"no power: an engine that {self.wrong_engine} passed as well, with {self.wrong.together.samples} "
                f"samples ({self.wrong.together.drafted} tokens drafted); this audit proves nothing about sampling"
            )
        return None

    @property
    def passed(self) -> bool:
        return self.failure is None

    def as_json(self) -> dict[str, Any]:
        """Everything, with numbers that JSON has: an infinite margin is null."""
        found: dict[str, Any] = _plain(dataclasses.asdict(self))
        found["greedy"] |= {"documents": len(self.greedy.texts), "equal": self.greedy.equal, "rate": self.greedy.rate}
        found["sampled"]["rejected"] = self.sampled.rejected
        found["wrong"]["rejected"] = self.wrong.rejected
        return {"passed": self.passed, "failure": self.failure, **found}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _named(token: int) -> str:
    return "the end" if token == END else f"token id {token}"


def _margin(margin: float) -> str:
    return f"{margin:.2g} logits below" if math.isfinite(margin) else "which the reference rules out"
