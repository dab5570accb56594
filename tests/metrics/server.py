"""A real Prometheus on this machine, from Debian's package: unpacked into a folder, and ended with the test."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.s3.server import Unavailable, apt, die_with_the_starter, free_port

ROOT = Path(__file__).resolve().parents[2]
CACHE = Path(os.environ.get("NIGHTDESK_CACHE") or ROOT / ".cache") / "prometheus"
START_SECONDS = 60.0


class Prometheus:
    """A context: scrapes what `targets` lists, with rules of its own."""

    def __init__(self, targets: Path, rules: str, seconds: float = 1.0) -> None:
        """`targets` is a file such as Ray's; `seconds` between two scrapes, and two looks at the rules."""
        self.program = unpacked() / "usr/bin/prometheus"
        self.folder = Path(tempfile.mkdtemp(prefix="npr-", dir="/tmp"))
        self.port = free_port()
        (self.folder / "alerts.yaml").write_text(rules)
        interval = f"{int(1000 * seconds)}ms"
        config = {
            "global": {"scrape_interval": interval, "evaluation_interval": interval},
            "rule_files": ["alerts.yaml"],
            "scrape_configs": [
                {"job_name": "ray", "file_sd_configs": [{"files": [str(targets)], "refresh_interval": "1s"}]}
            ],
        }
        (self.folder / "prometheus.yaml").write_text(json.dumps(config))

    def __enter__(self) -> Self:
        with (self.folder / "log").open("wb") as log:
            self.process = subprocess.Popen(
                [
                    self.program, f"--config.file={self.folder}/prometheus.yaml",
                    f"--storage.tsdb.path={self.folder}/db", "--log.level=warn",
                    f"--web.listen-address=127.0.0.1:{self.port}",
                ],
                env=os.environ | {"GOMAXPROCS": "1"}, stdout=log, stderr=log, preexec_fn=die_with_the_starter,
            )  # fmt: skip
        until = time.monotonic() + START_SECONDS
        while not self._is_ready():
            if self.process.poll() is not None or time.monotonic() > until:
                self.process.kill()
                raise AssertionError((self.folder / "log").read_text())
            time.sleep(0.1)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def values(self, query: str, seconds: float) -> list[float]:
        """All that a query gave in the last seconds, NaN left out."""
        now = time.time()
        told = self._get("query_range", query=query, start=now - seconds, end=now, step="1")
        values = [float(value) for series in told["result"] for _, value in series["values"]]
        return [value for value in values if value == value]

    def firing(self) -> set[tuple[str, str]]:
        """Alerts that fire now: (name, job)."""
        alerts = self._get("alerts")["alerts"]
        return {(a["labels"]["alertname"], a["labels"]["job_name"]) for a in alerts if a["state"] == "firing"}

    def broken_rules(self) -> list[str]:
        """What is wrong with rules that could not be evaluated."""
        rules = [rule for group in self._get("rules")["groups"] for rule in group["rules"]]
        return [f"{rule['name']}: {rule['lastError']}" for rule in rules if rule.get("lastError")]

    def _get(self, what: str, **query: Any) -> Any:
        url = f"http://127.0.0.1:{self.port}/api/v1/{what}?{urllib.parse.urlencode(query)}"
        try:
            with urllib.request.urlopen(url, timeout=30) as reply:
                return json.load(reply)["data"]
        except urllib.error.HTTPError as refusal:
            raise AssertionError(f"{query}: {refusal.read().decode()}") from None

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/-/ready", timeout=5):
                return True
        except OSError:
            return False


def promtool(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run Prometheus' own checks."""
    command = [str(unpacked() / "usr/bin/promtool"), *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=120)


def unpacked() -> Path:
    """The folder that holds the programs, fetched if need be: about 20 MB, once. Raises `Unavailable`."""
    root = CACHE / "root"
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not root.is_dir():
            _fetch(root)
    return root


def _fetch(root: Path) -> None:
    for program in ("apt-get", "dpkg"):
        if shutil.which(program) is None:
            raise Unavailable(f"no {program}: Prometheus is unpacked from Debian's package")
    folder = Path(tempfile.mkdtemp(prefix="fetch-", dir=CACHE))
    try:
        apt("download", "prometheus", folder=folder)  # its programs need nothing but the C library
        for package in folder.glob("*.deb"):
            subprocess.run(["dpkg", "-x", package, folder / "root"], check=True)
        (folder / "root").rename(root)
    finally:
        shutil.rmtree(folder)
