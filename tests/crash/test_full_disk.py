"""A disk that is full, for real: nothing torn is left, and the same command goes on when there is room."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jobs.run import execute
from pipeline.config import JobConfig
from pipeline.errors import StoreError
from pipeline.output.local_store import LocalStore
from pipeline.output.store import TMP
from tests.stub_engine import answers, expected, job, local, stub_models, write_stories

PAGE = 4096


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of half a megabyte."""
    folder = tmp_path / "out"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", folder], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no file system of its own for the test: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def room(disk: Path) -> int:
    """Bytes that are free."""
    status = os.statvfs(disk)
    return status.f_bavail * status.f_frsize


def fill(disk: Path, left: int) -> None:
    """Leave so many bytes free."""
    (disk / ".filler").write_bytes(bytes(room(disk) - left))


def test_a_part_that_does_not_fit_leaves_nothing(disk: Path) -> None:
    store = LocalStore(disk)
    assert store.create("small", b"rows")
    fill(disk, left=16 * PAGE)
    acts: list[Callable[[], Any]] = [
        lambda: store.create("part", bytes(20 * PAGE)),
        lambda: store.replace("small", bytes(20 * PAGE)),
        lambda: store.replace_if("small", bytes(20 * PAGE), str(store.version("small"))),
    ]
    for act in acts:
        with pytest.raises(StoreError, match=r"No space left on device.*run the same command again"):
            act()
        assert store.names(TMP) == []
        assert list(store.visible()) == ["small"]
        assert store.read("small") == b"rows"
    (disk / ".filler").unlink()
    assert store.create("part", bytes(20 * PAGE))


def test_a_run_on_a_full_disk_stops_resumably_wherever_it_fills_up(disk: Path, tmp_path: Path) -> None:
    write_stories(tmp_path, "a.parquet", 0, 12)
    config, stops, pages = job(tmp_path), 0, 0
    while stops == pages:
        fill(disk, left=pages * PAGE)
        stops += is_stopped(config)
        (disk / ".filler").unlink()
        if (disk / "part-000000-schema.parquet").exists():
            assert set(answers(tmp_path).items()) <= set(expected((0, 12)).items()), pages
        assert run(config) == 0
        assert answers(tmp_path) == expected((0, 12)), pages
        assert (disk / "_SUCCESS").exists()
        for path in disk.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        pages += 1
    assert stops > 10


def is_stopped(config: JobConfig) -> bool:
    try:
        run(config)
    except StoreError as error:
        return "No space left on device" in str(error)
    return False


def run(config: JobConfig) -> int:
    return execute(config, executor=local(), models=stub_models())
