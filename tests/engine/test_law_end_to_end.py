"""The law of what the whole packed engine emits: thousands of requests, against enumeration with the plain model.

Fixed seeds. What is ours fits well; each planted bug misses by a wide margin.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from pipeline import randomness, speculation
from pipeline.decode import Drafter
from pipeline.engine import verifier as verifier_module
from pipeline.engine.drafters import model as model_drafter
from pipeline.engine.drafters.model import ModelDrafter
from pipeline.engine.drafters.ngram import NgramDrafter
from pipeline.engine.laws import Decoding, Laws
from pipeline.engine.verifier import TargetVerifier
from pipeline.randomness import Stream
from pipeline.records import Request, SamplingParams
from tests import oracle
from tests.decoding import decoded, decoder, packed, runner
from tests.models import tiny_model
from tests.oracle import SequenceLaw

VOCABULARY, LENGTH, SLOTS, CONTEXT = 6, 3, 64, 40
SAMPLES, SAMPLES_OF_FEW, SAMPLES_OF_BUGS = 4000, 2500, 1300  # filtered texts are few; most bugs show sooner
FITS, MISFITS = 1e-3, 1e-6
SHAPE: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "head_dim": 4,
    "vocab": VOCABULARY,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "initializer_range": 0.25,
}
TARGET_SEED, DRAFT_SEED = 1, 0  # laws that differ, and a target that goes on with the loop every second time or so
PROMPT = (2, 1, 4, 2, 1, 4, 2, 1)  # loops, so that n-gram lookup proposes from the first token on
WARM = SamplingParams(LENGTH, temperature=1.0)
NUCLEUS = SamplingParams(LENGTH, temperature=1.0, top_p=0.8)


# what is expected


@cache
def target() -> PreTrainedModel:
    return tiny_model("llama", TARGET_SEED, **SHAPE)


@cache
def logits_after(tokens: tuple[int, ...]) -> np.ndarray:
    return target()(torch.tensor([tokens])).logits[0, -1].double().numpy()


@cache
def expected_law(prompt: tuple[int, ...], length: int, temperature: float, top_p: float) -> SequenceLaw:
    return oracle.enumerate_law(
        lambda prefix: oracle.filtered(logits_after(prompt + prefix), temperature, top_p=top_p), length
    )


# what the engine does


def drafter_named(kind: str) -> Drafter | None:
    if kind == "none":
        return None
    if kind == "ngram":
        return NgramDrafter(SLOTS)
    seed, support = (TARGET_SEED, VOCABULARY) if kind == "itself" else (DRAFT_SEED, 4)
    return ModelDrafter(runner(lambda: packed("llama", seed, **SHAPE), SLOTS, CONTEXT), support, "sample", 10**6)


def emitted(kind: str, requests: list[Request], draft_tokens: int = 2) -> list[tuple[int, ...]]:
    verifier = TargetVerifier(runner(lambda: packed("llama", TARGET_SEED, **SHAPE), SLOTS, CONTEXT))
    decoding = decoder(verifier, drafter_named(kind), SLOTS, CONTEXT, draft_tokens, seed=5)
    limits = decoding.scheduler.limits
    decoding.scheduler.limits = replace(limits, prefill_chunk=SLOTS * CONTEXT)  # no need to cut these prompts
    answers = decoded(decoding, requests)
    if kind != "none":
        drafted, accepted = (sum(getattr(a.stats, f) for a in answers) for f in ("drafted", "accepted"))
        assert drafted > len(requests) / 2
        assert accepted > (0.99 if kind == "itself" else 0.05) * drafted
        assert kind == "itself" or accepted < 0.95 * drafted
    return [tuple(a.token_ids) for a in answers]


def p_value(kind: str, params: SamplingParams, samples: int) -> float:
    texts = emitted(kind, [Request(str(i), list(PROMPT), params) for i in range(samples)])
    law = expected_law(PROMPT, LENGTH, params.temperature, params.top_p)
    return oracle.g_test(Counter(texts), law)


def test_the_laws_compared_differ_from_each_other_and_from_even_ones() -> None:
    """Or the tests below would say little."""
    warm, nucleus = (expected_law(PROMPT, LENGTH, 1.0, p) for p in (1.0, 0.8))
    assert oracle.total_variation(warm, nucleus) > 0.1
    even = dict.fromkeys(itertools.product(range(VOCABULARY), repeat=LENGTH), VOCABULARY**-LENGTH)
    assert oracle.total_variation(warm, even) > 0.2
    assert len(warm) == VOCABULARY**LENGTH


@pytest.mark.parametrize("params", [WARM, NUCLEUS], ids=["warm", "nucleus"])
@pytest.mark.parametrize("kind", ["none", "ngram", "itself", "model"])
def test_emitted_texts_have_the_targets_law(kind: str, params: SamplingParams) -> None:
    assert p_value(kind, params, SAMPLES if params is WARM else SAMPLES_OF_FEW) > FITS


def test_mixed_batch_gives_each_kind_of_row_its_own_law() -> None:
    """Greedy, cool and hot rows with 1 to 4 tokens to go and different prompts, all in each other's company."""
    kinds = list(itertools.product([PROMPT, PROMPT[:3], (4,)], [0.0, 0.7, 1.3], [1, 2, 4]))
    each = 110
    requests = [
        Request(f"{i}/{k}", list(prompt), SamplingParams(length, temperature=temperature))
        for i in range(each)
        for k, (prompt, temperature, length) in enumerate(kinds)
    ]
    texts = emitted("model", requests, draft_tokens=3)
    for temperature in (0.7, 1.3):
        counts: Counter[tuple[int, ...]] = Counter()
        law: SequenceLaw = {}
        for k, (prompt, t, length) in enumerate(kinds):
            mine = texts[k :: len(kinds)]
            expected = expected_law(prompt, length, t, 1.0)
            if t == 0.0:
                assert set(mine) == set(expected)
            elif t == temperature:  # one table of all such rows, each kind an equal share of it
                counts.update((k, *text) for text in mine)
                law |= {(k, *text): p / 9 for text, p in expected.items()}
        assert oracle.g_test(counts, law) > FITS
        other = {(k, *text): p for k, text, p in other_temperature(kinds, temperature)}
        assert oracle.g_test(counts, other) < MISFITS


