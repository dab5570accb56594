"""What only an engine at work knows of itself: how busy its models are, how long steps take, what waits.

One or more threads write, any may read. Counts since it began; knows nothing of rows, rates, or who reads.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum

STEP_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)  # bounds of `Vitals.steps`


class Reason(StrEnum):
    """Why a document, or a task on it, has no answer."""

    UNREADABLE = "unreadable"  # the row of the input
    PROMPT = "prompt"  # no prompt can be made of it
    MODEL = "model"  # the model refuses the request, or fails at it


@dataclass(frozen=True, slots=True)
class Vitals:
    """A meter's numbers at one moment."""

    target_seconds: float = 0.0  # during which a target was at work
    draft_seconds: float = 0.0
    steps: tuple[int, ...] = (0,) * (len(STEP_SECONDS) + 1)  # by duration: up to each bound, and longer
    running: int = 0  # sequences
    waiting: int = 0  # requests
    cohorts: int = 1
    halvings: int = 0  # of the batch, for lack of memory
    targets_lost: int = 0
    errors: Mapping[Reason, int] = field(default_factory=dict)


class Busy:
    """Seconds during which at least one of several threads was at something."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._at_it = 0
        self._since = 0.0
        self._before = 0.0

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """One more is at it inside."""
        with self._lock:
            if self._at_it == 0:
                self._since = self._clock()
            self._at_it += 1
        try:
            yield
        finally:
            with self._lock:
                self._at_it -= 1
                if self._at_it == 0:
                    self._before += self._clock() - self._since

    @property
    def seconds(self) -> float:
        """So far, what is going on now included."""
        with self._lock:
            return self._before + (self._clock() - self._since if self._at_it else 0.0)


class Meter:
    """Written once per step, not per token."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.target = Busy(clock)
        self.draft = Busy(clock)
        self._lock = threading.Lock()
        self._steps = [0] * (len(STEP_SECONDS) + 1)
        self._errors: Counter[Reason] = Counter()
        self._queues = (0, 0, 1)
        self._halvings = self._targets_lost = 0

    @contextmanager
    def step(self) -> Iterator[None]:
        """A step of one cohort goes on inside: drafting, and the target's pass."""
        began = self.clock()
        try:
            yield
        finally:
            with self._lock:
                self._steps[bisect_left(STEP_SECONDS, self.clock() - began)] += 1

    def queues(self, running: int, waiting: int, cohorts: int) -> None:
        """So many sequences run now, and so many requests wait for a slot."""
        self._queues = running, waiting, cohorts

    def halved(self) -> None:
        """Memory ran out, and the batch was made smaller."""
        self._halvings += 1

    def target_lost(self) -> None:
        """A target's worker is gone, and is replaced."""
        self._targets_lost += 1

    def error(self, reason: Reason) -> None:
        """A document, or a task on one, has no answer."""
        with self._lock:
            self._errors[reason] += 1

    def vitals(self) -> Vitals:
        """As things are now."""
        target, draft = self.target.seconds, self.draft.seconds
        with self._lock:
            running, waiting, cohorts = self._queues
            return Vitals(
                target, draft, tuple(self._steps), running, waiting, cohorts,
                self._halvings, self._targets_lost, dict(self._errors),
            )  # fmt: skip
