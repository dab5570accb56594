"""Every metric of nightdesk, as data, and how it gets to Ray, which exports it to Prometheus as `ray_` and its name.

The only module that knows Ray's metrics. Knows nothing of what is counted, or when. No metric fails a run.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from ray.util import metrics as ray_metrics

from pipeline.meter import STEP_SECONDS

LOG = logging.getLogger(__name__)
PREFIX = "ray_"  # what Ray puts before a metric's name
NEARLY_NOTHING = sys.float_info.min  # a counter exists from its first increment on, and 0 is refused as one
PUBLISHING_SECONDS = (0.01, 0.05, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class Sort(StrEnum):
    """What can be done with a metric: it grows, it has a value, or it has a distribution."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. Each of its tags has few values, in a run and over the years, but for `run`, which ages out."""

    name: str
    sort: Sort
    help: str
    tags: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()  # of a histogram's buckets


JOB, RUN, REPLICA = ("job_name",), ("job_name", "run"), ("job_name", "run", "replica")  # `job` is Prometheus' own
_C, _G, _H = Sort.COUNTER, Sort.GAUGE, Sort.HISTOGRAM

METRICS = (
    Metric("nightdesk_rows_total", _C, "Rows finished; work that was lost and done again counts twice.", REPLICA),
    Metric("nightdesk_error_rows_total", _C, "Rows finished with an error of the row or of a task.", REPLICA),
    Metric(
        "nightdesk_errors_total", _C, "Documents, or tasks on one, without an answer, by reason: unreadable, prompt or "
        "model.", (*REPLICA, "reason"),
    ),
    Metric("nightdesk_requests_total", _C, "Requests that the target has answered.", REPLICA),
    Metric("nightdesk_prompt_tokens_total", _C, "Tokens of the answered requests' prompts.", REPLICA),
    Metric("nightdesk_generated_tokens_total", _C, "Tokens of answers.", REPLICA),
    Metric("nightdesk_drafted_tokens_total", _C, "Tokens that were drafted for finished answers.", REPLICA),
    Metric("nightdesk_accepted_tokens_total", _C, "Drafted tokens that were accepted.", REPLICA),
    Metric(
        "nightdesk_sequence_steps_total", _C, "Passes of the target, one for each sequence in it: accepted and drafted "
        "tokens divided by these are tokens per step.", REPLICA,
    ),
    Metric(
        "nightdesk_position_drafted_tokens_total", _C, "Tokens that were drafted at this position of a block, from 1: "
        "how many steps drafted so many tokens or more.", (*REPLICA, "position"),
    ),
    Metric(
        "nightdesk_position_accepted_tokens_total", _C, "Tokens that were accepted at this position of a block, from "
        "1.", (*REPLICA, "position"),
    ),
    Metric("nightdesk_target_busy_seconds_total", _C, "Seconds during which the target was at work.", REPLICA),
    Metric("nightdesk_draft_busy_seconds_total", _C, "Seconds during which tokens were being drafted.", REPLICA),
    Metric(
        "nightdesk_step_seconds", _H, "How long steps take, drafting and the target's pass; the sum is an estimate.",
        REPLICA, STEP_SECONDS,
    ),
    Metric("nightdesk_sequences_running", _G, "Sequences that are being decoded.", REPLICA),
    Metric("nightdesk_requests_waiting", _G, "Requests that wait for a slot.", REPLICA),
    Metric("nightdesk_cohorts", _G, "Cohorts that the batch is divided into.", REPLICA),
    Metric("nightdesk_batch_halvings_total", _C, "Times that the batch was halved for lack of memory.", REPLICA),
    Metric("nightdesk_shards_published_total", _C, "Shards published.", REPLICA),
    Metric(
        "nightdesk_publication_seconds", _H, "How long publishing a shard takes; the sum is an estimate.", RUN,
        PUBLISHING_SECONDS,
    ),
    Metric("nightdesk_shards_waiting", _G, "Shards that nobody has.", RUN),
    Metric("nightdesk_shards_handed_out", _G, "Shards that replicas have, and that are not published.", RUN),
    Metric("nightdesk_replicas", _G, "Replicas at work.", RUN),
    Metric("nightdesk_draft_workers", _G, "Draft workers that have loaded, beside the targets.", RUN),
    Metric(
        "nightdesk_workers_lost_total", _C, "Workers that died, hung or failed, by kind: replica, target or draft.",
        (*RUN, "kind"),
    ),
    Metric("nightdesk_workers_replaced_total", _C, "Lost workers whose place was taken.", (*RUN, "kind")),
    Metric("nightdesk_run_active", _G, "1 while a run answers documents, 0 at its end.", RUN),
    Metric("nightdesk_run_rows", _G, "Rows that the run is to answer.", RUN),
    Metric("nightdesk_run_rows_done", _G, "Rows finished, those of an earlier attempt at the run included.", RUN),
    Metric("nightdesk_run_answered_rows", _G, "Rows finished by this attempt.", RUN),
    Metric("nightdesk_run_error_rows", _G, "Rows among them with an error.", RUN),
    Metric("nightdesk_run_error_limit_ratio", _G, "The job's max_error_rate.", RUN),
    Metric("nightdesk_run_start_timestamp_seconds", _G, "Unix time at which this attempt began.", RUN),
    Metric("nightdesk_run_deadline_timestamp_seconds", _G, "Unix time at which the run has to end, if any.", RUN),
    Metric("nightdesk_last_success_timestamp_seconds", _G, "Unix time of a command's end with exit code 0.", JOB),
    Metric(
        "nightdesk_last_failure_timestamp_seconds", _G, "Unix time of a command's end with another exit code.",
        (*JOB, "exit_code"),
    ),
)  # fmt: skip
BY_NAME = {metric.name: metric for metric in METRICS}

