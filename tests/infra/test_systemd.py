"""The units for systemd: valid, and a night is ended, confined and repeated as it should be."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.infra.manifests import INFRA


def unit(name: str) -> Any:
    parser = configparser.RawConfigParser(strict=False, delimiters=("=",), comment_prefixes=("#",))
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read(INFRA / "systemd" / name)
    return parser


def test_systemd_takes_the_units(tmp_path: Path) -> None:
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("systemd-analyze is not installed")
    for name in ("nightdesk.service", "nightdesk.timer"):
        text = (INFRA / "systemd" / name).read_text()
        # The program that it starts is installed where the unit is; here another one stands for it.
        (tmp_path / name).write_text(text.replace("/opt/nightdesk/.venv/bin/python", "/bin/true"))
    units = [str(tmp_path / name) for name in ("nightdesk.timer", "nightdesk.service")]
    done = subprocess.run([program, "verify", "--man=no", *units], capture_output=True, text=True, timeout=60)
    if "Failed to" in done.stderr and "manager" in done.stderr:
        pytest.skip(f"systemd-analyze does not work here: {done.stderr.splitlines()[0]}")
    ours = [line for line in done.stderr.splitlines() if "nightdesk" in line]
    assert (done.returncode, ours) == (0, [])


def test_a_stop_reaches_the_run_alone_and_waits_for_it() -> None:
    service = unit("nightdesk.service")["Service"]
    assert (service["Type"], service["KillSignal"], service["KillMode"]) == ("oneshot", "SIGTERM", "mixed")
    assert service["TimeoutStopSec"] == "5min"


def test_a_stopped_night_is_seen_and_not_begun_again_by_day() -> None:
    service = unit("nightdesk.service")["Service"]
    assert service["Restart"] == "no"
    assert "SuccessExitStatus" not in service


def test_the_service_can_write_where_it_must_and_nowhere_else() -> None:
    service = unit("nightdesk.service")["Service"]
    assert service["ProtectSystem"] == "strict"
    assert service["ReadWritePaths"] == f"{service['WorkingDirectory']}/out"
    assert service["Environment"].split()[0] == f"NIGHTDESK_CACHE=/var/cache/{service['CacheDirectory']}"
    assert service["User"] != "root"


def test_the_timer_makes_up_for_a_machine_that_was_off() -> None:
    timer = unit("nightdesk.timer")["Timer"]
    assert timer["Persistent"] == "yes"
    assert timer["RandomizedDelaySec"]
    (night,) = re.findall(r"(\d\d):00:00", timer["OnCalendar"])
    until = re.search(r"--until (\d\d):00", unit("nightdesk.service")["Service"]["ExecStart"])
    assert until is not None
    hours = (int(until[1]) - int(night)) % 24
    assert hours < int(unit("nightdesk.service")["Service"]["TimeoutStartSec"].removesuffix("h")) < 24
