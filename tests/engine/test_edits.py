"""Changes to single logits at every position of a block, against transformers' processors and plain loops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from pipeline.engine import edits
from pipeline.engine.edits import SMALL_VOCABULARY, Positions, edited
from pipeline.engine.laws import Decoding, Laws
from pipeline.engine.token_store import TokenStore
from pipeline.messages import Feed, Opening
from pipeline.records import SamplingParams
from tests import oracle

SMALL, LARGE = 11, 5000
TOLERANCE = {SMALL: 1e-12, LARGE: 1e-5}
assert SMALL <= SMALL_VOCABULARY < LARGE

Words = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Row:
    """A sequence and the tokens that are drafted behind it; logits stand behind each of these and before the first."""

    params: SamplingParams
    prompt: Sequence[int] = (1, 2, 3)
    answer: Sequence[int] = ()
    drafted: Sequence[int] = ()
    bad_words: Words = ()

    @property
    def heads(self) -> list[list[int]]:
        """What stands before each position of the block."""
        text = [*self.prompt, *self.answer, *self.drafted]
        first = len(self.prompt) + len(self.answer)
        return [text[: first + i] for i in range(len(self.drafted) + 1)]


def params_of(**changes: Any) -> SamplingParams:
    return SamplingParams(50, **changes)


def logits_of(rows: Sequence[Row], vocabulary: int, seed: int = 0) -> Tensor:
    count = sum(len(row.heads) for row in rows)
    logits = 3 * np.random.default_rng(seed).normal(size=(count, vocabulary))
    return torch.as_tensor(logits.astype(np.float32))


def edited_rows(logits_RV: Tensor, rows: Sequence[Row], eos: Sequence[int] = ()) -> Tensor:
    """`edited` as the verifier calls it; slots are taken in reverse, and hold old tokens behind those of the row."""
    slots_B = np.arange(len(rows))[::-1].copy()
    texts = TokenStore(len(rows))
    texts.tokens[:] = np.arange(texts.tokens.shape[1]) % 4
    fed = [row.heads[0] for row in rows]
    before_B, generated_B, counts_B = (
        np.array(sizes, dtype=np.int64)
        for sizes in ([len(f) for f in fed], [len(r.answer) for r in rows], [len(r.heads) for r in rows])
    )
    feed = Feed(np.arange(len(rows)), slots_B, np.zeros_like(before_B), before_B, np.concatenate(fed))
    texts.write(feed, [np.array(row.drafted, dtype=np.int64) for row in rows])
    openings = [Opening(i, (i, 0, 0), row.params, row.bad_words) for i, row in enumerate(rows)]
    return edited(logits_RV, openings, Positions.of_blocks(slots_B, before_B, generated_B, counts_B), texts, eos)


def by_processors(logits_V: Tensor, row: Row, head: list[int], eos: Sequence[int]) -> Tensor:
    """One position as transformers' own processors edit it, with the penalties that it lacks token by token."""
    params, prompt, size = row.params, len(row.prompt), len(logits_V)
    ids_1T, scores_1V = torch.tensor([head]), logits_V.double()[None]
    if params.logit_bias:
        biases = [[[token], bias] for token, bias in params.logit_bias.items()]
        scores_1V = SequenceBiasLogitsProcessor(biases)(ids_1T, scores_1V)  # type: ignore[arg-type]
    if params.repetition_penalty != 1:
        scores_1V = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(ids_1T, scores_1V)
    for token in set(head[prompt:]):
        scores_1V[0, token] -= params.presence_penalty + params.frequency_penalty * head[prompt:].count(token)
    words = [list(word) for word in row.bad_words if max(word) < size]
    if words:
        scores_1V = NoBadWordsLogitsProcessor(words)(ids_1T, scores_1V)
    if params.min_new_tokens and eos and not params.ignore_eos:
        scores_1V = MinNewTokensLengthLogitsProcessor(prompt, params.min_new_tokens, list(eos))(ids_1T, scores_1V)
    return scores_1V[0]


def by_loops(logits_V: Tensor, row: Row, head: list[int], eos: Sequence[int]) -> Tensor:
    """One position as the oracle edits it."""
    params, prompt = row.params, len(row.prompt)
    names = (
        "logit_bias",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "min_new_tokens",
        "ignore_eos",
    )
    changes = {name: getattr(params, name) for name in names}
    scores_V = oracle.edited(
        logits_V.double().numpy(), head[:prompt], head[prompt:], eos, bad_words=row.bad_words, **changes
    )
    return torch.as_tensor(scores_V)


