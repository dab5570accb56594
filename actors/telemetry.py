"""What a run tells of itself in metrics: worked out in the driver, from what it hears when it polls.

Knows nothing of Ray's metrics, and decides nothing.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from enum import StrEnum

from actors.metrics import BY_NAME, Export, RayExport
from actors.report import ReplicaReport, label
from pipeline.errors import NightdeskError
from pipeline.meter import STEP_SECONDS, Reason
from pipeline.stats import Progress

NUMBERS = {  # of `Progress`, by metric
    "nightdesk_rows_total": "rows_done",
    "nightdesk_error_rows_total": "error_rows",
    "nightdesk_requests_total": "requests",
    "nightdesk_prompt_tokens_total": "prompt_tokens",
    "nightdesk_generated_tokens_total": "new_tokens",
    "nightdesk_drafted_tokens_total": "drafted",
    "nightdesk_accepted_tokens_total": "accepted",
    "nightdesk_sequence_steps_total": "steps",
}
POSITIONS = {
    "nightdesk_position_drafted_tokens_total": "drafted_at",
    "nightdesk_position_accepted_tokens_total": "accepted_at",
}
VITALS = {  # of `Vitals`
    "nightdesk_target_busy_seconds_total": "target_seconds",
    "nightdesk_draft_busy_seconds_total": "draft_seconds",
    "nightdesk_batch_halvings_total": "halvings",
}
REFRESH_SECONDS = 1.0  # Ray passes a gauge on once, and forgets it after two of its reporting intervals, 1 s or more
QUEUES = {
    "nightdesk_sequences_running": "running",
    "nightdesk_requests_waiting": "waiting",
    "nightdesk_cohorts": "cohorts",
}


class Worker(StrEnum):
    """Kinds of workers that may be lost."""

    REPLICA = "replica"
    TARGET = "target"
    DRAFT = "draft"


class Telemetry:
    """One run's numbers, from its beginning to its end."""

    def __init__(
        self,
        export: Export,
        job: str,
        run: str,
        error_limit: float,
        deadline: float | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`deadline` and what `clock` says are Unix times."""
        self.export = export
        self.tags = {"job_name": job, "run": run}
        self.progress = Progress()  # of this attempt
        self._done_before = 0  # rows
        self._clock = clock
        self._gauges: dict[tuple[str, ...], tuple[float, dict[str, str]]] = {}  # by metric and its other tags
        self._refreshed = clock()
        self._told: dict[tuple[str, ...], float] = {}  # by metric and replica and whatever else
        self._published: dict[str, Progress] = {}  # by replica
        self._lost: Counter[Worker] = Counter()
        self._replaced: Counter[Worker] = Counter()
        self._drafts = 0
        self._set("nightdesk_run_active", 1)
        self._set("nightdesk_run_start_timestamp_seconds", self._refreshed)
        self._set("nightdesk_run_error_limit_ratio", error_limit)
        if deadline is not None:
            self._set("nightdesk_run_deadline_timestamp_seconds", deadline)
        for kind in Worker:
            self.export.add("nightdesk_workers_lost_total", 0, {**self.tags, "kind": kind})
            self.export.add("nightdesk_workers_replaced_total", 0, {**self.tags, "kind": kind})

    def rows(self, total: int, done_before: int) -> None:
        """The run has so many rows, of which an earlier attempt has done some."""
        self._done_before = done_before
        self._set("nightdesk_run_rows", total)
        self._tell_progress()

    def count(self, increment: Progress) -> None:
        """An increment, negative where work was lost."""
        self.progress += increment

    def heard(self, replica: str, report: ReplicaReport) -> None:
        """A replica has answered a poll."""
        name, vitals = label(replica), report.vitals
        published = sum((each.counts for each in report.published), self._published.get(name, Progress()))
        self._published[name] = published
        for total in (report.total, published):  # a run ends with a publication, before its last rows are in `total`
            for metric, field in NUMBERS.items():
                self._advance(metric, getattr(total, field), name)
            for metric, field in POSITIONS.items():
                for position, tokens in enumerate(getattr(total, field), 1):
                    self._advance(metric, tokens, name, position=str(position))
        for metric, field in VITALS.items():
            self._advance(metric, getattr(vitals, field), name)
        for metric, field in QUEUES.items():
            self._set(metric, getattr(vitals, field), replica=name)
        for reason in Reason:
            self._advance("nightdesk_errors_total", vitals.errors.get(reason, 0), name, reason=reason)
        self._steps(name, vitals.steps)
        for publication in report.published:
            if publication.created:
                self.export.observe("nightdesk_publication_seconds", publication.seconds, 1, self.tags)
        created = self._told.get(("published", name), 0) + sum(each.created for each in report.published)
        self._told["published", name] = created
        self._advance("nightdesk_shards_published_total", created, name)
        targets = self._told.get(("targets", name), 0)
        for _ in range(int(vitals.targets_lost - targets)):
            self.lost(Worker.TARGET)
            self.replaced(Worker.TARGET)
        self._told["targets", name] = vitals.targets_lost

    def state(self, waiting: int, handed_out: int, replicas: int, drafts: int) -> None:
        """How the run stands: shards, replicas at work, draft workers that have loaded."""
        self._set("nightdesk_shards_waiting", waiting)
        self._set("nightdesk_shards_handed_out", handed_out)
        self._set("nightdesk_replicas", replicas)
        self._set("nightdesk_draft_workers", drafts)
        for _ in range(drafts - self._drafts):
            self.replaced(Worker.DRAFT)
        self._drafts = drafts
        self._tell_progress()
        self._refresh()

    def hired(self) -> None:
        """A replica was."""
        self.replaced(Worker.REPLICA)

    def lost(self, kind: Worker) -> None:
        """A worker was."""
        self._lost[kind] += 1
        self.export.add("nightdesk_workers_lost_total", 1, {**self.tags, "kind": kind})

    def replaced(self, kind: Worker) -> None:
        """A worker has come; if one was lost before, in its place."""
        if self._replaced[kind] < self._lost[kind]:
            self._replaced[kind] += 1
            self.export.add("nightdesk_workers_replaced_total", 1, {**self.tags, "kind": kind})

    def gone(self, replica: str) -> None:
        """It is: whoever has its name next begins at nothing."""
        name = label(replica)
        for metric in QUEUES:
            if (metric, name) in self._gauges:
                self._set(metric, 0, replica=name)
                del self._gauges[metric, name]
        self._published.pop(name, None)
        self._told = {key: value for key, value in self._told.items() if key[1:2] != (name,)}

    def ended(self) -> None:
        """The run is over, well or not."""
        self.state(0, 0, 0, 0)
        self._set("nightdesk_run_active", 0)

    # --- small things

    def _tell_progress(self) -> None:
        self._set("nightdesk_run_rows_done", self._done_before + self.progress.rows_done)
        self._set("nightdesk_run_answered_rows", self.progress.rows_done)
        self._set("nightdesk_run_error_rows", self.progress.error_rows)

    def _set(self, metric: str, value: float, **more: str) -> None:
        """Told when it changes, and then now and then."""
        key, tags = (metric, *more.values()), {**self.tags, **more}
        if self._gauges.get(key) != (value, tags):
            self._gauges[key] = value, tags
            self.export.set(metric, value, tags)

    def _refresh(self) -> None:
        now = self._clock()
        if abs(now - self._refreshed) >= REFRESH_SECONDS:
            self._refreshed = now
            for (metric, *_), (value, tags) in self._gauges.items():
                self.export.set(metric, value, tags)

    def _advance(self, metric: str, total: float, replica: str, **more: str) -> None:
        """A counter is at `total`, as far as this replica goes."""
        key = (metric, replica, *more.values())
        before = self._told.get(key)
        if before is None or total > before:
            self._told[key] = total
            self.export.add(metric, total - (before or 0), {**self.tags, "replica": replica, **more})

    def _steps(self, replica: str, counts: tuple[int, ...]) -> None:
        for place, count in enumerate(counts):
            key = ("steps", replica, str(place))
            new = int(count - self._told.get(key, 0))
            if new:
                self._told[key] = count
                tags = {**self.tags, "replica": replica}
                self.export.observe("nightdesk_step_seconds", _middle(STEP_SECONDS, place), new, tags)


def tell_outcome(job: str, exit_code: int) -> None:
    """A command on the cluster at RAY_ADDRESS has ended. Elsewhere nobody would hear it: Ray ends with the command."""
    import ray

    from actors.session import ray_session

    if not (ray.is_initialized() or os.environ.get("RAY_ADDRESS")):
        return
    try:
        with ray_session():
            outcome(RayExport(), job, exit_code, time.time())
    except NightdeskError:  # it has no cluster to tell: the command has said so already
        return


def outcome(export: Export, job: str, exit_code: int, now: float) -> None:
    """When a command of a job ended well, or not."""
    if exit_code == 0:
        export.set("nightdesk_last_success_timestamp_seconds", now, {"job_name": job})
    else:
        tags = {"job_name": job, "exit_code": str(exit_code)}
        export.set("nightdesk_last_failure_timestamp_seconds", now, tags)


def _middle(bounds: tuple[float, ...], place: int) -> float:
    """A value that falls into that bucket."""
    if place == len(bounds):
        return 2 * bounds[-1]
    return (bounds[place] + (bounds[place - 1] if place else 0.0)) / 2


assert all(name in BY_NAME for name in (*NUMBERS, *POSITIONS, *VITALS, *QUEUES))
