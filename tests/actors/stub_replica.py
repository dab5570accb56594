"""Replicas that publish real parts with answers of a stub engine: no model is loaded, and their speed is the test's."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from actors.replica import FedStream, Replica
from pipeline.answering import Answerer
from pipeline.records import Completion, Request
from tests.stub_engine import ByteTokenizer, StubEngine


class StubReplica(Replica):
    """Takes `SECONDS` for an answer."""

    SECONDS = 0.02

    def _answerer(self) -> Answerer:
        work, prompters = self.work, self.work.prompters(ByteTokenizer())  # type: ignore[arg-type]
        stream = FedStream(self.engine(), self.feed)  # type: ignore[arg-type]
        return Answerer(work.config, work.plan, work.corpus(), prompters, stream, self.publications)

    def engine(self) -> StubEngine:
        return StubEngine(slots=2, seconds=self.SECONDS)


class Dawdler(StubEngine):
    """Gives a few answers, and the others when a test says that it has seen enough."""

    FEW, PATIENCE = 6, 120.0

    def __init__(self, hurry: Path) -> None:
        super().__init__(slots=2)
        self.hurry = hurry

    def stream(self, requests: Iterable[Request | None]) -> Iterator[Completion]:
        for number, completion in enumerate(super().stream(requests)):
            deadline = time.monotonic() + self.PATIENCE
            while number >= self.FEW and not self.hurry.exists() and time.monotonic() < deadline:
                time.sleep(0.05)
            yield completion


class DawdlingStubReplica(StubReplica):
    """Looks for a file `hurry` beside the output."""

    def engine(self) -> StubEngine:
        return Dawdler(Path(self.work.config.output.path).parent / "hurry")


class UnequalStubReplica(StubReplica):
    """The first one hired would take minutes for a shard."""

    def engine(self) -> StubEngine:
        return StubEngine(slots=2, seconds=60.0 if self.number == 0 else 0.01)


class Poisonable(StubEngine):
    """Dies of story 17."""

    def stream(self, requests: Iterable[Request | None]) -> Iterator[Completion]:
        return super().stream(self._tasted(requests))

    def _tasted(self, requests: Iterable[Request | None]) -> Iterator[Request | None]:
        for request in requests:
            if request is not None and bytes(request.prompt_token_ids).endswith(b"story 17"):
                os.kill(os.getpid(), signal.SIGKILL)
            yield request


class PoisonedStubReplica(StubReplica):
    """Unless it is a careful one, which would lose no more than its target."""

    def engine(self) -> StubEngine:
        return StubEngine(slots=2) if self.seats.careful else Poisonable(slots=2)
