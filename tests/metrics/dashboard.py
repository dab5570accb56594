"""The dashboard and the alerts as files of infra/, and both made fit for a test of seconds."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from actors.metrics import METRICS, PREFIX

INFRA = Path(__file__).resolve().parents[2] / "infra"
ALERTS = INFRA / "prometheus" / "alerts.yaml"
WINDOW = "8s"


def panels() -> list[dict[str, Any]]:
    dashboard = json.loads((INFRA / "grafana" / "nightdesk.json").read_text())
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def queries() -> list[tuple[str, str]]:
    """(panel's title, query), with Grafana's variables filled in."""
    found = [(panel["title"], target["expr"]) for panel in panels() for target in panel["targets"]]
    return [(title, e.replace("$job_name", ".*").replace("$__rate_interval", WINDOW)) for title, e in found]


def metrics_in(text: str) -> set[str]:
    """Names of ours, as they are in `METRICS`."""
    found = set(re.findall(rf"{PREFIX}(nightdesk_\w+)", text))
    histograms = {metric.name for metric in METRICS if metric.bounds}
    return {name.removesuffix("_bucket") if name.removesuffix("_bucket") in histograms else name for name in found}


def hurried() -> str:
    """The alert rules with minutes as seconds."""
    text = ALERTS.read_text()
    text = re.sub(r"\[\d+m\]", f"[{WINDOW}]", text)
    text = re.sub(r"\[\d+d\]", "[120s]", text)
    text = re.sub(r"for: \d+m", "for: 1s", text)
    for slow, fast in (("26 * 3600", "5"), ("15 * 60", "2")):
        assert text.count(slow) == 1, slow
        text = text.replace(slow, fast)
    return text
