"""Greedy decoding of ragged batches equals transformers' own text for each prompt alone, in float32."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pipeline.engine.runner import Runner
from pipeline.engine.verifier import TargetVerifier
from pipeline.errors import CacheMiss, ModelError
from pipeline.messages import DraftRequest, Feed, Opening, Proposal, Verdict, VerifyRequest
from pipeline.records import FinishReason, Request, SamplingParams
from pipeline.step import empty_proposal
from tests.decoding import decoded, decoder, drafter_of, generated_alone, packed, ragged_requests, runner, verifier_of
from tests.models import ARCHITECTURES, VOCABULARY, WINDOW, tiny_model

DRAFTERS = ("none", "ngram", "itself", "model")


@pytest.fixture(scope="module", params=ARCHITECTURES)
def architecture(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def texts(architecture: str) -> tuple[list[Request], list[list[int]]]:
    """Ten ragged requests and transformers' text for each alone."""
    requests = ragged_requests(10, VOCABULARY)
    model = tiny_model(architecture)
    return requests, [generated_alone(model, request) for request in requests]


@pytest.mark.parametrize("kind", DRAFTERS)
def test_ragged_batch_equals_each_prompt_alone(architecture: str, kind: str, texts) -> None:
    requests, expected = texts
    answers = decoded(decoder(verifier_of(architecture), drafter_of(kind, architecture)), requests)
    assert [a.token_ids for a in answers] == expected
    if kind == "itself":
        assert all(a.stats.accepted == a.stats.drafted for a in answers)
        assert sum(a.stats.drafted for a in answers) > 80


def generated(requests: list[Request]) -> list[list[int]]:
    """transformers' text of the tiny llama for each prompt alone."""
    model = tiny_model("llama")
    return [generated_alone(model, request) for request in requests]


def test_texts_of_the_tiny_models_vary(texts) -> None:
    _, expected = texts
    assert len({tuple(text[:3]) for text in expected}) > 5
    assert any(len(set(text)) > 8 for text in expected)


@pytest.mark.parametrize("slots", [1, 7, 16])
def test_number_of_slots_does_not_change_texts(slots: int) -> None:
    requests = ragged_requests(16, VOCABULARY, seed=3, longest=16)
    alone = generated(requests)
    answers = decoded(decoder(verifier_of("llama", slots), drafter_of("model", "llama", slots), slots), requests)
    assert [a.token_ids for a in answers] == alone


def looping_requests() -> list[Request]:
    """Prompts that repeat themselves, so that n-gram lookup proposes a lot, and rightly or wrongly."""
    rng = np.random.default_rng(7)
    phrases = [rng.integers(0, VOCABULARY, n).tolist() for n in (3, 5, 9)]
    return [Request(f"loop{i}", (phrases[i % 3] * 9)[: 20 + i], SamplingParams(30)) for i in range(9)]


@pytest.mark.parametrize("draft_tokens", [1, 2, 7])
def test_every_block_length_gives_the_same_texts(draft_tokens: int) -> None:
    requests = looping_requests()
    plain = decoded(decoder(verifier_of("qwen2")), requests)
    drafted = decoded(
        decoder(verifier_of("qwen2"), drafter_of("ngram", "qwen2"), draft_tokens=draft_tokens), requests
    )
    assert [a.token_ids for a in drafted] == [a.token_ids for a in plain]
    assert sum(a.stats.drafted for a in drafted) > 10


@pytest.mark.parametrize("length", [WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW])
@pytest.mark.parametrize("model_type", ["mistral", "gemma3_text"])
def test_sliding_window_with_rollbacks_across_its_edge(model_type: str, length: int) -> None:
    prompt = np.random.default_rng(length).integers(0, VOCABULARY, length).tolist()
    request = Request("w", prompt, SamplingParams(2 * WINDOW))
    expected = generated_alone(tiny_model(model_type), request)
    for kind in ("model", "itself"):
        [answer] = decoded(decoder(verifier_of(model_type), drafter_of(kind, model_type)), [request])
        assert answer.token_ids == expected


def test_a_window_that_is_ignored_would_be_noticed() -> None:
    prompt = np.random.default_rng(1).integers(0, VOCABULARY, 3 * WINDOW).tolist()
    request = Request("w", prompt, SamplingParams(16))
    wide = tiny_model("mistral", sliding_window=None)
    assert generated_alone(wide, request) != generated_alone(tiny_model("mistral"), request)


# ends


