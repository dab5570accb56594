"""Decides what the next step computes, and is the only one to change sequences.

`plan()` admits waiting requests into free slots and says, for every running sequence, which tokens to feed and
how many to draft; `apply()` takes the verdict in. No clock, no threads, no I/O, no models: the same object runs
in one process, under Ray, and in simulations.

Admission is by reservation: a sequence's slot holds its prompt and all it may generate, so nothing is ever
preempted. One rule feeds everything (`tokens[cached:]`): prompts in chunks, the pending token of a running
sequence, the tail after a fully accepted block, and the whole prefix after a worker was lost.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sized
from collections.abc import Sequence as SequenceOfTokens
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any, Protocol

import numpy as np

from pipeline.messages import Opening, PrefixCopy, Scores, VerifyReply, VerifyRequest
from pipeline.randomness import philox_key
from pipeline.records import Completion, CompletionStats, FinishReason, Request, SamplingParams
from pipeline.sequence import Alternatives, Sequence
from pipeline.step import Plan, Row
from pipeline.stopping import StopWatch

_INTEGERS = 2**63  # what a tensor holds
MOST_SAMPLES = 2**20  # each is a sequence in the queue: a slip of the pen must not take all memory


class Wording(Protocol):
    """What a scheduler asks of the target's tokenizer."""

    def raw(self, ids: list[int]) -> str:
        """The text of some tokens, its last character perhaps unfinished."""
        ...

    def spellings(self, word: str) -> tuple[tuple[int, ...], ...]:
        """The token sequences that write a word."""
        ...


def _whole(least: int, below: float = math.inf) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, Integral) and least <= int(value) < below


def _number(value: Any) -> bool:
    try:
        return isinstance(value, Real) and math.isfinite(float(value))
    except OverflowError:  # a whole number that no float holds
        return False


def _texts(value: Any) -> bool:
    return isinstance(value, tuple | list) and all(isinstance(text, str) and _writable(text) for text in value)


def _writable(text: str) -> bool:
    """Not empty, and without a lone surrogate, which no text holds and no tokenizer takes."""
    return bool(text) and not any("\ud800" <= character <= "\udfff" for character in text)


def _stops(value: Any) -> bool:
    return _texts(value) and all("\ufffd" not in text for text in value)  # that stands for bytes that are no character


_RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "max_new_tokens": (_whole(1), "a whole number, at least 1"),
    "temperature": (lambda value: _number(value) and value >= 0, "a number, at least 0"),
    "top_k": (_whole(0, _INTEGERS), "a whole number, at least 0"),
    "top_p": (lambda value: _number(value) and 0 < value <= 1, "above 0 and at most 1"),
    "min_p": (lambda value: _number(value) and 0 <= value <= 1, "from 0 to 1"),
    "repetition_penalty": (lambda value: _number(value) and value > 0, "a number above 0"),
    "presence_penalty": (_number, "a finite number"),
    "frequency_penalty": (_number, "a finite number"),
    "logit_bias": (
        lambda value: isinstance(value, Mapping) and all(_whole(0)(k) and _number(v) for k, v in value.items()),
        "token ids with finite numbers",
    ),
    "stop": (_stops, "a tuple of texts, none of them empty, with U+FFFD or with a lone surrogate"),
    "ignore_eos": (lambda value: isinstance(value, bool | np.bool_), "true or false"),
    "n": (_whole(1, MOST_SAMPLES + 1), f"a whole number from 1 to {MOST_SAMPLES}"),
    "logprobs": (lambda value: isinstance(value, str) and value in ("none", "raw", "law"), "none, raw or law"),
    "top_logprobs": (_whole(0, _INTEGERS), "a whole number, at least 0"),
    "bad_words": (_texts, "a tuple of texts, none of them empty or with a lone surrogate"),
    "min_new_tokens": (_whole(0, _INTEGERS), "a whole number, at least 0"),
}

SHORTEST_COPY = 8  # tokens; a shorter common prefix is cheaper to compute again than to copy


@dataclass(frozen=True, slots=True)
class Limits:
    """What a replica can hold and how it cuts its work; lengths in tokens."""

    slots: int  # sequences at once
    context: int  # prompt + generated
    draft_tokens: int  # drafted per sequence and step; 0 is plain decoding
    prefill_chunk: int = 256  # prompt tokens per step, over all sequences, so that running ones do not wait
    vocabulary: int | None = None  # ids from here on are refused in prompts
    draft_context: int | None = None  # where the drafter's own context ends; longer sequences go on without it


