"""Log probabilities of answers, with speculation on: the plain model's own, or those of the configured law."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.engine.verifier import Rule
from pipeline.records import Completion, FinishReason, Request, SamplingParams
from pipeline.stopping import UNFINISHED
from pipeline.wording import Wording
from tests.decoding import configured_law, decoded, decoder, drafter_of, ragged_requests, verifier_of
from tests.models import VOCABULARY, byte_tokenizer, tiny_model

CLOSE = 1e-4  # float32
TOP = 3
COVERED: list[tuple[Rule, str]] = [
    ("ratio", "none"),
    ("ratio", "model"),
    ("ratio", "ngram"),
    ("block", "model"),
    ("block", "itself"),
    ("coupled", "itself"),
    ("coupled", "greedy"),
]
VARIED: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.8},
    {"temperature": 1.3, "top_k": 9, "logit_bias": {3: 2.0, 5: -100.0}},
    {"temperature": 1.0, "min_p": 0.05, "repetition_penalty": 1.3},
    {"temperature": 1.0, "presence_penalty": 0.5, "frequency_penalty": 0.3, "min_new_tokens": 4},
)
EOS = (7, 70, 170)  # some texts end by themselves


def requests(logprobs: str, **params: Any) -> list[Request]:
    asked = ragged_requests(12, VOCABULARY, seed=2, longest=16)
    return [
        replace(r, params=replace(r.params, **VARIED[i % len(VARIED)], logprobs=logprobs, **params))
        for i, r in enumerate(asked)
    ]


def answers(asked: list[Request], rule: Rule, kind: str, eos: tuple[int, ...] = EOS) -> list[Completion]:
    drafter = drafter_of(kind, "llama", coupled=rule == "coupled", eos=eos)
    verifier = verifier_of("llama", rule=rule, eos=eos)
    return decoded(decoder(verifier, drafter, eos=eos, wording=Wording(byte_tokenizer())), asked)


@cache
def plain_logits(tokens: tuple[int, ...]) -> np.ndarray:
    """[T, V] of a plain forward pass of transformers."""
    return tiny_model("llama")(torch.tensor([tokens])).logits[0].double().numpy()


def laws(request: Request, answer: Completion) -> Iterator[np.ndarray]:
    """The law that each token's log probability is said to belong to."""
    prompt, text = request.prompt_token_ids, answer.token_ids
    for i, logits in enumerate(plain_logits((*prompt, *text))[len(prompt) - 1 : len(prompt) + len(text) - 1]):
        if request.params.logprobs == "raw":
            yield np.exp(logits - np.logaddexp.reduce(logits))
        else:
            yield configured_law(logits, request.params, prompt, text[:i], EOS)


@pytest.mark.parametrize("logprobs", ["raw", "law"])
@pytest.mark.parametrize(("rule", "kind"), COVERED)
def test_log_probabilities_are_those_of_a_plain_forward_pass(rule: Rule, kind: str, logprobs: str) -> None:
    asked = requests(logprobs)
    found = answers(asked, rule, kind)
    for request, answer in zip(asked, found, strict=True):
        expected = [law[token] for law, token in zip(laws(request, answer), answer.token_ids, strict=True)]
        assert answer.logprobs == pytest.approx(np.log(expected).tolist(), abs=CLOSE)
        assert answer.top_logprobs is None
    assert {str(a.finish_reason) for a in found} == {"stop", "length"}
    assert sum(len(a.token_ids) for a in found) > 60
    if kind == "itself":
        assert sum(a.stats.accepted for a in found) > 20


def test_raw_and_law_differ_where_parameters_do_something() -> None:
    """The same texts, since a log probability is looked at and not drawn with."""
    raw, law = (answers(requests(logprobs), "ratio", "model") for logprobs in ("raw", "law"))
    assert [a.token_ids for a in raw] == [a.token_ids for a in law]
    differ = [a.logprobs != pytest.approx(b.logprobs, abs=CLOSE) for a, b in zip(raw, law, strict=True) if a.token_ids]
    plain = [r.params.temperature == 1.0 and r.params.min_p == r.params.presence_penalty == 0 for r in requests("raw")]
    assert differ == [not p for p, a in zip(plain, raw, strict=True) if a.token_ids]
    greedy = [a for a, r in zip(law, requests("law"), strict=True) if r.params.temperature == 0]
    assert all(set(a.logprobs or ()) <= {0.0} for a in greedy)


@pytest.mark.parametrize("logprobs", ["raw", "law"])
@pytest.mark.parametrize(("rule", "kind"), [("ratio", "model"), ("block", "ngram"), ("coupled", "itself")])
def test_alternatives_are_the_likeliest_tokens_in_order(rule: Rule, kind: str, logprobs: str) -> None:
    asked = requests(logprobs, top_logprobs=TOP)
    seen = 0
    for request, answer in zip(asked, answers(asked, rule, kind), strict=True):
        assert answer.top_logprobs is not None
        assert answer.logprobs is not None
        for law, found, token, own in zip(
            laws(request, answer), answer.top_logprobs, answer.token_ids, answer.logprobs, strict=True
        ):
            likely = np.sort(law[law > 0])[::-1][:TOP]
            assert [p for _, p in found] == pytest.approx(np.log(likely).tolist(), abs=CLOSE)
            assert [law[i] for i, _ in found] == pytest.approx(likely.tolist(), abs=CLOSE)
            assert len({i for i, _ in found}) == len(found)
            assert dict(found).get(token, own) == own
            seen += 1
    assert seen > 60


