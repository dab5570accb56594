"""The loop that joins a scheduler, a drafter and a verifier: plan, draft, verify, apply.

Drafters and verifiers are two small protocols; whether they live in this process or behind an actor is not
known here. A drafter that fails costs speed: its sequences go on without drafts. A verifier that forgot a
sequence is fed it again; one whose step fails makes suspects of the sequences in it (`suspects`); one that runs out
of memory gets half of them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, Protocol

from pipeline.cohorts import Cohorts
from pipeline.errors import CacheMiss, NightdeskError, OutOfMemory, StepFailed, WorkerLost
from pipeline.flight import Flight, Outcome
from pipeline.headroom import Headroom
from pipeline.messages import DraftRequest, Proposal, VerifyReply, VerifyRequest
from pipeline.meter import Meter
from pipeline.records import Completion, FinishReason, Request
from pipeline.scheduler import Homes, Scheduler, failed
from pipeline.sequence import Sequence
from pipeline.step import Plan
from pipeline.suspects import Suspects

LOG = logging.getLogger(__name__)

Detokenize = Callable[[list[int]], str]
VAIN_DRAFTS = 3  # times in a row that drafting raised: then it is left
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
    """The target's side. Raises `CacheMiss` for prefixes it does not hold.

    `OutOfMemory` and `StepFailed`, and whatever the model raises, are about the step alone: it can be asked again.
    `WorkerLost` is the end.
    """

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
        self,
        scheduler: Scheduler,
        verifier: Verifier,
        drafter: Drafter | None,
        detokenize: Detokenize,
        homes: Homes = lambda handle, slot: 0,
        cohorts: Cohorts | None = None,
        notice: Callable[[str], None] = LOG.warning,
    ) -> None:
        """`homes` says which draft worker a sequence is drafted by. With `cohorts`, steps of several are under way at
        once, and drafter and verifier are called by several threads. `notice` is told lines for people.
        """
        self.scheduler = scheduler
        self.verifier = verifier
        self.drafter = drafter
        self.detokenize = detokenize
        self.homes = homes
        self.cohorts = cohorts
        self.notice = notice
        self.meter = Meter()
        self.suspects = Suspects()
        self.headroom = Headroom(scheduler.limits.slots)
        self._failures: list[Outcome] = []  # to be looked into when nothing is under way any more
        self._plainly = False  # the next step leaves the drafter out
        self._vain_drafts = 0
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
        flight = None if self.cohorts is None else Flight(self._carry_out)
        try:
            yield from self._answers(iter(requests), flight)
        finally:
            self._streaming = False
            if flight is not None:
                flight.close()
            self.scheduler.take_rejected()
            if not self.scheduler.idle:
                self.scheduler.clear()
            self.suspects.clear()
            self._failures.clear()

    def _answers(self, source: Iterator[Request | None], flight: Flight | None) -> Iterator[Answer]:
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
            self.meter.queues(len(self.scheduler.running), len(self.scheduler.waiting), self.scheduler.cohorts)
            if not self.scheduler.idle:
                yield from self.step() if flight is None else self._steps(flight)
            elif exhausted:
                return
            else:
                time.sleep(IDLE_SECONDS)

    def step(self) -> list[Answer]:
        """One pass of the target over all running sequences; returns what finished."""
        self._resize()
        plan = self._plan(None)
        if plan is None:
            return []
        answers = self._conclude(self._carry_out(plan))
        return answers + self._look_into_failures()

    def _steps(self, flight: Flight) -> list[Answer]:
        """Have every cohort under way, and take in what has landed; returns what finished."""
        assert self.cohorts is not None
        answers = []
        if flight.empty:
            answers += self._look_into_failures()
            self._resize()
            self.scheduler.divide(self.cohorts.count)
        if self.suspects.on_trial is not None:
            if flight.empty and (plan := self._plan(None)) is not None:
                flight.start(0, plan)
        elif not (self._failures or self._unsettled):
            for cohort in range(self.scheduler.cohorts):
                if not flight.has(cohort) and (plan := self._plan(cohort)) is not None:
                    flight.start(cohort, plan)
        for outcome in [] if flight.empty else flight.landed():
            judged = 0 if outcome.reply is None else sum(row.final for row in outcome.plan.rows)
            answers += self._conclude(outcome)
            full = bool(self.scheduler.waiting) and self.suspects.on_trial is None and not self._failures
            self.cohorts.observe(time.monotonic(), judged, full)
        return answers

    @property
    def _unsettled(self) -> bool:
        """Slots are to be numbered or divided otherwise, when nothing is under way."""
        divided = self.cohorts is None or self.scheduler.cohorts == self.cohorts.count
        return not divided or self.scheduler.limits.slots != self.headroom.slots

    def _resize(self) -> None:
        """As many slots as memory allows."""
        slots = self.headroom.slots
        if slots != self.scheduler.limits.slots:
            self.scheduler.resize(slots)
            self.suspects.clear()
            if self.cohorts is not None:
                self.cohorts = self.cohorts.of(slots)

    def _plan(self, cohort: int | None) -> Plan | None:
        """The next step of a cohort (None: of all)."""
        left = self._plainly or self._vain_drafts >= VAIN_DRAFTS
        drafting = self.drafter is not None and not left and self.drafter.ready()
        self._plainly = False
        plan = self.scheduler.plan(drafting, cohort, self.homes, self.suspects.on_trial)
        if plan is None and self.suspects.on_trial is not None:
            self.suspects.clear()  # whoever was on trial has left
        return plan

    def _carry_out(self, plan: Plan) -> Outcome:
        """Draft and verify; changes nothing here, and never raises."""
        with self.meter.step():
            return self._drafted_and_verified(plan)

    def _drafted_and_verified(self, plan: Plan) -> Outcome:
        try:
            request = plan.verify_request(self._propose(plan))
        except Exception as error:  # noqa: BLE001 - whatever befalls a drafter costs speed alone: `_conclude` sees to it
            return Outcome(plan, draft_failure=error)
        try:
            with self.meter.target.at_work():
                return Outcome(plan, request, self.verifier.verify(request))
        except Exception as error:  # noqa: BLE001 - `_conclude` and `_look_into_failures` own it
            return Outcome(plan, request, failure=error)

    def _propose(self, plan: Plan) -> Proposal | None:
        request = plan.draft_request()
        if request is None or self.drafter is None:
            return None
        with self.meter.draft.at_work():
            return self.drafter.propose(request)

    def _conclude(self, outcome: Outcome) -> list[Answer]:
        """Take in what became of a plan; returns what finished."""
        plan, failure = outcome.plan, outcome.failure or outcome.draft_failure
        if failure is None:
            assert outcome.request is not None
            assert outcome.reply is not None
            self._vain_drafts = 0 if any(row.wanted for row in plan.rows) else self._vain_drafts
            self.headroom.step()
            self.suspects.cleared(row.sequence.handle for row in plan.rows if row.final)
            return [self._complete(s) for s in self.scheduler.apply(plan, outcome.request, outcome.reply)]
        if isinstance(failure, AssertionError):  # not a sequence's fault but ours: who knows what else is wrong
            raise failure
        self.scheduler.abandon(plan)
        if outcome.draft_failure is not None and not isinstance(failure, OutOfMemory):
            self._draft_failed(failure)
        elif isinstance(failure, CacheMiss):
            self.scheduler.forget_target(failure.sequences)  # the next plan feeds what is missing
        elif isinstance(failure, NightdeskError) and not isinstance(failure, OutOfMemory | StepFailed):
            raise failure
        else:
            self._failures.append(outcome)
        return []

    def _draft_failed(self, failure: Exception) -> None:
        if isinstance(failure, CacheMiss):
            self.scheduler.forget_draft(failure.sequences)
            return
        self.scheduler.forget_draft()
        self._plainly = True
        if not isinstance(failure, WorkerLost):  # of that its owner has said something
            self._vain_drafts += 1
            for_good = ", as all others" if self._vain_drafts >= VAIN_DRAFTS else ""
            self.notice(f"drafting failed, and the next step goes without{for_good}: {_first_line(failure)}")

    def _look_into_failures(self) -> list[Answer]:
        """Steps of the target failed, and nothing is under way: who is to blame? Returns what ends by it."""
        failures, self._failures = self._failures, []
        if not failures:
            return []
        handles = {row.sequence.handle for outcome in failures for row in outcome.plan.rows}
        causes = [cause for o in failures if (cause := o.failure or o.draft_failure) is not None]
        cause = next((c for c in causes if isinstance(c, OutOfMemory)), causes[0])
        if all(o.failure is None for o in failures) and self.scheduler.limits.slots == 1:
            self._draft_failed(cause)  # there is no room for the drafter
            return []
        if isinstance(cause, OutOfMemory) or self.suspects.crowded:
            self.scheduler.forget_target([sequence.handle for sequence in self.scheduler.running])
            if len(handles) > 1 or self.scheduler.limits.slots > 1:
                self.headroom.too_many(len(self.scheduler.running))
                self.meter.halved()
                self.notice(f"{_first_line(cause)}; going on with {self.headroom.slots} sequences at once")
                return []
        if len(handles) == 1 and self.suspects.on_trial is None and len(self.scheduler.running) > 1:
            self.suspects.suspect(handles.pop())
            return []
        condemned = self.suspects.failed(handles)
        if condemned is None:
            return []
        if self.suspects.hopeless:
            raise cause
        if isinstance(cause, OutOfMemory):
            self.headroom.blameless()
        sequence = self.scheduler.condemn(condemned)
        problem = f"the target fails at this request, alone and repeatedly: {_first_line(cause)}"
        return [Answer(sequence.request, sequence.sample, failed(sequence.request, problem))]

    def _complete(self, sequence: Sequence) -> Answer:
        request = sequence.request
        if sequence.finish is FinishReason.ERROR:
            problem = "the target's logits are not finite for this prompt, or leave no token to choose"
            return Answer(request, sequence.sample, failed(request, problem))
        text = self.detokenize(sequence.tokens[len(request.prompt_token_ids) :]) if sequence.text is None else ""
        return Answer(request, sequence.sample, sequence.completion(text))


def _first_line(error: Exception) -> str:
    line = (str(error).strip().splitlines() or [""])[0]
    return line if isinstance(error, NightdeskError) else f"{type(error).__name__}: {line}"
