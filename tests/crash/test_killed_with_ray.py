"""The demo's job on Ray with its real model, its driver killed: the same command again ends it, every row once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / ".cache/models/smollm2-135m-instruct.gguf"
ROWS, ROWS_PER_SHARD = 16, 4

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not MODEL.exists(), reason="the demo's model is not there: make model"),
]


def start(output: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "jobs", "run", "configs/demo.yaml", "--limit", str(ROWS)]
    for change in (f"output.path={output}", f"output.rows_per_shard={ROWS_PER_SHARD}", "tasks.0.max_new_tokens=16"):
        command += ["--set", change]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def answers(output: Path) -> pd.DataFrame:
    return pd.read_parquet(output).sort_values("doc_id").reset_index(drop=True)


def family(pid: int) -> list[psutil.Process]:
    driver = psutil.Process(pid)
    return [driver, *driver.children(recursive=True)]


def test_driver_killed_at_three_moments_loses_and_doubles_nothing(tmp_path: Path) -> None:
    began = time.monotonic()
    assert start(tmp_path / "undisturbed").wait(900) == 0
    duration = time.monotonic() - began
    expected = answers(tmp_path / "undisturbed")
    assert len(expected) == ROWS

    output = tmp_path / "killed"
    for share in (0.35, 0.6, 0.85):
        driver = start(output)
        try:
            driver.wait(share * duration)
        except subprocess.TimeoutExpired:
            started = family(driver.pid)
            os.kill(driver.pid, signal.SIGKILL)
            driver.wait()
            _, left = psutil.wait_procs(started, timeout=300)  # Ray's agents take their time
            assert not left, [p.cmdline() for p in left]
        if list(output.glob("part-*")):
            seen = answers(output)
            assert seen["doc_id"].is_unique
    last = start(output)
    _, trouble = last.communicate(timeout=900)
    assert last.returncode == 0, trouble.decode()
    pd.testing.assert_frame_equal(answers(output), expected)
