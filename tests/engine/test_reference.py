"""The audit's reference, held against transformers' own `generate` and against formulas."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from pipeline.audit import END, LIKELY, LOOKBACK, Difference
from pipeline.engine.checkpoint import resolve
from pipeline.engine.reference import Reference
from pipeline.records import SamplingParams
from tests import oracle
from tests.engine.conftest import FolderOf
from tests.models import ARCHITECTURES, EOS, TOKENS, tiny_model

PROMPT = [3, 200, 17, 17, 90, 200, 17, 45, 3, 9]
LENGTH = 12
GREEDY = SamplingParams(LENGTH)
WORDS: dict[str, tuple[tuple[int, ...], ...]] = {}


@cache
def model(model_type: str = "llama", **changes: Any) -> PreTrainedModel:
    """In float64: two passes over the same tokens, cut otherwise, then agree far within any bound set here."""
    return tiny_model(model_type, seed=3, dtype=torch.float64, **changes)


def reference(noise: float = 0.0, model_type: str = "llama", eos: tuple[int, ...] = (EOS,)) -> Reference:
    return Reference(model(model_type), TOKENS, eos, lambda word: WORDS.get(word, ()), noise)


def logits_after(tokens: list[int], model_type: str = "llama") -> np.ndarray:
    return model(model_type)(torch.tensor([tokens])).logits[0, -1, :TOKENS].double().numpy()


def generated(eos: int | None = None, **options: Any) -> list[int]:
    """What transformers generates greedily; ids beyond the tokenizer are suppressed."""
    prompt = torch.tensor([PROMPT])
    beyond = list(range(TOKENS, int(model().config.vocab_size)))
    out = model().generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=LENGTH, do_sample=False, eos_token_id=eos,
        pad_token_id=0, suppress_tokens=beyond, temperature=None, top_p=None, top_k=None, **options,
    )  # fmt: skip
    return out[0, len(PROMPT) :].tolist()


@pytest.fixture(autouse=True)
def _words() -> None:
    WORDS.clear()


# --- greedy texts

PLAIN_TEXT = generated()
SETTINGS: dict[str, tuple[SamplingParams, dict[str, Any]]] = {
    "plain": (GREEDY, {}),
    "repetition": (replace(GREEDY, repetition_penalty=0.4), {"repetition_penalty": 0.4}),
    "bias": (replace(GREEDY, logit_bias={7: 9.0}), {"sequence_bias": {(7,): 9.0}}),
    "bad words": (
        replace(GREEDY, bad_words=("one", "two")),
        {"bad_words_ids": [[PLAIN_TEXT[2]], PLAIN_TEXT[4:6]]},
    ),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_what_transformers_generates_has_no_difference(setting: str) -> None:
    params, options = SETTINGS[setting]
    WORDS.update({"one": ((PLAIN_TEXT[2],),), "two": (tuple(PLAIN_TEXT[4:6]),)})
    text = generated(**options)
    assert reference(eos=()).differences(PROMPT, text, False, params) == ()
    if params is not GREEDY:
        assert text != PLAIN_TEXT
        assert reference(eos=()).differences(PROMPT, PLAIN_TEXT, False, params)


def test_a_text_that_ends_by_itself_is_compared_to_its_end() -> None:
    eos = PLAIN_TEXT[5]
    first = PLAIN_TEXT.index(eos)
    text = generated(eos=eos)
    assert text == PLAIN_TEXT[: first + 1]
    ending = reference(eos=(eos,))
    assert ending.differences(PROMPT, text[:-1], True, GREEDY) == ()
    went_on = ending.differences(PROMPT, PLAIN_TEXT, False, GREEDY)
    assert (went_on[0].position, went_on[0].expected, went_on[0].got) == (first, END, eos)
    too_early = ending.differences(PROMPT, text[: first - 1], True, GREEDY)
    assert [(d.position, d.expected, d.got) for d in too_early] == [(first - 1, text[first - 1], END)]
    logits = logits_after(PROMPT + text[: first - 1])
    assert too_early[0].margin == pytest.approx(logits.max() - logits[eos], abs=1e-5)


def test_no_end_is_expected_before_the_minimum_length() -> None:
    eos = PLAIN_TEXT[0]
    text = generated(eos=eos, min_new_tokens=4)
    assert eos not in text[:4]
    ended = text[-1] == eos
    assert reference(eos=(eos,)).differences(
        PROMPT, text[:-1] if ended else text, ended, replace(GREEDY, min_new_tokens=4)
    ) == ()


def test_a_difference_has_its_place_both_tokens_and_the_margin_and_does_not_hide_the_next() -> None:
    logits = logits_after(PROMPT + PLAIN_TEXT[:3])
    second = int(np.argsort(logits)[-2])
    text = [*PLAIN_TEXT[:3], second, *PLAIN_TEXT[4:]]
    found = reference(eos=()).differences(PROMPT, text, False, GREEDY)
    assert found[0] == Difference(3, PLAIN_TEXT[3], second, found[0].margin)
    assert found[0].margin == pytest.approx(logits.max() - logits[second], abs=1e-5)
    behind = [int(np.argmax(logits_after(PROMPT + text[:i]))) for i in range(4, LENGTH)]
    assert [d.position for d in found[1:]] == [4 + i for i, best in enumerate(behind) if best != text[4 + i]]


def test_a_forbidden_token_differs_without_bounds() -> None:
    WORDS["one"] = ((PLAIN_TEXT[2],),)
    found = reference(eos=()).differences(PROMPT, PLAIN_TEXT[:3], False, replace(GREEDY, bad_words=("one",)))
    assert found[-1].position == 2
    assert found[-1].margin == math.inf


def test_presence_and_frequency_count_the_answer_alone() -> None:
    params = replace(GREEDY, temperature=1.0, presence_penalty=0.7, frequency_penalty=0.4)
    law = reference().law(PROMPT, params, 1)[()]
    np.testing.assert_allclose(dense(law), oracle.softmax(logits_after(PROMPT)), atol=LIKELY)
    edited = logits_after([*PROMPT, 17, 17])
    edited[17] -= 0.7 + 2 * 0.4
    fed = reference()._begin(PROMPT)
    for token in (17, 17):
        reference()._feed(fed, token)
    np.testing.assert_allclose(reference()._edited(fed, params).numpy(), edited, atol=1e-4)


# --- laws


def dense(law: Any) -> np.ndarray:
    """[TOKENS] the likely tokens' probabilities, the rest spread over the other possible ones."""
    found = np.zeros(TOKENS)
    others = law.possible_V.copy()
    for token, p in law.likely.items():
        place = EOS if token == END else token
        found[place], others[place] = p, False
    if others.any():
        found[others] = law.rest / others.sum()
    return found


