"""A target's ranks, an actor each, as one worker: asked together, and ended together.

Every rank is sent every request and runs the same passes on its shard (`pipeline.engine.parallel`); rank 0's answer
counts. A rank that is dead, late or failing leaves the others waiting in a collective or out of step, so the group is
lost as a whole, and its owner makes a new one (`actors.target.RemoteVerifier`). A group of one is an ordinary worker.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any, Protocol

import ray

from actors.target import Target
from actors.worker import LOADING_SECONDS, answer
from pipeline.config import JobConfig
from pipeline.engine.assembly import Setup
from pipeline.errors import CacheMiss, NightdeskError, WorkerLost

GRACE_SECONDS = 2.0  # ranks notice that one is dead before Ray does: so long the culprit is waited for


class Place(Protocol):
    """Where a rank is put (`actors.seats.Seat`)."""

    @property
    def threads(self) -> int: ...

    def create(self, actor: type, *arguments: Any) -> Any:
        """A new actor here; returns its handle at once."""
        ...


class TargetGroup:
    """One `Target` per seat, rank 0 first; loading begins at once. Stands where a `Worker` would."""

    def __init__(self, seats: Sequence[Place], config: JobConfig, setup: Setup) -> None:
        """`seats` are on one node, with one GPU each where there are several."""
        self.several = len(seats) > 1
        self.names = [f"target rank {i}" for i in range(len(seats))] if self.several else ["the target worker"]
        self.handles = [seat.create(Target, config, setup, seat.threads, rank) for rank, seat in enumerate(seats)]
        meeting = self.handles[0].listen.remote() if self.several else None  # Ray hands on what rank 0 says
        self._sending = threading.Lock()
        self._loaded = [handle.ready.remote(meeting) for handle in self.handles]

    def wait_ready(self) -> Any:
        """What rank 0's `ready` returned, when all have loaded."""
        return self._answers(self._loaded, LOADING_SECONDS)

    def ask(self, method: str, argument: Any, seconds: float) -> Any:
        """Call a method of all ranks; rank 0's answer, once all have answered. Several threads may ask at once."""
        with self._sending:  # all ranks must hear the same in the same order
            calls = [getattr(handle, method).remote(argument) for handle in self.handles]
        return self._answers(calls, seconds)

    def end(self) -> None:
        """End all processes, whether they answer or not."""
        for handle in self.handles:
            ray.kill(handle)

    def _answers(self, calls: Sequence[Any], seconds: float) -> Any:
        if len(calls) == 1:
            return answer(calls[0], seconds, self.names[0])
        deadline = time.monotonic() + seconds
        ranks = {call: rank for rank, call in enumerate(calls)}
        answers: dict[int, Any] = {}
        misses: list[CacheMiss] = []
        failed = ""
        while ranks:
            done, _ = ray.wait(list(ranks), timeout=max(deadline - time.monotonic(), 0))
            if failed and not done:
                raise WorkerLost(failed)
            if not done:
                late = ", ".join(self.names[rank] for rank in ranks.values())
                raise WorkerLost(f"{late}: no answer for {seconds:g} s")
            rank = ranks.pop(done[0])
            try:
                answers[rank] = answer(done[0], seconds, self.names[rank])
            except CacheMiss as miss:
                misses.append(miss)
            except NightdeskError:  # the rank cannot load, is dead or out of memory, and that is the cause of all
                raise
            except Exception as error:  # noqa: BLE001 - whatever it was, this rank is out of step with the others
                if not failed:
                    failed = f"{self.names[rank]} failed: {_first_line(error)}"
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if failed:
            raise WorkerLost(failed)
        if misses and (answers or len({miss.sequences for miss in misses}) > 1):
            raise WorkerLost("the target's ranks are out of step: not all of them miss the same sequences")
        if misses:
            raise misses[0]
        return answers[0]


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
