"""A driver's memory does not grow with the number of rows."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

from tests.crash.zygote import ROOT
from tests.stub_engine import job, local, stub_models, write_stories

FEW, MANY = 5_000, 100_000
ROWS_PER_FILE = 5_000
MARGIN_MB = 25  # of about 190; keeping one answer per row takes 50 more


def test_ten_times_the_rows_need_the_same_memory(tmp_path: Path) -> None:
    runs = {rows: start(tmp_path / f"{rows}", rows) for rows in (FEW, MANY)}
    peaks = {rows: json.loads(run.communicate()[0].splitlines()[-1]) for rows, run in runs.items()}
    assert all(run.returncode == 0 for run in runs.values())
    assert peaks[MANY] - peaks[FEW] < MARGIN_MB, peaks


def start(folder: Path, rows: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.crash.test_memory", str(folder), str(rows)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def main(folder: Path, rows: int) -> int:
    """One run in this process, which ends with a line that holds its peak memory in MB."""
    from jobs.run import execute

    for first in range(0, rows, ROWS_PER_FILE):
        write_stories(folder, f"{first:07d}.parquet", first, first + ROWS_PER_FILE)
    code = execute(job(folder, output__rows_per_shard=1000), executor=local(), models=stub_models())
    print(json.dumps(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024))
    return code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