def assert_edited(rows: Sequence[Row], vocabulary: int, eos: Sequence[int] = (), seed: int = 0) -> None:
    logits_RV = logits_of(rows, vocabulary, seed)
    untouched = logits_RV.clone()
    ours_RV = edited_rows(logits_RV, rows, eos)
    places = [(row, head) for row in rows for head in row.heads]
    assert len(ours_RV) == len(places)
    for r, (row, head) in enumerate(places):
        for expected_V in (by_processors(logits_RV[r], row, head, eos), by_loops(logits_RV[r], row, head, eos)):
            torch.testing.assert_close(ours_RV[r].double(), expected_V, rtol=0, atol=TOLERANCE[vocabulary])
    assert (logits_RV == untouched).all()


both_vocabularies = pytest.mark.parametrize("vocabulary", [SMALL, LARGE])


# ---------------------------------------------------------------------------------- one kind of change at a time


REPEATING = {"prompt": (1, 2, 1, 9), "answer": (4, 4, 1), "drafted": (4, 5, 5, 2, 9)}
SINGLE: dict[str, Row] = {
    "bias": Row(params_of(logit_bias={0: 5.0, 3: -100.0, 10: 0.125}), **REPEATING),
    "repetition": Row(params_of(repetition_penalty=1.5), **REPEATING),
    "reward for repetition": Row(params_of(repetition_penalty=0.5), **REPEATING),
    "presence": Row(params_of(presence_penalty=1.5), **REPEATING),
    "frequency": Row(params_of(frequency_penalty=0.25), **REPEATING),
    "reward for frequency": Row(params_of(frequency_penalty=-0.5, presence_penalty=-1.0), **REPEATING),
    "penalties after each other": Row(
        params_of(repetition_penalty=2.0, presence_penalty=1.5, frequency_penalty=0.5, logit_bias={4: 3.0}), **REPEATING
    ),
    "words of one token": Row(params_of(), **REPEATING, bad_words=((3,), (5,))),
    "words of two": Row(params_of(), **REPEATING, bad_words=((4, 5), (5, 5), (5, 2), (1, 4), (9, 4))),
    "words of three": Row(params_of(), **REPEATING, bad_words=((4, 5, 5), (1, 4, 5), (4, 1, 4), (9, 9, 9))),
    "words of one to three": Row(params_of(), **REPEATING, bad_words=((8,), (5, 2), (1, 4, 5), (8,))),
    "minimum length": Row(params_of(min_new_tokens=6), **REPEATING),
    "minimum length of a text that may not end": Row(params_of(min_new_tokens=6, ignore_eos=True), **REPEATING),
    "nothing": Row(params_of(temperature=0.7, top_k=3), **REPEATING),
}


@both_vocabularies
@pytest.mark.parametrize("kind", SINGLE)
def test_every_position_of_a_block_is_edited_as_transformers_does(kind: str, vocabulary: int) -> None:
    assert_edited([SINGLE[kind]], vocabulary, eos=(0, 7))


@both_vocabularies
def test_rows_of_all_kinds_in_one_call_keep_to_themselves(vocabulary: int) -> None:
    assert_edited(list(SINGLE.values()), vocabulary, eos=(0, 7))
    assert_edited(list(SINGLE.values())[::-1], vocabulary, eos=(7,), seed=1)


@both_vocabularies
def test_drafted_tokens_change_the_positions_behind_them_alone(vocabulary: int) -> None:
    row = Row(params_of(presence_penalty=2.0), drafted=(5, 6))
    logits_RV = torch.zeros(3, vocabulary)
    ours_RV = edited_rows(logits_RV, [row])
    assert ours_RV[:, 5].tolist() == [0, -2, -2]
    assert ours_RV[:, 6].tolist() == [0, 0, -2]
    assert ours_RV.count_nonzero() == 3


def test_prompt_counts_for_the_repetition_penalty_and_not_for_the_others() -> None:
    params = params_of(repetition_penalty=2.0, presence_penalty=1.0, frequency_penalty=0.5)
    row = Row(params, prompt=(1, 1), answer=(2, 2))
    assert edited_rows(torch.full((1, 4), 8.0), [row]).tolist() == [[8, 4, 4 - 1 - 2 * 0.5, 8]]


# ------------------------------------------------------------------------------------------------------ bad words