@pytest.mark.parametrize("logprobs", ["raw", "law"])
def test_more_alternatives_than_tokens_cost_no_more_than_all_of_them(logprobs: str) -> None:
    """A table as wide as was asked for would not fit any memory."""
    many, all_of_them = (requests(logprobs, top_logprobs=top)[:2] for top in (2**62, VOCABULARY))
    assert answers(many, "ratio", "ngram") == answers(all_of_them, "ratio", "ngram")


def test_rows_of_one_batch_get_what_each_asked_for() -> None:
    """None, raw, law and another number of alternatives, side by side; the texts are those without."""
    asked = [
        replace(r, params=replace(r.params, logprobs=("none", "raw", "law")[i % 3], top_logprobs=(0, 5, 2, 0)[i % 4]))
        for i, r in enumerate(requests("none"))
    ]
    found = answers(asked, "ratio", "model")
    bare = answers(requests("none"), "ratio", "model")
    assert [a.token_ids for a in found] == [a.token_ids for a in bare]
    for request, answer, without in zip(asked, found, bare, strict=True):
        assert without.logprobs is None
        assert without.top_logprobs is None
        if request.params.logprobs == "none":
            assert answer.logprobs is None
            assert answer.top_logprobs is None
            continue
        expected = [law[token] for law, token in zip(laws(request, answer), answer.token_ids, strict=True)]
        assert answer.logprobs == pytest.approx(np.log(expected).tolist(), abs=CLOSE)
        if request.params.top_logprobs == 0:
            assert answer.top_logprobs is None
        else:
            support = [int((law > 0).sum()) for law in laws(request, answer)]
            assert [len(t) for t in answer.top_logprobs or ()] == [
                min(request.params.top_logprobs, s) for s in support
            ]


@pytest.mark.parametrize(("rule", "kind"), [("ratio", "model"), ("block", "itself"), ("coupled", "itself")])
def test_lists_are_as_long_as_the_answer_wherever_it_is_cut(rule: Rule, kind: str) -> None:
    """At EOS inside a block and at stop strings, some of which begin in an earlier block."""
    asked = requests("raw", top_logprobs=2)
    free = answers(asked, rule, kind, eos=())
    wording, stopped = Wording(byte_tokenizer()), 0
    for place, longest in ((2, 1), (3, 2), (5, 3)):  # the stop string: from this token on, so many tokens
        stops = [wording.raw(a.token_ids[place : place + longest]) for a in free]
        watched = [
            replace(r, params=replace(r.params, stop=(stop,) if stop and UNFINISHED not in stop else ()))
            for r, stop in zip(asked, stops, strict=True)
        ]
        for request, answer, whole in zip(watched, answers(watched, rule, kind, eos=()), free, strict=True):
            count = len(answer.token_ids)
            assert answer.logprobs is not None
            assert answer.top_logprobs is not None
            assert whole.logprobs is not None
            assert len(answer.logprobs) == len(answer.top_logprobs) == count
            assert answer.token_ids == whole.token_ids[:count]
            assert answer.logprobs == pytest.approx(whole.logprobs[:count], abs=CLOSE)
            assert np.isfinite(answer.logprobs).all()
            assert answer.stats.accepted <= min(count, answer.stats.drafted)
            stopped += answer.finish_reason is FinishReason.STOP
            assert (answer.finish_reason is FinishReason.STOP) or not request.params.stop or count == len(
                whole.token_ids
            )
    assert stopped > 8


def test_an_answer_that_ends_at_once_has_empty_lists() -> None:
    [free] = answers([Request("k", [1, 2], SamplingParams(4))], "ratio", "none", eos=())
    params = SamplingParams(4, logprobs="raw", top_logprobs=2)
    [answer] = answers([Request("k", [1, 2], params)], "ratio", "itself", eos=(free.token_ids[0],))
    assert (answer.token_ids, answer.logprobs, answer.top_logprobs) == ([], [], [])
    assert answer.finish_reason is FinishReason.STOP


def test_the_sum_is_the_log_probability_of_the_text() -> None:
    """Of the law that was configured, by the chain rule, token by token with the plain model."""
    asked = [replace(r, params=replace(r.params, min_new_tokens=0)) for r in requests("law")]
    for request, answer in zip(asked, answers(asked, "block", "itself"), strict=True):
        total = sum(np.log(law[t]) for law, t in zip(laws(request, answer), answer.token_ids, strict=True))
        assert sum(answer.logprobs or ()) == pytest.approx(float(total), abs=CLOSE * (1 + len(answer.token_ids)))


def test_an_error_row_has_no_log_probabilities_and_its_neighbours_keep_theirs() -> None:
    verifier = verifier_of("llama")
    verifier.runner.model.get_input_embeddings().weight.data[150] = torch.nan
    params = SamplingParams(5, temperature=1.0, logprobs="raw", top_logprobs=1)
    good, bad = Request("good", [1, 2, 3], params), Request("bad", [150, 2], params)
    sound, failed = decoded(decoder(verifier, drafter_of("ngram", "llama")), [good, bad])
    assert failed.error is not None
    assert failed.logprobs is None
    assert failed.top_logprobs is None
    expected = [law[token] for law, token in zip(laws(good, sound), sound.token_ids, strict=True)]
    assert sound.logprobs == pytest.approx(np.log(expected).tolist(), abs=CLOSE)
