"""Keeps draft workers up: creates them, notices that one is lost, and replaces it without anybody waiting.

Knows nothing of proposals. A pool that has lost all its workers costs speed and nothing else, so it never gives
up; it only takes longer from one vain attempt to the next.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from actors.losses import Losses
from actors.worker import Worker
from pipeline.errors import NightdeskError, WorkerLost

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0  # seconds before a replacement is replaced


@dataclass
class Place:
    """One worker of the pool, or the gap that it left."""

    number: int
    worker: Worker | None
    ready: bool = False
    losses: Losses = field(default_factory=Losses)
    retry_at: float = 0.0


class DraftPool:
    """A fixed number of workers. Whoever uses the pool stays with one worker until it is lost."""

    def __init__(
        self,
        create: Callable[[int], Worker],
        size: int,
        notice: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`create` makes worker number i; `notice` is told of every loss."""
        self.create = create
        self.notice = notice
        self.clock = clock
        self.places = [Place(i, create(i)) for i in range(size)]

    def wait_ready(self) -> Any:
        """What the first worker's `ready` returned. Raises what loading raised, or the last of several losses."""
        place = self.places[0]
        while True:
            assert place.worker is not None
            try:
                loaded = place.worker.wait_ready()
            except WorkerLost as loss:
                self.lose(place.worker, loss)
                if place.losses.too_many:
                    raise
                place.worker = self.create(place.number)
                continue
            place.ready = True
            return loaded

    def worker(self) -> Worker | None:
        """A worker that can be asked now, if there is one; also sees to those that cannot."""
        for place in self.places:
            self._tend(place)
        return next((place.worker for place in self.places if place.ready), None)

    def lose(self, worker: Worker, cause: NightdeskError) -> None:
        """A worker is dead or late: end it, and let a new one load in the background."""
        place = self._place_of(worker)
        worker.end()
        place.worker, place.ready = None, False
        place.retry_at = self.clock() + _pause(place.losses.in_a_row)
        place.losses.lost()
        self.notice(f"{cause}; going on without drafts until it is replaced")

    def praise(self, worker: Worker) -> None:
        """A worker has answered."""
        self._place_of(worker).losses.answered()

    def _tend(self, place: Place) -> None:
        if place.worker is None and self.clock() >= place.retry_at:
            place.worker = self.create(place.number)
        if place.worker is None or place.ready:
            return
        try:
            place.ready = place.worker.is_ready()
        except NightdeskError as loss:
            self.lose(place.worker, loss)

    def _place_of(self, worker: Worker) -> Place:
        return next(place for place in self.places if place.worker is worker)


def _pause(losses: int) -> float:
    """Seconds until a replacement, after so many earlier losses in a row."""
    return 0.0 if losses == 0 else min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** (losses - 1))