@both_vocabularies
@pytest.mark.parametrize(
    "row",
    [
        Row(params_of(), prompt=(1,), bad_words=((1, 2, 3), (0, 0, 1, 2, 3))),  # longer than all there is
        Row(params_of(), prompt=(0,), bad_words=((0, 0, 5), (0, 5, 6))),  # an empty place is not token 0
        Row(params_of(), prompt=(1,), drafted=(2, 3), bad_words=((1, 2, 3), (1, 2, 3, 4))),
        Row(params_of(), prompt=(7, 1), answer=(2,), bad_words=((1, 2, 3), (2, 4), (7, 1, 2, 5))),  # begun there
        Row(params_of(), prompt=(7, 1, 2), drafted=(3, 3), bad_words=((1, 2, 3), (2, 3, 3), (3, 3, 3))),
    ],
)
def test_words_are_banned_where_their_beginning_stands_right_before(row: Row, vocabulary: int) -> None:
    assert_edited([row], vocabulary)
    assert_edited([Row(params_of(), bad_words=((1, 2, 3, 4, 5, 6),)), row, Row(params_of())], vocabulary)


@both_vocabularies
def test_words_with_tokens_beyond_the_vocabulary_are_passed_over(vocabulary: int) -> None:
    unknown = vocabulary + 3
    row = Row(params_of(), prompt=(1, 2), drafted=(3,), bad_words=((unknown,), (2, unknown), (unknown, 4), (2, 3, 4)))
    assert_edited([row], vocabulary)
    logits_RV = logits_of([row], vocabulary)
    [first, second] = edited_rows(logits_RV, [row])
    assert first.isfinite().all()
    assert torch.nonzero(second.isinf())[:, 0].tolist() == [4]


# ---------------------------------------------------------------------------------------------------- minimum length


@both_vocabularies
@pytest.mark.parametrize("eos", [(), (0,), (0, 7, 10), (4, 10**6)])
def test_no_eos_before_the_minimum_length(vocabulary: int, eos: tuple[int, ...]) -> None:
    """The answer has two tokens at the first position and five at the last: four of them at the third."""
    params = [params_of(min_new_tokens=4, ignore_eos=deaf) for deaf in (False, True)]
    rows = [Row(p, answer=(5, 5), drafted=(6, 6, 6)) for p in params]
    ours_RV = edited_rows(logits_of(rows, vocabulary), rows, eos)
    known = sorted(token for token in eos if token < vocabulary)
    assert [torch.nonzero(row.isinf())[:, 0].tolist() for row in ours_RV] == [known, known, *[[]] * 6]


# ------------------------------------------------------------------------------------------------ kinds of tensors


@pytest.mark.parametrize(("vocabulary", "dtype"), [(SMALL, torch.float64), (LARGE, torch.float32)])
def test_bfloat16_logits_are_edited_in_the_precision_of_laws(vocabulary: int, dtype: torch.dtype) -> None:
    params = params_of(repetition_penalty=1.1, presence_penalty=0.3, logit_bias={1: 0.01})
    row = Row(params, answer=(1, 2), drafted=(3,))
    logits_RV = logits_of([row], vocabulary).bfloat16()
    ours_RV = edited_rows(logits_RV, [row])
    assert ours_RV.dtype == dtype
    assert logits_RV.dtype == torch.bfloat16
    for r, head in enumerate(row.heads):
        expected_V = by_processors(logits_RV[r], row, head, ())
        torch.testing.assert_close(ours_RV[r].double(), expected_V, rtol=0, atol=1e-6)


@both_vocabularies
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_without_anything_to_edit_the_tensor_comes_back_itself(vocabulary: int, dtype: torch.dtype) -> None:
    rows = [
        Row(params_of(temperature=1.0, top_k=2, top_p=0.5, min_p=0.1), drafted=(1,)),
        Row(params_of(min_new_tokens=3), answer=(1, 2, 3)),  # long enough
        Row(params_of(min_new_tokens=3, ignore_eos=True)),
    ]
    logits_RV = logits_of(rows, vocabulary).to(dtype)
    assert edited_rows(logits_RV, rows, (0,)) is logits_RV


@both_vocabularies
@pytest.mark.parametrize("kind", SINGLE)
def test_the_tensor_passed_in_is_never_changed(kind: str, vocabulary: int) -> None:
    """In the very type that is worked in, so that no conversion makes a copy."""
    logits_RV = logits_of([SINGLE[kind]], vocabulary).to(torch.float64 if vocabulary == SMALL else torch.float32)
    before = logits_RV.clone()
    edited_rows(logits_RV, [SINGLE[kind]], (0,))
    assert (logits_RV == before).all()


