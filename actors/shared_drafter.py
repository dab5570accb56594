"""A draft model that several replicas use: what they ask at the same time is drafted in one pass.

All passes are one thread's, so that each of the many threads that wait for an answer needs no torch threads of its own.
Knows nothing of Ray, nor of what a pass is.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from actors.draft_slots import SlotTable
from pipeline.errors import CacheMiss, OutOfMemory
from pipeline.messages import DraftRequest, Proposal, replica_of

Answers = list[Proposal | CacheMiss]


@dataclass(frozen=True, slots=True)
class Drafted:
    """A draft worker's answer to a replica."""

    proposal: Proposal
    others: int  # sequences of other replicas that the worker drafts for
    seconds: float  # that the worker took, waiting included


class SharedDrafter:
    """Answers whoever asks, from whatever thread."""

    def __init__(
        self,
        propose_all: Callable[[Sequence[DraftRequest]], Answers],
        slots: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`propose_all` as `ModelDrafter.propose_all`; sequences of up to `slots` slots are held, if memory allows."""
        self.propose_all = propose_all
        self.table = SlotTable(slots)
        self.clock = clock
        self._waiting: list[tuple[DraftRequest, Future[tuple[Proposal, int]]]] = []
        self._asked = threading.Condition()
        threading.Thread(target=self._work, name="draft", daemon=True).start()

    def propose(self, request: DraftRequest) -> Drafted:
        """Wait for the pass that this request takes part in. Raises CacheMiss, OutOfMemory, or what failed."""
        asked_at, answer = self.clock(), Future[tuple[Proposal, int]]()
        with self._asked:
            self._waiting.append((request, answer))
            self._asked.notify()
        proposal, others = answer.result()
        return Drafted(proposal, others, self.clock() - asked_at)

    def _work(self) -> None:
        while True:
            with self._asked:
                self._asked.wait_for(lambda: self._waiting)
                asked, self._waiting = self._waiting, []
            try:
                answers = self._pass([request for request, _ in asked])
            except Exception as error:  # noqa: BLE001 - whatever it was, it is those who asked who must know
                for _, answer in asked:
                    answer.set_exception(error)
                continue
            for (_, answer), drafted in zip(asked, answers, strict=True):
                if isinstance(drafted, CacheMiss):
                    answer.set_exception(drafted)
                else:
                    answer.set_result(drafted)

    def _pass(self, requests: Sequence[DraftRequest]) -> list[tuple[Proposal, int] | CacheMiss]:
        now = self.clock()
        local = self.table.localise(requests, now)
        held = [request for request in local if not isinstance(request, CacheMiss)]
        try:
            answers = iter(self.propose_all(held) if held else ())
        except OutOfMemory:
            self.table.exhausted()
            raise
        merged = [asked if isinstance(asked, CacheMiss) else next(answers) for asked in local]
        return [
            answer if isinstance(answer, CacheMiss) else (answer, self._others(request, now))
            for request, answer in zip(requests, merged, strict=True)
        ]

    def _others(self, request: DraftRequest, now: float) -> int:
        return self.table.in_use(now, replica_of(int(request.feed.sequences[0])))
