"""Independent references in numpy and float64, written from the formulas with plain loops.

Shares no code with pipeline.speculation, whose tests it serves. It enumerates: where a statistical test would
see a wrong rule by chance, an enumerated law shows it to 1e-12.

Words: a *law* is an array over the vocabulary that sums to 1, a *prefix* a tuple of tokens, a *next law* a
function from a prefix to a law (a model), a *judge* turns blocks into judgements (the rule under test).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

Law = np.ndarray
Prefix = tuple[int, ...]
NextLaw = Callable[[Prefix], Law]
SequenceLaw = dict[Prefix, float]


# ------------------------------------------------------------------------------------------- models and laws


class Tabular:
    """A model whose law after each prefix is random, and depends on the whole prefix and the seed alone.

    `zeros` is the share of tokens that get probability 0 (one always stays); `sharpness` spreads the rest.
    """

    def __init__(self, seed: int, vocabulary: int, zeros: float = 0.0, sharpness: float = 1.0) -> None:
        self.seed, self.vocabulary, self.zeros, self.sharpness = seed, vocabulary, zeros, sharpness
        self._laws: dict[Prefix, Law] = {}

    def __call__(self, prefix: Prefix) -> Law:
        if prefix not in self._laws:
            rng = np.random.default_rng([self.seed, len(prefix), *prefix])
            weights = np.exp(self.sharpness * rng.normal(size=self.vocabulary))
            weights[rng.random(self.vocabulary) < self.zeros] = 0.0
            if not weights.any():
                weights[rng.integers(self.vocabulary)] = 1.0
            self._laws[prefix] = weights / weights.sum()
        return self._laws[prefix]


def one_hot(law: Law) -> Law:
    """The most likely token with certainty; the first of several."""
    hot = np.zeros(len(law))
    hot[int(np.argmax(law))] = 1.0
    return hot


def top(law: Law, m: int) -> Law:
    """The m most likely tokens (earlier ones first among equals), *not* renormalised."""
    order = sorted(range(len(law)), key=lambda token: (-law[token], token))
    kept = np.zeros(len(law))
    for token in order[:m]:
        kept[token] = law[token]
    return kept


def filtered(
    logits: np.ndarray, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Law:
    """Logits to law as transformers orders it: temperature, top-k, top-p, min-p. Temperature 0 is greedy.

    top-k keeps whatever ties with the k-th; top-p drops the least likely tokens while their sum is at most
    1 - top_p; min-p drops what is below min_p times the largest. The most likely token always stays.
    """
    logits = np.asarray(logits, dtype=np.float64)
    if temperature == 0:
        return one_hot(logits)
    scores = logits / temperature
    if 0 < top_k < len(scores):
        scores = np.where(scores < np.sort(scores)[-top_k], -np.inf, scores)
    if top_p < 1.0:
        law, below = softmax(scores), 0.0
        for token in np.argsort(scores, kind="stable")[:-1]:
            below += law[token]
            if below > 1.0 - top_p:
                break
            scores[token] = -np.inf
    if min_p > 0.0:
        law = softmax(scores)
        scores = np.where(law < min_p * law.max(), -np.inf, scores)
    return softmax(scores)


def edited(
    logits: np.ndarray,
    prompt: Sequence[int],
    answer: Sequence[int],
    eos: Sequence[int] = (),
    *,
    logit_bias: Mapping[int, float] | None = None,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    bad_words: Sequence[Sequence[int]] = (),
    min_new_tokens: int = 0,
    ignore_eos: bool = False,
) -> np.ndarray:
    """The logits of one position after every edit, in order; `answer` is all that was generated before it."""
    scores = [float(x) for x in logits]
    text = [*prompt, *answer]
    for token, bias in (logit_bias or {}).items():
        scores[token] += bias
    for token in range(len(scores)):
        if token in text:
            scores[token] *= repetition_penalty if scores[token] < 0 else 1.0 / repetition_penalty
        count = sum(1 for other in answer if other == token)
        scores[token] -= frequency_penalty * count + (presence_penalty if count else 0.0)
    for *head, last in bad_words:
        stands = len(head) <= len(text) and all(text[len(text) - len(head) + i] == x for i, x in enumerate(head))
        if stands and last < len(scores):
            scores[last] = -math.inf
    if len(answer) < min_new_tokens and not ignore_eos:
        for token in eos:
            if token < len(scores):
                scores[token] = -math.inf
    return np.array(scores)


def race(law: Law, uniforms: np.ndarray) -> int:
    """The token whose exponential clock of rate p(x) rings first, one uniform in [0, 1) per token."""
    winner, shortest = -1, math.inf
    for token, (p, u) in enumerate(zip(law, uniforms, strict=True)):
        if p > 0 and (winner < 0 or -math.log1p(-u) / p < shortest):
            winner, shortest = token, -math.log1p(-u) / p
    return winner


def softmax(scores: np.ndarray) -> Law:
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()


# ------------------------------------------------------------------------------------------- plain decoding


def enumerate_law(next_law: NextLaw, length: int) -> SequenceLaw:
    """The law of the first `length` tokens: every sequence of positive probability, with its probability."""
    law: SequenceLaw = {(): 1.0}
    for _ in range(length):
        longer: SequenceLaw = {}
        for prefix, mass in law.items():
            for token, probability in enumerate(next_law(prefix)):
                if probability > 0:
                    longer[(*prefix, token)] = mass * float(probability)
        law = longer
    return law


def greedy(next_law: NextLaw, length: int) -> Prefix:
    """The most likely token again and again."""
    prefix: Prefix = ()
    for _ in range(length):
        prefix = (*prefix, int(np.argmax(next_law(prefix))))
    return prefix


# ---------------------------------------------------------------------------------------- speculative decoding


@dataclass(frozen=True)
class Block:
    """What a rule judges: γ tokens, the laws that are claimed for them, and the target's γ + 1 laws."""

    tokens: Prefix
    drafts: list[Law]
    targets: list[Law]