# ------------------------------------------------------------------------------------- numbers that are not finite


def laws_of(logits_RV: Tensor, rows: Sequence[Row], eos: Sequence[int] = ()) -> Laws:
    decoding = Decoding.of(row.params for row in rows).repeat(np.array([len(row.heads) for row in rows]))
    return Laws(edited_rows(logits_RV, rows, eos), decoding)


@both_vocabularies
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"logit_bias": {4: -100.0}}, ()),
        ({"repetition_penalty": 1.3}, ()),
        ({"presence_penalty": 1.0, "frequency_penalty": 1.0}, ()),
        ({}, ((4,),)),
        ({"min_new_tokens": 9}, ()),
    ],
)
def test_nan_stays_visible_under_every_edit(changes: dict, words: Words, temperature: float, vocabulary: int) -> None:
    rows = [Row(params_of(temperature=temperature, **changes), answer=(4,), bad_words=words)] * 2
    logits_RV = logits_of(rows, vocabulary)
    logits_RV[0, 4] = torch.nan
    laws = laws_of(logits_RV, rows, (4,))
    assert laws.logits_RV[0, 4].isnan()
    assert laws.finite_R.tolist() == [False, True]


@both_vocabularies
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 3, "top_p": 0.9}])
def test_row_of_which_everything_is_banned_is_flagged_and_harms_nobody(sampling: dict, vocabulary: int) -> None:
    everything = tuple((token,) for token in range(vocabulary))
    healthy = Row(params_of(repetition_penalty=1.2, **sampling), answer=(4,))
    rows = [healthy, Row(params_of(**sampling), bad_words=everything), healthy]
    logits_RV = logits_of(rows, vocabulary)
    laws = laws_of(logits_RV, rows)
    assert laws.finite_R.tolist() == [True, False, True]
    for r in (0, 2):
        alone = laws_of(logits_RV[r : r + 1], [healthy])
        assert (laws.whole(torch.tensor([r])) == alone.whole(torch.tensor([0]))).all()


# --------------------------------------------------------------------------------------------------- all together


tokens = st.integers(0, SMALL - 1)
some_params = st.builds(
    SamplingParams,
    max_new_tokens=st.just(9),
    repetition_penalty=st.sampled_from([1.0, 1.5, 0.75]),
    presence_penalty=st.sampled_from([0.0, 0.5, -1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.25, -0.5]),
    logit_bias=st.dictionaries(tokens, st.sampled_from([-100.0, -1.5, 0.0, 2.0]), max_size=3),
    ignore_eos=st.booleans(),
    min_new_tokens=st.integers(0, 7),
)
some_rows = st.builds(
    Row,
    some_params,
    prompt=st.lists(st.integers(0, 3), min_size=1, max_size=6),
    answer=st.lists(st.integers(0, 3), max_size=6),
    drafted=st.lists(st.integers(0, 3), max_size=5),
    bad_words=st.lists(
        st.lists(st.integers(0, 4) | st.just(LARGE + 1), min_size=1, max_size=3).map(tuple), max_size=5
    ).map(tuple),
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    rows=st.lists(some_rows, min_size=1, max_size=4),
    eos=st.lists(tokens, max_size=3, unique=True).map(tuple),
    seed=st.integers(0, 3),
    vocabulary=st.sampled_from([SMALL, SMALL, SMALL, LARGE]),
)
def test_any_parameters_and_histories_are_edited_as_transformers_does(
    rows: list[Row], eos: tuple[int, ...], seed: int, vocabulary: int
) -> None:
    assert_edited(rows, vocabulary, eos, seed)


WARPED: dict[str, Row] = {
    "everything": Row(
        params_of(
            temperature=0.7,
            top_k=7,
            top_p=0.9,
            min_p=0.05,
            repetition_penalty=1.3,
            presence_penalty=0.5,
            frequency_penalty=0.2,
            logit_bias={4: 2.5, 8: -100.0},
            min_new_tokens=6,
        ),
        **REPEATING,
        bad_words=((3,), (4, 5)),
    ),
    "warm": Row(params_of(temperature=1.6, min_p=0.1, repetition_penalty=1.3), **REPEATING),
    "nucleus": Row(params_of(temperature=1.0, top_p=0.6, presence_penalty=3.0), **REPEATING, bad_words=((5, 2),)),
    "top-k": Row(params_of(temperature=1.0, top_k=3, min_new_tokens=6), **REPEATING),
    "no filter": Row(params_of(temperature=0.5, logit_bias={1: 4.0}), **REPEATING),
    "nothing to edit": Row(params_of(temperature=0.9, top_p=0.7, min_p=0.01), **REPEATING),
}