def test_eos_inside_an_accepted_block_cuts_there() -> None:
    requests = ragged_requests(8, VOCABULARY, seed=5)
    model = tiny_model("llama")
    free = [generated_alone(model, r) for r in requests]
    eos = next(t for text in free for t in text[3:])
    expected = [generated_alone(model, r, eos) for r in requests]
    assert any(len(e) < len(f) for e, f in zip(expected, free, strict=True))
    for kind in DRAFTERS:
        answers = decoded(decoder(verifier_of("llama"), drafter_of(kind, "llama"), eos=[eos]), requests)
        assert [a.token_ids for a in answers] == expected
        for a, r in zip(answers, requests, strict=True):
            stopped = len(a.token_ids) < r.params.max_new_tokens
            assert a.finish_reason == (FinishReason.STOP if stopped else FinishReason.LENGTH) or eos not in free
            assert a.stats.accepted <= len(a.token_ids)


def test_ignored_eos_is_an_ordinary_token() -> None:
    request = ragged_requests(1, VOCABULARY, seed=5)[0]
    text = generated_alone(tiny_model("llama"), request)
    kept = Request("k", request.prompt_token_ids, SamplingParams(request.params.max_new_tokens, ignore_eos=True))
    [answer] = decoded(decoder(verifier_of("llama"), drafter_of("itself", "llama"), eos=[text[0]]), [kept])
    assert answer.token_ids == text


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("prompt_length", [1, 38, 39])
def test_length_ends_at_the_context(kind: str, prompt_length: int) -> None:
    """A prompt of one token; two places left with k = 4; one token less than the context."""
    prompt = np.random.default_rng(2).integers(0, VOCABULARY, prompt_length).tolist()
    request = Request("c", prompt, SamplingParams(100))
    decoding = decoder(verifier_of("llama", context=40), drafter_of(kind, "llama", context=40), context=40)
    [answer] = decoded(decoding, [request])
    expected = generated_alone(tiny_model("llama"), Request("c", prompt, SamplingParams(40 - prompt_length)))
    assert answer.token_ids == expected
    assert answer.finish_reason is FinishReason.LENGTH


def test_impossible_requests_come_back_as_errors_and_leave_others_alone() -> None:
    good = ragged_requests(3, VOCABULARY, seed=9)
    bad = [
        Request("empty", [], SamplingParams(5)),
        Request("long", [1] * 200, SamplingParams(5)),
        Request("none", [1], SamplingParams(0)),
        Request("foreign", [1, VOCABULARY], SamplingParams(5)),
    ]
    decoding = decoder(verifier_of("llama"), vocabulary=VOCABULARY)
    answers = decoded(decoding, [bad[0], good[0], bad[1], good[1], bad[2], bad[3], good[2]])
    assert [a.error is None for a in answers] == [False, True, False, True, False, False, True]
    assert [a.finish_reason for a in answers if a.error] == [FinishReason.ERROR] * 4
    assert [a.token_ids for a in answers if a.error is None] == generated(good)


def test_padded_ids_are_never_drawn() -> None:
    bound = 40
    verifier = verifier_of("llama")
    verifier.runner.vocabulary = bound
    requests = [r for r in ragged_requests(6, bound, seed=4)]
    answers = decoded(decoder(verifier, drafter_of("ngram", "llama")), requests)
    assert max(max(a.token_ids) for a in answers) < bound


# cache


def test_non_finite_row_is_an_error_and_its_slot_serves_the_next_one() -> None:
    """The row's cache is poisoned with NaN; a healthy sequence in the same slot and its neighbours are untouched."""
    requests = ragged_requests(6, 100, seed=8)
    poison = Request("poison", [150, 3, 4], SamplingParams(5))
    verifier = verifier_of("llama", slots=2)
    verifier.runner.model.get_input_embeddings().weight.data[150] = torch.nan
    answers = decoded(decoder(verifier, None, 2), [requests[0], poison, *requests[1:]])
    assert answers[1].finish_reason is FinishReason.ERROR
    assert "finite" in (answers[1].error or "")
    assert [a.token_ids for a in answers if not a.error] == generated(requests)


def test_shared_prefix_is_copied_not_computed_again() -> None:
    prefix = np.random.default_rng(0).integers(0, VOCABULARY, 60).tolist()
    requests = [Request(str(i), [*prefix, i, i + 1], SamplingParams(8)) for i in range(6)]
    verifier = verifier_of("llama")
    fed: list[int] = []
    forward = verifier.runner.forward
    verifier.runner.forward = lambda feed, *rest: (fed.append(len(feed.tokens)), forward(feed, *rest))[1]  # type: ignore[method-assign]
    answers = decoded(decoder(verifier), requests)
    assert [a.token_ids for a in answers] == generated(requests)
    assert sum(fed) < 2 * 62 + 6 * (8 + 3)  # computed at most twice: by the first and whoever began with it


