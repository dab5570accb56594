"""Publication on a real S3 server, and through a proxy that fails as networks do: the first writer wins."""

from __future__ import annotations

import contextlib
import multiprocessing
import pickle
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.errors import OutputError, StoreError
from pipeline.output.object_store import ObjectStore
from pipeline.output.store import ABANDONED_SECONDS, TMP, Entry, open_store
from pipeline.remote import files
from tests.s3.bucket import Bucket
from tests.s3.proxy import Proxy, answer, break_off, cut, hang, lose_answer, of

WRITERS = 8


@pytest.fixture
def store(s3: Bucket) -> ObjectStore:
    return ObjectStore(f"{s3.url}/out")


@pytest.fixture
def through(s3: Bucket, proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    """A store behind `proxy` that loses patience soon."""
    monkeypatch.setattr(files, "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(files, "PATIENCE_SECONDS", 2.0)
    return ObjectStore(f"{s3.url}/out")


def at_once(act: Callable[[int], bool]) -> list[bool]:
    """What `WRITERS` threads are told that do this at the same time."""
    ready = threading.Barrier(WRITERS)

    def one(writer: int) -> bool:
        ready.wait()
        return act(writer)

    with ThreadPoolExecutor(WRITERS) as pool:
        return list(pool.map(one, range(WRITERS)))


# --- on a server that is well


def test_the_first_writer_wins(store: ObjectStore) -> None:
    assert store.create("a/b.json", b"first")
    assert not store.create("a/b.json", b"second")
    assert store.read("a/b.json") == b"first"


def test_two_who_write_the_same_bytes_are_still_two(store: ObjectStore) -> None:
    assert store.create("part", b"rows")
    assert not store.create("part", b"rows")


def test_of_many_creators_one_wins(store: ObjectStore) -> None:
    won = at_once(lambda writer: store.create("part", b"%d" % writer))
    assert won.count(True) == 1
    assert store.read("part") == b"%d" % won.index(True)


def test_a_large_part_is_one_conditional_write(s3: Bucket, proxy: Proxy, through: ObjectStore) -> None:
    data = bytes(60 << 20)  # above the size at which s3fs would write it in pieces
    assert through.create("part", data)
    assert not through.create("part", data[:-1])
    assert [(seen.method, seen.conditions) for seen in proxy.seen if seen.method in ("PUT", "POST")] == [
        ("PUT", ("If-None-Match",))
    ] * 2
    assert s3.uploads() == []


def test_replacing_leaves_the_new_content(store: ObjectStore) -> None:
    store.replace("claim.json", b"old")
    store.replace("claim.json", b"new")
    assert store.read("claim.json") == b"new"


def test_what_is_not_there_is_not_there(store: ObjectStore) -> None:
    assert store.names() == []
    assert store.names("_nightdesk/runs") == []
    assert store.visible() == {}
    assert not store.exists("a")
    assert store.version("a") is None
    store.remove("a")
    for read in (store.read, store.open):
        with pytest.raises(FileNotFoundError):
            read("a")


def test_names_are_the_files_and_folders_of_one_level(store: ObjectStore, s3: Bucket) -> None:
    for key in ("out/b", "out/a/x", "out/a/y/z", "outside", "out/"):
        s3.put(key)
    assert store.names() == ["a", "b"]
    assert store.names("a") == ["x", "y"]


def test_listings_see_what_another_writer_added_since(store: ObjectStore, s3: Bucket) -> None:
    store.create("a", b"")
    assert (store.names(), list(store.visible())) == (["a"], ["a"])
    s3.put("out/b")
    assert (store.names(), list(store.visible())) == (["a", "b"], ["a", "b"])


def test_visible_are_the_files_that_a_reader_meets_at_any_depth(store: ObjectStore, s3: Bucket) -> None:
    for name in ("b", "day=1/part", "day=1/_tmp/x", ".crc", "a", "_SUCCESS", "day=1/.part.crc", "_nightdesk0"):
        store.create(name, name.encode())
    assert [(name, entry.size) for name, entry in store.visible().items()] == [("a", 1), ("b", 1), ("day=1/part", 10)]
    assert store.visible()["a"] == Entry(1, str(store.version("a")))


def test_what_is_hidden_is_not_listed_however_much_it_is(
    through: ObjectStore, s3: Bucket, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.remote.s3.PAGE_KEYS", 5)
    for key in ("Z", "_SUCCESS", "_zzz", "part", *(f"_nightdesk/runs/{i:02d}" for i in range(30))):
        s3.put(f"out/{key}")
    assert list(through.visible()) == ["Z", "part"]
    assert proxy.count("GET") == 2
    for i in range(12):
        s3.put(f"out/part-{i:02d}")
    assert len(through.visible()) == 14
    assert proxy.count("GET") == 2 + 4


def test_the_version_changes_with_the_content(store: ObjectStore) -> None:
    store.create("part", b"one")
    first = store.version("part")
    store.replace("part", b"two")
    assert store.version("part") not in (first, None)


def test_read_many_gives_those_that_are_there(store: ObjectStore) -> None:
    names = [f"{i}" for i in range(40)]
    for name in names:
        store.create(name, name.encode())
    assert store.read_many([*names, "other"]) == {name: name.encode() for name in names}


def test_an_open_file_is_read_in_pieces(through: ObjectStore, proxy: Proxy) -> None:
    rows = 1 << 17
    table = pa.table({"id": range(rows), "text": [f"{i:064x}" for i in range(rows)]})
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="none", use_dictionary=False)
    data = sink.getvalue().to_pybytes()
    through.create("part", data)
    with through.open("part") as file:
        assert pq.ParquetFile(file).read(columns=["id"]).column("id").to_pylist() == list(range(rows))
        file.seek(-4, 2)
        assert file.read() == b"PAR1"
        file.seek(1000)
        assert file.read(3000) == data[1000:4000]
    assert len(data) > 8 << 20
    assert proxy.count("GET", "out/part") < 12


def test_an_open_file_that_is_replaced_is_a_failure_and_not_a_mixture(store: ObjectStore) -> None:
    store.create("part", b"1" * (1 << 20))
    with store.open("part") as file:
        file.read(10)
        store.replace("part", b"2" * (1 << 20))
        file.seek(900_000)
        with pytest.raises(StoreError, match="replaced or removed while it was read"):
            file.read(10)


def test_replacing_a_version_needs_that_version_to_be_there(store: ObjectStore) -> None:
    assert not store.replace_if("part", b"new", "0" * 32)
    assert not store.exists("part")
    store.create("part", b"old")
    old = str(store.version("part"))
    assert not store.replace_if("part", b"new", "0" * 32)
    assert store.read("part") == b"old"
    assert store.replace_if("part", b"new", old)
    assert not store.replace_if("part", b"newer", old)
    assert store.read("part") == b"new"


def test_of_many_who_replace_one_version_one_succeeds(store: ObjectStore) -> None:
    store.create("part", b"old")
    old = str(store.version("part"))
    won = at_once(lambda writer: store.replace_if("part", b"%d" % writer, old))
    assert won.count(True) == 1
    assert store.read("part") == b"%d" % won.index(True)


def test_sweeping_takes_old_temporary_files_and_leaves_new_ones(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.create(f"{TMP}/a", b"")
    store.create("part", b"")
    store.sweep()
    assert store.names(TMP) == ["a"]
    later = time.time() + ABANDONED_SECONDS + 60
    monkeypatch.setattr(time, "time", lambda: later)
    store.sweep()
    assert store.names(TMP) == []
    assert store.exists("part")


def test_a_store_goes_to_other_processes(store: ObjectStore) -> None:
    store.create("part", b"rows")
    with multiprocessing.get_context("fork").Pool(1) as pool:  # of a process that has a connection
        assert pool.apply(pickle.loads(pickle.dumps(store)).read, ("part",)) == b"rows"
    assert store.read("part") == b"rows"


def test_the_store_of_a_path_is_chosen_by_its_protocol(tmp_path: Path) -> None:
    assert isinstance(open_store("s3://bucket/out/"), ObjectStore)
    assert open_store("s3://bucket/out/").location == "s3://bucket/out"
    assert open_store(f"file://{tmp_path}").location == str(tmp_path)


# --- when something fails


def test_a_write_that_is_cut_in_the_middle_leaves_nothing_and_is_repeated(
    through: ObjectStore, s3: Bucket, proxy: Proxy
) -> None:
    seen: list[bytes | None] = []

    def look(handler: object) -> None:
        cut(handler)  # type: ignore[arg-type]
        seen.append(s3.get("out/part"))

    proxy.fail(of("PUT"), look)
    assert through.create("part", b"r" * 100_000)
    assert seen == [None]
    assert through.read("part") == b"r" * 100_000
    assert proxy.count("PUT") == 2


@pytest.mark.parametrize("lost", [1, 2])
def test_a_write_whose_answer_is_lost_counts_once(through: ObjectStore, proxy: Proxy, lost: int) -> None:
    proxy.fail(of("PUT"), lose_answer, times=lost)
    assert through.create("part", b"rows")
    assert not through.create("part", b"rows")


def test_a_lost_answer_to_the_loser_makes_no_winner(through: ObjectStore, s3: Bucket, proxy: Proxy) -> None:
    s3.put("out/part", b"theirs")
    proxy.fail(of("PUT"), lose_answer)
    assert not through.create("part", b"ours")
    assert s3.get("out/part") == b"theirs"


def test_where_metadata_is_forgotten_the_content_tells_whose_a_file_is(
    through: ObjectStore, s3: Bucket, proxy: Proxy
) -> None:
    s3.put("out/part", b"rows")  # as it would look
    proxy.fail(of("PUT"), answer(503, "SlowDown"))
    assert through.create("part", b"rows")
    assert not through.create("part", b"ours")


def test_a_replacement_whose_answer_is_lost_has_been_made(through: ObjectStore, proxy: Proxy) -> None:
    through.create("part", b"old")
    old = str(through.version("part"))
    through.probe()
    proxy.fail(of("PUT", "part"), lose_answer)
    assert through.replace_if("part", b"new", old)
    assert through.read("part") == b"new"


@pytest.mark.parametrize(
    ("status", "code"),
    [(500, "InternalError"), (502, ""), (503, "SlowDown"), (503, "ServiceUnavailable"), (409, "OperationAborted"),
     (409, "ConditionalRequestConflict"), (429, "TooManyRequests"), (400, "RequestTimeout")],
)  # fmt: skip
def test_what_passes_is_waited_for(through: ObjectStore, proxy: Proxy, status: int, code: str) -> None:
    for method in ("PUT", "GET", "DELETE"):
        proxy.fail(of(method), answer(status, code), times=2)
    proxy.fail(of("HEAD"), answer(status if status != 400 else 503, code), times=2)
    assert through.create("part", b"rows")
    assert through.read("part") == b"rows"
    assert through.exists("part")
    through.remove("part")
    assert through.names() == []


def test_a_write_that_hangs_is_repeated(through: ObjectStore, proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.remote.s3.UPLOAD_SECONDS", 1.0)
    monkeypatch.setattr("pipeline.remote.s3.UPLOAD_BYTES_PER_SECOND", 100 << 20)
    monkeypatch.setattr(files, "PATIENCE_SECONDS", 60.0)
    data = bytes(20 << 20)  # more than the buffers of a connection hold
    proxy.fail(of("PUT"), hang)
    assert through.create("part", data)
    assert proxy.count("PUT") == 2


def test_an_answer_that_breaks_off_is_fetched_again(through: ObjectStore, proxy: Proxy) -> None:
    through.create("part", b"r" * 100_000)
    proxy.fail(of("GET", "part"), break_off, times=2)
    assert through.read("part") == b"r" * 100_000
    proxy.fail(of("GET"), break_off, times=2)
    assert through.names() == ["part"]


def test_what_does_not_pass_is_given_up_in_time(through: ObjectStore, proxy: Proxy) -> None:
    proxy.fail(of("PUT"), answer(503, "SlowDown"), times=1000)
    began = time.monotonic()
    with pytest.raises(StoreError, match=r"out/part: writing failed \(PutObject: SlowDown.*run the same command"):
        through.create("part", b"rows")
    assert time.monotonic() - began < 5
    assert proxy.count("PUT") > 3


def test_a_store_that_cannot_be_reached_is_given_up_in_time(
    through: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_CONNECTIONS", {})
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(StoreError, match="run the same command again"):
        through.read("part")


def test_an_interruption_ends_the_waiting(through: ObjectStore, proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    proxy.fail(of("GET"), answer(503, "SlowDown"))
    monkeypatch.setattr(time, "sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        through.read("part")


def test_a_bucket_that_does_not_exist_is_a_mistake_in_the_job(s3: Bucket) -> None:
    for act in (ObjectStore("s3://no-such-bucket/out").names, ObjectStore("s3://no-such-bucket/out").probe,
                ObjectStore("s3://n/out").names):  # fmt: skip
        with pytest.raises(OutputError, match=r"output\.path: s3://n.*create the bucket, or correct the path"):
            act()


def test_no_permission_names_the_bucket_and_what_was_refused(
    through: ObjectStore, s3: Bucket, proxy: Proxy
) -> None:
    proxy.fail(of("PUT"), answer(403, "AccessDenied"), times=2)  # asked once more with credentials made anew
    with pytest.raises(OutputError, match=rf"output\.path: {s3.url}/out/part: .*\(PutObject: AccessDenied"):
        through.create("part", b"rows")
    through.create("part", b"rows")
    proxy.fail(of("PUT"), answer(403, "AccessDenied"), times=2)
    with pytest.raises(StoreError, match="AccessDenied"):  # in mid-run it is no mistake of the job
        through.create("other", b"rows")


def test_messages_hold_no_secrets(through: ObjectStore, proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "key testkey, secret testsecret, X-Amz-Signature=abcdef0123 AWSAccessKeyId=AKIAIOSFODNN7EXAMPLE"
    proxy.fail(of("PUT"), answer(400, "Strange", text))
    with pytest.raises(StoreError, match="Strange") as caught:
        through.create("part", b"")
    for secret in ("testkey", "testsecret", "abcdef0123", "AKIAIOSFODNN7EXAMPLE"):
        assert secret not in str(caught.value)


# --- what the probe finds


def test_the_probe_finds_a_store_that_heeds_conditions_and_leaves_nothing(store: ObjectStore, s3: Bucket) -> None:
    store.probe()
    assert store.can_replace_if
    assert s3.keys() == []


def test_a_store_that_ignores_conditions_is_refused(through: ObjectStore, s3: Bucket, proxy: Proxy) -> None:
    proxy.heeds_conditions = False
    with pytest.raises(OutputError, match=r"lets two writers both create one name.*output\.single_writer: true"):
        through.probe()
    assert s3.keys() == []


def test_a_store_that_lets_several_racing_writers_win_is_refused(
    through: ObjectStore, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, puts = ObjectStore._put, []

    def late_to_notice(self: ObjectStore, name: str, data: bytes, absent: bool = False) -> bool:
        puts.append(name)
        return put(self, name, data, absent and puts.count(name) <= 2)  # one after the other it is right

    monkeypatch.setattr(ObjectStore, "_put", late_to_notice)
    with pytest.raises(OutputError, match="lets two writers both create one name"):
        through.probe()


@pytest.mark.parametrize(("status", "code"), [(501, "NotImplemented"), (400, "InvalidArgument")])
def test_a_store_that_knows_no_conditions_is_refused(
    through: ObjectStore, s3: Bucket, proxy: Proxy, status: int, code: str
) -> None:
    proxy.fail(lambda seen: bool(seen.conditions), answer(status, code), times=1000)
    with pytest.raises(OutputError, match=r"output\.single_writer: true"):
        through.probe()
    assert s3.keys() == []


def test_a_store_that_takes_no_writes_at_all_is_told_as_that(through: ObjectStore, proxy: Proxy) -> None:
    proxy.fail(of("PUT"), answer(400, "InvalidRequest"), times=1000)
    with pytest.raises(StoreError, match=r"writing failed \(PutObject: InvalidRequest"):
        through.probe()


def test_a_single_writer_does_without_conditions(s3: Bucket, proxy: Proxy, through: ObjectStore) -> None:
    proxy.heeds_conditions = False
    alone = ObjectStore(f"{s3.url}/out", single_writer=True)
    alone.probe()
    assert not alone.can_replace_if
    assert alone.create("part", b"old")
    assert not alone.create("part", b"other")
    old = str(alone.version("part"))
    assert not alone.replace_if("part", b"new", "0" * 32)
    assert alone.replace_if("part", b"new", old)
    assert alone.read("part") == b"new"


def test_a_single_writer_does_where_conditions_are_not_known(s3: Bucket, proxy: Proxy, through: ObjectStore) -> None:
    proxy.fail(lambda seen: bool(seen.conditions), answer(501, "NotImplemented"), times=1000)
    alone = ObjectStore(f"{s3.url}/out", single_writer=True)
    alone.probe()
    assert alone.create("part", b"old")
    assert alone.replace_if("part", b"new", str(alone.version("part")))
    assert alone.read("part") == b"new"


def test_where_versions_cannot_be_replaced_only_a_single_writer_may(
    through: ObjectStore, s3: Bucket, proxy: Proxy
) -> None:
    proxy.fail(lambda seen: "If-Match" in seen.conditions, answer(501, "NotImplemented"), times=1000)
    through.probe()
    through.create("part", b"old")
    with pytest.raises(OutputError, match=r"If-Match.*output\.single_writer: true"):
        through.replace_if("part", b"new", str(through.version("part")))
    assert through.read("part") == b"old"


def test_who_was_not_there_when_the_store_was_probed_finds_out_before_replacing(
    through: ObjectStore, proxy: Proxy
) -> None:
    through.create("part", b"old")
    proxy.heeds_conditions = False
    with pytest.raises(OutputError, match="single_writer"):
        through.replace_if("part", b"new", str(through.version("part")))


# --- other file systems


def test_any_file_system_that_creates_names_once_will_do() -> None:
    store = ObjectStore("memory://bucket/out")
    with contextlib.suppress(FileNotFoundError):
        for name in store.names():
            store.remove(name)
    store.probe()
    assert store.create("a/part", b"rows")
    assert not store.create("a/part", b"other")
    store.create("_nightdesk/plan", b"")
    assert (store.names(), store.names("a")) == (["_nightdesk", "a"], ["part"])
    assert [(name, entry.size) for name, entry in store.visible().items()] == [("a/part", 4)]
    assert store.read_many(["a/part", "b"]) == {"a/part": b"rows"}
    with store.open("a/part") as file:
        assert file.read() == b"rows"
    with pytest.raises(OutputError, match="single_writer"):
        store.replace_if("a/part", b"new", str(store.version("a/part")))
    alone = ObjectStore("memory://bucket/out", single_writer=True)
    assert alone.replace_if("a/part", b"new", str(alone.version("a/part")))
    for name in ("a/part", "_nightdesk/plan"):
        store.remove(name)
    assert store.visible() == {}
