"""The Delta table is a log over parts that stay where they are: one transaction per run, whoever tries how often."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from deltalake.transaction import AddAction

from pipeline.errors import NightdeskError, OutputError, StoreError
from pipeline.output import delta, delta_storage
from pipeline.output.delta import AddedPart, DeltaLog, RemovedPart
from pipeline.output.delta_storage import Storage, said

SCHEMA = pa.schema([("id", pa.string()), ("when", pa.timestamp("us", "Europe/Paris")), ("n", pa.int32())])
BY_SOURCE = SCHEMA.append(pa.field("source", pa.string()))
NOON = pd.Timestamp("2024-05-17 12:00", tz="UTC")


def write(folder: Path, name: str, ids: str, partition: Mapping[str, str | None] | None = None) -> AddedPart:
    """A part with a row per character of `ids`."""
    values = {"id": list(ids), "when": [NOON] * len(ids), "n": [None] * len(ids)}
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(values, SCHEMA), path)
    return AddedPart(name, path.stat().st_size, len(ids), partition or {}, path.stat().st_mtime_ns // 10**6)


def removed(part: AddedPart) -> RemovedPart:
    return RemovedPart(part.name, part.size, part.partition)


def ids(folder: Path) -> str:
    """What an analyst reads, in order, by two readers."""
    found = "".join(sorted(DeltaTable(folder).to_pandas()["id"]))
    assert "".join(sorted(pl.read_delta(str(folder))["id"].to_list())) == found
    return found


def versions(folder: Path) -> int:
    return len(list((folder / "_delta_log").glob("*.json")))


@pytest.fixture
def log(tmp_path: Path) -> DeltaLog:
    return DeltaLog(str(tmp_path), SCHEMA, [])


def test_two_runs_add_their_parts_and_pandas_reads_all(tmp_path: Path, log: DeltaLog) -> None:
    log.commit(1, [write(tmp_path, "part-000001-000000.parquet", "ab")], [], fresh=False)
    assert ids(tmp_path) == "ab"
    more = [write(tmp_path, f"part-000002-00000{n}.parquet", text) for n, text in enumerate(("c", "de"))]
    log.commit(2, more, [], fresh=False)
    assert ids(tmp_path) == "abcde"
    frame = DeltaTable(tmp_path).to_pandas()
    assert list(frame.columns) == ["id", "when", "n"]
    assert set(frame["when"]) == {NOON}
    assert frame["n"].isna().all()


def test_no_data_is_copied_and_plain_readers_see_parts_only(tmp_path: Path, log: DeltaLog) -> None:
    log.commit(1, [write(tmp_path, "part-000001-000000.parquet", "ab")], [], fresh=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["_delta_log", "part-000001-000000.parquet"]
    assert pd.read_parquet(tmp_path)["id"].tolist() == ["a", "b"]


def test_the_table_opens_before_any_part_is_there(tmp_path: Path, log: DeltaLog) -> None:
    log.create(1)
    log.create(1)
    frame = DeltaTable(tmp_path).to_pandas()
    assert (list(frame.columns), len(frame), versions(tmp_path)) == (["id", "when", "n"], 0, 1)
    assert not log.committed(1)


def test_a_run_without_parts_is_committed_too(tmp_path: Path, log: DeltaLog) -> None:
    assert not log.committed(1)
    log.commit(1, [], [], fresh=False)
    assert (log.committed(1), log.committed(2)) == (True, False)


def test_a_second_driver_of_a_run_changes_nothing(tmp_path: Path, log: DeltaLog) -> None:
    part = write(tmp_path, "part-000001-000000.parquet", "ab")
    log.commit(1, [part], [], fresh=False)
    before = versions(tmp_path)
    DeltaLog(str(tmp_path), SCHEMA, []).commit(1, [part], [], fresh=False)
    assert (ids(tmp_path), versions(tmp_path)) == ("ab", before)


def test_counts_come_from_the_log(tmp_path: Path, log: DeltaLog) -> None:
    log.commit(1, [write(tmp_path, "part-000001-000000.parquet", "abc")], [], fresh=False)
    assert DeltaTable(tmp_path).count() == 3


def test_a_removed_part_is_not_shown_though_its_file_is_there(tmp_path: Path, log: DeltaLog) -> None:
    old, kept = (write(tmp_path, f"part-000001-00000{n}.parquet", text) for n, text in enumerate("ab"))
    log.commit(1, [old, kept], [], fresh=False)
    log.commit(2, [write(tmp_path, "part-000002-000000.parquet", "c")], [removed(old)], fresh=False)
    assert ids(tmp_path) == "bc"
    os.unlink(tmp_path / old.name)
    assert ids(tmp_path) == "bc"


@pytest.mark.parametrize("also_removed", [False, True])
def test_a_part_replaced_in_place_counts_once_with_its_new_size(
    tmp_path: Path, log: DeltaLog, also_removed: bool
) -> None:
    old = write(tmp_path, "part-000001-000000.parquet", "abcdefgh" * 50)
    log.commit(1, [old], [], fresh=False)
    new = write(tmp_path, old.name, "abx")
    log.commit(2, [new], [removed(old)] if also_removed else [], fresh=False)
    assert ids(tmp_path) == "abx"
    actions = pa.table(DeltaTable(tmp_path).get_add_actions()).to_pylist()
    assert [(row["size_bytes"], row["num_records"]) for row in actions] == [(new.size, 3)]


def test_a_fresh_run_leaves_its_own_parts_only(tmp_path: Path, log: DeltaLog) -> None:
    log.commit(1, [write(tmp_path, "part-000001-000000.parquet", "ab")], [], fresh=False)
    log.commit(2, [write(tmp_path, "part-000002-000000.parquet", "c")], [], fresh=False)
    before = versions(tmp_path)
    log.commit(3, [write(tmp_path, "part-000003-000000.parquet", "xy")], [], fresh=True)
    assert (ids(tmp_path), versions(tmp_path)) == ("xy", before + 1)


def test_fresh_makes_the_table_hold_exactly_what_is_given(tmp_path: Path, log: DeltaLog) -> None:
    """A log that was lost, or parts that were left out of it, are put right by naming all parts."""
    one, two, three = (write(tmp_path, f"part-000001-00000{n}.parquet", text) for n, text in enumerate("abc"))
    log.commit(1, [one, two], [], fresh=False)
    two = write(tmp_path, two.name, "BB")
    log.commit(2, [one, two, three], [], fresh=True)
    assert ids(tmp_path) == "BBac"
    assert DeltaTable(tmp_path).count() == 4
    commit = (tmp_path / "_delta_log" / f"{2:020d}.json").read_text()
    assert (one.name in commit, '"remove"' in commit) == (False, False)


def test_a_fresh_run_may_change_columns_and_partitions(tmp_path: Path, log: DeltaLog) -> None:
    log.commit(1, [write(tmp_path, "part-000001-000000.parquet", "ab")], [], fresh=False)
    schema = BY_SOURCE.append(pa.field("naive", pa.timestamp("us")))  # a type that needs a feature of the table
    part = write(tmp_path, "source=dpa/part-000002-000000.parquet", "c", {"source": "dpa"})
    DeltaLog(str(tmp_path), schema, ["source"]).commit(2, [part], [], fresh=True)
    frame = DeltaTable(tmp_path).to_pandas()
    assert frame[["id", "source"]].to_numpy().tolist() == [["c", "dpa"]]
    assert frame["naive"].isna().all()


def test_a_run_that_is_not_fresh_may_change_neither(tmp_path: Path, log: DeltaLog) -> None:
    log.commit(1, [write(tmp_path, "part-000001-000000.parquet", "ab")], [], fresh=False)
    for other in (DeltaLog(str(tmp_path), BY_SOURCE, ["source"]), DeltaLog(str(tmp_path), SCHEMA, ["n"])):
        for attempt in (lambda log=other: log.commit(2, [], [], fresh=False), lambda log=other: log.create(2)):
            with pytest.raises(OutputError, match="--fresh"):
                attempt()
    assert ids(tmp_path) == "ab"


@pytest.mark.parametrize("schema", [SCHEMA, SCHEMA.append(pa.field("new", pa.string()))])
def test_readers_see_no_rows_while_a_fresh_run_is_on_its_way_rather_than_missing_files(
    tmp_path: Path, log: DeltaLog, schema: pa.Schema
) -> None:
    old = write(tmp_path, "part-000001-000000.parquet", "ab")
    log.commit(1, [old], [], fresh=False)
    fresh = DeltaLog(str(tmp_path), schema, [])
    fresh.clear(2)
    os.unlink(tmp_path / old.name)
    assert ids(tmp_path) == ""
    assert not fresh.committed(2)
    before = versions(tmp_path)
    fresh.clear(2)  # a second driver, or the same one after a kill
    assert versions(tmp_path) == before
    fresh.commit(2, [write(tmp_path, "part-000002-000000.parquet", "c")], [], fresh=True)
    fresh.clear(2)
    assert ids(tmp_path) == "c"


def test_a_driver_that_slept_until_the_run_was_committed_does_not_clear_it(tmp_path: Path, log: DeltaLog) -> None:
    log.commit(1, [write(tmp_path, "part-000001-000000.parquet", "ab")], [], fresh=False)
    log.commit(2, [write(tmp_path, "part-000002-000000.parquet", "c")], [], fresh=True)
    log.clear(2)
    assert ids(tmp_path) == "c"


def test_clearing_where_there_is_no_table_makes_none(tmp_path: Path, log: DeltaLog) -> None:
    log.clear(1)
    assert list(tmp_path.iterdir()) == []


def test_a_log_that_is_ahead_of_the_plans_is_refused_rather_than_taken_for_committed(
    tmp_path: Path, log: DeltaLog
) -> None:
    log.commit(5, [write(tmp_path, "part-000005-000000.parquet", "ab")], [], fresh=False)
    for attempt in (lambda: log.create(1), lambda: log.commit(1, [], [], fresh=False)):
        with pytest.raises(OutputError, match="ends with run 5, which is later than run 1"):
            attempt()


# --- several drivers


def commit_at_once(logs: list[DeltaLog], *parts: AddedPart) -> None:
    """All commit run 1 with these parts at the same moment; raises what one of them raised."""
    start = threading.Barrier(len(logs))

    def commit(log: DeltaLog) -> None:
        start.wait()
        log.commit(1, parts, [], fresh=False)

    with ThreadPoolExecutor(len(logs)) as pool:
        list(pool.map(commit, logs))


@pytest.mark.parametrize("exists", [False, True])
def test_drivers_that_commit_one_run_at_once_commit_it_once(tmp_path: Path, log: DeltaLog, exists: bool) -> None:
    for turn in range(5):
        folder = tmp_path / str(turn)
        part = write(folder, "part-000001-000000.parquet", "ab")
        logs = [DeltaLog(str(folder), SCHEMA, []) for _ in range(4)]
        if exists:
            logs[0].create(1)
        commit_at_once(logs, part)
        assert (ids(folder), versions(folder)) == ("ab", 2)  # the table, and the run


def test_a_commit_that_another_one_overtook_is_not_repeated(
    tmp_path: Path, log: DeltaLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other driver commits between this one's look at the log and its commit."""
    part = write(tmp_path, "part-000001-000000.parquet", "ab")
    log.create(1)
    whole = DeltaTable.create_write_transaction

    def overtaken(table: DeltaTable, *args: object, **kwargs: object) -> None:
        monkeypatch.setattr(DeltaTable, "create_write_transaction", whole)
        DeltaLog(str(tmp_path), SCHEMA, []).commit(1, [part], [], fresh=False)
        whole(table, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(DeltaTable, "create_write_transaction", overtaken)
    log.commit(1, [part], [], fresh=False)
    assert (ids(tmp_path), versions(tmp_path)) == ("ab", 2)


def test_another_programs_append_does_not_stop_a_commit(
    tmp_path: Path, log: DeltaLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    log.create(1)
    whole = DeltaTable.create_write_transaction
    theirs, ours = write(tmp_path, "theirs.parquet", "t"), write(tmp_path, "part-000001-000000.parquet", "ab")

    def overtaken(table: DeltaTable, *args: object, **kwargs: object) -> None:
        monkeypatch.setattr(DeltaTable, "create_write_transaction", whole)
        action = AddAction(theirs.name, theirs.size, {}, 0, True, json.dumps({"numRecords": 1}))
        whole(DeltaTable(tmp_path), [action], "append", DeltaTable(tmp_path).schema())
        whole(table, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(DeltaTable, "create_write_transaction", overtaken)
    log.commit(1, [ours], [], fresh=False)
    assert ids(tmp_path) == "abt"


def test_commits_that_are_always_overtaken_end_with_a_word(
    tmp_path: Path, log: DeltaLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    log.create(1)
    monkeypatch.setattr(delta, "FIRST_PAUSE_SECONDS", 0.0)

    def conflict(*args: object, **kwargs: object) -> None:
        raise delta.CommitFailedError("Metadata changed since last commit.")

    monkeypatch.setattr(DeltaTable, "create_write_transaction", conflict)
    with pytest.raises(StoreError, match="Metadata changed since last commit"):
        log.commit(1, [], [], fresh=False)


KILLED = """
import os, sys
from deltalake import DeltaTable
from pipeline.output.delta import AddedPart, DeltaLog
from tests.output.test_delta import SCHEMA
folder, name, size, when = sys.argv[1:]
whole = DeltaTable.create_write_transaction
def commit(*args, **kwargs):
    if when == "after":
        whole(*args, **kwargs)
    os.kill(os.getpid(), 9)
DeltaTable.create_write_transaction = commit
DeltaLog(folder, SCHEMA, []).commit(1, [AddedPart(name, int(size), 2, {}, 0)], [], fresh=False)
"""


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_driver_killed_at_its_commit_is_continued_by_the_next(tmp_path: Path, log: DeltaLog, when: str) -> None:
    part = write(tmp_path, "part-000001-000000.parquet", "ab")
    argv = [sys.executable, "-c", KILLED, str(tmp_path), part.name, str(part.size), when]
    assert subprocess.run(argv, cwd=Path(__file__).parents[2], check=False).returncode == -9
    assert log.committed(1) == (when == "after")
    log.commit(1, [part], [], fresh=False)
    assert (ids(tmp_path), versions(tmp_path)) == ("ab", 2)


def test_a_commit_is_durable_when_it_returns(tmp_path: Path, log: DeltaLog, monkeypatch: pytest.MonkeyPatch) -> None:
    log.create(1)
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(os.readlink(f"/proc/self/fd/{handle}")))
    log.commit(1, [write(tmp_path, "part-000001-000000.parquet", "ab")], [], fresh=False)
    assert [Path(path).name for path in synced] == ["00000000000000000001.json", "_delta_log"]


def test_drivers_that_commit_one_run_at_once_on_s3_commit_it_once(tmp_path: Path, s3: Any) -> None:
    values = ["a b", "50%", None, "ä"]
    parts = [
        write(tmp_path, f"{folder_of(value)}/part-000001-000000.parquet", chr(97 + n), {"source": value})
        for n, value in enumerate(values)
    ]
    for part in parts:
        s3.put(f"out/{part.name}", (tmp_path / part.name).read_bytes())
    logs = [DeltaLog(f"{s3.url}/out", BY_SOURCE, ["source"]) for _ in range(4)]
    commit_at_once(logs, *parts)
    assert logs[0].committed(1)
    options = {"AWS_ALLOW_HTTP": "true"}
    table = DeltaTable(f"{s3.url}/out", storage_options=options)
    assert (table.version(), table.count()) == (1, 4)
    rows = table.to_pyarrow_table().select(["id", "source"]).to_pylist()
    assert {row["id"]: row["source"] for row in rows} == {chr(97 + n): value for n, value in enumerate(values)}
    logs[1].commit(2, [], [removed(parts[0])], fresh=False)
    assert DeltaTable(f"{s3.url}/out", storage_options=options).count() == 3


# --- partitions


VALUES = ["a b", "50%", "k=v", "a/b", "ä", "x#y", "q?z", None, "a%20b", "c:d", "it's", "[x]", "\\", '"', "t~+ü"]


def folder_of(value: str | None) -> str:
    """A key=value folder, as Hive writes it."""
    return "source=" + ("none" if value is None else quote(value, safe=""))


def test_partition_values_of_every_spelling_come_back(tmp_path: Path) -> None:
    log = DeltaLog(str(tmp_path), BY_SOURCE, ["source"])
    parts = [
        write(tmp_path, f"{folder_of(value)}/part-000001-000000.parquet", chr(97 + n), {"source": value})
        for n, value in enumerate(VALUES)
    ]
    log.commit(1, parts, [], fresh=False)
    expected = {chr(97 + n): value for n, value in enumerate(VALUES)}
    frame = DeltaTable(tmp_path).to_pandas()
    values = [None if pd.isna(value) else value for value in frame["source"]]
    assert dict(zip(frame["id"], values, strict=True)) == expected
    by_polars = pl.read_delta(str(tmp_path), columns=["id"])["id"].to_list()
    assert sorted(by_polars) == sorted(expected)


def test_parts_in_folders_of_every_spelling_are_removed_and_replaced(tmp_path: Path) -> None:
    log = DeltaLog(str(tmp_path), BY_SOURCE, ["source"])
    parts = [
        write(tmp_path, f"{folder_of(value)}/part-000001-000000.parquet", chr(97 + n), {"source": value})
        for n, value in enumerate(VALUES)
    ]
    log.commit(1, parts, [], fresh=False)
    again = [write(tmp_path, part.name, chr(65 + n), part.partition) for n, part in enumerate(parts[::2])]
    log.commit(2, again, [removed(part) for part in parts[1::2]], fresh=False)
    assert sorted(DeltaTable(tmp_path).to_pandas()["id"]) == [chr(65 + n) for n in range(len(again))]
    log.commit(3, [write(tmp_path, "source=x/part-000003-000000.parquet", "x", {"source": "x"})], [], fresh=True)
    assert DeltaTable(tmp_path).to_pandas()["id"].tolist() == ["x"]


def test_partition_columns_have_the_types_of_the_schema(tmp_path: Path) -> None:
    schema = SCHEMA.append(pa.field("day", pa.date32())).append(pa.field("number", pa.int64()))
    log = DeltaLog(str(tmp_path), schema, ["day", "number"])
    values = {"day": "2024-05-17", "number": "123"}
    log.commit(1, [write(tmp_path, "day=2024-05-17/number=123/part.parquet", "a", values)], [], fresh=False)
    table = DeltaTable(tmp_path).to_pyarrow_table().select(["day", "number"])
    assert table.to_pylist() == [{"day": pd.Timestamp("2024-05-17").date(), "number": 123}]


@pytest.mark.parametrize("name", ["with space", "50%", "ü#?x", "a=b"])
def test_the_folder_of_a_table_may_have_any_name(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    DeltaLog(str(folder), SCHEMA, []).commit(1, [write(folder, "part-000001-000000.parquet", "ab")], [], fresh=False)
    assert "".join(DeltaTable(str(folder)).to_pandas()["id"]) == "ab"


# --- failures


def failure(attempt: Callable[[], object]) -> NightdeskError:
    with pytest.raises(NightdeskError) as caught:
        attempt()
    assert "\n" not in str(caught.value)
    assert "\x1b" not in str(caught.value)
    return caught.value


def test_a_folder_that_cannot_be_written_is_named_and_the_run_can_go_on(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "_delta_log").write_text("")
    error = failure(lambda: DeltaLog(f"{tmp_path}/out", SCHEMA, []).commit(1, [], [], fresh=False))
    assert isinstance(error, StoreError)
    assert str(error).startswith(f"{tmp_path}/out: committing run 1 failed (")


def test_a_table_of_a_newer_protocol_is_refused(tmp_path: Path, log: DeltaLog) -> None:
    log.create(1)
    first = tmp_path / "_delta_log" / f"{0:020d}.json"
    newer = '"minReaderVersion":3,"minWriterVersion":7,"readerFeatures":["unheardOf"],"writerFeatures":["unheardOf"]'
    first.write_text(first.read_text().replace('{"minReaderVersion":1,"minWriterVersion":2}', "{" + newer + "}"))
    assert "unheardOf" in first.read_text()
    assert isinstance(failure(lambda: log.commit(1, [], [], fresh=False)), OutputError)


@pytest.mark.parametrize("location", ["gs://bucket/out", "memory://out"])
def test_other_storage_is_refused_by_name(location: str) -> None:
    error = failure(lambda: DeltaLog(location, SCHEMA, []))
    assert isinstance(error, OutputError)
    assert location.split(":")[0] + "://" in str(error)


KEY, SECRET, TOKEN = "AKIAPLAINLYVISIBLE", "plainly+visible/secret", "plainly.visible.token"


@pytest.fixture
def nobody_listens(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(delta_storage, "_PATIENCE", {"max_retries": "0", "retry_timeout": "1s"})
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))


@pytest.mark.usefixtures("nobody_listens")
def test_an_endpoint_that_is_away_is_a_storage_failure_without_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_SESSION_TOKEN": TOKEN}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    log = DeltaLog("s3://bucket/out", SCHEMA, [])
    for attempt in (lambda: log.committed(1), lambda: log.create(1), lambda: log.commit(1, [], [], fresh=False)):
        error = failure(attempt)
        assert isinstance(error, StoreError)
        assert "refused" in str(error)
        printed = "".join(traceback.format_exception(error))
        assert not [value for value in values.values() if value in printed]


@pytest.mark.usefixtures("nobody_listens")
def test_credentials_and_endpoint_come_from_the_provider_chain_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    answer = tmp_path / "answer.json"
    (tmp_path / "config").write_text(
        f"[profile night]\nregion = eu-west-1\nendpoint_url = http://127.0.0.1:7\ncredential_process = cat {answer}\n"
    )
    monkeypatch.setenv("AWS_PROFILE", "night")
    storage = Storage("s3://bucket/out")
    for key in ("FIRST", "SECOND"):
        given = {"Version": 1, "AccessKeyId": key, "SecretAccessKey": SECRET, "SessionToken": TOKEN}
        answer.write_text(json.dumps(given))
        options = storage.options() or {}
        assert options["AWS_ACCESS_KEY_ID"] == key
        assert (options["AWS_SECRET_ACCESS_KEY"], options["AWS_SESSION_TOKEN"]) == (SECRET, TOKEN)
        assert (options["AWS_ENDPOINT_URL"], options["AWS_ALLOW_HTTP"]) == ("http://127.0.0.1:7", "true")
        assert options["AWS_REGION"] == "eu-west-1"


@pytest.mark.usefixtures("nobody_listens")
def test_a_credential_process_that_fails_is_not_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config").write_text(f"[profile night]\ncredential_process = sh -c 'echo {KEY} >&2; exit 1'\n")
    monkeypatch.setenv("AWS_PROFILE", "night")
    log = DeltaLog("s3://bucket/out", SCHEMA, [])
    error = failure(lambda: log.committed(1))
    assert isinstance(error, StoreError)
    assert KEY not in "".join(traceback.format_exception(error))


def test_what_storage_says_is_one_line_without_what_signs_a_request() -> None:
    answer = f"<Error><AWSAccessKeyId>{KEY}</AWSAccessKeyId><StringToSign>\n</StringToSign><Code>AccessDenied</Code>"
    url = "http://x/y?X-Amz-Signature=abcdef&X-Amz-Credential=KEYKEY/2024&k=v"
    text = f"GET {url} {SECRET}\n\x1b[31m↳\x1b[0m\n{answer}"
    found = said(OSError(text), {"AWS_SECRET_ACCESS_KEY": SECRET})
    assert found == "GET http://x/y?X-Amz-Signature=***&X-Amz-Credential=***&k=v *** ↳ AccessDenied"
    long = said(OSError("first " + "x" * 10_000 + " last"), None)
    assert (len(long) <= 300, long.startswith("first "), long.endswith(" last")) == (True, True, True)


def test_a_part_added_twice_in_one_commit_is_a_bug(tmp_path: Path, log: DeltaLog) -> None:
    part = write(tmp_path, "part-000001-000000.parquet", "ab")
    with pytest.raises(AssertionError, match="added twice"):
        log.commit(1, [part, part], [], fresh=False)


def test_a_path_that_delta_would_misread_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"%-signs.*output\.format: parquet"):
        DeltaLog(str(tmp_path / "a%20b"), pa.schema([("id", pa.string())]), [])
    DeltaLog(str(tmp_path / "100%"), pa.schema([("id", pa.string())]), [])
