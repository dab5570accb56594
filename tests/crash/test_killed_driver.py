"""`kill -9` of the driver, anywhere: the same command again, and every row is there once."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import pandas as pd
import pytest

from tests.crash.zygote import Zygote
from tests.stub_engine import answers, expected, write_stories

KILLS = 20
STORIES = 160
SECONDS_PER_ANSWER = 0.006
KILLED = -signal.SIGKILL
SCHEMA_PART = "part-000000-schema.parquet"


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    with Zygote() as process:
        yield process


class Reader:
    """An analyst who reads `folder`/out all the time, and insists on what may never happen."""

    def __init__(self, folder: Path) -> None:
        self.location = str(folder / "out")
        self.reads = 0
        self.rows = 0
        self.failure: BaseException | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed.set()
        self._thread.join()

    def _read(self) -> None:
        while not self._closed.is_set() and not self.is_there():
            time.sleep(0.001)
        try:
            while not self._closed.is_set():
                self._look()
        except BaseException as error:  # noqa: BLE001  carried to the test
            self.failure = error

    def is_there(self) -> bool:
        """Is there something to read?"""
        return Path(self.location, SCHEMA_PART).exists()

    def _look(self) -> None:
        frame = pd.read_parquet(self.location)
        assert frame["doc_id"].is_unique, "a reader saw a row twice"
        assert len(frame) >= self.rows, "a reader saw rows disappear"
        assert frame["summary"].notna().all(), "a reader saw a row without its answer"
        self.reads += 1
        self.rows = len(frame)


def test_twenty_kills_spread_over_a_run_lose_and_double_nothing(zygote: Zygote, tmp_path: Path) -> None:
    for name in ("undisturbed", "killed"):
        write_stories(tmp_path / name, "a.parquet", 0, STORIES)
    began = time.monotonic()
    assert zygote.run(tmp_path / "undisturbed", seconds=SECONDS_PER_ANSWER) == 0
    duration = time.monotonic() - began
    chance = random.Random(KILLS)
    moments = sorted(chance.uniform(0, duration) for _ in range(KILLS))
    lives = [later - earlier for earlier, later in zip([0.0, *moments], moments, strict=False)]
    folder = tmp_path / "killed"
    with Reader(folder) as reader:
        ends = [kill_after(zygote, folder, life) for life in lives]
        assert zygote.run(folder) == 0
    assert ends == [KILLED] * KILLS, "a run ended before it was killed: make it longer"
    assert reader.failure is None, reader.failure
    assert reader.reads > KILLS
    assert answers(folder) == expected((0, STORIES))
    assert (folder / "out" / "_SUCCESS").read_text().strip() == "000001"


def kill_after(zygote: Zygote, folder: Path, seconds: float) -> int:
    pid = zygote.start(folder, seconds=SECONDS_PER_ANSWER)
    time.sleep(seconds)
    os.kill(pid, signal.SIGKILL)
    return zygote.wait(pid)


def test_a_kill_before_any_change_to_the_file_system_is_mended_by_the_same_command(
    zygote: Zygote, tmp_path: Path
) -> None:
    for point, folder in crash_points(zygote, tmp_path, stories=6):
        assert zygote.run(folder, die_at=point) == KILLED, point
        assert set(seen(folder).items()) <= set(expected((0, 6)).items()), point
        assert zygote.run(folder) == 0, point
        assert answers(folder) == expected((0, 6)), point
        assert (folder / "out" / "_SUCCESS").exists(), point


def test_a_kill_anywhere_in_a_fresh_start_never_shows_old_and_new_rows_together(
    zygote: Zygote, tmp_path: Path
) -> None:
    for point, folder in crash_points(zygote, tmp_path, stories=6, fresh=True):
        assert zygote.run(folder, die_at=point, fresh=True) == KILLED, point
        assert set(seen(folder).items()) <= set(expected((0, 6)).items()), point
        assert zygote.run(folder) == 0, point
        assert answers(folder) == expected((0, 6)), point
        assert (folder / "out" / "_SUCCESS").exists(), point


def crash_points(
    zygote: Zygote, tmp_path: Path, stories: int, fresh: bool = False
) -> Iterator[tuple[int, Path]]:
    """Every place where a run can be cut short, with a folder for it; the last one is after its last change."""
    points, last = 0, 1
    while points < last:
        folder = tmp_path / f"{points}"
        write_stories(folder, "a.parquet", 0, stories)
        if fresh:
            assert zygote.run(folder) == 0
        if points == 0:
            assert zygote.run(folder, fresh=fresh) == 0
            last = int((folder / "calls").read_text())
            assert last > 30, "the hooks count nothing"
        else:
            yield points, folder
        points += 1


def seen(folder: Path) -> dict[str, str]:
    """What a reader sees; nothing before the first part is there."""
    return answers(folder) if (folder / "out" / SCHEMA_PART).exists() else {}


def test_two_runs_at_once_on_one_output_both_end_with_every_row_once(zygote: Zygote, tmp_path: Path) -> None:
    write_stories(tmp_path, "a.parquet", 0, 80)
    with Reader(tmp_path) as reader:
        pids = [zygote.start(tmp_path, seconds=0.004) for _ in range(2)]
        codes = [zygote.wait(pid) for pid in pids]
    assert codes == [0, 0], (tmp_path / "log").read_text()
    assert reader.failure is None, reader.failure
    assert answers(tmp_path) == expected((0, 80))
    assert (tmp_path / "out" / "_SUCCESS").exists()
