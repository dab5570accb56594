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
from actors.metrics import RayExport
from actors.session import ray_session
from actors.telemetry import Telemetry, Worker
from pipeline import events
from pipeline.config import JobConfig
from pipeline.engine.assembly import BATCH, agree
from pipeline.output.names import run_name
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
        run = run_name(work.plan.run)
        with ray_session(), events.about(run=run):
            until = None if work.deadline is None else work.deadline.at
            telemetry = Telemetry(RayExport(), self.config.name, run, self.config.max_error_rate, until)
            telemetry.rows(work.plan.rows, work.plan.rows - sum(shard.rows for shard in shards))

            def counted(increment: Progress) -> None:
                telemetry.count(increment)
                report(increment)

            placement = arrange(self.config)
            self._where = placement.describe()
            cluster = Cluster()
            cluster.look()
            coordinator = Coordinator(
                shards, counted, LOG.warning, careful=not placement.separate, handful=BATCHES_IN_HAND * self._batch(),
                deadline=work.deadline,
            )  # fmt: skip
            work = replace(work, deadline=None)  # this machine's clock decides
            hiring = Hiring(self.config, placement, cluster, _notice_seats)
            drafts = self._drafts(placement, cluster, telemetry)
            Crew(work, coordinator, hiring, cluster, drafts, LOG.warning, telemetry).run()

    def describe(self) -> str:
        """Where the last run took place."""
        return self._where

    def _batch(self) -> int:
        """Rows that a replica answers at once."""
        wanted = self.config.decoding.batch
        return BATCH["cuda" if self.config.target.gpus else "cpu"] if wanted == "auto" else wanted

    def _drafts(self, placement: Placement, cluster: Cluster, telemetry: Telemetry) -> Drafts | None:
        if not placement.drafts:
            return None
        config, setup = self.config, agree(self.config)

        def employ(seat: Seat, name: str) -> DraftGroup:
            return DraftGroup.at(seat, config, setup, name)

        def lost(line: str) -> None:
            telemetry.lost(Worker.DRAFT)
            with events.about("draft_worker_lost"):
                LOG.warning(line)

        seats = DraftSeats(config, placement.drafts, cluster, employ, _notice_seats)
        limit = config.decoding.step_timeout
        return Drafts(DraftPool(seats.create, len(placement.drafts), lost, step_timeout=limit), seats)


def _notice_seats(line: str) -> None:
    with events.about("placement"):
        LOG.warning(line)
