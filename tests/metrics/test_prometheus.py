"""A real Prometheus: its own checks of the rules, every panel's query, and every alert in a staged failure."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from actors.report import Activity, Publication, ReplicaReport
from actors.telemetry import Telemetry, Worker, outcome
from pipeline.meter import STEP_SECONDS, Reason, Vitals
from pipeline.stats import Progress
from tests.metrics.dashboard import ALERTS, INFRA, hurried, queries
from tests.metrics.exporter import Exporter
from tests.metrics.server import Prometheus, promtool, unpacked
from tests.s3.server import Unavailable

STAGED = 60.0  # seconds at most, until all that is staged has happened
EXPECTED = {
    ("NightdeskRunFailed", "bad"), ("NightdeskErrorShare", "bad"), ("NightdeskAcceptanceCollapsed", "bad"),
    ("NightdeskPublicationSlow", "bad"), ("NightdeskWorkersLost", "bad"), ("NightdeskDeadlineMissed", "bad"),
    ("NightdeskNoRows", "stalled"), ("NightdeskNoRows", "mute"), ("NightdeskNoSuccess", "stalled"),
    ("NightdeskRunStopped", "stopped"),
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _prometheus() -> None:
    try:
        unpacked()
    except Unavailable as reason:
        pytest.skip(f"no Prometheus: {reason}")


class Job:
    """A run whose replica tells more at every tick."""

    def __init__(self, export: Exporter, name: str, deadline: float = 3600.0) -> None:
        self.export, self.name = export, name
        self.telemetry = Telemetry(export, name, "000001", 0.1, time.time() + deadline)
        self.telemetry.rows(total=10_000, done_before=10)
        self.ticks = 0
        self.total = Progress()

    def tick(self, accepted: int, errors: int, publishing: float) -> None:
        self.ticks += 1
        increment = Progress(
            rows_done=10, error_rows=errors, requests=10, prompt_tokens=90, new_tokens=60, steps=20, drafted=60,
            accepted=accepted, drafted_at=(20, 20, 20), accepted_at=(accepted, 0, 0),
        )  # fmt: skip
        self.total += increment
        published = (Publication(self.ticks, increment, True, publishing),)
        vitals = Vitals(
            0.8 * self.ticks, 0.4 * self.ticks, (self.ticks,) * (len(STEP_SECONDS) + 1), 4, 9, 2, self.ticks,
            errors={Reason.MODEL: errors * self.ticks},
        )  # fmt: skip
        self.telemetry.count(increment)
        told = ReplicaReport(published, self.total, 0, Activity("x", 0, None), vitals=vitals)
        self.telemetry.heard("the replica", told)
        self.telemetry.state(5, 2, 1, 1)

    def ended(self, code: int, ago: float = 0.0) -> None:
        outcome(self.export, self.name, code, time.time() - ago)


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A Prometheus that has watched a good run and failing ones, for as long as it took for all alerts to fire."""
    folder = tmp_path_factory.mktemp("prometheus")
    with Exporter() as export:
        targets = export.write_targets(folder / "targets.json")
        with Prometheus(targets, hurried()) as prometheus:
            good, bad, stalled = Job(export, "good"), Job(export, "bad", deadline=-1.0), Job(export, "stalled")
            mute, stopped = Telemetry(export, "mute", "000001", 0.1), Job(export, "stopped")
            mute.rows(5, 0)
            stalled.tick(accepted=15, errors=0, publishing=0.2)
            stalled.ended(0)
            fired: set[tuple[str, str]] = set()
            began = time.monotonic()
            while time.monotonic() - began < STAGED and (not fired >= EXPECTED or good.ticks < 6):
                for job in (good, stopped):
                    job.tick(accepted=15, errors=0, publishing=0.2)
                bad.tick(accepted=1, errors=5, publishing=100.0)
                bad.telemetry.lost(Worker.TARGET)
                good.ended(0)
                bad.ended(3)
                stopped.ended(4)
                time.sleep(1.0)
                fired |= prometheus.firing()
            yield prometheus, fired


def test_every_alert_fires_where_something_fails_and_nowhere_else(staged: Any) -> None:
    prometheus, fired = staged
    assert fired == EXPECTED
    assert prometheus.broken_rules() == []
    rules = YAML(typ="safe").load(ALERTS.read_text())["groups"][0]["rules"]
    assert {rule["alert"] for rule in rules} == {name for name, _ in EXPECTED}


