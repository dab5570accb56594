"""A real run on a real Ray, scraped by a real Prometheus: every panel has data, and every line of its log is JSON."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from actors.metrics import METRICS, PREFIX
from tests.actors.test_session import command
from tests.actors.tiny_job import tiny_job
from tests.metrics.dashboard import ALERTS, queries
from tests.metrics.server import Prometheus, unpacked
from tests.models import tiny_folder
from tests.s3.server import Unavailable, free_port

pytestmark = pytest.mark.slow
ROWS, TOKENS = 200, 40
SECONDS = 600.0  # at most, for each of the steps below, on a machine that does much else
WITHOUT_DATA = {"nightdesk_run_deadline_timestamp_seconds"}  # `run` has no deadline


@pytest.fixture
def ray_head() -> Iterator[tuple[str, Path]]:
    """(address, Ray's list of what to scrape) of a Ray with all its files in a folder of its own."""
    try:
        unpacked()
    except Unavailable as reason:
        pytest.skip(f"no Prometheus: {reason}")
    folder, port = Path(tempfile.mkdtemp(prefix="nm-", dir="/tmp")), free_port()
    environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"} | {
        "RAY_metrics_report_interval_ms": "1000", "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled",
    }  # fmt: skip
    head = subprocess.Popen(
        [
            sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", f"--port={port}",
            f"--temp-dir={folder}", "--num-cpus=4", f"--metrics-export-port={free_port()}",
            "--dashboard-host=127.0.0.1", f"--dashboard-port={free_port()}", f"--ray-client-server-port={free_port()}",
            f"--object-store-memory={128 * 2**20}",
        ],
        env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    targets, until = folder / "prom_metrics_service_discovery.json", time.monotonic() + SECONDS
    started: list[psutil.Process] = []
    try:
        while not (targets.exists() and json.loads(targets.read_text())[0]["targets"]):
            assert head.poll() is None, "ray start has ended"
            assert time.monotonic() < until, "Ray has not written what to scrape"
            time.sleep(0.5)
        yield f"127.0.0.1:{port}", targets
    finally:
        session = [p for p in psutil.process_iter(["cmdline"]) if str(folder) in " ".join(p.info["cmdline"] or ())]
        for process in (psutil.Process(head.pid), *session):
            started += [process, *process.children(recursive=True)]
        for process in started:
            if process.is_running():
                process.kill()
        psutil.wait_procs(started, 10)
        head.wait(10)
        shutil.rmtree(folder, ignore_errors=True)


def test_a_runs_panels_have_data_and_its_log_is_json(ray_head: tuple[str, Path], tmp_path: Path) -> None:
    address, targets = ray_head
    models = tuple(tiny_folder(tmp_path / str(i), seed=i, num_hidden_layers=1) for i in range(2))
    config = tiny_job(tmp_path, models, ROWS, TOKENS, placement="separate")  # type: ignore[arg-type]
    environment = {"RAY_ADDRESS": address, "NIGHTDESK_LOG": "json", "RAY_AUTH_MODE": "disabled"}
    with Prometheus(targets, ALERTS.read_text()) as prometheus:
        began = time.time()
        _, log = ended(command(config, tmp_path / "job.yaml", **environment), 0)
        events = [json.loads(line) for line in log.splitlines()]
        assert {"run_planned", "progress", "shard_published", "run_closed"} <= {each["event"] for each in events}
        published = [each for each in events if each["event"] == "shard_published"]
        assert len(published) == ROWS // 8
        assert all(each["run"] == "000001" and each["replica"] and each["job"] == "tiny" for each in published)
        other = config.model_copy(update={"seed": 7})
        _, log = ended(command(other, tmp_path / "other.yaml", **environment), 2)
        last = json.loads(log.splitlines()[-1])
        assert (last["event"], last["exit_code"]) == ("failed", 2)
        time.sleep(5)  # the last words are scraped
        seconds = time.time() - began + 10
        names = {m.name: f"{{__name__=~'{PREFIX}{m.name}(_bucket)?'}}" for m in METRICS}
        empty = {name for name, query in names.items() if not prometheus.values(query, seconds)}
        assert empty == WITHOUT_DATA
        vain = {title for title, query in queries() if not prometheus.values(query, seconds)}
        assert vain == {"Time until the deadline"}
        rows = prometheus.values(f"sum({PREFIX}nightdesk_rows_total)", seconds)
        assert max(rows) == ROWS
        assert prometheus.values(f"{PREFIX}nightdesk_run_active", seconds)[-1] == 0, "the end was scraped too"
        assert max(prometheus.values(f"{PREFIX}nightdesk_last_success_timestamp_seconds", seconds)) > began
        assert prometheus.broken_rules() == []


def ended(run: subprocess.Popen[str], code: int) -> Any:
    """(standard output, standard error)."""
    said = run.communicate(timeout=SECONDS)
    assert run.returncode == code, said[1]
    return said