class Forgetful:
    """A verifier whose worker is replaced by an empty one at given calls."""

    def __init__(self, model_type: str, at: set[int]) -> None:
        self.model_type, self.at, self.calls = model_type, at, 0
        self.inner = verifier_of(model_type)

    def verify(self, request: VerifyRequest) -> Verdict:
        self.calls += 1
        if self.calls in self.at:
            self.inner = verifier_of(self.model_type)
        return self.inner.verify(request)


class ForgetfulDrafter:
    """A model drafter that is emptied at given calls."""

    keeps_proposals = True
    chunk: int | None = 24

    def __init__(self, at: set[int]) -> None:
        self.at, self.calls = at, 0
        self.inner = drafter_of("itself", "llama")

    def ready(self) -> bool:
        return True

    def propose(self, request: DraftRequest) -> Proposal:
        self.calls += 1
        if self.calls in self.at:
            self.inner = drafter_of("itself", "llama")
        assert self.inner is not None
        return self.inner.propose(request)


def test_lost_target_resumes_every_sequence_from_its_accepted_prefix() -> None:
    requests = ragged_requests(7, VOCABULARY, seed=11, longest=20)
    expected = generated(requests)
    for at in ({1}, {2, 3}, set(range(2, 20, 4))):
        verifier = Forgetful("llama", at)
        answers = decoded(decoder(verifier, drafter_of("model", "llama")), requests)
        assert [a.token_ids for a in answers] == expected
        assert verifier.calls > max(at)


def test_emptied_drafter_is_fed_again_and_accepted_again() -> None:
    requests = ragged_requests(7, VOCABULARY, seed=11, longest=20)
    expected = generated(requests)
    drafter = ForgetfulDrafter({2, 7, 11})
    answers = decoded(decoder(verifier_of("llama"), drafter), requests)
    assert [a.token_ids for a in answers] == expected
    assert all(a.stats.accepted == a.stats.drafted for a in answers)


def test_stale_slot_is_never_taken_for_a_prefix() -> None:
    """After a step that was not carried out, what its slots held before is not relied on."""
    rng = np.random.default_rng(3)
    shared = rng.integers(0, VOCABULARY, 40).tolist()
    tails = rng.integers(0, VOCABULARY, (10, 6)).tolist()
    requests = [Request(str(i), shared[: 40 - i] + tail, SamplingParams(5)) for i, tail in enumerate(tails)]
    expected = generated(requests)
    for at in (1, 4, 7, 10):
        answers = decoded(decoder(Forgetful("llama", {at}), ForgetfulDrafter({at + 1, at + 4})), requests)
        assert [a.token_ids for a in answers] == expected


def test_unknown_sequence_is_a_cache_miss() -> None:
    verifier = verifier_of("llama")
    seen: list[VerifyRequest] = []
    inner = verifier.verify
    verifier.verify = lambda request: (seen.append(request), inner(request))[1]  # type: ignore[method-assign]
    decoded(decoder(verifier), ragged_requests(2, VOCABULARY))
    with pytest.raises(CacheMiss) as miss:
        verifier_of("llama").verify(seen[-1])
    assert set(miss.value.sequences) == set(seen[-1].feed.sequences.tolist())


def test_a_model_with_other_attention_is_refused() -> None:
    with pytest.raises(ModelError, match="attention"):
        Runner(tiny_model("llama"), 2, 64, VOCABULARY)


def test_attention_that_is_silently_not_called_is_noticed() -> None:
    run = runner(lambda: packed("llama"))
    run.model.config._attn_implementation = "eager"
    with pytest.raises(AssertionError, match="packed attention"):
        decoded(decoder(TargetVerifier(run)), ragged_requests(1, VOCABULARY))


def test_empty_proposal_has_no_tokens() -> None:
    proposal = empty_proposal(3, 2, 5)
    assert proposal.lengths.tolist() == [0, 0, 0]
    assert (proposal.tokens == -1).all()
    assert proposal.support_ids.shape == (3, 2, 5)


def test_a_sequence_that_has_moved_to_another_slot_keeps_its_opening() -> None:
    """The batch was made smaller, say; and then somebody takes the slot that it left."""
    made = runner(lambda: packed("llama"))

    def fed(sequence: int, slot: int) -> Feed:
        one = np.ones(1, dtype=np.int64)
        return Feed(one * sequence, one * slot, one * 0, one, one)

    opening = {n: Opening(n, (0, 0, 0), SamplingParams(4)) for n in (1, 2)}
    made.open([opening[1]], [], fed(1, 0))
    made.open([opening[1]], [], fed(1, 1))
    made.open([opening[2]], [], fed(2, 0))
    assert made.openings == {1: opening[1], 2: opening[2]}
    made.open([opening[2]], [], fed(2, 1))
    assert made.openings == {2: opening[2]}
