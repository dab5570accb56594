"""Laws from logits, against the oracle's filters; and what is drawn from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline import speculation
from pipeline.engine.laws import (
    CANDIDATES,
    MORE_CANDIDATES,
    SMALL_VOCABULARY,
    Decoding,
    Filters,
    Laws,
    raw_log_probabilities,
)
from pipeline.records import SamplingParams
from tests import oracle

LARGE = SMALL_VOCABULARY + 100
FILTERS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.3},
    {"temperature": 2.5},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.0, "top_k": 3},
    {"temperature": 1.0, "top_k": 10**6},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 1.0, "top_p": 0.05},
    {"temperature": 0.7, "top_k": 4, "top_p": 0.6},
    {"temperature": 1.4, "top_k": 40, "top_p": 0.95},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.02},
]


def laws_of(logits: Any, filters: Sequence[dict[str, Any]]) -> Laws:
    params = [SamplingParams(1, **f) for f in filters]
    return Laws(torch.as_tensor(np.asarray(logits), dtype=torch.float32), Decoding.of(params))


def whole(laws: Laws) -> np.ndarray:
    return laws.whole(torch.arange(len(laws.logits_RV))).numpy()


def logits_of(rows: int, vocabulary: int, seed: int = 0, spread: float = 2.0) -> np.ndarray:
    return (spread * np.random.default_rng(seed).normal(size=(rows, vocabulary))).astype(np.float32)


# against the oracle


@pytest.mark.parametrize(("vocabulary", "tolerance"), [(2, 1e-12), (7, 1e-12), (300, 1e-12), (LARGE, 1e-5)])
def test_laws_are_the_oracles(vocabulary: int, tolerance: float) -> None:
    """Every row has parameters of its own; large vocabularies are worked through a few rows at a time."""
    filters = FILTERS * 2
    logits = logits_of(len(filters), vocabulary, seed=vocabulary)
    ours = whole(laws_of(logits, filters))
    for row, f in enumerate(filters):
        expected = oracle.filtered(logits[row], **f)
        assert np.abs(ours[row] - expected).max() < tolerance, f
        assert ((ours[row] > 0) == (expected > 0)).all(), f


@pytest.mark.parametrize("vocabulary", [7, LARGE])
def test_row_does_not_depend_on_its_neighbours(vocabulary: int) -> None:
    logits = logits_of(len(FILTERS), vocabulary)
    together = whole(laws_of(logits, FILTERS))
    for row, f in enumerate(FILTERS):
        assert (whole(laws_of(logits[row : row + 1], [f]))[0] == together[row]).all()


@pytest.mark.parametrize("vocabulary", [900, LARGE])
@pytest.mark.parametrize(
    "filters", [{"top_p": 0.97}, {"top_k": 600}, {"top_k": CANDIDATES}, {"top_k": 500, "top_p": 0.9}, {"top_p": 0.4}]
)
def test_nucleus_larger_than_the_candidates(vocabulary: int, filters: dict[str, Any]) -> None:
    logits = logits_of(1, vocabulary, seed=3, spread=0.3)
    [law] = whole(laws_of(logits, [{"temperature": 1.0, **filters}]))
    expected = oracle.filtered(logits[0], **filters)
    assert (expected > 0).sum() >= min(CANDIDATES, filters.get("top_k", vocabulary))
    assert np.abs(law - expected).max() < 1e-7
    assert ((law > 0) == (expected > 0)).all()


@pytest.mark.parametrize("count", [CANDIDATES - 1, CANDIDATES, CANDIDATES + 1])
def test_nucleus_of_about_as_many_tokens_as_are_looked_at(count: int) -> None:
    logits = np.full((1, 1000), -30.0) - np.arange(1000) / 100
    logits[0, :count] = -np.arange(count) / 1000
    expected = (oracle.filtered(logits[0], top_p=0.9999) > 0).sum()
    assert expected == count
    for f in ({"top_p": 0.9999}, {"top_k": count}):
        assert (whole(laws_of(logits, [{"temperature": 1.0, **f}])) > 0).sum() == count


def kept_with_ties(logits: np.ndarray, top_k: int = 0, top_p: float = 1.0) -> np.ndarray:
    """The rule for equal logits: whatever ties with the last one that a filter keeps is kept."""
    law = oracle.softmax(logits.astype(np.float64))
    if 0 < top_k < len(law):
        law = np.where(logits >= np.sort(logits)[-top_k], law, 0)
        law /= law.sum()
    if top_p < 1:
        ahead, last = 0.0, logits.max()
        for x in sorted(set(logits[law > 0].tolist()), reverse=True):
            if ahead >= top_p:
                break
            last, ahead = x, ahead + law[logits == x].sum()
        law = np.where(logits >= last, law, 0)
        law /= law.sum()
    return law


@pytest.mark.parametrize("vocabulary", [12, 1000, LARGE])
@pytest.mark.parametrize(
    "filters", [{"top_k": 5}, {"top_k": 50}, {"top_p": 0.3}, {"top_p": 0.85}, {"top_k": 50, "top_p": 0.3}]
)
def test_tokens_that_tie_with_the_last_one_kept_are_kept(vocabulary: int, filters: dict[str, Any]) -> None:
    """Few distinct values, as in bfloat16: ties across every border, that of the candidates among them."""
    rng = np.random.default_rng(vocabulary)
    for values in ([0.0, 5.0], [0.0, 1.0, 2.0, 3.5], np.arange(8) / 2):
        logits = rng.choice(values, vocabulary).astype(np.float32)
        logits[3] = 6.0
        [law] = whole(laws_of(logits[None], [{"temperature": 1.0, **filters}]))
        expected = kept_with_ties(logits, **filters)
        assert ((law > 0) == (expected > 0)).all()
        assert np.abs(law - expected).max() < 1e-5


@pytest.mark.parametrize(("vocabulary", "tolerance"), [(1000, 1e-12), (LARGE, 1e-7)])
def test_one_high_token_before_a_thousand_equal_ones(vocabulary: int, tolerance: float) -> None:
    """Top-k keeps them all, so that the best one's share is small and top-p needs the others too."""
    logits = np.zeros((1, vocabulary), dtype=np.float32)
    logits[0, 7] = 5.0
    [law] = whole(laws_of(logits, [{"temperature": 1.0, "top_k": 50, "top_p": 0.3}]))
    assert np.abs(law - oracle.softmax(logits[0].astype(np.float64))).max() < tolerance


