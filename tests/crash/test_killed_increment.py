"""`kill -9` at every change to the file system while documents are replaced, moved, removed and parts merged."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.crash.test_killed_driver import Reader
from tests.crash.zygote import Zygote
from tests.stub_engine import answer_to

KILLED = -signal.SIGKILL
JOB: dict[str, Any] = {"input__keep": ["title"], "output__rows_per_shard": 5}
BY_DAY: dict[str, Any] = {**JOB, "output__partition_by": ["day"]}
Docs = dict[str, tuple[str, str]]  # id → body, day

BEFORE: Docs = {f"{n:02d}": (f"story {n}", "mon" if n % 2 else "tue") for n in range(12)}
AFTER: Docs = {
    **{identity: doc for identity, doc in BEFORE.items() if identity not in ("00", "07")},  # two are gone
    "03": ("a correction", "mon"),
    "04": ("story 4", "wed"),  # moved, where days are folders
    "12": ("story 12", "mon"),
}


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    with Zygote() as process:
        yield process


def write(folder: Path, docs: Docs) -> None:
    (folder / "in").mkdir(parents=True, exist_ok=True)
    columns = {"doc_id": list(docs), "body": [b for b, _ in docs.values()], "title": ["t"] * len(docs)}
    pq.write_table(pa.table({**columns, "day": [d for _, d in docs.values()]}), folder / "in/a.parquet")


def expected(docs: Docs) -> dict[str, str]:
    return {identity: answer_to(f"Say: {body}") for identity, (body, _) in docs.items()}


def rows(folder: Path) -> list[tuple[str, str]]:
    frame = pd.read_parquet(folder / "out")
    return sorted(zip(frame["doc_id"], frame["summary"], strict=True))


def kill_everywhere(
    zygote: Zygote, tmp_path: Path, prepared: Path, check: Callable[[Path, int], None], **options: Any
) -> int:
    """A driver with `options` on copies of `prepared`, killed before each change that it makes; how many there were."""
    folder = copied(prepared, tmp_path / "whole")
    assert zygote.run(folder, **options) == 0, (folder / "log").read_text()
    points = int((folder / "calls").read_text())
    for point in range(1, points + 1):
        folder = copied(prepared, tmp_path / str(point))
        assert zygote.run(folder, die_at=point, **options) == KILLED, point
        check(folder, point)
        shutil.rmtree(folder)
    return points


def copied(prepared: Path, folder: Path) -> Path:
    """With hard links, so that the parts are the very files that plans know."""
    shutil.copytree(prepared, folder, copy_function=os_link)
    for name in ("log", "calls", "in/a.parquet"):
        data = (folder / name).read_bytes()
        (folder / name).unlink()
        (folder / name).write_bytes(data)
    return folder


def os_link(source: str, target: str) -> None:
    Path(target).hardlink_to(source)


@pytest.mark.parametrize("changes", [JOB, BY_DAY], ids=["flat", "by day"])
def test_a_night_of_changes_killed_anywhere_is_whole_after_the_same_command(
    zygote: Zygote, tmp_path: Path, changes: dict[str, Any]
) -> None:
    prepared = tmp_path / "prepared"
    write(prepared, BEFORE)
    # The input's path is part of a plan, so every copy must read the same one.
    options = {"job": {**changes, "input__path": str(prepared / "in")}, "allow_deletions": True}
    assert zygote.run(prepared, **options) == 0
    write(prepared, AFTER)
    old, new = set(expected(BEFORE).items()), set(expected(AFTER).items())

    def check(folder: Path, point: int) -> None:
        meanwhile = rows(folder)
        assert set(meanwhile) <= old | new, point
        if changes is JOB:
            assert len({identity for identity, _ in meanwhile}) == len(meanwhile), f"{point}: a document twice"
        assert {i for i, _ in meanwhile} >= set(BEFORE) & set(AFTER), f"{point}: a document is missing"
        assert zygote.run(folder, **options) == 0, (folder / "log").read_text()
        assert rows(folder) == sorted(new), point
        assert (folder / "out/_SUCCESS").exists(), point

    points = kill_everywhere(zygote, tmp_path, prepared, check, **options)
    assert points > 40, "the hooks count nothing"


def test_a_compaction_killed_anywhere_is_finished_by_the_next_run(zygote: Zygote, tmp_path: Path) -> None:
    prepared = tmp_path / "prepared"
    write(prepared, BEFORE)
    options = {"job": {**JOB, "input__path": str(prepared / "in")}}
    assert zygote.run(prepared, **options) == 0
    whole = sorted(expected(BEFORE).items())

    def check(folder: Path, point: int) -> None:
        meanwhile = rows(folder)
        assert len(meanwhile) == len(set(meanwhile)), point
        assert set(meanwhile) <= set(whole), point
        assert zygote.run(folder, **options) == 0, (folder / "log").read_text()
        assert rows(folder) == whole, point

    assert kill_everywhere(zygote, tmp_path, prepared, check, compact=True, **options) > 15


def test_a_reader_sees_no_row_twice_and_none_missing_while_rows_are_replaced(zygote: Zygote, tmp_path: Path) -> None:
    docs = {f"{n:03d}": (f"story {n}", "mon") for n in range(120)}
    write(tmp_path, docs)
    assert zygote.run(tmp_path, job=JOB) == 0
    with Reader(tmp_path) as reader:
        for night in range(4):
            docs |= {f"{n:03d}": (f"story {n} of night {night}", "mon") for n in range(night, 120, 7)}
            docs[f"1{night}00"] = ("new", "mon")
            write(tmp_path, docs)
            assert zygote.run(tmp_path, job=JOB, seconds=0.002) == 0
    assert reader.failure is None, reader.failure
    assert reader.reads > 10
    assert rows(tmp_path) == sorted(expected(docs).items())
