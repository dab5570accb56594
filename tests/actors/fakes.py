"""Stand-ins for workers: they answer, fail or are lost as a test says. No Ray."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from actors.shared_drafter import Drafted
from pipeline.errors import NightdeskError, WorkerLost
from tests.actors.exchange import TRAITS, Slots


class FakeWorker:
    """Loads when told to, and gives out its answers one by one; an exception among them is raised."""

    def __init__(self, name: str = "the worker", answers: list[Any] | None = None, loads: Any = True) -> None:
        self.name = name
        self.answers = [] if answers is None else answers
        self.loads = loads  # None: not yet
        self.life: Any = True  # what it answers to a ping
        self.handle = object()
        self.several = False
        self.asked: list[Any] = []
        self.ended = False

    def is_ready(self) -> bool:
        return self.loads is not None and self.wait_ready() is not None

    def wait_ready(self) -> Any:
        if isinstance(self.loads, Exception):
            raise self.loads
        return self.loads

    def shows_life(self, seconds: float) -> bool:
        if isinstance(self.life, Exception):
            raise self.life
        return bool(self.life)

    def ask(self, method: str, argument: Any, seconds: float) -> Any:
        assert not self.ended, "a worker that was ended is asked"
        self.asked.append((method, argument))
        answer = self.answers.pop(0)
        if isinstance(answer, NightdeskError):
            raise answer
        return answer

    def end(self) -> None:
        self.ended = True


def dead(name: str = "the worker") -> WorkerLost:
    return WorkerLost(f"{name} is gone")


class Dying:
    """An actor in a replica's place that does not live to see its first call."""

    def __init__(self, *arguments: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def ready(self) -> bool:
        return True

    def poll(self, *arguments: object) -> None:
        raise AssertionError("it is dead")


class Puppet:
    """A rank that does as its part of a script says; loads no model, and no torch."""

    def __init__(self, config: object, setup: object, threads: int, rank: int) -> None:
        self.rank = rank

    def listen(self) -> str:
        return "here"

    def ready(self, meeting: str | None) -> str:
        return f"{meeting} {self.rank}"

    def verify(self, script: list[Any]) -> str:
        part = script[self.rank]
        if isinstance(part, Exception):
            raise part
        if part == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if isinstance(part, float):
            time.sleep(part)
        return f"answer of {self.rank}"


class Drafty:
    """A draft worker's actor without a model; drafts slowly when it is told to."""

    def __init__(self, *arguments: object) -> None:
        self.slots, self.seconds = Slots(), 0.0

    def ready(self) -> Any:
        return TRAITS

    def ping(self) -> bool:
        return True

    def pid(self) -> int:
        return os.getpid()

    def take(self, seconds: float) -> None:
        self.seconds = seconds

    def propose(self, request: Any) -> Any:
        time.sleep(self.seconds)
        return Drafted(self.slots.draft(request), 0, self.seconds)