LAWS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.5},
    {"top_k": 5},
    {"top_p": 0.8},
    {"min_p": 0.05},
    {"top_k": 20, "top_p": 0.7, "min_p": 0.02},
]


@pytest.mark.parametrize("filters", LAWS, ids=str)
def test_laws_are_the_formulas(filters: dict[str, Any]) -> None:
    params = replace(GREEDY, **{"temperature": 1.0, **filters})
    law = reference().law(PROMPT, params, 1)[()]
    expected = oracle.filtered(logits_after(PROMPT), **{"temperature": 1.0, **filters})
    np.testing.assert_allclose(dense(law), expected, atol=LIKELY)
    assert sum(law.likely.values()) + law.rest == pytest.approx(1.0)
    assert (END in law.likely) == (expected[EOS] > 0)
    assert not law.possible_V[EOS]
    possible = np.flatnonzero(expected > 0)
    assert np.flatnonzero(law.possible_V).tolist() == possible[possible != EOS].tolist()
    assert len(law.possible_V) == TOKENS  # no token beyond the tokenizer


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_laws_behind_likely_tokens_are_those_of_a_plain_pass_over_the_longer_text(model_type: str) -> None:
    """Windows of 8 tokens, and three tokens fed from a cache."""
    params = replace(GREEDY, temperature=0.3)
    law = reference(model_type=model_type).law(PROMPT, params, 4)
    masses = {(): 1.0}
    for prefix, after in law.items():
        logits = logits_after([*PROMPT, *prefix], model_type)
        np.testing.assert_allclose(dense(after), oracle.filtered(logits, 0.3), atol=LIKELY)
        masses |= {(*prefix, token): masses[prefix] * p for token, p in after.likely.items() if token != END}
    behind = {text for text, mass in masses.items() if mass >= LOOKBACK and len(text) < 4}
    assert set(law) == behind
    assert max(map(len, law)) == 3


def test_a_minimum_length_leaves_no_end_in_the_law() -> None:
    law = reference().law(PROMPT, replace(GREEDY, temperature=2.0, min_new_tokens=1), 1)[()]
    assert END not in law.likely


def test_tokens_that_tie_with_the_last_kept_one_are_kept() -> None:
    logits = torch.full((TOKENS,), -50.0, dtype=torch.float64)
    logits[:4] = torch.tensor([2.0, 1.0, 1.0, 0.0])
    for filters in ({"top_k": 2}, {"top_p": 0.6}):
        law = reference()._next_token(logits, replace(GREEDY, temperature=1.0, **filters))  # type: ignore[arg-type]
        assert np.flatnonzero(law.possible_V).tolist() == [0, 1, 2]


def test_what_rounding_could_move_across_a_border_is_doubtful() -> None:
    logits = torch.full((TOKENS,), -50.0, dtype=torch.float64)
    logits[:4] = torch.tensor([2.0, 1.0, 0.99, 0.0])
    for filters, doubtful in (({"top_k": 2}, {1, 2}), ({"top_k": 3}, set()), ({"min_p": math.exp(-2.01)}, {3})):
        params = replace(GREEDY, temperature=1.0, **filters)  # type: ignore[arg-type]
        law = reference(noise=0.01)._next_token(logits, params)
        assert law.doubtful == doubtful
        assert sum(law.likely.values()) == pytest.approx(1.0)
        assert set(law.likely) == {0, 1, 2} - doubtful
        assert reference()._next_token(logits, params).doubtful == frozenset()
    nucleus = oracle.softmax(logits.numpy())[:3].sum()
    params = replace(GREEDY, temperature=1.0, top_p=float(nucleus) + 0.001)  # just enough for a fourth token
    assert reference(noise=0.01)._next_token(logits, params).doubtful == {3}
    assert reference()._next_token(logits, params).possible_V[3]


def test_it_is_loaded_from_a_folder_with_transformers_own_attention(folder_of: FolderOf) -> None:
    checkpoint = resolve(str(folder_of("llama", seed=3)))
    loaded = Reference.load(checkpoint, "float32", "cpu", 0.0)
    assert loaded.model.config._attn_implementation in ("sdpa", "eager")
    assert (loaded.vocabulary, loaded.eos) == (TOKENS, [EOS])
    assert loaded.differences(PROMPT, PLAIN_TEXT, False, GREEDY) == ()
    assert loaded.spell("ab")
