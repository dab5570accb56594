"""An audit on the cluster: one worker that sits where a replica would."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from actors.autoscaler import arrange
from actors.seats import Seat, reserve_replica
from actors.session import ray_session
from actors.worker import Worker
from pipeline.config import JobConfig

if TYPE_CHECKING:
    from pipeline.audit import Audit
    from pipeline.engine.auditing import Effort, Question

Work = tuple[JobConfig, Sequence["Question"], "Effort | None"]
AUDIT_SECONDS = 24 * 3600.0  # for an audit: only a worker that hangs takes longer


class Auditor:
    """The actor."""

    def __init__(self, threads: int) -> None:
        self.threads = threads

    def ready(self) -> bool:
        """Nothing is to be loaded before the audit, which loads one model after the other."""
        from pipeline.engine.assembly import set_threads

        set_threads(self.threads)
        return True

    def audit(self, work: Work) -> Audit:
        """Target and draft in this process."""
        from pipeline.engine.auditing import audit

        config, questions, effort = work
        return audit(config, questions, _in_silence, effort)


def audit_on_ray(config: JobConfig, questions: Sequence[Question], effort: Effort | None = None) -> Audit:
    """Audit a job where its target has room, which need not be where this process runs.

    Target and draft share one worker, wherever the job puts its drafts: what is audited is what they compute. So do the
    ranks of either, which must fit on one GPU.
    """
    together = config.decoding.model_copy(update={"placement": "colocated"})
    target = config.target.model_copy(update={"replicas": 1, "gpus": min(config.target.gpus, 1)})
    drafts = tuple(draft.model_copy(update={"gpus": min(draft.gpus, 1)}) for draft in config.draft)
    config = config.model_copy(update={"decoding": together, "target": target, "draft": drafts})
    with ray_session():
        seats = reserve_replica(arrange(config).replicas[0], config.decoding.placement_timeout)
        try:
            return _ask(seats.replica, (config, questions, effort))
        finally:
            seats.release()


def _ask(seat: Seat, work: Work) -> Audit:
    worker = Worker(seat.create(Auditor, seat.threads), "the audit's worker")
    try:
        worker.wait_ready()
        audit: Audit = worker.ask("audit", work, AUDIT_SECONDS)
        return audit
    finally:
        worker.end()


def _in_silence(line: str) -> None:
    return None