@pytest.mark.parametrize(("title", "query"), queries(), ids=lambda text: text[:40])
def test_every_panels_query_gives_data(staged: Any, title: str, query: str) -> None:
    prometheus, _ = staged
    assert prometheus.values(query, STAGED), f"{title}: {query}"


@pytest.mark.parametrize(("what", "file"), [("rules", ALERTS), ("config", INFRA / "prometheus" / "prometheus.yaml")])
def test_prometheus_finds_nothing_wrong(what: str, file: Path) -> None:
    done = promtool("check", what, file.name, folder=file.parent)
    assert done.returncode == 0, done.stdout + done.stderr


def test_alerts_fire_after_the_hours_and_minutes_that_they_say(tmp_path: Path) -> None:
    tags = 'job_name="a",run="1"'

    def series(name: str, values: str, more: str = tags) -> dict[str, str]:
        return {"series": f"ray_nightdesk_{name}{{{more}}}", "values": values}

    def fires(alert: str, at: str, expected: list[dict[str, str]]) -> dict[str, Any]:
        return {"alertname": alert, "eval_time": at, "exp_alerts": [{"exp_labels": each} for each in expected]}

    job = 'job_name="a"'
    page, ticket = {"job_name": "a", "severity": "page"}, {"job_name": "a", "run": "1", "severity": "ticket"}
    tests = [
        {   # the success of minute 0, said for a minute by a driver that is then gone
            "input_series": [series("last_success_timestamp_seconds", "0x1 _x2000", job)],
            "alert_rule_test": [
                fires("NightdeskNoSuccess", "25h59m", []), fires("NightdeskNoSuccess", "26h2m", [page]),
            ],
        },
        {   # failed at minute 10, and well again at minute 100; each said by a worker of its own
            "input_series": [
                series("last_failure_timestamp_seconds", "_x10 600x1 _x200", job + ',exit_code="1",WorkerId="x"'),
                series("last_success_timestamp_seconds", "_x100 6000x1 _x200", job + ',WorkerId="y"'),
            ],
            "alert_rule_test": [
                fires("NightdeskRunFailed", "9m", []), fires("NightdeskRunFailed", "60m", [page]),
                fires("NightdeskRunFailed", "101m", []), fires("NightdeskRunStopped", "60m", []),
            ],
        },
        {   # rows until minute 20, then none; the run began at minute 0
            "input_series": [
                series("run_active", "1x90"), series("run_start_timestamp_seconds", "0x90"),
                series("rows_total", "0+5x20 100x70", tags + ',replica="0"'),
            ],
            "alert_rule_test": [
                fires("NightdeskNoRows", "30m", []), fires("NightdeskNoRows", "40m", [{**page, "run": "1"}]),
            ],
        },
        {   # a run that has only just begun has no rows either
            "input_series": [series("run_active", "1x90"), series("run_start_timestamp_seconds", "0x90")],
            "alert_rule_test": [
                fires("NightdeskNoRows", "14m", []), fires("NightdeskNoRows", "16m", [{**page, "run": "1"}]),
            ],
        },
        {   # one loss an hour is life, three in ten minutes are not
            "input_series": [
                series("workers_lost_total", "0x9 1x59 2x59", tags + ',kind="draft"'),
                series("workers_lost_total", "0x9 1x4 2x4 3x90", tags + ',kind="target"'),
            ],
            "alert_rule_test": [fires("NightdeskWorkersLost", "25m", [{**ticket, "kind": "target"}])],
        },
        {   # five minutes beyond its deadline of minute 10
            "input_series": [series("run_active", "1x30"), series("run_deadline_timestamp_seconds", "600x30")],
            "alert_rule_test": [
                fires("NightdeskDeadlineMissed", "14m", []), fires("NightdeskDeadlineMissed", "17m", [ticket]),
            ],
        },
    ]  # fmt: skip
    rules = YAML(typ="safe").load(ALERTS.read_text())
    for rule in rules["groups"][0]["rules"]:
        del rule["annotations"]
    (tmp_path / "rules.yaml").write_text(json.dumps(rules))
    tests = [{"interval": "1m", **test} for test in tests]
    whole = {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": tests}
    (tmp_path / "tests.yaml").write_text(json.dumps(whole))
    done = promtool("test", "rules", "tests.yaml", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