def other_temperature(kinds: list[Any], temperature: float) -> list[tuple[int, tuple[int, ...], float]]:
    """The laws of all rows of one temperature, at the other one."""
    other = 2.0 - temperature
    return [
        (k, text, p / 9)
        for k, (prompt, t, length) in enumerate(kinds)
        if t == temperature
        for text, p in expected_law(prompt, length, other, 1.0).items()
    ]


# planted bugs


def redraw_from_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = Laws.draw
    monkeypatch.setattr(Laws, "draw", lambda self, rows, ids, probs, *rest: draw(self, rows, ids, probs * 0, *rest))


def claim_the_whole_law(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws from the four likeliest tokens and says what each had among all."""
    propose = ModelDrafter.propose

    def lying(self: ModelDrafter, request: Any) -> Any:
        proposal = propose(self, request)
        rows, places, _ = proposal.support_probs.shape
        rest = 1.0 - proposal.support_probs.sum(-1, keepdims=True)
        ids = np.full((rows, places, 1), VOCABULARY, dtype=np.int64)  # where the rest of the mass is said to be
        return type(proposal)(
            proposal.tokens,
            proposal.lengths,
            np.concatenate([proposal.support_ids, ids], -1),
            np.concatenate([proposal.support_probs, rest], -1).clip(min=0),
        )

    monkeypatch.setattr(ModelDrafter, "propose", lying)


def claim_a_cooler_law(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws at the sequence's temperature and ships the law of another."""
    top = Laws.top

    def tempered(self: Laws, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        ids, probs = top(self, size)
        return ids, Shipped(probs)

    class Shipped:
        """Draws as itself, is sent as its square."""

        def __init__(self, probs: torch.Tensor) -> None:
            self.probs = probs

        def double(self) -> torch.Tensor:
            return self.probs.double()

        def cpu(self) -> torch.Tensor:
            return self.probs.square()

    monkeypatch.setattr(Laws, "top", tempered)


def draft_with_the_numbers_that_judge(monkeypatch: pytest.MonkeyPatch) -> None:
    uniforms = randomness.uniforms
    monkeypatch.setattr(model_drafter, "uniforms", lambda k, s, o, stream: uniforms(k, s, o, Stream.ACCEPT))


def redraw_with_the_numbers_that_drafted(monkeypatch: pytest.MonkeyPatch) -> None:
    def shared(keys: Any, starts: Any, count: int) -> np.ndarray:
        numbers = randomness.verdict_uniforms(keys, starts, count)
        numbers[..., 1] = randomness.uniforms(keys, starts, count, Stream.DRAFT)
        return numbers

    monkeypatch.setattr(verifier_module, "verdict_uniforms", shared)


def keep_whatever_is_likely(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accepts with p(x), as if every proposed token had been certain."""
    judge = speculation.judge_ratio
    monkeypatch.setattr(
        speculation, "judge_ratio", lambda p, q, lengths, u: judge(p, torch.where(q > 0, 1.0, 0.0).double(), lengths, u)
    )


def forget_the_filters_of_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Applies top-p where the next token is drawn without a draft, and the bare law elsewhere."""
    repeat = Decoding.repeat

    def bare(self: Decoding, counts: np.ndarray) -> Decoding:
        full = repeat(self, counts)
        return replace(full, top_p_R=np.where(np.repeat(counts, counts) > 1, 1.0, full.top_p_R))

    monkeypatch.setattr(Decoding, "repeat", bare)


BUGS: list[tuple[Callable[[pytest.MonkeyPatch], None], str, SamplingParams]] = [
    (redraw_from_the_target, "model", WARM),
    (redraw_from_the_target, "ngram", WARM),
    (claim_the_whole_law, "model", WARM),
    (claim_a_cooler_law, "model", WARM),
    (draft_with_the_numbers_that_judge, "model", WARM),
    (redraw_with_the_numbers_that_drafted, "model", WARM),
    (keep_whatever_is_likely, "model", WARM),
    (forget_the_filters_of_the_block, "model", NUCLEUS),
]


@pytest.mark.parametrize(("plant", "kind", "params"), BUGS, ids=lambda value: getattr(value, "__name__", ""))
def test_planted_bug_misses_the_law(
    plant: Callable[[pytest.MonkeyPatch], None], kind: str, params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    samples = SAMPLES if plant is redraw_with_the_numbers_that_drafted else SAMPLES_OF_BUGS
    assert p_value(kind, params, samples) < MISFITS