@dataclass(frozen=True)
class Judgement:
    """What each token's uniform is compared with (γ numbers), and the next token's law after 0 … γ tokens."""

    acceptance: list[float]
    residuals: list[Law]


Judge = Callable[[Sequence[Block]], list[Judgement]]


def judge_by(rule: str) -> Judge:
    """The rule as this module understands it."""
    return lambda blocks: [
        Judgement(
            acceptance(block, rule), [residual(block, kept, rule) for kept in range(len(block.tokens) + 1)]
        )
        for block in blocks
    ]


def acceptance(block: Block, rule: str) -> list[float]:
    """ratio: min(1, p(x) / q(x)). block: h_1 … h_γ (DESIGN section 5)."""
    if rule == "ratio":
        return [
            0.0 if q[x] == 0 else min(1.0, p[x] / q[x])
            for x, q, p in zip(block.tokens, block.drafts, block.targets, strict=False)
        ]
    count = len(block.tokens)
    weights = block_weights(block)
    h = []
    for i in range(1, count):
        surplus = 0.0
        for p, q in zip(block.targets[i], block.drafts[i], strict=True):
            surplus += max(weights[i] * p - q, 0.0)
        total = surplus + 1.0 - weights[i]
        h.append(1.0 if total == 0 else surplus / total)
    return [*h, weights[count]] if count else []


def block_weights(block: Block) -> list[float]:
    """P_0 … P_γ."""
    weights = [1.0]
    for i, x in enumerate(block.tokens):
        q = block.drafts[i][x]
        weights.append(0.0 if q == 0 else min(weights[-1] * block.targets[i][x] / q, 1.0))
    return weights


def residual(block: Block, kept: int, rule: str) -> Law:
    """The next token's law once `kept` tokens are kept."""
    p = np.array(block.targets[kept], dtype=np.float64)
    p = p / p.sum()
    if kept == len(block.tokens):
        return p
    scale = 1.0 if rule == "ratio" else block_weights(block)[kept]
    rest = np.array([max(scale * a - b, 0.0) for a, b in zip(p, block.drafts[kept], strict=True)])
    return rest / rest.sum() if rest.sum() > 0 else p


def kept_law(acceptance: Sequence[float], rule: str) -> list[float]:
    """The probability of keeping 0 … γ tokens."""
    count = len(acceptance)
    if rule == "ratio":
        return [
            math.prod(acceptance[:kept]) * (1.0 - acceptance[kept] if kept < count else 1.0)
            for kept in range(count + 1)
        ]
    return [
        (acceptance[kept - 1] if kept else 1.0) * math.prod(1.0 - a for a in acceptance[kept:])
        for kept in range(count + 1)
    ]