def test_greedy_is_the_first_of_equals() -> None:
    logits = [[1.0, 3.0, 3.0, 0.0], [2.0, 2.0, 2.0, 2.0]]
    laws = laws_of(logits, [{}, {}])
    assert whole(laws).argmax(-1).tolist() == [1, 0]
    ids, probs = laws.top(3)
    assert ids.tolist() == [[1, -1, -1], [0, -1, -1]]
    assert probs.tolist() == [[1, 0, 0], [1, 0, 0]]


@pytest.mark.parametrize("vocabulary", [9, LARGE])
@pytest.mark.parametrize("filters", FILTERS[:1] + FILTERS[4:])
def test_impossible_tokens_stay_impossible(vocabulary: int, filters: dict[str, Any]) -> None:
    logits = logits_of(1, vocabulary)
    logits[0, ::2] = -np.inf
    laws = laws_of(logits, [filters])
    assert laws.finite_R.tolist() == [True]
    [law] = whole(laws)
    assert np.abs(law - oracle.filtered(logits[0], **filters)).max() < 1e-5
    assert law[::2].max() == 0
    u = torch.linspace(0, 1 - 2**-53, 50, dtype=torch.float64)
    assert (drawn(laws, np.zeros(50), u) % 2 == 1).all()


# numbers that are not finite


@pytest.mark.parametrize("vocabulary", [9, LARGE])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, "one nan", "one inf"])
@pytest.mark.parametrize("filters", FILTERS)
def test_row_that_is_not_finite_is_flagged_and_alone_harms_nobody(vocabulary: int, bad: Any, filters: dict) -> None:
    """Alone, so that no neighbour lends it a support; and beside a sound row, which is as it would be alone."""
    logits = logits_of(2, vocabulary)
    if isinstance(bad, str):
        logits[0, 5] = np.nan if bad == "one nan" else np.inf
    else:
        logits[0] = bad
    alone = laws_of(logits[:1], [filters])
    assert alone.finite_R.tolist() == [False]
    [token] = drawn(alone, [0], [0.5])
    assert -1 <= token < vocabulary
    alone.top(3)
    both = laws_of(logits, [filters, filters])
    assert both.finite_R.tolist() == [False, True]
    assert (whole(both)[1] == whole(laws_of(logits[1:], [filters]))[0]).all()
    assert drawn(both, [0, 1], [0.5, 0.5])[1] == drawn(laws_of(logits[1:], [filters]), [0], [0.5])[0]


