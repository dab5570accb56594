"""What an output says of itself: done, missing, failed and why, at rest and while it is written."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

import jobs.run
from jobs import cli, status
from jobs.compact import compact_output
from jobs.run import execute
from pipeline.config import JobConfig
from pipeline.errors import Stopped
from pipeline.output.claim import CLAIM, Claim
from pipeline.output.local_store import LocalStore
from pipeline.output.store import Store
from pipeline.records import Completion, Request
from tests.stub_engine import FAILS, StubEngine, job, local, stub_models, write_stories


class Interrupted(StubEngine):
    def __init__(self, after: int) -> None:
        super().__init__()
        self.after = after

    def stream(self, requests: Iterable[Request | None]) -> Iterator[Completion]:
        for number, completion in enumerate(super().stream(requests)):
            if number == self.after:
                raise KeyboardInterrupt
            yield completion


def run(config: JobConfig, engine: StubEngine | None = None, **options: Any) -> int:
    return execute(config, executor=local(engine), models=stub_models(), **options)


def told(path: Path | str, capsys: pytest.CaptureFixture[str]) -> tuple[str, dict[str, Any]]:
    """What `status --json` prints: the lines for people, and the object."""
    capsys.readouterr()
    assert cli.main(["status", str(path), "--json"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    document: dict[str, Any] = json.loads(last)
    return "\n".join(lines), document


def test_an_output_that_is_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_stories(tmp_path, "a.parquet", 0, 10)
    run(job(tmp_path))
    text, found = told(tmp_path / "out", capsys)
    assert (found["rows"], found["answered"], found["missing"], found["failed"]) == (10, 10, 0, 0)
    assert (found["reasons"], found["at_work"], found["success"]) == ([], None, "000001")
    assert (found["output"], found["format"], found["partition_by"]) == (str(tmp_path / "out"), "parquet", [])
    (only,) = found["runs"]
    assert (only["run"], only["kind"], only["state"]) == ("000001", "answers", "closed")
    assert (only["rows"], only["published"], only["missing"], only["error_rows"]) == (10, 10, 0, 0)
    parts = list((tmp_path / "out").glob("part-000001-*.parquet"))
    assert found["parts"]["count"] == found["parts"]["small"] == len(parts) == 3
    assert found["parts"]["bytes"] == sum(path.stat().st_size for path in parts)
    assert found["last_summary"]["run"] == "000001"
    for line in ("done      10 rows, in 3 parts", "missing   0 rows", "failed    0 rows", "at work   nobody"):
        assert line in text
    assert "last      run 000001 of stub: 10 rows, 0 failed, ended 20" in text
    assert "_SUCCESS  of run 000001" in text
    assert "hint" not in text


def test_failed_rows_are_grouped_by_reason_with_an_example(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in").mkdir()
    rows = [{"doc_id": f"{n}", "body": FAILS if n in (3, 7) else f"story {n}", "title": "t"} for n in range(10)]
    lines = [json.dumps(row) for row in rows]
    (tmp_path / "in/a.jsonl").write_text("\n".join([*lines, '{"doc_id": "x", ', '{"doc_id": 1,']) + "\n")
    (tmp_path / "in/b.jsonl").write_text('{"doc_id": "empty", "body": "", "title": "t"}\n')
    run(job(tmp_path, input__keep=["title"], max_error_rate=1.0))
    text, found = told(tmp_path / "out", capsys)
    assert (found["rows"], found["answered"], found["failed"]) == (13, 8, 5)
    reasons = {(entry["task"], entry["rows"]): entry for entry in found["reasons"]}
    assert reasons["summary", 2]["reason"] == "logits are not finite"
    assert reasons["summary", 2]["example_id"] == "3"
    assert reasons[None, 1]["reason"] == "text is empty"
    assert sum(entry["rows"] for entry in found["reasons"] if entry["task"] is None) == 3
    assert not [entry for entry in found["reasons"] if "jsonl" in entry["reason"]], "places differ, reasons do not"
    assert "failed    5 rows (38.46%)" in text
    assert "          2 × summary: logits are not finite (for one, 3)" in text


def test_a_run_that_was_stopped_is_open_and_its_rows_are_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_stories(tmp_path, "a.parquet", 0, 10)
    run(job(tmp_path))
    write_stories(tmp_path, "b.parquet", 10, 30, n12=FAILS)
    with pytest.raises(Stopped):
        run(job(tmp_path, max_error_rate=0.5), Interrupted(14))
    text, found = told(tmp_path / "out", capsys)
    closed, opened = found["runs"]
    assert (closed["state"], opened["state"], opened["ended"]) == ("closed", "open", None)
    assert opened["rows"] == 20
    assert 0 < opened["published"] < 20
    assert opened["published"] + opened["missing"] == 20
    assert found["missing"] == opened["missing"]
    assert found["rows"] == 10 + opened["published"]
    assert opened["error_rows"] == found["failed"]
    assert found["success"] is None
    assert found["last_summary"]["run"] == "000001"
    assert f"run 000002 open, {opened['published']} of 20 rows published, {opened['missing']} missing" in text
    assert "_SUCCESS  no" in text
    run(job(tmp_path, max_error_rate=0.5))
    _, found = told(tmp_path / "out", capsys)
    assert (found["rows"], found["missing"], found["failed"]) == (30, 0, 1)


def test_rows_that_a_run_gave_up_are_missing_until_the_next_one_answers_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_stories(tmp_path, "a.parquet", 0, 10)
    write_stories(tmp_path, "b.parquet", 10, 20)
    with pytest.raises(Stopped):
        run(job(tmp_path), Interrupted(5))
    write_stories(tmp_path, "b.parquet", 10, 22)
    with pytest.raises(Stopped):  # after the first run was closed without them
        run(job(tmp_path), Interrupted(10))
    _, found = told(tmp_path / "out", capsys)
    assert [entry["state"] for entry in found["runs"]] == ["closed", "open"]
    assert found["runs"][0]["missing"] > 0
    assert found["missing"] == found["runs"][1]["missing"] > 0
    run(job(tmp_path))
    text, found = told(tmp_path / "out", capsys)
    assert (found["rows"], found["missing"]) == (22, 0)
    assert "given up" in text


def test_who_is_at_work_is_said_and_the_dead_are_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_stories(tmp_path, "a.parquet", 0, 4)
    run(job(tmp_path))
    with Claim(LocalStore(tmp_path / "out")):
        text, found = told(tmp_path / "out", capsys)
    assert (found["at_work"]["pid"], found["at_work"]["host"]) == (os.getpid(), socket.gethostname())
    assert 0 <= found["at_work"]["seconds_ago"] < 60
    assert f"at work   process {os.getpid()} on {socket.gethostname()}, heard of" in text
    silent = {"id": "x", "host": "elsewhere", "pid": 1, "heartbeat": time.time() - 3600}
    (tmp_path / "out" / CLAIM).write_text(json.dumps(silent))
    assert told(tmp_path / "out", capsys)[1]["at_work"] is None


def test_a_run_that_has_planned_nothing_yet_is_at_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Claim(LocalStore(tmp_path / "out")):
        text, found = told(tmp_path / "out", capsys)
    assert (found["runs"], found["rows"], found["at_work"]["pid"]) == ([], 0, os.getpid())
    assert "nothing planned yet" in text


@pytest.mark.parametrize("name", ["none", "empty", "file", "others"])
def test_what_is_no_output_ends_with_two_and_a_line(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "others").mkdir()
    (tmp_path / "others/part-000001-000000.parquet").write_bytes(b"PAR1")
    assert cli.main(["status", str(tmp_path / name), "--json"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("nightdesk: ")
    assert said.err.count("\n") == 1
    assert str(tmp_path / name) in said.err
    assert not (tmp_path / "none").exists()


def test_runs_that_were_started_over_are_only_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_stories(tmp_path, "a.parquet", 0, 10)
    run(job(tmp_path))
    run(job(tmp_path), fresh=True)
    text, found = told(tmp_path / "out", capsys)
    assert [entry["run"] for entry in found["runs"]] == ["000002"]
    assert (found["superseded_runs"], found["rows"]) == (1, 10)
    assert "and 1 earlier ones" in text


def test_many_small_parts_are_worth_a_hint_and_compaction_is_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_stories(tmp_path, "a.parquet", 0, 10, n3=FAILS)
    run(job(tmp_path, max_error_rate=0.5))
    monkeypatch.setattr(status, "MANY_SMALL", 3)
    assert "hint      3 parts are below 8.0 MiB: nightdesk compact joins them" in told(tmp_path / "out", capsys)[0]
    compact_output(str(tmp_path / "out"), 128)
    text, found = told(tmp_path / "out", capsys)
    assert (found["parts"]["count"], found["rows"], found["failed"], found["missing"]) == (1, 10, 1, 0)
    assert [entry["kind"] for entry in found["runs"]] == ["answers", "compaction"]
    assert (found["runs"][0]["published"], found["last_summary"]["run"]) == (10, "000001")
    assert "hint" not in text


@pytest.mark.parametrize("layout", ["parquet", "delta"])
def test_replaced_and_removed_rows_count_once(
    tmp_path: Path, layout: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = job(tmp_path, output__format=layout, max_error_rate=0.5)
    write_stories(tmp_path, "a.parquet", 0, 30, n20=FAILS)
    run(config)
    write_stories(tmp_path, "a.parquet", 1, 31, n5="other", n9=FAILS)
    run(config)
    _, found = told(tmp_path / "out", capsys)
    assert (found["format"], found["rows"], found["failed"], found["missing"]) == (layout, 30, 1, 0)
    (reason,) = found["reasons"]
    assert (reason["rows"], reason["example_id"]) == (1, "00009")


def test_what_an_open_run_of_a_delta_table_published_is_not_there_yet(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = job(tmp_path, output__format="delta")
    write_stories(tmp_path, "a.parquet", 0, 10)
    run(config)
    write_stories(tmp_path, "a.parquet", 0, 30, n5="other")
    with pytest.raises(Stopped):
        run(config, Interrupted(15))
    _, found = told(tmp_path / "out", capsys)
    assert found["runs"][1]["published"] > 0
    assert found["rows"] == 10


def test_what_a_run_gave_up_of_a_delta_table_still_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = job(tmp_path, output__format="delta")
    write_stories(tmp_path, "a.parquet", 0, 12)
    run(asked)
    write_stories(tmp_path, "a.parquet", 1, 12, n5="a correction")
    with pytest.raises(Stopped):
        run(asked, Interrupted(0), allow_deletions=True)
    write_stories(tmp_path, "a.parquet", 0, 12)

    def stopped(*args: Any) -> None:
        raise Stopped("between two runs")

    monkeypatch.setattr(jobs.run, "make_plan", stopped)
    with pytest.raises(Stopped, match="between"):
        run(asked)
    _, found = told(tmp_path / "out", capsys)
    assert found["runs"][-1]["state"] == "closed"
    assert found["rows"] == len(DeltaTable(str(tmp_path / "out")).to_pandas()) == 12


def test_partitions_samples_and_kept_columns_that_look_like_reasons(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in").mkdir()
    rows = [
        {"key": f"{n}", "body": FAILS if n == 3 else f"story {n}", "day": "mo" if n % 2 else None}
        | {"net_finish": "kept", "net_error": "kept"}
        for n in range(8)
    ]
    (tmp_path / "in/a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tasks = [
        {"name": "gist", "prompt": "Say: {body}", "max_new_tokens": 64, "n": 2, "temperature": 1.0},
        {"name": "topic", "prompt": "Say: topic of {body}", "max_new_tokens": 64},
    ]
    changes = {"input__id": "key", "input__keep": ["net_finish", "net_error"], "output__partition_by": ["day"]}
    run(job(tmp_path, **changes, tasks=tasks, max_error_rate=0.5))
    text, found = told(tmp_path / "out", capsys)
    assert (found["rows"], found["failed"], found["partition_by"]) == (8, 1, ["day"])
    assert [(entry["task"], entry["rows"], entry["example_id"]) for entry in found["reasons"]] == [
        ("gist", 1, "3"),
        ("topic", 1, "3"),
    ]
    assert "partitioned by day" in text


def test_reasons_beyond_the_first_ten_are_counted_in_text_and_listed_in_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.jsonl").write_text('{"doc_id": "a", "body": "", "title": "t"}\n{"body": "NOT-A-NUMBER"}\n{,\n')
    run(job(tmp_path, input__keep=["title"], max_error_rate=1.0))
    monkeypatch.setattr(status, "SHOWN_REASONS", 1)
    text, found = told(tmp_path / "out", capsys)
    assert len(found["reasons"]) == 3
    assert "and 2 more reasons" in text
    assert text.count(" × ") == 1


def test_parts_that_go_while_they_are_read_are_not_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_stories(tmp_path, "a.parquet", 0, 10)
    run(job(tmp_path))
    first = sorted((tmp_path / "out").glob("part-000001-*.parquet"))[0]
    listed = status._parts_read

    def then_gone(*args: Any) -> Any:
        found = listed(*args)
        first.unlink()
        return found

    monkeypatch.setattr(status, "_parts_read", then_gone)
    text, found = told(tmp_path / "out", capsys)
    assert (found["rows"], found["parts"]["unreadable"]) == (6, 1)
    assert "1 part replaced or removed meanwhile" in text


def test_nothing_is_written_and_nothing_removed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_stories(tmp_path, "a.parquet", 0, 10)
    with contextlib.suppress(Stopped):
        run(job(tmp_path), Interrupted(5))

    def state() -> dict[str, int]:
        return {str(path): path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}

    before = state()
    told(tmp_path / "out", capsys)
    assert state() == before


def test_an_output_on_s3(tmp_path: Path, s3: Any, capsys: pytest.CaptureFixture[str]) -> None:
    write_stories(tmp_path, "a.parquet", 0, 10, n3=FAILS)
    config = job(tmp_path, output__path=f"{s3.url}/out", max_error_rate=0.5)
    with pytest.raises(Stopped):
        run(config, Interrupted(6))
    _, found = told(f"{s3.url}/out", capsys)
    assert found["runs"][0]["state"] == "open"
    assert found["missing"] == 10 - found["rows"]
    run(config)
    _, found = told(f"{s3.url}/out", capsys)
    assert (found["output"], found["rows"], found["failed"]) == (f"{s3.url}/out", 10, 1)
    assert found["reasons"][0]["example_id"] == "00003"
    for nothing in (f"{s3.url}/nothing", f"s3://{s3.name}-none/out"):
        assert cli.main(["status", nothing]) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_an_output_is_read_by_its_listing_and_its_parts_once_each(tmp_path: Path) -> None:
    """What a status costs on remote storage."""
    write_stories(tmp_path, "a.parquet", 0, 40)
    run(job(tmp_path))

    class Counting(LocalStore):
        opened: list[str] = []  # noqa: RUF012

        def open(self, name: str) -> Any:
            self.opened.append(name)
            return super().open(name)

    store: Store = Counting(tmp_path / "out")
    status.status_of(store, "out")
    parts = [name for name in Counting.opened if name.endswith(".parquet")]
    assert len(parts) == len(set(parts)) == 10