@dataclass(frozen=True, slots=True)
class Resident:
    """Whose tokens a slot holds, for sharing prefixes; it outlives the sequence until the slot is reused."""

    tokens: list[int]
    target: int = 0  # leading tokens valid in the target's cache
    draft: int = 0


class Scheduler:
    """Sequences in slots, requests in a queue, and the step that comes next."""

    def __init__(
        self,
        limits: Limits,
        eos: Iterable[int],
        seed: int,
        salt: int = 0,
        drafter_keeps_proposals: bool = True,
        draft_chunk: int | None = None,
        wording: Wording | None = None,
        first_handle: int = 0,
    ) -> None:
        """`drafter_keeps_proposals`: the drafter's cache holds its own drafted tokens but the last, as a model's does.

        `draft_chunk` bounds the tokens fed to the drafter per step beside the running rows' own; None: no bound.
        Without `wording`, requests with stop strings or bad words are refused. Sequences are numbered from
        `first_handle` + 1.
        """
        self.limits = limits
        self.eos = frozenset(eos)
        self.seed = seed
        self.salt = salt
        self.drafter_keeps_proposals = drafter_keeps_proposals
        self.draft_chunk = draft_chunk
        self.wording = wording
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.residents = [Resident([]) for _ in range(limits.slots)]
        self.free = list(range(limits.slots))
        self.rejected: list[tuple[Request, int, Completion]] = []  # request, sample, why not
        self._handles = first_handle

    # requests in

    def submit(self, request: Request) -> None:
        """Queue a request, as one sequence per sample.

        One that can't be decoded is answered with an error per sample by the next `take_rejected`.
        """
        problem = self._problem(request)
        if problem is not None:
            wanted = getattr(request.params, "n", 1)
            samples = wanted if _RANGES["n"][0](wanted) else 1
            self.rejected += [(request, sample, failed(request, problem)) for sample in range(samples)]
            return
        prompt, params = len(request.prompt_token_ids), request.params
        bad_words: tuple[tuple[int, ...], ...] = ()
        if self.wording is not None:
            spelled = [s for word in params.bad_words for s in self.wording.spellings(word)]
            bad_words = tuple(s for s in spelled if params.ignore_eos or s not in {(token,) for token in self.eos})
        for sample in range(params.n):
            self._handles += 1
            key = philox_key(self.seed, self.salt, request.key, sample)
            watch = None
            if params.stop and self.wording is not None:
                watch = StopWatch(tuple(params.stop), self.wording.raw, params.min_new_tokens)
            self.waiting.append(
                Sequence(
                    handle=self._handles,
                    request=request,
                    opening=Opening(self._handles, key, params, bad_words),
                    limit=min(prompt + int(params.max_new_tokens), self.limits.context),  # numpy's may wrap around
                    watch=watch,
                    sample=sample,
                )
            )

    def take_rejected(self) -> list[tuple[Request, int, Completion]]:
        """Answers to the requests that were refused since the last call."""
        rejected, self.rejected = self.rejected, []
        return rejected

    def _problem(self, request: Request) -> str | None:
        tokens = request.prompt_token_ids
        if not isinstance(tokens, SequenceOfTokens | np.ndarray) or not all(isinstance(t, Integral) for t in tokens):
            return "the prompt is no list of token ids"
        if len(tokens) == 0:
            return "the prompt has no tokens"
        if len(tokens) >= self.limits.context:
            return f"the prompt has {len(tokens)} tokens, the context {self.limits.context}: no room for an answer"
        if not isinstance(request.params, SamplingParams):
            return f"the request's params are {type(request.params).__name__}: they must be SamplingParams"
        for name, (fits, meaning) in _RANGES.items():
            value = getattr(request.params, name)
            if not fits(value):
                return f"{name} is {_brief(value)}: it must be {meaning}"
        if self.wording is None and (request.params.stop or request.params.bad_words):
            return "stop strings and bad words need a tokenizer, and this engine has none"
        bound = self.limits.vocabulary
        foreign = [token for token in request.params.logit_bias if bound is not None and token >= bound]
        if foreign:
            return f"logit_bias names token {foreign[0]}, the vocabulary ends with {bound - 1 if bound else ''}"
        if min(tokens) < 0 or (bound is not None and max(tokens) >= bound):
            return f"the prompt has a token id outside 0 to {'…' if bound is None else bound - 1}"
        return None

    @property
    def queued(self) -> int:
        """Requests that wait for a slot, and refused ones whose answers wait to be taken."""
        return len(self.waiting) + len(self.rejected)

    @property
    def idle(self) -> bool:
        """Nothing runs and nothing waits."""
        return not self.running and not self.waiting

    # a step

    def plan(self, drafting: bool = True) -> Plan | None:
        """What to compute next; None when idle. With `drafting` false the drafter is left out of the step."""
        self._admit()
        if not self.running:
            return None
        drafting = drafting and self.limits.draft_tokens > 0
        residents = list(self.residents)  # as they will be when the plan's copies are made, one by one
        target_copies: list[PrefixCopy] = []
        draft_copies: list[PrefixCopy] = []
        rows = []
        budget, draft_budget = self.limits.prefill_chunk, self.draft_chunk
        for sequence in self.running:
            start, draft_start = sequence.target_cached, sequence.draft_cached
            decoding = sequence.generated > 0 and len(sequence.tokens) - start <= self.limits.draft_tokens + 2
            if not decoding and budget <= 0:
                continue
            drafts = drafting and self._drafted(sequence)
            if start == 0:
                most = len(sequence.tokens) - 1
                if drafts:  # no more than the drafter can share too, or whether the first block is drafted, and with
                    most = max(_held(sequence, "draft", residents, most))  # it the text, would be the neighbours' doing
                start = self._share(sequence, "target", residents, most, target_copies)
                if drafts:
                    draft_start = self._share(sequence, "draft", residents, start, draft_copies, least=1)
                residents[sequence.slot] = Resident(sequence.tokens, start, draft_start)
            end = len(sequence.tokens) if decoding else min(len(sequence.tokens), start + budget)
            row = self._row(sequence, start, end, draft_start, drafts, draft_budget)
            if not decoding:
                budget -= end - start
            if draft_budget is not None and (not decoding or row.draft_fed > self.limits.draft_tokens + 2):
                draft_budget -= row.draft_fed
            rows.append(row)
        rows.sort(key=lambda r: r.sequence.slot)  # neighbouring slots are read as one view
        return Plan(tuple(rows), tuple(target_copies), tuple(draft_copies))

    def _drafted(self, sequence: Sequence) -> bool:
        """The drafter follows this sequence: a block behind it still fits its context."""
        reach = self.limits.draft_context
        return reach is None or len(sequence.tokens) + self.limits.draft_tokens <= reach

    def _row(
        self, sequence: Sequence, start: int, end: int, draft_start: int, drafts: bool, draft_budget: int | None
    ) -> Row:
        """Feed the target up to `end`, the drafter as far as it may come, and draft where both are there."""
        draft_end, wanted = draft_start, 0
        if drafts:
            reach = end if draft_budget is None else draft_start + max(draft_budget, self.limits.draft_tokens + 2)
            draft_end = max(draft_start, min(end, reach))
            if draft_end == len(sequence.tokens):
                wanted = max(0, min(self.limits.draft_tokens, sequence.room - 1))
        return Row(sequence, start, end, draft_start, draft_end, wanted, sequence.drafts_greedily)

    def apply(self, plan: Plan, request: VerifyRequest, reply: VerifyReply) -> list[Sequence]:
        """Take the reply to a plan in; returns the sequences that ended, their slots already free."""
        ended = []
        proposal, verdict = request.proposal, reply.verdict
        for b, row in enumerate(plan.rows):
            sequence = row.sequence
            sequence.target_cached, sequence.target_opened = row.target_end, True
            sequence.draft_cached = row.draft_end
            sequence.draft_opened |= row.draft_fed > 0
            if row.final:
                length = int(proposal.lengths[b])
                drafted = [int(t) for t in proposal.tokens[b][:length]]
                if reply.overlap is not None:
                    sequence.compared = [a + float(c) for a, c in zip(sequence.compared, reply.overlap[b], strict=True)]
                if reply.scores is not None and sequence.request.params.logprobs != "none":
                    sequence.score(*_scored(reply.scores, b, int(verdict.accepted[b]) + 1))
                self._judge(sequence, drafted, int(verdict.accepted[b]), int(verdict.next_token[b]), row)
            if sequence.finish is None:
                sequence.check()
            else:
                ended.append(sequence)
            self._remember(sequence)
        for sequence in ended:
            self.running.remove(sequence)
            self.free.append(sequence.slot)
        self.free.sort()
        return ended

    def _judge(self, sequence: Sequence, drafted: list[int], accepted: int, next_token: int, row: Row) -> None:
        if next_token < 0:
            sequence.finish = FinishReason.ERROR
            sequence.target_cached = 0
            return
        before = len(sequence.tokens)
        eos = frozenset() if sequence.request.params.ignore_eos else self.eos
        sequence.extend(drafted, accepted, next_token, eos)
        sequence.target_cached = min(before + accepted, len(sequence.tokens) - 1)
        if row.draft_end == before and row.draft_fed:
            kept = min(accepted, max(len(drafted) - 1, 0)) if self.drafter_keeps_proposals else 0
            sequence.draft_cached = min(before + kept, len(sequence.tokens) - 1)

    # slots and prefixes

    def _admit(self) -> None:
        while self.waiting and self.free:
            sequence = self.waiting.popleft()
            shared = [_common(self.residents[slot].tokens, sequence.tokens) for slot in self.free]
            sequence.slot = self.free.pop(int(np.argmax(shared)))
            self.running.append(sequence)

    def _share(
        self,
        sequence: Sequence,
        model: str,
        residents: list[Resident],
        most: int,
        copies: list[PrefixCopy],
        least: int = SHORTEST_COPY,
    ) -> int:
        """Tokens a new sequence need not feed, since a slot holds them (DESIGN section 4); adds the copy needed.

        A copy must bring `least` tokens more than the sequence's own slot holds.
        """
        held = _held(sequence, model, residents, most)
        source = int(np.argmax(held))
        if held[source] >= held[sequence.slot] + least:
            copies.append(PrefixCopy(source, sequence.slot, held[source]))
            return held[source]
        return held[sequence.slot]

    def _remember(self, sequence: Sequence) -> None:
        self.residents[sequence.slot] = Resident(sequence.tokens, sequence.target_cached, sequence.draft_cached)

    def clear(self) -> None:
        """Drop all requests unanswered; what their slots hold is not relied on."""
        self.waiting.clear()
        self.rejected.clear()
        self.running.clear()
        self.residents = [Resident([]) for _ in range(self.limits.slots)]
        self.free = list(range(self.limits.slots))

    # workers that forget

    def abandon(self, plan: Plan) -> None:
        """A plan was not carried out to its end: what its slots held before may be overwritten."""
        for row in plan.rows:
            self._remember(row.sequence)

    def forget_target(self, handles: Iterable[int]) -> None:
        """The target does not hold these sequences: each is fed again from its first token.

        What other slots hold is no longer relied on for sharing, since one of them may have been the source.
        """
        for sequence in self._named(handles):
            sequence.target_cached, sequence.target_opened = 0, False
        self.residents = [replace(r, target=0) for r in self.residents]

    def forget_draft(self, handles: Iterable[int] | None = None) -> None:
        """The drafter does not hold these sequences (None: any)."""
        for sequence in self.running if handles is None else self._named(handles):
            sequence.draft_cached, sequence.draft_opened = 0, False
        self.residents = [replace(r, draft=0) for r in self.residents]

    def _named(self, handles: Iterable[int]) -> list[Sequence]:
        chosen = set(handles)
        return [s for s in self.running if s.handle in chosen]