# asking for less than the whole


@pytest.mark.parametrize("vocabulary", [9, LARGE])
def test_probability_of_single_tokens(vocabulary: int) -> None:
    laws = laws_of(logits_of(len(FILTERS), vocabulary), FILTERS)
    rng = np.random.default_rng(1)
    rows = torch.as_tensor(rng.integers(0, len(FILTERS), 500))
    tokens = torch.as_tensor(rng.integers(0, vocabulary, 500))
    expected = torch.as_tensor(whole(laws))[rows, tokens]
    assert (laws.probability(rows, tokens) == expected).all()


def test_probability_of_no_token_is_0() -> None:
    laws = laws_of(logits_of(2, 9), [{}, {"temperature": 1.0}])
    rows, tokens = torch.tensor([0, 1, 0, 1]), torch.tensor([-1, -1, 9, 10**6])
    assert laws.probability(rows, tokens).tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("vocabulary", [9, LARGE])
@pytest.mark.parametrize("size", [1, 4, 64, 10**5])
def test_top_is_the_likeliest_part_of_the_law(vocabulary: int, size: int) -> None:
    laws = laws_of(logits_of(len(FILTERS), vocabulary), FILTERS)
    ids, probs = (x.numpy() for x in laws.top(size))
    assert ids.shape == probs.shape == (len(FILTERS), min(size, vocabulary))
    assert probs.dtype == np.float32
    for row, law in enumerate(whole(laws)):
        expected = oracle.top(law, size)
        given = np.zeros(vocabulary)
        kept = ids[row] >= 0
        assert (probs[row][kept] > 0).all()
        assert (probs[row][~kept] == 0).all()
        given[ids[row][kept]] = probs[row][kept]
        assert np.abs(given - expected).max() < 1e-7
        assert (np.diff(probs[row]) <= 0).all()


# drawing


NOTHING = (np.full(1, -1), np.zeros(1))


def drawn(laws: Laws, rows: Any, uniforms: Any, less: tuple[np.ndarray, np.ndarray] = NOTHING) -> np.ndarray:
    """Tokens at some rows, less a law that is the same for all."""
    rows_n = torch.as_tensor(np.asarray(rows), dtype=torch.int64)
    ids, probs = (torch.as_tensor(np.tile(x, (len(rows_n), 1))) for x in less)
    return laws.draw(rows_n, ids, probs.double(), torch.as_tensor(uniforms, dtype=torch.float64)).numpy()


@pytest.mark.parametrize("vocabulary", [9, 400, LARGE])
def test_drawing_equals_drawing_from_the_whole_residual(vocabulary: int) -> None:
    """With listed supports and without, something subtracted or nothing, all rows mixed in one call."""
    rng = np.random.default_rng(vocabulary)
    laws = laws_of(logits_of(len(FILTERS), vocabulary), FILTERS)
    count = 600
    rows = torch.as_tensor(rng.integers(0, len(FILTERS), count))
    law_nV = laws.whole(rows)
    ids = np.stack([rng.permutation(vocabulary)[:6] for _ in range(count)])
    ids[:, 0] = law_nV.argmax(-1).numpy()  # so that something of the law is taken away
    ids[rng.random(ids.shape) < 0.2] = -1
    probs = np.where(ids >= 0, rng.random(ids.shape), 0.0)
    probs /= np.maximum(probs.sum(-1, keepdims=True), 1e-9)
    uniforms = torch.as_tensor(rng.random(count))
    minus = torch.as_tensor(ids), torch.as_tensor(probs)
    ours = laws.draw(rows, *minus, uniforms)
    expected = speculation.draw(speculation.subtract(law_nV, *minus), uniforms)
    greedy = laws.greedy_R[rows]
    assert (ours[~greedy] == expected[~greedy]).float().mean() > 0.999  # a uniform may fall between two roundings
    assert (ours[greedy] == laws.best_R[rows][greedy]).all()
    assert (law_nV.gather(1, ours[:, None]) > 0).all()


@pytest.mark.parametrize(
    "filters", [{"temperature": 1.0}, {"temperature": 0.8, "top_k": 5}, {"top_p": 0.8, "temperature": 1.0}]
)
def test_drawn_tokens_have_the_frequencies_of_the_law(filters: dict[str, Any]) -> None:
    laws = laws_of(logits_of(1, 12, seed=4).repeat(500, 0), [filters] * 500)  # as many are drawn from at once
    tokens = drawn(laws, np.arange(20_000) % 500, np.random.default_rng(0).random(20_000))
    expected = oracle.filtered(laws.logits_RV[0].numpy(), **filters)
    counts = {(t,): int(n) for t, n in enumerate(np.bincount(tokens, minlength=12)) if n}
    assert oracle.g_test(counts, {(t,): p for t, p in enumerate(expected)}) > 1e-3
    warmer = oracle.filtered(laws.logits_RV[0].numpy(), **{**filters, "temperature": 1.3})
    assert oracle.g_test(counts, {(t,): p for t, p in enumerate(warmer)}) < 1e-9


def test_extreme_uniforms_never_land_on_an_impossible_token() -> None:
    logits = np.full((2, 300), -np.inf)
    logits[:, 100:103] = [0.0, 1.0, 2.0]
    laws = laws_of(logits, [{"temperature": 1.0}, {"temperature": 1.0, "top_k": 2}])
    assert drawn(laws, [0, 0, 1, 1], [0.0, 1 - 2**-53, 0.0, 1 - 2**-53]).tolist() == [100, 102, 101, 102]


def test_law_that_equals_what_is_taken_away_is_drawn_from_itself() -> None:
    laws = laws_of(logits_of(1, 6), [{"temperature": 1.0, "top_k": 3}])
    [law] = whole(laws)
    tokens = drawn(laws, np.zeros(200), np.random.default_rng(0).random(200), (np.arange(6), law))
    assert set(tokens.tolist()) == set(np.flatnonzero(law).tolist())


def test_reading_the_laws_leaves_the_logits_as_they_were() -> None:
    logits = torch.as_tensor(logits_of(3, 9)).double()
    before = logits.clone()
    laws = Laws(logits, Decoding.of([SamplingParams(1, temperature=t, top_k=3) for t in (0.0, 0.5, 1.0)]))
    laws.draw(torch.arange(3), torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1).double(), torch.rand(3).double())
    assert (logits == before).all()


def test_bfloat16_logits_are_read_exactly() -> None:
    logits = torch.as_tensor(logits_of(2, 50)).bfloat16()
    params = [SamplingParams(1, temperature=1.0), SamplingParams(1, temperature=0.0)]
    ours = Laws(logits, Decoding.of(params)).whole(torch.arange(2))
    wide = Laws(logits.double(), Decoding.of(params)).whole(torch.arange(2))
    assert (ours == wide).all()


# temperatures of any size


@pytest.mark.parametrize("vocabulary", [9, 5000])
@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}])
@pytest.mark.parametrize("temperature", [5e-324, 1e-320, 1e-46, 1e-38, 1e-20, 1e-6])
def test_tiny_temperature_shares_all_mass_among_the_largest_logits(
    temperature: float, filters: dict[str, Any], vocabulary: int
) -> None:
    """Nothing overflows, and two equal logits have half of the mass each: a residual needs the very numbers."""
    logits = logits_of(2, vocabulary)
    logits[0, [2, 5]] = logits.max() + 1
    logits[1, 3] = logits.max() + 1
    laws = laws_of(logits, [{"temperature": temperature, **filters}] * 2)
    expected = np.zeros((2, vocabulary))
    expected[0, [2, 5]], expected[1, 3] = 0.5, 1.0
    assert laws.finite_R.all()
    assert np.abs(whole(laws) - expected).max() < 1e-6
    half_of_2 = (np.array([2]), np.array([0.5]))
    assert drawn(laws, [0, 0, 0, 1], [0.0, 0.01, 0.99, 0.3], half_of_2).tolist() == [5, 5, 5, 3]


@pytest.mark.parametrize("vocabulary", [9, 5000])
@pytest.mark.parametrize("temperature", [1e30, 1e39, 1e308])
def test_huge_temperature_is_flat_over_what_is_possible(temperature: float, vocabulary: int) -> None:
    logits = logits_of(2, vocabulary)
    logits[:, 4] = -np.inf
    laws = laws_of(logits, [{"temperature": temperature}, {"temperature": temperature, "top_k": 2}])
    law, best = whole(laws)
    assert laws.finite_R.all()
    assert law == pytest.approx(np.where(np.arange(vocabulary) == 4, 0, 1 / (vocabulary - 1)), rel=1e-5)
    assert best[4] == 0
    assert (best > 0).sum() >= 2
    neighbours = laws_of(logits_of(2, vocabulary), [{"temperature": temperature}, {"temperature": 0.7}])
    assert whole(neighbours)[1] == pytest.approx(oracle.filtered(logits_of(2, vocabulary)[1], 0.7), abs=1e-5)


