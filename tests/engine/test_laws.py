"""Laws from logits, against the oracle's filters; and what is drawn from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from pipeline import speculation
from pipeline.engine.laws import CANDIDATES, SMALL_VOCABULARY, Decoding, Laws
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


def test_one_high_token_before_a_thousand_equal_ones() -> None:
    """Top-k keeps them all, so that the best one's share is small and top-p needs the others too."""
    logits = np.zeros((1, 1000), dtype=np.float32)
    logits[0, 7] = 5.0
    [law] = whole(laws_of(logits, [{"temperature": 1.0, "top_k": 50, "top_p": 0.3}]))
    assert np.abs(law - oracle.softmax(logits[0].astype(np.float64))).max() < 1e-12


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
    laws = laws_of(logits_of(1, 12, seed=4), [filters])
    tokens = drawn(laws, np.zeros(20_000), np.random.default_rng(0).random(20_000))
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
