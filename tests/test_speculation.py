"""The rules emit the target's law exactly, by enumeration; `verify` decides as `acceptance` and `residual` say."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.messages import Proposal, Verdict
from pipeline.speculation import (
    acceptance,
    draw,
    judge_ratio,
    match,
    race,
    read,
    residual,
    subtract,
    verify,
)
from tests import oracle
from tests.oracle import Block, NextLaw, Prefix, Tabular
from tests.proposals import lay_out, ours

RULES = ["ratio", "block"]
BELOW_ONE = float(np.nextafter(1.0, 0.0))


def normalised(law: np.ndarray) -> np.ndarray:
    return law / law.sum()


def disjoint(next_law: NextLaw, even: bool) -> NextLaw:
    """The law on every other token only."""
    return lambda prefix: normalised(next_law(prefix) * (np.arange(len(next_law(prefix))) % 2 != even) + 0.0)


TARGET, DRAFT = Tabular(1, 4), Tabular(2, 4)
CASES: dict[str, tuple[NextLaw, NextLaw]] = {
    "all tokens possible": (TARGET, DRAFT),
    "far apart": (Tabular(3, 4, sharpness=3.0), Tabular(4, 4, sharpness=3.0)),
    "zeros in both": (Tabular(5, 4, zeros=0.4), Tabular(6, 4, zeros=0.4)),
    "disjoint supports": (disjoint(TARGET, True), disjoint(DRAFT, False)),
    "draft equals target": (TARGET, TARGET),
    "greedy draft": (TARGET, lambda prefix: oracle.one_hot(DRAFT(prefix))),
    "greedy target": (lambda prefix: oracle.one_hot(TARGET(prefix)), DRAFT),
    "both greedy": (
        lambda prefix: oracle.one_hot(TARGET(prefix)),
        lambda prefix: oracle.one_hot(DRAFT(prefix)),
    ),
    **{
        f"draft cut to {m} tokens": (TARGET, lambda p, m=m: normalised(oracle.top(DRAFT(p), m)))
        for m in (1, 2, 3, 4)
    },
}
PLANS: dict[str, Callable[[Prefix], int]] = {
    "always 2": lambda prefix: 2,
    "ragged, 0 to 3": lambda prefix: (1 + 2 * len(prefix) + sum(prefix)) % 4,
    "none": lambda prefix: 0,
}


def random_blocks(seed: int, count: int, vocabulary: int = 5, longest: int = 4) -> list[Block]:
    """Blocks of every length, with zeros in the laws, whose tokens the draft may have drawn."""
    rng = np.random.default_rng(seed)
    blocks = []
    for b in range(count):
        target, draft = (
            Tabular(seed * 1000 + b, vocabulary, 0.2),
            Tabular(seed * 1000 + b + 500, vocabulary, 0.2),
        )
        tokens: Prefix = ()
        for _ in range(b % (longest + 1)):
            tokens = (*tokens, int(rng.choice(vocabulary, p=draft(tokens))))
        heads = [tokens[:i] for i in range(len(tokens) + 1)]
        blocks.append(Block(tokens, [draft(h) for h in heads[:-1]], [target(h) for h in heads]))
    return blocks


def kept_by(rule: str, good: list[bool]) -> int:
    if rule == "ratio":
        return good.index(False) if False in good else len(good)
    return max((i + 1 for i, is_good in enumerate(good) if is_good), default=0)


def one_position(p: list[float], q: list[float], token: int) -> tuple[torch.Tensor, Proposal]:
    """One row with one drafted token; the bonus position has the same law."""
    ids = torch.arange(len(q))[None, None]
    return torch.tensor([[p, p]], dtype=torch.float64), Proposal(
        torch.tensor([[token]]), torch.tensor([1]), ids, torch.tensor([[q]], dtype=torch.float64)
    )


# ---------------------------------------------------------------------------------------------------- the law


@pytest.mark.parametrize("rule", RULES)
def test_worked_example_gives_the_target_law_and_not_that_of_redrawing(rule: str) -> None:
    p, q = [0.6, 0.4], [0.8, 0.2]
    emitted, redrawn = np.zeros(2), np.zeros(2)
    for token in range(2):
        target, proposal = one_position(p, q, token)
        chance = float(acceptance(target, proposal, rule)[0, 0])
        rest = residual(target, proposal, torch.tensor([0]), rule)[0].numpy()
        assert chance == pytest.approx([0.75, 1.0][token], abs=1e-15)
        assert rest == pytest.approx([0.0, 1.0], abs=1e-15)
        for law, after in ((emitted, rest), (redrawn, np.array(p))):
            law[token] += q[token] * chance
            law += q[token] * (1 - chance) * after
    assert emitted == pytest.approx([0.6, 0.4], abs=1e-15)
    assert redrawn == pytest.approx([0.72, 0.28], abs=1e-15)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("plan", PLANS)
def test_emitted_law_is_the_target_law(case: str, plan: str, rule: str) -> None:
    target, draft = CASES[case]
    emitted = oracle.speculative_law(target, draft, PLANS[plan], 3, rule, ours(rule))
    assert oracle.total_variation(emitted, oracle.enumerate_law(target, 3)) < 1e-12


@pytest.mark.parametrize("rule", RULES)
def test_acceptance_and_residual_equal_the_oracle(rule: str) -> None:
    blocks = random_blocks(7, 60)
    for got, expected in zip(ours(rule)(blocks), oracle.judge_by(rule)(blocks), strict=True):
        assert got.acceptance == pytest.approx(expected.acceptance, abs=1e-12)
        assert np.array(got.residuals) == pytest.approx(np.array(expected.residuals), abs=1e-12)


def test_block_keeps_at_least_as_many_tokens_as_ratio_on_average() -> None:
    gains = []
    for seed in range(12):
        target, draft = Tabular(seed, 3), Tabular(seed + 100, 3)
        blocks = oracle.blocks_after((), target, draft, draft, 3, lambda block: 3)
        means = {}
        for rule in RULES:
            judgements = ours(rule)([block for _, block in blocks])
            means[rule] = sum(
                mass * np.dot(range(4), oracle.kept_law(judgement.acceptance, rule))
                for (mass, _), judgement in zip(blocks, judgements, strict=True)
            )
        gains.append(means["block"] - means["ratio"])
    assert min(gains) >= -1e-12
    assert max(gains) > 0.05


@pytest.mark.parametrize("rule", RULES)
def test_a_draft_that_equals_the_target_is_always_accepted(rule: str) -> None:
    """Its law comes in another order and scale, so sums differ by rounding: this must not show."""
    blocks = [Block(b.tokens, b.targets[:-1], b.targets) for b in random_blocks(3, 40)]
    blocks = [b for b in blocks if all(q[x] > 0 for x, q in zip(b.tokens, b.drafts, strict=True))]
    for judgement in ours(rule)(blocks):
        assert judgement.acceptance == pytest.approx([1.0] * len(judgement.acceptance), abs=1e-14)


@pytest.mark.parametrize("rule", RULES)
def test_an_empty_residual_draws_from_the_target_law(rule: str) -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        law = rng.random(7)
        target, proposal = one_position(list(law), list(law * 3.7), 2)
        rest = residual(target, proposal, torch.tensor([0]), rule)[0].numpy()
        assert rest == pytest.approx(law / law.sum(), abs=1e-15)


# -------------------------------------------------------------------------------------------------- decisions


@pytest.mark.parametrize("rule", RULES)
def test_verify_switches_exactly_at_each_cut_point(rule: str) -> None:
    blocks = random_blocks(11, 40)
    target, proposal = lay_out(blocks)
    cuts = acceptance(target, proposal, rule).numpy()
    rng = np.random.default_rng(1)
    switched = 0
    for i in range(cuts.shape[1]):
        uniforms = rng.random((len(blocks), cuts.shape[1] + 1, 2))
        for place, is_below in ((np.nextafter(cuts[:, i], -1), True), (cuts[:, i], False)):
            possible = (place >= 0) & (place < 1)
            uniforms[:, i, 0] = np.where(possible, place, 0.5)
            good = uniforms[:, :-1, 0] < cuts
            assert (good[possible, i] == is_below).all()
            verdict = verify(target, proposal, uniforms, rule)
            expected = [kept_by(rule, list(good[b, : len(block.tokens)])) for b, block in enumerate(blocks)]
            assert verdict.accepted.tolist() == expected
            switched += int(possible.sum())
    assert switched > 100


@pytest.mark.parametrize("rule", RULES)
def test_next_token_switches_exactly_where_the_residual_sums_do(rule: str) -> None:
    blocks = random_blocks(13, 40)
    target, proposal = lay_out(blocks)
    uniforms = np.random.default_rng(2).random((len(blocks), target.shape[1], 2))
    accepted = verify(target, proposal, uniforms, rule).accepted
    law = residual(target, proposal, accepted, rule).numpy()
    sums, rows = np.cumsum(law, axis=1), np.arange(len(blocks))
    for token in range(law.shape[1]):
        for point in (np.nextafter(sums[:, token], 0), sums[:, token]):
            point = np.minimum(point, BELOW_ONE)
            uniforms[rows, accepted.numpy(), 1] = point
            verdict = verify(target, proposal, uniforms, rule)
            assert verdict.accepted.tolist() == accepted.tolist()
            expected = [
                next((t for t in range(law.shape[1]) if law[b, t] > 0 and sums[b, t] > point[b]), None)
                for b in rows
            ]
            last = [int(np.flatnonzero(row)[-1]) for row in law]
            expected = [e if e is not None else last[b] for b, e in enumerate(expected)]
            assert verdict.next_token.tolist() == expected


@pytest.mark.parametrize("rule", RULES)
def test_an_impossible_token_fails_even_at_uniform_zero(rule: str) -> None:
    target, proposal = one_position([0.0, 1.0], [0.5, 0.5], 0)
    verdict = verify(target, proposal, torch.zeros(1, 2, 2), rule)
    assert (verdict.accepted.tolist(), verdict.next_token.tolist()) == ([0], [1])


@pytest.mark.parametrize("rule", RULES)
def test_a_token_outside_its_own_law_is_never_accepted(rule: str) -> None:
    target, proposal = one_position([0.5, 0.5], [1.0, 0.0], 1)
    assert acceptance(target, proposal, rule).tolist() == [[0.0]]
    pad = Proposal(torch.tensor([[-1]]), proposal.lengths, torch.tensor([[[0, -1]]]), torch.ones(1, 1, 2))
    assert acceptance(target, pad, rule).tolist() == [[0.0]]


def test_match_keeps_tokens_while_they_equal_the_targets_own() -> None:
    tokens = np.array([[5, 6, 7], [5, 6, 7], [5, 6, 7], [5, 6, -1], [-1, -1, -1], [5, 9, 7]])
    lengths = np.array([3, 3, 2, 2, 0, 3])
    own = torch.tensor(
        [[5, 6, 7, 8], [5, 0, 7, 8], [5, 6, 7, 8], [5, 6, -1, -1], [-1, -1, -1, -1], [1, 9, 7, 8]]
    )
    proposal = Proposal(tokens, lengths, tokens[..., None], np.ones((6, 3, 1)))
    verdict = match(own, proposal)
    assert verdict.accepted.tolist() == [3, 1, 2, 2, 0, 0]
    assert verdict.next_token.tolist() == [8, 0, 7, -1, -1, 1]
    nothing = Proposal(tokens[:, :0], lengths * 0, tokens[:, :0, None], np.ones((6, 0, 1)))
    assert match(own[:, :1], nothing).next_token.tolist() == own[:, 0].tolist()


@pytest.mark.parametrize("rule", ["coupled", "", "Ratio"])
def test_an_unknown_rule_is_refused_with_the_known_ones(rule: str) -> None:
    target, proposal = one_position([0.5, 0.5], [0.5, 0.5], 1)
    calls = [
        lambda: verify(target, proposal, torch.zeros(1, 2, 2), rule),
        lambda: acceptance(target, proposal, rule),
        lambda: residual(target, proposal, torch.tensor([0]), rule),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"'ratio' or 'block'"):
            call()


def test_a_residual_after_more_tokens_than_were_drafted_is_refused() -> None:
    target, proposal = one_position([0.5, 0.5], [0.5, 0.5], 1)
    with pytest.raises(ValueError, match="not within lengths"):
        residual(target, proposal, torch.tensor([2]), "ratio")


# ------------------------------------------------------------------------------------------ shapes and numbers


def same(one: Verdict, other: Verdict) -> bool:
    return bool(torch.equal(one.accepted, other.accepted) and torch.equal(one.next_token, other.next_token))


@pytest.mark.parametrize("rule", RULES)
def test_each_row_gets_what_it_gets_alone_without_its_padding(rule: str) -> None:
    blocks = random_blocks(17, 30)
    target, proposal = lay_out(blocks, extra=3)
    uniforms = np.random.default_rng(3).random((len(blocks), target.shape[1], 2))
    for b, block in enumerate(blocks):
        uniforms[b, len(block.tokens) + 1 :] = np.nan
    together = verify(target, proposal, uniforms, rule)
    for b, block in enumerate(blocks):
        count = len(block.tokens)
        alone, law = lay_out([block], seed=b, extra=0)
        verdict = verify(alone, law, uniforms[b : b + 1, : count + 1], rule)
        assert verdict.accepted.tolist() == together.accepted[b : b + 1].tolist()
        assert verdict.next_token.tolist() == together.next_token[b : b + 1].tolist()


@pytest.mark.parametrize("rule", RULES)
def test_a_row_with_a_law_that_is_not_finite_leaves_its_neighbours_alone(rule: str) -> None:
    blocks = random_blocks(19, 20)
    target, proposal = lay_out(blocks)
    uniforms = np.random.default_rng(4).random((len(blocks), target.shape[1], 2))
    sound = verify(target, proposal, uniforms, rule)
    for junk in (np.nan, np.inf, 0.0):
        broken = target.clone()
        broken[[3, 9]] = junk
        verdict = verify(broken, proposal, uniforms, rule)
        assert verdict.next_token[[3, 9]].tolist() == [-1, -1]
        others = [b for b in range(len(blocks)) if b not in (3, 9)]
        assert verdict.accepted[others].tolist() == sound.accepted[others].tolist()
        assert verdict.next_token[others].tolist() == sound.next_token[others].tolist()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_any_float_type_is_judged_by_its_own_numbers_in_float64(rule: str, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(5)
    target = torch.from_numpy(rng.random((6, 4, 9))).to(dtype)
    probs = torch.from_numpy(rng.random((6, 3, 9))).to(dtype)
    ids = torch.arange(9, dtype=torch.int32).expand(6, 3, 9)
    tokens = torch.from_numpy(rng.integers(0, 9, (6, 3)))
    proposal = Proposal(tokens, torch.tensor([3, 2, 1, 0, 3, 3]), ids, probs)
    exact = Proposal(tokens, proposal.lengths, ids, probs.double())
    uniforms = torch.from_numpy(rng.random((6, 4, 2)))
    assert torch.equal(acceptance(target, proposal, rule), acceptance(target.double(), exact, rule))
    verdict = verify(target, proposal, uniforms, rule)
    assert same(verdict, verify(target.double(), exact, uniforms, rule))
    assert acceptance(target, proposal, rule).dtype == torch.float64
    assert verdict.accepted.dtype == verdict.next_token.dtype == torch.int64


def test_numpy_and_torch_proposals_are_the_same_even_read_only() -> None:
    target, proposal = lay_out(random_blocks(23, 20))
    arrays = (proposal.tokens, proposal.lengths, proposal.support_ids, proposal.support_probs)
    as_torch = Proposal(*(torch.from_numpy(array.copy()) for array in arrays))
    uniforms = np.random.default_rng(6).random((20, target.shape[1], 2))
    for array in (*arrays, uniforms):
        array.setflags(write=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        verdict = verify(target, proposal, uniforms)
    assert same(verdict, verify(target, as_torch, torch.from_numpy(uniforms.copy())))
    backwards = Proposal(*(np.flip(np.flip(array).copy()) for array in arrays))
    assert same(verdict, verify(target, backwards, np.asfortranarray(uniforms)))


def test_inputs_are_left_as_they_were() -> None:
    target, proposal = lay_out(random_blocks(29, 20))
    before = [target.clone(), *(np.array(getattr(proposal, name)) for name in Proposal.__slots__)]
    for rule in RULES:
        verify(target, proposal, np.full((20, target.shape[1], 2), 0.9), rule)
    after = [target, *(getattr(proposal, name) for name in Proposal.__slots__)]
    for one, other in zip(before, after, strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("rows", [0, 2])
def test_nothing_proposed_draws_from_the_target_law(rule: str, rows: int) -> None:
    target = torch.tensor([[[0.0, 1.0, 3.0]]], dtype=torch.float64).expand(rows, 1, 3)
    for size in (0, 1):
        empty = Proposal(
            np.zeros((rows, 0), int),
            np.zeros(rows, int),
            np.zeros((rows, 0, size), int),
            np.zeros((rows, 0, size)),
        )
        verdict = verify(target, empty, torch.full((rows, 1, 2), 0.2), rule)
        assert verdict.accepted.tolist() == [0] * rows
        assert verdict.next_token.tolist() == [1] * rows
        assert acceptance(target, empty, rule).shape == (rows, 0)
        assert residual(target, empty, np.zeros(rows, int), rule).tolist() == [[0.0, 0.25, 0.75]] * rows


@pytest.mark.parametrize("rule", RULES)
def test_an_id_that_occurs_twice_in_a_support_counts_with_its_sum(rule: str) -> None:
    rng = np.random.default_rng(8)
    target = torch.from_numpy(rng.random((5, 3, 4)))
    tokens, lengths = rng.integers(0, 4, (5, 2)), np.array([2, 2, 2, 1, 0])
    ids, probs = np.tile(np.arange(4), (5, 2, 1)), rng.random((5, 2, 4))
    once = Proposal(tokens, lengths, ids, probs)
    share = rng.random((5, 2, 4))
    twice = Proposal(
        tokens,
        lengths,
        np.concatenate([ids, ids], -1),
        np.concatenate([probs * share, probs * (1 - share)], -1),
    )
    np.testing.assert_allclose(
        acceptance(target, once, rule), acceptance(target, twice, rule), atol=1e-14, rtol=0
    )
    for kept in (0, 1, 2):
        laws = [residual(target, proposal, np.minimum(kept, lengths), rule) for proposal in (once, twice)]
        np.testing.assert_allclose(*laws, atol=1e-13, rtol=0)


@pytest.mark.parametrize("rule", RULES)
def test_an_id_beyond_the_targets_vocabulary_has_no_target_probability(rule: str) -> None:
    """A draft whose embedding matrix is padded further: the mass counts in its law, the token never passes."""
    target = torch.tensor([[[0.5, 0.5, 0.0], [0.5, 0.5, 0.0]]], dtype=torch.float64)
    wide = torch.nn.functional.pad(target, (0, 7))
    for token in (1, 9):
        proposal = Proposal(
            torch.tensor([[token]]),
            torch.tensor([1]),
            torch.tensor([[[1, 9]]]),
            torch.tensor([[[0.75, 0.25]]]),
        )
        np.testing.assert_allclose(
            acceptance(target, proposal, rule), acceptance(wide, proposal, rule), atol=1e-15
        )
        got = residual(target, proposal, [0], rule)
        np.testing.assert_allclose(got, residual(wide, proposal, [0], rule)[:, :3], atol=1e-15)
        assert got.tolist() == [[1.0, 0.0, 0.0]]


def test_judging_in_pieces_equals_verify() -> None:
    blocks = random_blocks(31, 60)
    target, proposal = lay_out(blocks)
    uniforms = torch.from_numpy(np.random.default_rng(9).random((60, target.shape[1], 2)))
    drafted, rows = read(proposal, target.device), torch.arange(60)
    whole = target / target.sum(-1, keepdim=True)
    chosen = whole[:, :-1].gather(-1, drafted.tokens_BK.clamp(min=0)[..., None])[..., 0]
    accepted = judge_ratio(chosen, drafted.chosen_BK, drafted.lengths_B, uniforms[:, :-1, 0])
    law = subtract(whole[rows, accepted], drafted.ids_BKM[rows, accepted], drafted.probs_BKM[rows, accepted])
    pieces = Verdict(accepted, draw(law, uniforms[rows, accepted, 1]))
    assert same(pieces, verify(target, proposal, uniforms, "ratio"))


# ---------------------------------------------------------------------------------------------------- drawing


@pytest.mark.parametrize("width", [1, 5, 127, 128, 129, 1000, 4096])
def test_drawing_is_the_inverse_of_the_running_sum(width: int) -> None:
    rng = np.random.default_rng(width)
    law = rng.random((300, width)) * (rng.random((300, width)) < 0.5)
    law[:, rng.integers(width)] += 0.1
    points = rng.random(300)
    sums = np.cumsum(law / law.sum(1, keepdims=True), axis=1)
    expected = [int(np.searchsorted(sums[b], points[b], side="right")) for b in range(300)]
    assert draw(torch.from_numpy(law), torch.from_numpy(points)).tolist() == expected


@pytest.mark.parametrize("width", [3, 128, 300, 1000])
@pytest.mark.parametrize("scale", [1.0, 1e-300, 1e300, 1 / 3])
def test_drawing_never_lands_on_probability_zero(width: int, scale: float) -> None:
    first, last = width // 3, 2 * width // 3
    law = torch.zeros(2, width, dtype=torch.float64)
    law[:, first], law[:, last] = 0.1 * scale, 0.7 * scale
    ends = torch.tensor([0.0, BELOW_ONE], dtype=torch.float64)
    assert draw(law, ends).tolist() == [first, last]
    alone = torch.zeros(2, width, dtype=torch.float64)
    alone[:, last] = scale
    assert draw(alone, ends).tolist() == [last, last]


def test_drawing_at_the_very_end_survives_sums_that_fall_short_of_one() -> None:
    """Ten times 0.1 sums to less than 1: the point lies beyond the last sum."""
    law = torch.zeros(1, 12, dtype=torch.float64)
    law[0, :10] = 0.1
    assert draw(law, torch.tensor([BELOW_ONE], dtype=torch.float64)).tolist() == [9]
    thirds = torch.zeros(1, 40_000, dtype=torch.float64)
    thirds[0, 5:30_001] = 1 / 3
    assert draw(thirds, torch.tensor([BELOW_ONE], dtype=torch.float64)).tolist() == [30_000]


def test_a_law_without_finite_mass_draws_minus_one() -> None:
    law = torch.tensor([[0.0, 0.0], [np.nan, 1.0], [np.inf, 1.0], [0.0, 2.0]], dtype=torch.float64)
    assert draw(law, torch.full((4,), 0.5)).tolist() == [-1, -1, -1, 1]


# ----------------------------------------------------------------------------------------------------- racing


def raced(laws: np.ndarray, numbers: np.ndarray) -> list[int]:
    """One race per row of `numbers` over all tokens of the laws."""
    law_BV = torch.as_tensor(np.broadcast_to(laws, numbers.shape).copy())
    ids_BV = torch.arange(numbers.shape[1]).expand(numbers.shape)
    return race(ids_BV, law_BV.log(), torch.as_tensor(numbers)).tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "law",
    [[0.6, 0.4], [0.05, 0.0, 0.5, 0.15, 0.3, 0.0], [0.9989, 0.001, 0.0001], [1 / 40] * 40],
)
def test_races_are_won_as_often_as_the_law_says(law: list[float]) -> None:
    count = 40_000
    tokens = raced(np.array(law), np.random.default_rng(len(law)).random((count, len(law))))
    counts = {(t,): int(n) for t, n in enumerate(np.bincount(tokens, minlength=len(law))) if n}
    assert oracle.g_test(counts, {(t,): p for t, p in enumerate(law)}) > 1e-3
    wrong = normalised(np.array(law) + np.eye(len(law))[-1] * 0.03)
    assert oracle.g_test(counts, {(t,): float(p) for t, p in enumerate(wrong)}) < 1e-3


def test_races_are_the_oracles_clocks() -> None:
    rng = np.random.default_rng(3)
    laws = np.stack([Tabular(seed, 30, zeros=0.5, sharpness=3.0)(()) for seed in range(200)])
    numbers = rng.random(laws.shape)
    assert raced(laws, numbers) == [oracle.race(law, u) for law, u in zip(laws, numbers, strict=True)]


@pytest.mark.parametrize("ends", [[0.0, 0.0], [BELOW_ONE, BELOW_ONE], [0.0, BELOW_ONE], [2.0**-53, 0.0]])
def test_race_is_harmless_at_the_ends_of_the_uniforms(ends: list[float]) -> None:
    """Whatever numbers fall to whom, an impossible token never wins; equal numbers favour the likelier token."""
    rng = np.random.default_rng(0)
    for law in ([0.0, 0.3, 0.0, 0.7, 0.0], [0.0, 0.0, 0.0, 1.0, 0.0], [0.0, 1e-300, 0.0, 1.0, 0.0]):
        tokens = raced(np.array(law), rng.choice(ends, (300, 5)))
        assert set(tokens) <= set(np.flatnonzero(law).tolist())
    for u in (0.0, BELOW_ONE):
        assert raced(np.array([0.0, 0.3, 0.0, 0.7]), np.full((1, 4), u)) == [3]
    assert raced(np.array([1e-3, 1 - 1e-3]), np.array([[0.0, BELOW_ONE]])) == [0]
    assert raced(np.array([0.0, 1.0]), np.array([[0.0, BELOW_ONE]])) == [1]


def test_race_looks_at_numbers_of_one_step_of_53_bits() -> None:
    """The smallest uniforms decide: neighbours there are told apart, so that V = 151,936 has no ties."""
    law = np.full(4, 0.25)
    assert raced(law, np.array([[3, 2, 1, 2]]) * 2.0**-53) == [2]
    assert raced(law, np.array([[1, 1, 0, 1]]) * 2.0**-53) == [2]
    assert raced(law, 0.75 + np.array([[3, 2, 1, 2]]) * 2.0**-50) == [2]


def test_race_over_the_support_is_that_over_the_whole_law_in_any_order() -> None:
    rng = np.random.default_rng(5)
    for seed in range(100):
        law, numbers = Tabular(seed, 50, zeros=0.7)(()), rng.random((1, 50))
        support = rng.permutation(np.flatnonzero(law))
        padded = np.concatenate([support, [-1, -1]])
        logs = np.concatenate([np.log(law[support]), [-np.inf, -np.inf]])
        some = race(*(torch.as_tensor(x)[None] for x in (padded, logs, np.append(numbers[0, support], [0.0, 0.0]))))
        assert some.tolist() == raced(law, numbers)


@pytest.mark.parametrize("noise", [0.02, 0.1, 0.5])
def test_close_laws_that_race_with_the_same_numbers_agree_often(noise: float) -> None:
    """At least (1 - d) / (1 + d) of the time for laws at total variation d (Daliri et al. 2024, theorem 1)."""
    rng = np.random.default_rng(1)
    p = Tabular(1, 20, sharpness=1.5)(())
    q = normalised(p * np.exp(noise * rng.normal(size=20)))
    numbers, others = rng.random((20_000, 20)), rng.random((20_000, 20))
    d = float(np.abs(p - q).sum() / 2)
    agree = np.mean(np.array(raced(p, numbers)) == raced(q, numbers))
    assert agree > (1 - d) / (1 + d) - 0.01
    assert agree > np.mean(np.array(raced(p, numbers)) == raced(q, others)) + 0.2


def test_race_of_a_row_without_a_law_leaves_its_neighbours_alone() -> None:
    laws = np.array([[0.2, 0.8], [np.nan, np.nan], [0.0, 0.0], [0.2, 0.8]])
    numbers = np.array([[0.1, 0.1], [0.1, 0.1], [0.1, 0.1], [0.0, 0.9]])
    tokens = raced(laws, numbers)
    assert (tokens[0], tokens[3]) == (1, 0)
    assert all(0 <= token < 2 for token in tokens)


# ------------------------------------------------------------------------------------------------- properties

weights = st.lists(
    st.one_of(st.just(0.0), st.floats(0, 1), st.sampled_from([1e-300, 1e-17, 1e-9, 0.5, 1.0])),
    min_size=4,
    max_size=4,
).filter(lambda values: sum(values) > 1e-3)
points = st.one_of(st.sampled_from([0.0, BELOW_ONE]), st.floats(0, 1, exclude_max=True))


@settings(max_examples=80, deadline=None, derandomize=True)
@given(p=weights, q=weights, rule=st.sampled_from(RULES))
def test_one_drafted_token_leaves_the_target_law_whatever_the_laws(
    p: list[float], q: list[float], rule: str
) -> None:
    draft = np.array(q) / sum(q)
    emitted = np.zeros(4)
    for token in np.flatnonzero(draft):
        target, proposal = one_position(p, q, int(token))
        chance = float(acceptance(target, proposal, rule)[0, 0])
        assert 0.0 <= chance <= 1.0
        rest = residual(target, proposal, torch.tensor([0]), rule)[0].numpy()
        assert rest.sum() == pytest.approx(1.0, abs=1e-12)
        emitted[token] += draft[token] * chance
        emitted += draft[token] * (1 - chance) * rest
    assert emitted == pytest.approx(np.array(p) / sum(p), abs=1e-12)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    laws=st.lists(st.tuples(weights, weights, st.integers(0, 3)), min_size=0, max_size=4),
    bonus=weights,
    numbers=st.lists(st.tuples(points, points), min_size=5, max_size=5),
    rule=st.sampled_from(RULES),
)
def test_every_emitted_token_is_possible_and_follows_from_the_cuts(
    laws: list[tuple[list[float], list[float], int]],
    bonus: list[float],
    numbers: list[tuple[float, float]],
    rule: str,
) -> None:
    targets = [normalised(np.array(p)) for p, _, _ in laws] + [normalised(np.array(bonus))]
    block = Block(tuple(x for _, _, x in laws), [normalised(np.array(q)) for _, q, _ in laws], targets)
    target, proposal = lay_out([block], extra=1)
    uniforms = np.array([[*numbers, (0.0, 0.0)]])[:, : target.shape[1]]
    verdict = verify(target, proposal, uniforms, rule)
    kept, token = int(verdict.accepted), int(verdict.next_token)
    cuts = acceptance(target, proposal, rule)[0].numpy()
    assert kept == kept_by(rule, list(uniforms[0, : len(laws), 0] < cuts[: len(laws)]))
    assert all(targets[i][block.tokens[i]] > 0 for i in range(kept))
    assert residual(target, proposal, verdict.accepted, rule)[0, token] > 0
    assert targets[kept][token] > 0