@pytest.mark.parametrize("temperature", [1e-4, 0.01, 0.7])
def test_equal_logits_share_the_mass_when_float32_scales_them(temperature: float) -> None:
    """Scaled logits in the hundreds of thousands would leave nothing of a normaliser's fraction."""
    logits = torch.as_tensor(logits_of(1, 5000)).bfloat16()
    logits[0, [7, 8, 9]] = 23.0
    laws = Laws(logits, Decoding.of([SamplingParams(1, temperature=temperature)]))
    rows = torch.zeros(1, dtype=torch.int64)
    minus = torch.tensor([[7, 8]]), torch.tensor([[1 / 3, 1 / 3 - 1e-3]]).double()
    tokens = [laws.draw(rows, *minus, torch.tensor([u]).double()).item() for u in (1e-4, 2e-3, 5e-3, 0.99)]
    assert tokens == [8, 8, 9, 9]


# flat laws, whose filters need more than the candidates


FLAT: list[dict[str, Any]] = [
    {"min_p": 0.4},
    {"min_p": 0.7},
    {"min_p": 1.0},
    {"min_p": 0.4, "top_p": 0.7},
    {"min_p": 0.75, "top_k": 3000},
    *({"top_k": k, "top_p": p} for k in (300, 1000, 1023, 1024, 1025, 2000) for p in (0.2, 0.9, 0.999)),
]


@pytest.mark.parametrize("filters", FLAT)
@pytest.mark.parametrize("temperature", [1.0, 1.7])
def test_filters_of_flat_laws_keep_what_the_oracle_keeps(filters: dict[str, Any], temperature: float) -> None:
    logits = logits_of(2, 6000, seed=5, spread=0.2)
    laws = laws_of(logits, [{"temperature": temperature, **filters}] * 2)
    for row, law in enumerate(whole(laws)):
        expected = oracle.filtered(logits[row], temperature, **filters)
        assert ((law > 0) == (expected > 0)).all()
        assert np.abs(law - expected).max() < 1e-7
    if filters == FLAT[0]:
        assert ((whole(laws) > 0).sum(-1) > MORE_CANDIDATES).all()


@pytest.mark.parametrize("border", [CANDIDATES, MORE_CANDIDATES])
@pytest.mark.parametrize("kind", ["top_k", "top_p"])
@pytest.mark.parametrize("reach", [-2, 0, 1, 40])
def test_ties_across_the_candidates_are_kept(border: int, kind: str, reach: int) -> None:
    """Equal logits from three places before the last candidate to `reach` places behind it, around a filter's end."""
    logits = np.linspace(-9, -10, 6000)
    first, last = border - 3, border + reach
    logits[:first] = np.linspace(1, 0.5, first)
    logits[first:last] = 0.0
    ahead = oracle.softmax(logits)[:first].sum()
    filters = {"top_k": first + 1} if kind == "top_k" else {"top_p": float(ahead + 1e-5)}
    order = np.random.default_rng(0).permutation(6000)
    logits = logits[order].astype(np.float32)
    [law] = whole(laws_of(logits[None], [{"temperature": 1.0, **filters}]))
    assert (law > 0).sum() == last
    assert np.abs(law - kept_with_ties(logits, **filters)).max() < 1e-7


def by_sorting(scaled: np.ndarray, top_k: int, top_p: float, min_p: float) -> tuple[np.ndarray, float]:
    """What is kept, and the normaliser, by plain sums in float64 over distinct values, best first."""
    weights, kept = np.exp(scaled), np.ones(len(scaled), dtype=bool)
    if top_k:
        kept = scaled >= np.sort(scaled)[-top_k]
    if top_p < 1:
        _, place = np.unique(-scaled, return_inverse=True)
        mass = np.bincount(place, np.where(kept, weights, 0.0))
        better = np.cumsum(mass) - mass
        kept &= (better < top_p * mass.sum())[place]
    if min_p:
        kept &= scaled >= scaled.max() + np.log(min_p)
    return kept, float(np.log(weights[kept].sum()))


