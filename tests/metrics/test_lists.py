"""What is written about metrics and events, the dashboard, and the code agree."""

from __future__ import annotations

import re

import pytest

from actors.metrics import METRICS
from pipeline.events import KINDS
from tests.metrics.dashboard import ALERTS, INFRA, metrics_in, panels, queries

README = (INFRA / "prometheus" / "README.md").read_text()


def test_every_metric_is_in_the_table_with_its_kind_and_tags_and_no_other() -> None:
    told = re.findall(r"^\| `(nightdesk_\w+)` \| (\w+) \| ([\w, ]*) \| (.+) \|$", README, re.MULTILINE)
    assert told == [(m.name, str(m.sort), ", ".join(m.tags), m.help) for m in METRICS]


def test_every_event_is_in_the_table_and_no_other() -> None:
    table = README.partition("| event | meaning |")[2].partition("## Metrics")[0]
    told = re.findall(r"^\| `(\w+)` \| (.+) \|$", table, re.MULTILINE)
    assert told == [(kind.name, kind.meaning) for kind in KINDS]


def test_every_metric_is_on_the_dashboard_and_no_other() -> None:
    shown = metrics_in(" ".join(query for _, query in queries()))
    assert shown == {metric.name for metric in METRICS}


def test_alerts_ask_for_metrics_that_there_are() -> None:
    assert metrics_in(ALERTS.read_text()) <= {metric.name for metric in METRICS}


@pytest.mark.parametrize("panel", panels(), ids=lambda panel: panel["title"])
def test_every_panel_says_what_it_shows(panel: dict) -> None:  # type: ignore[type-arg]
    assert panel["title"]
    assert panel["description"].endswith(".")
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert all(target["expr"] and target["legendFormat"] for target in panel["targets"])


def test_no_two_panels_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells
