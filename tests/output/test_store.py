"""Publication on local disk: the first writer wins, and a name never holds half a file."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import OutputError, StoreError
from pipeline.output.store import ABANDONED_SECONDS, TMP, LocalStore, open_store


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "out")


def test_the_first_writer_wins(store: LocalStore) -> None:
    assert store.create("a/b.json", b"first")
    assert not store.create("a/b.json", b"second")
    assert store.read("a/b.json") == b"first"


def test_replacing_leaves_the_new_content(store: LocalStore) -> None:
    store.replace("claim.json", b"old")
    store.replace("claim.json", b"new")
    assert store.read("claim.json") == b"new"


def test_nothing_is_left_in_tmp(store: LocalStore) -> None:
    store.create("a", b"1")
    store.create("a", b"2")
    store.replace("a", b"3")
    assert store.names(TMP) == []


def test_a_folder_that_is_not_there_has_no_names(store: LocalStore) -> None:
    assert store.names() == []
    assert store.names("_nightdesk/runs") == []
    assert not store.exists("a")
    store.remove("a")
    with pytest.raises(FileNotFoundError):
        store.read("a")


def test_listings_see_what_another_process_wrote(store: LocalStore) -> None:
    store.create("a", b"")
    assert store.names() == ["_nightdesk", "a"]
    (store.root / "b").write_bytes(b"")
    assert store.names() == ["_nightdesk", "a", "b"]


def test_a_part_is_durable_before_it_has_its_name_and_the_name_before_it_is_reported(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.create("first", b"")  # folders are made once
    calls: list[str] = []
    for name in ("fsync", "link"):
        monkeypatch.setattr(os, name, recorded(getattr(os, name), name, calls))
    store.create("part", b"rows")
    assert calls == ["fsync", "link", "fsync"]


def recorded(call: Callable[..., Any], name: str, calls: list[str]) -> Callable[..., Any]:
    def recording(*args: Any) -> Any:
        calls.append(name)
        return call(*args)

    return recording


def test_a_failed_write_leaves_nothing_under_the_name(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    store.create("first", b"")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreError, match="No space left"):
        store.create("part", b"rows")
    monkeypatch.undo()
    assert store.names() == ["_nightdesk", "first"]
    assert store.names(TMP) == []


def test_a_writer_whose_temporary_file_was_swept_writes_it_again(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    link, swept = os.link, []

    def sweep_once(source: Path, target: Path) -> None:
        if not swept:
            swept.append(source)
            os.unlink(source)
        link(source, target)

    monkeypatch.setattr(os, "link", sweep_once)
    assert store.create("part", b"rows")
    assert store.read("part") == b"rows"


def test_a_file_system_without_hard_links_is_refused(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(OutputError, match="no hard links"):
        store.create("part", b"rows")


def test_sweeping_takes_old_temporary_files_and_leaves_those_being_written(store: LocalStore) -> None:
    store.create("part", b"rows")
    for name, age in (("old", ABANDONED_SECONDS + 10), ("new", 0.0)):
        path = store.root / TMP / name
        path.write_bytes(b"")
        os.utime(path, (time.time() - age, time.time() - age))
    store.sweep()
    assert store.names(TMP) == ["new"]


def test_an_output_path_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(OutputError, match="is a file"):
        open_store(str(tmp_path / "out"))
