"""What a replica tells the coordinator when it is polled."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.stats import Progress


@dataclass(frozen=True, slots=True)
class Activity:
    """What a replica is at. `limit` is how many seconds that may take; None: no saying."""

    what: str
    seconds: float
    limit: float | None

    @property
    def is_late(self) -> bool:
        return self.limit is not None and self.seconds > self.limit


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """All of it since the replica began, so that a report may be lost or repeated."""

    published: tuple[int, ...]  # shards, in the order of publication, leaving out as many as the poll said
    total: Progress
    kept: Progress  # the part of `total` that is published, and stays should the replica be lost
    wants: int  # shards it could begin now
    activity: Activity
    notices: tuple[str, ...] = ()  # lines for whoever watches the run
    failure: Exception | None = None
    ended: bool = False  # it was told that no more shards come, and has done all it had