def blocks_after(
    prefix: Prefix, target: NextLaw, draft: NextLaw, claimed: NextLaw, count: int, cut: Callable[[Block], int]
) -> list[tuple[float, Block]]:
    """Every block that `draft` may propose after a prefix, with its probability; each claims `claimed`'s laws.

    `cut` says how many of the tokens are handed in, and may look at them (a correct drafter's must not).
    """
    found: list[tuple[float, Block]] = []
    vocabulary = range(len(target(prefix)))
    for tokens in itertools.product(vocabulary, repeat=count):
        heads = [prefix + tokens[:i] for i in range(count + 1)]
        mass = math.prod(float(draft(head)[token]) for head, token in zip(heads, tokens, strict=False))
        if mass > 0:
            block = Block(tokens, [claimed(head) for head in heads[:-1]], [target(head) for head in heads])
            left = cut(block)
            found.append((mass, Block(tokens[:left], block.drafts[:left], block.targets[: left + 1])))
    return found


def speculative_law(
    target: NextLaw,
    draft: NextLaw,
    plan: Callable[[Prefix], int],
    length: int,
    rule: str,
    judge: Judge,
    claimed: NextLaw | None = None,
    cut: Callable[[Block], int] = lambda block: len(block.tokens),
) -> SequenceLaw:
    """The law of the first `length` tokens of speculative decoding, block after block.

    `plan` says how many tokens are drafted after a prefix. `claimed` is what the proposals say they were drawn
    from (what they were drawn from, unless a test lies).
    """
    law: list[SequenceLaw] = [{} for _ in range(length + 1)]
    law[0][()] = 1.0
    for done in range(length):
        drafted = [
            (prefix, mass * chance, block)
            for prefix, mass in law[done].items()
            for chance, block in blocks_after(prefix, target, draft, claimed or draft, plan(prefix), cut)
        ]
        judgements = judge([block for _, _, block in drafted]) if drafted else []
        for (prefix, mass, block), judgement in zip(drafted, judgements, strict=True):
            for kept, chance in enumerate(kept_law(judgement.acceptance, rule)):
                for token, probability in enumerate(judgement.residuals[kept]):
                    emitted = (prefix + block.tokens[:kept] + (token,))[:length]
                    share = mass * chance * float(probability)
                    if share > 0:
                        law[len(emitted)][emitted] = law[len(emitted)].get(emitted, 0.0) + share
    return law[length]


# ------------------------------------------------------------------------------------------------ comparing


def total_variation(one: Mapping[Prefix, float], other: Mapping[Prefix, float]) -> float:
    """Half the sum of absolute differences: 0 for equal laws, 1 for disjoint ones."""
    return sum(abs(one.get(s, 0.0) - other.get(s, 0.0)) for s in one.keys() | other.keys()) / 2


def g_test(counts: Mapping[Prefix, int], law: Mapping[Prefix, float]) -> float:
    """The p-value of counts under a law: how often the truth would fit as badly.

    Outcomes expected fewer than five times are taken together; one that is impossible makes it 0. The
    chi-square tail is Wilson and Hilferty's (1931), good to a few per cent where a test looks (1e-6 … 0.5).
    """
    total = sum(counts.values())
    if any(count and law.get(outcome, 0.0) <= 0 for outcome, count in counts.items()):
        return 0.0
    cells, rare = [], [0.0, 0.0]
    for outcome, probability in law.items():
        observed, expected = float(counts.get(outcome, 0)), probability * total
        if expected >= 5:
            cells.append((observed, expected))
        else:
            rare = [rare[0] + observed, rare[1] + expected]
    if rare[1] > 0:
        cells.append((rare[0], rare[1]))
    statistic = 2 * sum(observed * math.log(observed / expected) for observed, expected in cells if observed)
    return chi_square_tail(statistic, len(cells) - 1)


def chi_square_tail(statistic: float, freedom: int) -> float:
    """P(X > statistic) for a chi-square variable, by Wilson and Hilferty's cube root."""
    if freedom < 1:
        return 1.0
    spread = 2.0 / (9.0 * freedom)
    normal = ((max(statistic, 0.0) / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)
    return 0.5 * math.erfc(normal / math.sqrt(2))
