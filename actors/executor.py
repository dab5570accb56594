"""Runs shards on Ray: the cluster's plan, and the crew that carries it out."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from actors.autoscaler import arrange
from actors.cluster import Cluster
from actors.coordinator import Coordinator
from actors.crew import Crew, Drafts
from actors.draft_group import DraftGroup
from actors.draft_pool import DraftPool
from actors.draft_seats import DraftSeats
from actors.hiring import Hiring
from actors.session import ray_session
from pipeline.config import JobConfig
from pipeline.engine.assembly import BATCH, agree
from pipeline.output.plan import Shard
from pipeline.stats import Progress
from pipeline.work import JobWork

if TYPE_CHECKING:
    from actors.placement import Placement
    from actors.seats import Seat

LOG = logging.getLogger(__name__)
BATCHES_IN_HAND = 2  # of rows, for each replica


class RayExecutor:
    """An executor (`pipeline.work.Executor`) on the cluster at RAY_ADDRESS, or on a local Ray while it runs."""

    def __init__(self, config: JobConfig) -> None:
        self.config = config
        self._where = "Ray"

    def run(self, work: JobWork, shards: list[Shard], report: Callable[[Progress], None]) -> None:
        """See `pipeline.work.Executor`."""
        with ray_session():
            placement = arrange(self.config)
            self._where = placement.describe()
            cluster = Cluster()
            cluster.look()
            coordinator = Coordinator(
                shards, report, LOG.warning, careful=not placement.separate, handful=BATCHES_IN_HAND * self._batch(),
                deadline=work.deadline,
            )  # fmt: skip
            work = replace(work, deadline=None)  # this machine's clock decides
            hiring = Hiring(self.config, placement, cluster, LOG.warning)
            Crew(work, coordinator, hiring, cluster, self._drafts(placement, cluster), LOG.warning).run()

    def describe(self) -> str:
        """Where the last run took place."""
        return self._where

    def _batch(self) -> int:
        """Rows that a replica answers at once."""
        wanted = self.config.decoding.batch
        return BATCH["cuda" if self.config.target.gpus else "cpu"] if wanted == "auto" else wanted

    def _drafts(self, placement: Placement, cluster: Cluster) -> Drafts | None:
        if not placement.drafts:
            return None
        config, setup = self.config, agree(self.config)

        def employ(seat: Seat, name: str) -> DraftGroup:
            return DraftGroup.at(seat, config, setup, name)

        seats = DraftSeats(config, placement.drafts, cluster, employ, LOG.warning)
        limit = config.decoding.step_timeout
        return Drafts(DraftPool(seats.create, len(placement.drafts), LOG.warning, step_timeout=limit), seats)
