"""Keeps a job's draft workers up: creates them, notices that one is lost, and replaces it without anybody waiting.

Belongs to the driver. Knows nothing of proposals, nor of where workers sit. A pool that has lost all its workers costs
speed and nothing else, so it never gives up; it only takes longer from one vain attempt to the next.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from actors.losses import Losses
from actors.roster import Member, Roster, Traits
from actors.worker import LOADING_SECONDS
from pipeline.errors import NightdeskError, WorkerLost

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0  # seconds before a replacement is replaced
SEAT_PAUSE = 1.0  # seconds until a seat is asked for again, where there was none


class DraftWorker(Protocol):
    """What the pool needs of a worker; `Worker` and `DraftGroup` have it."""

    name: str
    handle: Any  # of the actor that replicas ask

    def is_ready(self) -> bool:
        """Has it loaded? Raises what loading raised."""
        ...

    def wait_ready(self) -> Any:
        """Its `Traits`."""
        ...

    def shows_life(self, seconds: float) -> bool:
        """See `Worker.shows_life`."""
        ...

    def end(self) -> None:
        """End it, whether it answers or not."""
        ...


@dataclass
class Place:
    """One worker of the pool, or the gap that it left."""

    number: int
    worker: DraftWorker | None = None
    home: int = 0
    created_at: float = 0.0
    traits: Traits | None = None  # once it has loaded
    losses: Losses = field(default_factory=Losses)
    retry_at: float = 0.0


class DraftPool:
    """A fixed number of places, as many of them filled as can be."""

    def __init__(
        self,
        create: Callable[[int], DraftWorker | None],
        size: int,
        notice: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        step_timeout: float = 120.0,
    ) -> None:
        """`create` makes a worker for place i, or None where there is no seat now; `notice` is told of every loss.

        A worker that gives no sign of life for `step_timeout` seconds is lost.
        """
        self.create = create
        self.notice = notice
        self.clock = clock
        self.step_timeout = step_timeout
        self.places = [Place(i) for i in range(size)]
        self.roster = Roster()
        self.failure: NightdeskError | None = None  # a draft model that cannot be loaded, whoever tries
        self._homes = 0

    def tend(self) -> None:
        """See to every place, without waiting for anybody."""
        for place in self.places:
            try:
                self._tend(place)
            except WorkerLost as loss:
                self._lose(place, str(loss))
            except NightdeskError as error:
                self.failure = error
            except Exception as error:  # noqa: BLE001 - what befell one worker while it loaded need not befall the next
                self._lose(place, f"draft worker {place.number} failed: {type(error).__name__}: {error}")

    def lose(self, home: int, cause: str) -> None:
        """A worker is dead or late, as a replica tells. It may have been replaced already."""
        for place in self.places:
            if place.worker is not None and place.home == home:
                self._lose(place, cause)

    def end(self) -> None:
        """End all workers."""
        for place in self.places:
            if place.worker is not None:
                place.worker.end()
                place.worker, place.traits = None, None

    def _tend(self, place: Place) -> None:
        if place.worker is None:
            self._fill(place)
        elif place.traits is None:
            self._see_it_load(place, place.worker)
        elif place.worker.shows_life(self.step_timeout):
            place.losses.answered()

    def _fill(self, place: Place) -> None:
        now = self.clock()
        if now < place.retry_at:
            return
        place.worker = self.create(place.number)
        if place.worker is None:
            place.retry_at = now + SEAT_PAUSE
            return
        self._homes += 1
        place.home, place.created_at = self._homes, now

    def _see_it_load(self, place: Place, worker: DraftWorker) -> None:
        if worker.is_ready():
            place.traits = worker.wait_ready()
            self._publish()
        elif self.clock() - place.created_at > LOADING_SECONDS:
            raise WorkerLost(f"{worker.name} has not loaded for {LOADING_SECONDS:g} s")

    def _lose(self, place: Place, cause: str) -> None:
        """End it, and let a new one load in the background."""
        if place.worker is not None:
            place.worker.end()
        place.worker, place.traits = None, None
        place.retry_at = self.clock() + _pause(place.losses.in_a_row)
        place.losses.lost()
        self._publish()
        self.notice(f"{cause}; replacing it")

    def _publish(self) -> None:
        members = tuple(
            Member(place.home, place.worker.name, place.worker.handle, place.traits)
            for place in self.places
            if place.worker is not None and place.traits is not None
        )
        if members != self.roster.members:
            self.roster = Roster(self.roster.version + 1, members)


def _pause(losses: int) -> float:
    """Seconds until a replacement, after so many earlier losses in a row."""
    return 0.0 if losses == 0 else min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** (losses - 1))
