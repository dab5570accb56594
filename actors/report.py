"""What coordinator and replica tell each other when the one polls the other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pipeline.meter import Vitals
from pipeline.output.plan import Shard
from pipeline.stats import Progress

if TYPE_CHECKING:
    from actors.roster import Roster


def label(replica: str) -> str:
    """A replica's name in logs and metrics: its number. One that never had company is 0; names are used again."""
    return replica.removeprefix("replica ") if replica.startswith("replica ") else "0"


@dataclass(frozen=True, slots=True)
class Order:
    """The argument of `Replica.poll`."""

    give: tuple[Shard, ...] = ()
    seen: int = 0  # publications that have been heard of, and need not be told again
    close: bool = False  # it is to hand back what it has not begun, and to end when the rest is done
    roster: Roster | None = None  # of draft workers, where the replica has told another version


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
class Publication:
    """A shard that a replica has published, or found to be published by somebody else."""

    shard: int
    counts: Progress  # of the shard, as they are, were or will be in the replica's `total`
    created: bool = True  # by this replica
    seconds: float = 0.0  # that publishing took


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """All of it since the replica began, so that a report may be lost or repeated."""

    published: tuple[Publication, ...]  # in their order, leaving out as many as the poll said
    total: Progress
    wants: int  # shards it could begin now
    activity: Activity
    returned: tuple[int, ...] = ()  # shards that it will not begin
    notices: tuple[str, ...] = ()  # lines for whoever watches the run
    failure: Exception | None = None
    ended: bool = False  # it was told to end, and has done all it had
    roster_version: int = 0  # of the draft workers that it knows; 0: it has been told of none
    vitals: Vitals = field(default_factory=Vitals)
    draft_losses: tuple[tuple[int, str], ...] = ()  # (home, cause) of draft workers that did not answer it