@pytest.mark.parametrize("seed", range(40))
def test_floors_by_buckets_are_those_by_sorting(seed: int) -> None:
    """In float64, so that both add the same numbers; coarse values make ties, some far apart, some impossible."""
    rng = np.random.default_rng(seed)
    size = int(rng.integers(2, 3000))
    scaled = rng.normal(size=size) * rng.choice([1e-9, 0.01, 1.0, 30.0])
    if seed % 2:
        scaled = np.round(scaled * 4) / 4
    scaled[rng.random(size) < 0.1] = -np.inf
    scaled[0] = 0.25
    whole_mass = np.log(np.exp(scaled).sum())
    for _ in range(4):
        top_k = int(rng.choice([0, rng.integers(1, size)]))
        top_p, min_p = float(rng.choice([1.0, rng.uniform(1e-3, 1)])), float(rng.choice([0.0, rng.random()]))
        numbers = (torch.tensor([x], dtype=torch.float64) for x in (whole_mass, top_p, min_p))
        whole_1, top_p_1, min_p_1 = numbers
        filters = Filters(whole_1, torch.tensor([top_k]), top_p_1, min_p_1, size)
        floor, normaliser = filters.reached(torch.tensor(scaled))
        kept, expected = by_sorting(scaled, top_k, top_p, min_p)
        possible = scaled > -np.inf
        assert ((scaled >= floor.item()) & possible).tolist() == (kept & possible).tolist()
        assert normaliser.item() == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("vocabulary", [9, 400, LARGE, 6000])
def test_ids_of_a_law_that_lies_on_few_are_those_with_probability(vocabulary: int) -> None:
    """In ascending order, with the vocabulary's size behind them; a law that is not few has a reason."""
    filters = FILTERS + [{"temperature": 1.0, **f} for f in FLAT]
    laws = laws_of(logits_of(len(filters), vocabulary, spread=1.0), filters)
    for row, law in enumerate(whole(laws)):
        kept = np.flatnonzero(law)
        if laws.few_R[row]:
            listed = laws.ids_RC[row].tolist()
            assert listed == [*kept.tolist(), *[vocabulary] * (len(listed) - len(kept))], filters[row]
        else:
            assert len(kept) in range(CANDIDATES, vocabulary + 1) or laws.greedy_R[row] or len(kept) == vocabulary
    assert laws.few_R.any()


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    vocabulary=st.sampled_from([3, 60, 5000, 5003]),
    temperature=st.sampled_from([0.05, 0.7, 1.0, 1.3, 4.0]),
    top_k=st.sampled_from([0, 1, 2, 255, 256, 257, 1024, 1025, 4999]),
    top_p=st.just(1.0) | st.floats(0.001, 0.9999),
    min_p=st.just(0.0) | st.floats(1e-6, 1.0),
    spread=st.sampled_from([0.001, 0.3, 2.0, 10.0]),
    step=st.sampled_from([0.0, 0.25, 2.0]),
    seed=st.integers(0, 9),
)
def test_any_filters_keep_what_sorting_keeps_up_to_rounding_of_their_borders(
    vocabulary: int, temperature: float, top_k: int, top_p: float, min_p: float, spread: float, step: float, seed: int
) -> None:
    """Where float32 sums decide, a token at the very border may go either way: both of these laws are allowed."""
    [logits] = logits_of(1, vocabulary, seed, spread)
    logits = np.round(logits / step) * step if step else logits
    filters = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    laws = laws_of(logits[None], [filters])
    [law] = whole(laws)
    scaled = (logits.astype(np.float64) - logits.max()) / temperature
    slack = 1e-5 if vocabulary > SMALL_VOCABULARY else 1e-11
    least, most = (
        by_sorting(
            scaled,
            top_k if top_k < vocabulary else 0,
            top_p if top_p == 1 else min(top_p + sign * slack, 1.0),
            min(min_p * (1 - sign * slack), 1.0),
        )[0]
        for sign in (-1, 1)
    )
    assert not (least & (law == 0) & (scaled > -700)).any()
    assert not (~most & (law > 0)).any()
    assert law.sum() == pytest.approx(1.0, abs=1e-6 if slack == 1e-5 else 1e-12)
    weights = np.where(law > 0, np.exp(scaled), 0.0)
    assert np.abs(law - weights / weights.sum()).max() < slack