Tags = Mapping[str, str]


class Export(Protocol):
    """Where numbers go."""

    def add(self, name: str, amount: float, tags: Tags) -> None:
        """A counter grows; by 0 it comes into being."""
        ...

    def set(self, name: str, value: float, tags: Tags) -> None:
        """A gauge has this value from now on."""
        ...

    def observe(self, name: str, value: float, times: int, tags: Tags) -> None:
        """A histogram is told a value, several times."""
        ...


class RayExport:
    """Ray's metrics, in a process that is connected to Ray. The first failure is said, and the last thing tried."""

    def __init__(self) -> None:
        self._metrics: dict[str, Any] = {}
        self._failed = False

    def add(self, name: str, amount: float, tags: Tags) -> None:
        """See `Export`."""
        self._do(name, Sort.COUNTER, "inc", amount or NEARLY_NOTHING, tags)

    def set(self, name: str, value: float, tags: Tags) -> None:
        """See `Export`."""
        self._do(name, Sort.GAUGE, "set", value, tags)

    def observe(self, name: str, value: float, times: int, tags: Tags) -> None:
        """See `Export`."""
        for _ in range(times):
            self._do(name, Sort.HISTOGRAM, "observe", value, tags)

    def _do(self, name: str, sort: Sort, method: str, value: float, tags: Tags) -> None:
        metric = BY_NAME[name]
        assert metric.sort is sort, f"{name} is a {metric.sort}"
        assert set(metric.tags) == set(tags), f"{name} has the tags {metric.tags}, not {sorted(tags)}"
        if self._failed:
            return
        try:
            if name not in self._metrics:
                self._metrics[name] = _made(metric)
            getattr(self._metrics[name], method)(float(value), tags=dict(tags))
        except Exception as error:  # noqa: BLE001 - whatever befalls Ray's metrics, the run goes on
            self._failed = True
            cause = f"{type(error).__name__}: {error}".splitlines()[0]
            LOG.warning("metrics are not reported any more: %s", cause, extra={"event": "metrics_failed"})


def _made(metric: Metric) -> Any:
    if metric.sort is Sort.COUNTER:
        return ray_metrics.Counter(metric.name, metric.help, tag_keys=metric.tags)
    if metric.sort is Sort.GAUGE:
        return ray_metrics.Gauge(metric.name, metric.help, tag_keys=metric.tags)
    return ray_metrics.Histogram(metric.name, metric.help, boundaries=list(metric.bounds), tag_keys=metric.tags)
