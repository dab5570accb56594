"""Which draft workers are up, as the driver tells its replicas. Knows nothing of what they hold or how they fare."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pipeline.engine.assembly import Setup


@dataclass(frozen=True, slots=True)
class Traits:
    """What a scheduler must know of a drafter (`decode.Drafter`)."""

    keeps_proposals: bool
    chunk: int | None

    @classmethod
    def of_workers(cls, setup: Setup) -> Traits:
        """Those of a job's draft workers, before any of them is up: all host a model."""
        return cls(True, setup.limits.prefill_chunk)


@dataclass(frozen=True, slots=True)
class Member:
    """A draft worker that has loaded. `home` is a number that no other ever had or will have."""

    home: int
    name: str
    handle: Any  # of its actor
    traits: Traits


@dataclass(frozen=True, slots=True)
class Roster:
    """All that are up; `version` grows with every change."""

    version: int = 0
    members: tuple[Member, ...] = ()
