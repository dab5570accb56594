"""The loop that joins a scheduler, a drafter and a verifier: plan, draft, verify, apply.

Drafters and verifiers are two small protocols; whether they live in this process or behind an actor is not
known here. A drafter that fails costs speed: its sequences go on without drafts. A verifier that forgot a
sequence is fed it again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, Protocol

from pipeline.errors import CacheMiss, NightdeskError, WorkerLost
from pipeline.messages import DraftRequest, Proposal, VerifyReply, VerifyRequest
from pipeline.records import Completion, FinishReason, Request
from pipeline.scheduler import Scheduler, failed
from pipeline.sequence import Sequence
from pipeline.step import Plan

Detokenize = Callable[[list[int]], str]
IDLE_SECONDS = 0.01  # pause when nothing runs and no request is to be had


class Drafter(Protocol):
    """Whatever proposes. Raises `CacheMiss` for prefixes it does not hold, `WorkerLost` when it is gone."""

    keeps_proposals: bool  # its cache holds its own drafted tokens, the last one excepted
    chunk: int | None  # most tokens to feed it per step beside running rows; None: no bound

    def ready(self) -> bool:
        """Can be asked now; false while a lost worker is being replaced."""
        ...

    def propose(self, request: DraftRequest) -> Proposal:
        """Draft up to `request.wanted` tokens per row, each with the law it was drawn from."""
        ...


class Verifier(Protocol):
    """The target's side. Raises `CacheMiss` for prefixes it does not hold."""

    def verify(self, request: VerifyRequest) -> VerifyReply:
        """Run the fed and the proposed tokens, and judge the latter."""
        ...


class Answer(NamedTuple):
    """A completion, and which sample of which request it answers."""

    request: Request
    sample: int
    completion: Completion


class RequestStream(Protocol):
    """What a job needs of an engine."""

    def stream(self, requests: Iterable[Request | None]) -> Iterator[Completion]:
        """Answer every request once per sample, in the order in which they finish.

        Requests are pulled a bounded number ahead. None stands for "no request right now, more may come".
        """
        ...


class Decoder:
    """Decodes requests as they come; a finished sequence's slot is taken by the next request at once."""

    def __init__(
        self, scheduler: Scheduler, verifier: Verifier, drafter: Drafter | None, detokenize: Detokenize
    ) -> None:
        self.scheduler = scheduler
        self.verifier = verifier
        self.drafter = drafter
        self.detokenize = detokenize
        self._streaming = False

    def stream(self, requests: Iterable[Request | None]) -> Iterator[Completion]:
        """See `RequestStream`."""
        return (answer.completion for answer in self.answers(requests))

    def answers(self, requests: Iterable[Request | None]) -> Iterator[Answer]:
        """As `stream`, each completion with the request it answers.

        One that ends early (a failure, a consumer that stops) leaves nothing behind for the next.
        """
        if self._streaming:
            raise NightdeskError("this engine is answering other requests: end that stream before the next one")
        self._streaming = True
        try:
            yield from self._answers(iter(requests))
        finally:
            self._streaming = False
            if not self.scheduler.idle:
                self.scheduler.clear()

    def _answers(self, source: Iterator[Request | None]) -> Iterator[Answer]:
        exhausted = False
        while True:
            while not exhausted and self.scheduler.queued < self.scheduler.limits.slots:
                try:
                    request = next(source)
                except StopIteration:
                    exhausted = True
                    break
                if request is None:
                    break
                self.scheduler.submit(request)
            yield from (Answer(*rejected) for rejected in self.scheduler.take_rejected())
            if not self.scheduler.idle:
                yield from self.step()
            elif exhausted:
                return
            else:
                time.sleep(IDLE_SECONDS)

    def step(self) -> list[Answer]:
        """One pass of the target over all running sequences; returns what finished."""
        drafting = self.drafter is not None and self.drafter.ready()
        plan = self.scheduler.plan(drafting)
        if plan is None:
            return []
        try:
            proposal = self._propose(plan)
        except (CacheMiss, WorkerLost) as loss:
            self.scheduler.abandon(plan)
            self.scheduler.forget_draft(loss.sequences if isinstance(loss, CacheMiss) else None)
            if isinstance(loss, CacheMiss):
                return []  # the next plan feeds what is missing
            plan = self.scheduler.plan(drafting=False)
            assert plan is not None
            proposal = None
        request = plan.verify_request(proposal)
        try:
            reply = self.verifier.verify(request)
        except CacheMiss as miss:
            self.scheduler.abandon(plan)
            self.scheduler.forget_target(miss.sequences)
            return []
        return [self._complete(sequence) for sequence in self.scheduler.apply(plan, request, reply)]

    def _propose(self, plan: Plan) -> Proposal | None:
        request = plan.draft_request()
        if request is None or self.drafter is None:
            return None
        return self.drafter.propose(request)

    def _complete(self, sequence: Sequence) -> Answer:
        request = sequence.request
        if sequence.finish is FinishReason.ERROR:
            problem = "the target's logits are not finite for this prompt, or leave no token to choose"
            return Answer(request, sequence.sample, failed(request, problem))
        text = self.detokenize(sequence.tokens[len(request.prompt_token_ids) :]) if sequence.text is None else ""
        return Answer(request, sequence.sample, sequence.completion(text))
