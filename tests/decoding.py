"""Decoders over tiny models and over tables, for tests; and the plain references they are held against."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from pipeline.decode import Decoder, Drafter, Verifier
from pipeline.engine.attention import NAME
from pipeline.engine.drafters.model import ModelDrafter, Sampling
from pipeline.engine.drafters.ngram import NgramDrafter
from pipeline.engine.runner import Runner
from pipeline.engine.token_store import TokenStore
from pipeline.engine.verifier import Rule, TargetVerifier
from pipeline.messages import Feed, Opening, PrefixCopy
from pipeline.records import Completion, Request, SamplingParams
from pipeline.scheduler import Limits, Scheduler
from pipeline.wording import Wording
from tests import oracle
from tests.models import tiny_model

PREFILL_CHUNK = 24  # small, so that prompts of these tests are cut

Build = Callable[[], PreTrainedModel]


def runner(build: Build, slots: int = 4, context: int = 200, vocabulary: int | None = None) -> Runner:
    """A runner over a model that `build` makes with packed attention."""
    model = build()
    return Runner(model, slots, context, vocabulary or model.config.vocab_size)


def packed(model_type: str, seed: int = 0, **changes: object) -> PreTrainedModel:
    return tiny_model(model_type, seed, attn_implementation=NAME, **changes)  # type: ignore[arg-type]


class TabularRunner:
    """A `DraftRunner` without a model: logits are a function of all tokens before a position. Checks no prefixes."""

    def __init__(self, logits: Callable[[tuple[int, ...]], np.ndarray], slots: int, vocabulary: int) -> None:
        self.logits, self.vocabulary = logits, vocabulary
        self.openings: dict[int, Opening] = {}
        self.texts = TokenStore(slots)

    def open(self, openings: Sequence[Opening], copies: Sequence[PrefixCopy], feed: Feed) -> None:
        for copy in copies:
            self.texts.copy(copy)
        self.openings.update((opening.sequence, opening) for opening in openings)

    def forward(self, feed: Feed, extra_tokens: Sequence[np.ndarray], wanted_R: np.ndarray) -> torch.Tensor:
        self.texts.write(feed, extra_tokens)
        ends = [
            (slot, cached + i + 1)
            for slot, cached, fed, extra in zip(feed.slots, feed.cached, feed.lengths, extra_tokens, strict=True)
            for i in range(fed + len(extra))
        ]
        heads = [tuple(self.texts.tokens[slot, :end].tolist()) for slot, end in (ends[r] for r in wanted_R)]
        found = [self.logits(head) for head in heads]
        return torch.tensor(np.array(found).reshape(len(found), self.vocabulary), dtype=torch.float32)

    def scrub(self, slot: int) -> None:
        self.texts.tokens[slot] = 0


def decoder(
    verifier: Verifier,
    drafter: Drafter | None = None,
    slots: int = 4,
    context: int = 200,
    draft_tokens: int = 4,
    eos: Iterable[int] = (),
    seed: int = 0,
    vocabulary: int | None = None,
    wording: Wording | None = None,
    prefill_chunk: int = PREFILL_CHUNK,
    salt: int = 0,
) -> Decoder:
    """Join parts as `assembly.make_decoder` does, without a job file or a tokenizer."""
    limits = Limits(slots, context, draft_tokens if drafter else 0, prefill_chunk, vocabulary)
    scheduler = Scheduler(
        limits,
        eos,
        seed,
        salt,
        drafter_keeps_proposals=drafter is not None and drafter.keeps_proposals,
        draft_chunk=None if drafter is None else drafter.chunk,
        wording=wording,
    )
    return Decoder(scheduler, verifier, drafter, scheduler.wording or (lambda ids: " ".join(map(str, ids))))


def drafter_of(
    kind: str,
    model_type: str,
    slots: int = 4,
    context: int = 200,
    coupled: bool = False,
    eos: Iterable[int] = (),
    chunk: int = PREFILL_CHUNK,
    **changes: object,
) -> Drafter | None:
    """none, ngram, itself (the target as its own draft), model (other weights), or such a model greedy or auto."""
    if kind == "none":
        return None
    if kind == "ngram":
        return NgramDrafter(slots)
    seed = 0 if kind == "itself" else 5
    build = lambda: packed(model_type, seed, **changes)  # noqa: E731
    sampling: Sampling = "greedy" if kind == "greedy" else "auto" if kind == "auto" else "sample"
    return ModelDrafter(runner(build, slots, context), 16, sampling, chunk, coupled, eos)


def decoded(decoding: Decoder, requests: Sequence[Request]) -> list[Completion]:
    """Answers in the order of the requests, a request's samples in a row."""
    answers = {(id(request), sample): completion for request, sample, completion in decoding.answers(requests)}
    return [answers[id(request), sample] for request in requests for sample in range(request.params.n)]


def verifier_of(
    model_type: str,
    slots: int = 4,
    context: int = 200,
    rule: Rule = "ratio",
    eos: Iterable[int] = (),
    compare_sampling: bool = False,
    **changes: object,
) -> TargetVerifier:
    return TargetVerifier(runner(lambda: packed(model_type, 0, **changes), slots, context), rule, eos, compare_sampling)


def configured_law(
    logits: np.ndarray, params: SamplingParams, prompt: Sequence[int], answer: Sequence[int], eos: Iterable[int] = ()
) -> oracle.Law:
    """The law of the token behind `answer`, from the plain model's logits there: the formulas, token by token."""
    scores = np.array(logits, dtype=np.float64)
    for token, bias in params.logit_bias.items():
        scores[token] += bias
    for token in {*prompt, *answer}:
        scores[token] *= params.repetition_penalty if scores[token] < 0 else 1 / params.repetition_penalty
    for token in set(answer):
        scores[token] -= params.presence_penalty + params.frequency_penalty * list(answer).count(token)
    if len(answer) < params.min_new_tokens and not params.ignore_eos:
        scores[list(eos)] = -np.inf
    return oracle.filtered(scores, params.temperature, params.top_k, params.top_p, params.min_p)


def generated_alone(model: PreTrainedModel, request: Request, eos: int | None = None) -> list[int]:
    """transformers' own greedy text for one prompt, without its EOS token."""
    prompt = torch.tensor([request.prompt_token_ids])
    out = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=request.params.max_new_tokens,
        do_sample=False,
        eos_token_id=eos,
        pad_token_id=0,
        temperature=None,
        top_p=None,
        top_k=None,
    )[0, prompt.shape[1] :].tolist()
    return out[: out.index(eos)] if eos in out else out


def ragged_requests(
    count: int, vocabulary: int, seed: int = 0, longest: int = 32, **params: object
) -> list[Request]:
    """Prompts of 1 to 60 tokens, some with a common beginning, asking for 1 to `longest` tokens."""
    rng = np.random.default_rng(seed)
    common = rng.integers(0, vocabulary, 20).tolist()
    requests = []
    for i in range(count):
        prompt = (common if i % 3 == 0 else []) + rng.integers(0, vocabulary, int(rng.integers(1, 60))).tolist()
        wanted = int(rng.integers(1, longest + 1))
        requests.append(Request(str(i), prompt, SamplingParams(wanted, **params)))  # type: ignore[arg-type]
    return requests
