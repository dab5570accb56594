"""What a run tells of itself in metrics, from the reports of its replicas."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import pytest

from actors import metrics
from actors.metrics import BY_NAME, METRICS, NEARLY_NOTHING, RayExport, Sort
from actors.report import Activity, Publication, ReplicaReport, label
from actors.telemetry import REFRESH_SECONDS, Telemetry, Worker, outcome
from pipeline.meter import STEP_SECONDS, Reason, Vitals
from pipeline.stats import Progress

Key = tuple[str, frozenset[tuple[str, str]]]


class Ledger:
    """An export that adds up."""

    def __init__(self) -> None:
        self.values: dict[Key, float] = {}
        self.observed: dict[Key, list[float]] = defaultdict(list)
        self.calls = 0

    def add(self, name: str, amount: float, tags: Mapping[str, str]) -> None:
        assert BY_NAME[name].sort is Sort.COUNTER
        assert amount >= 0, name
        key = self._key(name, tags)
        self.values[key] = self.values.get(key, 0) + amount

    def set(self, name: str, value: float, tags: Mapping[str, str]) -> None:
        assert BY_NAME[name].sort is Sort.GAUGE
        self.values[self._key(name, tags)] = value

    def observe(self, name: str, value: float, times: int, tags: Mapping[str, str]) -> None:
        assert BY_NAME[name].sort is Sort.HISTOGRAM
        self.observed[self._key(name, tags)] += [value] * times

    def _key(self, name: str, tags: Mapping[str, str]) -> Key:
        self.calls += 1
        assert set(tags) == set(BY_NAME[name].tags), name
        return name, frozenset((k, str(v)) for k, v in tags.items() if k not in ("job_name", "run"))

    def __call__(self, name: str, **tags: str) -> float:
        return self.values[f"nightdesk_{name}", frozenset(tags.items())]


@pytest.fixture
def ledger() -> Ledger:
    return Ledger()


@pytest.fixture
def telemetry(ledger: Ledger) -> Telemetry:
    return Telemetry(ledger, "wire", "000001", 0.01, deadline=5000.0, clock=lambda: 1000.0)


def report(published: tuple[Publication, ...] = (), total: Progress | None = None, **vitals: Any) -> ReplicaReport:
    return ReplicaReport(published, total or Progress(), 0, Activity("x", 0.0, None), vitals=Vitals(**vitals))


def test_reports_about_everything_so_far_are_counted_once(telemetry: Telemetry, ledger: Ledger) -> None:
    for rows in (3, 3, 5):
        total = Progress(rows_done=rows, new_tokens=10 * rows, drafted_at=(rows, 1), accepted_at=(2,))
        telemetry.heard("replica 1", report(total=total, target_seconds=0.5 * rows, errors={Reason.PROMPT: rows - 1}))
    assert ledger("rows_total", replica="1") == 5
    assert ledger("generated_tokens_total", replica="1") == 50
    assert ledger("position_drafted_tokens_total", replica="1", position="1") == 5
    assert ledger("position_drafted_tokens_total", replica="1", position="2") == 1
    assert ledger("position_accepted_tokens_total", replica="1", position="1") == 2
    assert ledger("target_busy_seconds_total", replica="1") == 2.5
    assert ledger("errors_total", replica="1", reason="prompt") == 4
    assert ledger("errors_total", replica="1", reason="model") == 0, "it is there before it happens"


def test_whoever_takes_a_lost_replicas_name_counts_on(telemetry: Telemetry, ledger: Ledger) -> None:
    telemetry.heard("the replica", report(total=Progress(rows_done=7), running=4))
    assert ledger("sequences_running", replica="0") == 4
    telemetry.gone("the replica")
    assert ledger("sequences_running", replica="0") == 0
    telemetry.heard("the replica", report(total=Progress(rows_done=2), running=1))
    assert ledger("rows_total", replica="0") == 9
    assert ledger("sequences_running", replica="0") == 1


def test_rows_of_the_last_shard_count_though_the_replica_has_not_told_its_total(
    telemetry: Telemetry, ledger: Ledger
) -> None:
    shard = Progress(rows_done=8, shards_done=1, drafted_at=(5,))
    telemetry.heard("replica 0", report((Publication(0, shard),), total=Progress(rows_done=11)))
    assert ledger("rows_total", replica="0") == 11
    telemetry.heard("replica 0", report((Publication(1, shard),), total=Progress(rows_done=15, drafted_at=(9,))))
    assert ledger("rows_total", replica="0") == 16
    assert ledger("position_drafted_tokens_total", replica="0", position="1") == 10
    telemetry.gone("replica 0")
    telemetry.heard("replica 0", report(total=Progress(rows_done=1)))
    assert ledger("rows_total", replica="0") == 17


def test_steps_are_observed_in_their_buckets(telemetry: Telemetry, ledger: Ledger) -> None:
    counts = [0] * (len(STEP_SECONDS) + 1)
    for first, last in ((1, 0), (2, 0), (2, 1)):
        counts[0], counts[-1] = first, last
        telemetry.heard("replica 0", report(steps=tuple(counts)))
    ((key, values),) = ledger.observed.items()
    assert key[0] == "nightdesk_step_seconds"
    assert len([v for v in values if v <= STEP_SECONDS[0]]) == 2
    assert len([v for v in values if v > STEP_SECONDS[-1]]) == 1


def test_publications_by_others_are_not_a_replicas_own(telemetry: Telemetry, ledger: Ledger) -> None:
    mine, found = Publication(0, Progress(), True, 2.5), Publication(1, Progress(), created=False)
    telemetry.heard("replica 0", report((mine, found)))
    telemetry.heard("replica 0", report((Publication(2, Progress(), True, 0.5),)))
    assert ledger("shards_published_total", replica="0") == 2
    assert list(ledger.observed.values()) == [[2.5, 0.5]]


def test_lost_workers_are_counted_by_kind_and_so_are_those_in_their_place(
    telemetry: Telemetry, ledger: Ledger
) -> None:
    assert ledger("workers_lost_total", kind="target") == 0
    telemetry.hired()
    telemetry.state(1, 1, 1, 2)
    assert ledger("workers_replaced_total", kind="replica") == ledger("workers_replaced_total", kind="draft") == 0
    telemetry.lost(Worker.REPLICA)
    telemetry.hired()
    telemetry.lost(Worker.DRAFT)
    telemetry.state(1, 1, 1, 1)
    assert ledger("workers_replaced_total", kind="draft") == 0
    telemetry.state(1, 1, 1, 2)
    for lost in (1, 1, 3):
        telemetry.heard("replica 0", report(targets_lost=lost))
    for kind, lost in (("replica", 1), ("draft", 1), ("target", 3)):
        assert ledger("workers_lost_total", kind=kind) == ledger("workers_replaced_total", kind=kind) == lost


def test_a_runs_own_numbers_can_go_down_and_end_well(telemetry: Telemetry, ledger: Ledger) -> None:
    assert ledger("run_active") == 1
    assert ledger("run_start_timestamp_seconds") == 1000.0
    assert ledger("run_deadline_timestamp_seconds") == 5000.0
    telemetry.rows(total=100, done_before=40)
    telemetry.count(Progress(rows_done=10, error_rows=2))
    telemetry.state(waiting=3, handed_out=2, replicas=1, drafts=0)
    assert (ledger("run_rows"), ledger("run_rows_done"), ledger("run_answered_rows")) == (100, 50, 10)
    assert (ledger("run_error_rows"), ledger("run_error_limit_ratio")) == (2, 0.01)
    assert (ledger("shards_waiting"), ledger("shards_handed_out"), ledger("replicas")) == (3, 2, 1)
    telemetry.count(Progress() - Progress(rows_done=4))
    telemetry.ended()
    assert (ledger("run_rows_done"), ledger("run_active"), ledger("replicas")) == (46, 0, 0)


def test_a_poll_with_no_news_costs_no_calls(telemetry: Telemetry, ledger: Ledger) -> None:
    told = report(total=Progress(rows_done=3, drafted_at=(1, 2)), running=2)
    telemetry.heard("replica 0", told)
    telemetry.state(1, 1, 1, 0)
    calls = ledger.calls
    telemetry.heard("replica 0", told)
    telemetry.state(1, 1, 1, 0)
    assert ledger.calls == calls


def test_gauges_are_told_again_and_again_because_ray_forgets_them(ledger: Ledger) -> None:
    now = [1000.0]
    telemetry = Telemetry(ledger, "wire", "000001", 0.01, clock=lambda: now[0])
    telemetry.rows(100, 0)
    telemetry.heard("replica 0", report(running=2))
    telemetry.heard("replica 1", report(running=3))
    telemetry.gone("replica 1")
    ledger.values.clear()
    telemetry.state(1, 1, 1, 0)
    assert ("nightdesk_run_active", frozenset()) not in ledger.values, "not with every poll"
    now[0] += REFRESH_SECONDS
    telemetry.state(1, 1, 1, 0)
    assert (ledger("run_active"), ledger("run_rows"), ledger("run_error_rows")) == (1, 100, 0)
    assert ledger("sequences_running", replica="0") == 2
    assert ("nightdesk_sequences_running", frozenset({("replica", "1")})) not in ledger.values, "it is gone"


def test_an_end_is_a_success_or_a_failure_with_its_code(ledger: Ledger) -> None:
    outcome(ledger, "wire", 0, 7.0)
    outcome(ledger, "wire", 3, 8.0)
    assert ledger("last_success_timestamp_seconds") == 7.0
    assert ledger("last_failure_timestamp_seconds", exit_code="3") == 8.0


def test_every_metric_is_told_somewhere(telemetry: Telemetry, ledger: Ledger) -> None:
    telemetry.rows(1, 0)
    telemetry.state(1, 1, 1, 1)
    steps = (1,) * (len(STEP_SECONDS) + 1)
    total = Progress(drafted_at=(1,), accepted_at=(1,))
    telemetry.heard("replica 0", report((Publication(0, Progress()),), total, steps=steps))
    outcome(ledger, "wire", 0, 1.0)
    outcome(ledger, "wire", 1, 1.0)
    assert {name for name, _ in (*ledger.values, *ledger.observed)} == set(BY_NAME)


def test_names_say_what_they_count() -> None:
    assert len(BY_NAME) == len(METRICS)
    for metric in METRICS:
        assert metric.name.startswith("nightdesk_"), metric
        assert metric.name.endswith("_total") == (metric.sort is Sort.COUNTER), metric
        assert metric.help.endswith("."), metric
        assert bool(metric.bounds) == (metric.sort is Sort.HISTOGRAM), metric
        assert "job" not in metric.tags, "that is Prometheus' own label"
        if metric.sort is Sort.HISTOGRAM:
            assert metric.name.endswith("_seconds"), metric


def test_labels_are_numbers() -> None:
    assert [label(name) for name in ("the replica", "replica 0", "replica 12")] == ["0", "0", "12"]


class FakeRayMetric:
    def __init__(self, name: str, description: str = "", tag_keys: tuple[str, ...] = (), **rest: Any) -> None:
        assert description
        self.told: list[float] = []

    def inc(self, value: float, tags: dict[str, str]) -> None:
        assert value > 0
        self.told.append(value)

    def set(self, value: float, tags: dict[str, str]) -> None:
        raise RuntimeError("no core worker\nand more")


def test_a_metric_that_fails_is_said_once_and_fails_nobody(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(metrics.ray_metrics, "Gauge", FakeRayMetric)
    monkeypatch.setattr(metrics.ray_metrics, "Counter", FakeRayMetric)
    export, tags = RayExport(), {"job_name": "a", "run": "b"}
    export.add("nightdesk_workers_lost_total", 0, {**tags, "kind": "draft"})
    assert export._metrics["nightdesk_workers_lost_total"].told == [NEARLY_NOTHING]
    assert 0 < NEARLY_NOTHING + 1 == 1
    export.set("nightdesk_run_active", 1, tags)
    export.set("nightdesk_run_active", 0, tags)
    export.add("nightdesk_workers_lost_total", 1, {**tags, "kind": "draft"})
    assert caplog.messages == ["metrics are not reported any more: RuntimeError: no core worker"]