# log probabilities


@pytest.mark.parametrize("vocabulary", [9, LARGE])
@pytest.mark.parametrize("top", [0, 1, 5, 10**5])
def test_log_probabilities_and_alternatives_are_those_of_the_law(vocabulary: int, top: int) -> None:
    logits = logits_of(len(FILTERS), vocabulary)
    logits[0, 3] = logits[0, 6] = logits[0].max() + 1  # greedy: the first of equals comes first
    laws = laws_of(logits, FILTERS)
    rows = torch.arange(len(FILTERS)).repeat(2)
    tokens = torch.as_tensor(np.random.default_rng(2).integers(0, vocabulary, len(rows)))
    chosen, ids, logs = laws.log_probabilities(rows, tokens, top)
    law_nV = laws.whole(rows)
    assert ids.shape == logs.shape == (len(rows), min(top, vocabulary))
    torch.testing.assert_close(chosen, law_nV.gather(1, tokens[:, None])[:, 0].log(), rtol=0, atol=1e-9)
    known = ids >= 0  # a place without a token has no probability either
    expected = torch.where(known, law_nV.gather(1, ids.clamp(min=0)), 0.0).log()
    torch.testing.assert_close(logs, expected, rtol=0, atol=1e-9)
    best = law_nV.sort(-1, descending=True).values[:, : ids.shape[1]]
    torch.testing.assert_close(logs, best.log(), rtol=0, atol=1e-9)
    assert all(len(set(row)) == len(row) for row in ids.tolist())
    if top:
        assert ids[0, 0] == 3