@both_vocabularies
def test_law_at_every_position_is_that_of_transformers_chain(vocabulary: int) -> None:
    """Processors, then temperature, top-k, top-p and min-p, in the order in which `generate` has them."""
    rows, eos = list(WARPED.values()), (0, 7)
    places = [(row, head) for row in rows for head in row.heads]
    logits_RV = logits_of(rows, vocabulary, seed=5)
    laws = laws_of(logits_RV, rows, eos)
    ours_RV = laws.whole(torch.arange(len(logits_RV)))
    for r, (row, head) in enumerate(places):
        p, ids_1T = row.params, torch.tensor([head])
        scores_1V = by_processors(logits_RV[r], row, head, eos)[None]
        scores_1V = TemperatureLogitsWarper(p.temperature)(ids_1T, scores_1V)
        scores_1V = TopKLogitsWarper(p.top_k)(ids_1T, scores_1V) if p.top_k else scores_1V
        scores_1V = TopPLogitsWarper(p.top_p)(ids_1T, scores_1V) if p.top_p < 1 else scores_1V
        scores_1V = MinPLogitsWarper(p.min_p)(ids_1T, scores_1V) if p.min_p else scores_1V
        expected_V = scores_1V[0].softmax(-1)
        assert ((ours_RV[r] > 0) == (expected_V > 0)).all()
        torch.testing.assert_close(ours_RV[r], expected_V, rtol=0, atol=TOLERANCE[vocabulary])


@both_vocabularies
def test_word_that_ends_with_eos_is_banned_beside_the_minimum_length(vocabulary: int) -> None:
    """EOS is banned behind 5 by the word, and at the first position by the length, whatever comes first."""
    row = Row(params_of(min_new_tokens=1), drafted=(4, 5, 4), bad_words=((5, 7), (7,), (4, 4, 7)))
    assert_edited([row], vocabulary, eos=(7,))
    row = Row(params_of(min_new_tokens=1), drafted=(4, 5, 4), bad_words=((5, 7),))
    assert_edited([row], vocabulary, eos=(7,))
    ours_RV = edited_rows(logits_of([row], vocabulary), [row], (7,))
    assert [torch.nonzero(r.isinf())[:, 0].tolist() for r in ours_RV] == [[7], [], [7], []]


@both_vocabularies
@pytest.mark.parametrize(
    "kind", ["penalties after each other", "bias", "reward for repetition", "words of one to three"]
)
def test_impossible_tokens_stay_impossible_under_every_edit(kind: str, vocabulary: int) -> None:
    row = SINGLE[kind]
    logits_RV = logits_of([row], vocabulary)
    logits_RV[:, 1::2] = -torch.inf
    assert (edited_rows(logits_RV, [row])[:, 1::2] == -torch.inf).all()


# ---------------------------------------------------------------------------------------------------- planted bugs


def penalise_what_stands_before_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    def flat(cls: Any, slots_B: Any, before_B: Any, generated_B: Any, counts_B: Any) -> Positions:
        owner_R = np.repeat(np.arange(len(counts_B)), counts_B)
        return cls(owner_R, slots_B[owner_R], before_B[owner_R], generated_B[owner_R])

    monkeypatch.setattr(Positions, "of_blocks", classmethod(flat))


def count_every_token_once(monkeypatch: pytest.MonkeyPatch) -> None:
    penalise = edits._Edit.penalise_presence_and_frequency
    monkeypatch.setattr(
        edits._Edit, "penalise_presence_and_frequency", lambda self, p, f: penalise(self, p + f, np.zeros_like(f))
    )


def read_empty_places_as_token_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edits, "_NONE", 0)


def forget_the_ends_of_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    forbid = edits._Edit.forbid_end
    monkeypatch.setattr(edits._Edit, "forbid_end", lambda self, shortest_B, eos_E: forbid(self, shortest_B, eos_E[:1]))


@pytest.mark.parametrize(
    "plant",
    [
        penalise_what_stands_before_the_block,
        count_every_token_once,
        read_empty_places_as_token_0,
        forget_the_ends_of_a_list,
    ],
)
def test_planted_bug_in_the_edits_is_seen(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [*SINGLE.values(), Row(params_of(), prompt=(0,), bad_words=((0, 0, 5),))]
    assert_edited(rows, SMALL, (0, 7))
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        assert_edited(rows, SMALL, (0, 7))
