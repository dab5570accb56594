"""Publication on local disk: the first writer wins, and a name never holds half a file."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import OutputError, StoreError
from pipeline.output.local_store import LOCK, LocalStore
from pipeline.output.store import ABANDONED_SECONDS, TMP, Entry, open_store


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


def refuse(source: Path, target: Path) -> None:
    raise PermissionError(errno.EPERM, "Operation not permitted")


def test_a_file_system_without_hard_links_is_refused(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_visible_are_the_files_that_a_reader_meets_at_any_depth(store: LocalStore) -> None:
    for name in ("b", "day=1/part", "day=1/_tmp/x", ".crc", "a", "_SUCCESS", "day=1/.part.crc"):
        store.create(name, name.encode())
    assert [(name, entry.size) for name, entry in store.visible().items()] == [("a", 1), ("b", 1), ("day=1/part", 10)]
    assert LocalStore(store.root / "nowhere").visible() == {}


def test_the_version_changes_whenever_a_file_is_replaced(store: LocalStore) -> None:
    store.create("part", b"one")
    first = store.version("part")
    assert first is not None
    assert store.visible() == {"part": Entry(3, first)}
    store.replace("part", b"one")
    os.utime(store.root / "part", ns=(0, int(first.partition("-")[0], 16)))  # as if in the same tick of the clock
    assert store.version("part") not in (first, None)
    assert store.version("other") is None


def test_read_many_gives_those_that_are_there(store: LocalStore) -> None:
    for name in "ab":
        store.create(name, name.encode())
    assert store.read_many(["a", "b", "c"]) == {"a": b"a", "b": b"b"}


def test_replacing_a_version_needs_that_version_to_be_there(store: LocalStore) -> None:
    assert not store.replace_if("part", b"new", "1-1-1")
    assert store.version("part") is None
    store.create("part", b"old")
    old = store.version("part")
    assert old is not None
    assert not store.replace_if("part", b"new", "1-1-1")
    assert store.read("part") == b"old"
    assert store.replace_if("part", b"new", old)
    assert not store.replace_if("part", b"newer", old)
    assert store.read("part") == b"new"
    assert store.names(TMP) == []


def test_of_many_who_replace_one_version_one_succeeds(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.create("part", b"old")
    old = store.version("part")
    assert old is not None
    rename = os.replace

    def slowly(source: Path, target: Path) -> None:
        time.sleep(0.02)
        rename(source, target)

    monkeypatch.setattr(os, "replace", slowly)
    with ThreadPoolExecutor(8) as pool:
        replaced = list(pool.map(lambda i: store.replace_if("part", b"%d" % i, old), range(8)))
    assert sum(replaced) == 1
    assert store.read("part") == b"%d" % replaced.index(True)


def test_a_file_replaced_between_look_and_lock_stays(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.create("part", b"old")
    old = store.version("part")
    assert old is not None
    flock, overtaken = fcntl.flock, []

    def overtake(handle: int, operation: int) -> None:
        if not overtaken:
            overtaken.append(True)
            store.replace("part", b"theirs")
        flock(handle, operation)

    monkeypatch.setattr(fcntl, "flock", overtake)
    assert not store.replace_if("part", b"ours", old)
    assert store.read("part") == b"theirs"


def test_the_lock_file_stays(store: LocalStore) -> None:
    store.create("part", b"old")
    assert store.replace_if("part", b"new", str(store.version("part")))
    store.sweep()
    assert store.exists(LOCK)


def without_locks(handle: int, operation: int) -> None:
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


def test_a_file_system_without_locks_replaces_only_for_a_single_writer(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.create("part", b"old")
    monkeypatch.setattr(fcntl, "flock", without_locks)
    for act in (store.probe, lambda: store.replace_if("part", b"new", str(store.version("part")))):
        with pytest.raises(OutputError, match=r"no file locks.*single_writer: true"):
            act()
    store.replace("claim", b"")
    store.remove("claim")
    alone = LocalStore(store.root, single_writer=True)
    alone.probe()
    assert alone.replace_if("part", b"new", str(store.version("part")))


def test_a_file_system_without_hard_links_serves_a_single_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", refuse)
    alone = LocalStore(tmp_path, single_writer=True)
    alone.probe()
    assert alone.create("part", b"rows")
    assert not alone.create("part", b"other")
    assert alone.read("part") == b"rows"


def test_the_probe_leaves_nothing_behind(store: LocalStore) -> None:
    store.probe()
    assert store.names(TMP) == []
    assert store.visible() == {}


def test_the_probe_refuses_a_file_system_that_gives_a_name_twice(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", os.replace)
    with pytest.raises(OutputError, match=r"two writers can both get one name.*single_writer: true"):
        store.probe()


def test_a_link_to_nothing_is_named(tmp_path: Path) -> None:
    (tmp_path / "out").symlink_to(tmp_path / "gone")
    with pytest.raises(OutputError, match=r"out is a link to nothing .*gone"):
        LocalStore(tmp_path / "out")