@pytest.mark.parametrize("vocabulary", [9, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_raw_log_probabilities_are_those_of_log_softmax(vocabulary: int, dtype: torch.dtype) -> None:
    logits = torch.as_tensor(logits_of(7, vocabulary, spread=6.0)).to(dtype)
    logits[2, 1] = -torch.inf
    rows = torch.tensor([0, 2, 2, 6, 5, 4, 3, 3, 1])
    tokens = torch.as_tensor(np.random.default_rng(0).integers(0, vocabulary, len(rows)))
    tokens[1] = 1
    expected = logits.double().log_softmax(-1)[rows]
    for top in (0, 1, 6, 10**5):
        chosen, ids, logs = raw_log_probabilities(logits, rows, tokens, top)
        torch.testing.assert_close(chosen, expected.gather(1, tokens[:, None])[:, 0], rtol=0, atol=1e-5)
        torch.testing.assert_close(logs, expected.gather(1, ids), rtol=0, atol=1e-5)
        torch.testing.assert_close(logs, expected.topk(min(top, vocabulary)).values, rtol=0, atol=1e-5)
    empty = raw_log_probabilities(logits, rows[:0], tokens[:0], 2)
    assert [x.shape for x in empty] == [(0,), (0, 2), (0, 2)]


# drawing by the rules block and coupled


MANY_AND_FEW: list[dict[str, Any]] = [{}, {"top_k": 5}, {"top_p": 0.9}, {"top_k": 400}, {"temperature": 0.6}]


@pytest.mark.parametrize("vocabulary", [9, 5000])
def test_drawing_with_a_scale_equals_drawing_from_the_whole_residual(vocabulary: int) -> None:
    """Scales of the rule `block`, among them one that leaves nothing of the law, which is then drawn from itself."""
    rng = np.random.default_rng(vocabulary)
    laws = laws_of(logits_of(len(MANY_AND_FEW), vocabulary), [{"temperature": 1.0, **f} for f in MANY_AND_FEW])
    rows = torch.as_tensor(rng.integers(0, len(MANY_AND_FEW), 300))
    law_nV = laws.whole(rows)
    probs, ids = law_nV.topk(6)
    probs = probs * torch.as_tensor(rng.uniform(0.2, 1.0, probs.shape))
    ids[:, 3] = -1
    probs[:, 3] = 0.0
    scale = torch.as_tensor(rng.uniform(0.3, 1.0, len(rows)))
    scale[::7] = 0.0
    uniforms = torch.as_tensor(rng.random(len(rows)))
    uniforms[:2] = torch.tensor([0.0, 1 - 2**-53])
    ours = laws.draw(rows, ids, probs, uniforms, scale)
    residual = speculation.subtract(law_nV, ids, probs, scale)
    assert (ours == speculation.draw(residual, uniforms)).float().mean() > 0.99
    assert (residual.gather(1, ours[:, None]) > 0).all()


@pytest.mark.parametrize("top", [40.0, 40.7, 77.3, -35.1])
def test_residual_of_nearly_equal_laws_does_not_see_the_rounding_of_a_normaliser(top: float) -> None:
    """Two tokens of different weight are left 1e-5 each; float32 has steps of 4e-6 where the normaliser is."""
    logits = np.full((1, 5000), -np.inf)
    logits[0, [10, 20, 30]] = top + np.log([0.9, 0.06, 0.04])
    laws = laws_of(logits, [{"temperature": 1.0}])
    [law] = whole(laws)
    less = np.array([10, 20, 30]), law[[10, 20, 30]] - [1e-5, 1e-5, -2e-5]
    assert drawn(laws, [0, 0, 0, 0], [0.0, 0.485, 0.515, 0.99], less).tolist() == [10, 10, 20, 20]


def raced(laws: Laws, row: int, draws: int, seed: int = 0) -> np.ndarray:
    keys = np.tile(np.array([seed, 5, 6], dtype=np.uint64), (draws, 1))
    return laws.race(torch.full((draws,), row), keys, np.arange(draws)).numpy()


@pytest.mark.parametrize("filters", [{}, {"top_k": 4}, {"top_p": 0.8}])
def test_raced_tokens_have_the_frequencies_of_the_law(filters: dict[str, Any]) -> None:
    laws = laws_of(logits_of(1, 12, seed=4), [{"temperature": 1.0, **filters}])
    [law] = whole(laws)
    tokens = raced(laws, 0, 3000)
    counts = {(t,): int(n) for t, n in enumerate(np.bincount(tokens, minlength=12)) if n}
    assert oracle.g_test(counts, {(t,): p for t, p in enumerate(law)}) > 1e-3
    warmer = oracle.filtered(laws.logits_RV[0].numpy(), 1.3, **filters)
    assert oracle.g_test(counts, {(t,): p for t, p in enumerate(warmer)}) < 1e-3


def test_race_is_the_same_whether_the_law_lies_on_few_or_on_many() -> None:
    """One law three times: on listed ids, over the vocabulary, and in a small vocabulary; greedy rows do not race."""
    logits = np.full((4, 5000), -np.inf)
    logits[:, 3000:3300] = logits_of(1, 300, seed=8, spread=1.0)
    logits[:, 3250:3300] = -np.inf
    filters = [{"temperature": 1.0, "top_k": 250}, {"temperature": 1.0}, {"temperature": 1.0, "min_p": 1e-9}, {}]
    laws = laws_of(logits, filters)
    few = laws.few_R.tolist()
    assert few[0] or few[2]
    assert not few[1]
    expected = raced(laws, 1, 60)
    assert len(set(expected.tolist())) > 20
    for row in (0, 2):
        assert raced(laws, row, 60).tolist() == expected.tolist()
    small = Laws(laws.logits_RV[1:2, :4000], Decoding.of([SamplingParams(1, temperature=1.0)]))
    assert raced(small, 0, 60).tolist() == expected.tolist()
    assert set(raced(laws, 3, 5).tolist()) == {int(logits[3].argmax())}


@pytest.mark.parametrize("u", [0.0, 1 - 2**-53])
@pytest.mark.parametrize("vocabulary", [9, 5000])
def test_extreme_noise_never_lets_an_impossible_token_win(
    u: float, vocabulary: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same noise for all: the likeliest wins. The extreme for the impossible ones alone: these still lose."""
    logits = np.full((2, vocabulary), -np.inf)
    logits[:, 5:8] = [0.0, 2.0, 1.0]
    laws = laws_of(logits, [{"temperature": 1.0}, {"temperature": 1.0, "top_k": 2}])
    for row in (0, 1):
        with monkeypatch.context() as patch:
            patch.setattr("pipeline.engine.laws.coupled_uniforms", lambda keys, places, ids: np.full(np.shape(ids), u))
            assert set(raced(laws, row, 3).tolist()) == {6}
            patch.setattr(
                "pipeline.engine.laws.coupled_uniforms",
                lambda keys, places, ids: np.where(np.isin(ids, (6, 7)), 0.5, 0.0),
            )
            expected = 5 if row == 0 else 6
            assert set(raced(laws, row, 3).tolist()) == {expected}