def _scored(scores: Scores, b: int, tokens: int) -> tuple[list[float], list[Alternatives]]:
    """One row's log probabilities and alternatives, per token of its verdict."""
    alternatives = [
        [(int(i), float(p)) for i, p in zip(ids, logs, strict=True) if i >= 0]
        for ids, logs in zip(scores.top_ids[b][:tokens], scores.top_logprobs[b][:tokens], strict=True)
    ]
    return [float(p) for p in scores.logprobs[b][:tokens]], alternatives


def _held(sequence: Sequence, model: str, residents: list[Resident], most: int) -> list[int]:
    """How many of a sequence's first tokens each slot holds for a model, up to `most`."""
    return [min(_common(r.tokens, sequence.tokens), getattr(r, model), most) for r in residents]


def _common(a: list[int], b: list[int]) -> int:
    """Length of the longest common prefix."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while low < high:  # invariant: a[:low] == b[:low], a[:high + 1] != b[:high + 1] or high is the end
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _brief(value: Any) -> str:
    """What somebody gave, as far as it fits into a line; a number may have too many digits to be written at all."""
    try:
        text = repr(value)
    except ValueError:
        return "a number of very many digits"
    return text if len(text) <= 100 else text[:97] + "…"


def failed(request: Request, problem: str) -> Completion:
    """The answer to a request that can't be decoded."""
    prompt = request.prompt_token_ids
    stats = CompletionStats(prompt_tokens=len(prompt) if isinstance(prompt, Sized) else 0)
    return Completion(request.key, [], "", FinishReason.ERROR, None, stats, error=problem)
