"""A draft worker where it sits: one actor, or one for each rank of a draft model that takes several GPUs.

Knows nothing of what is asked of it: replicas ask rank 0, and that one sees to the others (`actors.draft`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from actors.draft import Draft
from actors.seats import Seat
from actors.target_group import Place
from actors.worker import Worker
from pipeline.config import JobConfig
from pipeline.engine.assembly import Setup


class DraftGroup:
    """One `Draft` per seat, rank 0 first, as one worker of a pool; loading begins at once."""

    def __init__(self, seats: Sequence[Place], config: JobConfig, setup: Setup, name: str) -> None:
        """`seats` are on one node, with one GPU each where there are several."""
        self.name = name
        others = [seat.create(Draft, config, setup, seat.threads, rank) for rank, seat in enumerate(seats[1:], 1)]
        self.handle = seats[0].create(Draft, config, setup, seats[0].threads, 0, others)
        if not others:
            self.ranks = [Worker(self.handle, name)]
            return
        place = self.handle.listen.remote()  # Ray hands on what rank 0 says
        handles = [self.handle, *others]
        self.ranks = [Worker(handle, f"{name} rank {rank}", place) for rank, handle in enumerate(handles)]

    @classmethod
    def at(cls, seat: Seat, config: JobConfig, setup: Setup, name: str) -> DraftGroup:
        """A draft worker that has all of a seat; its ranks share it, a GPU for each."""
        return cls([seat] if seat.gpus < 2 else [replace(seat, gpus=1)] * seat.gpus, config, setup, name)

    def is_ready(self) -> bool:
        """Have all ranks loaded? Raises what loading raised."""
        return all([rank.is_ready() for rank in self.ranks])

    def wait_ready(self) -> Any:
        """What `ready` returned, when all have loaded."""
        for rank in self.ranks:
            loaded = rank.wait_ready()
        return loaded

    def shows_life(self, seconds: float) -> bool:
        """See `Worker.shows_life`."""
        return all([rank.shows_life(seconds) for rank in self.ranks])

    def end(self) -> None:
        """End all processes, whether they answer or not."""
        for rank in self.ranks:
            rank.end()
