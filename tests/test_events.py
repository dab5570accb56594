"""Events: a line each, as JSON or text, with what is known around them and without secrets."""

from __future__ import annotations

import ast
import io
import json
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from jobs import cli
from jobs.progress import ProgressLine
from pipeline import events
from pipeline.stats import Progress

ROOT = Path(__file__).resolve().parents[1]
JOB = """
name: wire
input: {path: in, text: body}
output: {path: out}
target: {model: nowhere}
tasks: [{name: summary, prompt: "Say: {body}"}]
"""


@pytest.fixture
def as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(events.MODE, "json")


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


def test_an_event_is_one_line_with_all_that_is_known(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(events.MODE, "json")
    with events.written(), events.about(run="000007", job="wire"), events.about(replica="2"):
        events.tell("shard_published", "shard 3 is\npublished", shard=3, rows=20)
    (line,) = lines(capsys)
    assert line.pop("time").endswith("+00:00")
    assert line == {
        "level": "info", "event": "shard_published", "message": "shard 3 is\npublished",
        "run": "000007", "job": "wire", "replica": "2", "shard": 3, "rows": 20,
    }  # fmt: skip


def test_what_was_known_inside_is_not_known_outside(capsys: pytest.CaptureFixture[str], as_json: None) -> None:
    with events.written():
        with events.about(run="000001"), pytest.raises(KeyError):
            raise KeyError
        events.tell("audit_started", "x")
    assert "run" not in lines(capsys)[0]


def test_warnings_of_modules_are_events_with_the_name_that_is_around(
    capsys: pytest.CaptureFixture[str], as_json: None
) -> None:
    with events.written():
        log = logging.getLogger("actors.crew")
        with events.about("replica_lost", replica="1"):
            log.warning("%s is gone", "replica 1")
        log.warning("skipped", extra={"event": "input_skipped"})
        logging.getLogger("botocore").warning("something")
    first, second, third = lines(capsys)
    assert (first["event"], first["message"], first["replica"]) == ("replica_lost", "replica 1 is gone", "1")
    assert (second["event"], second["level"]) == ("input_skipped", "warning")
    assert (third["event"], third["logger"]) == (events.OTHER, "botocore")


def test_whatever_a_library_writes_there_is_a_line_of_json_too(
    capsys: pytest.CaptureFixture[str], as_json: None
) -> None:
    with events.written():
        print("a bar\rthat moves", file=sys.stderr)
        sys.stderr.write("no end")
        thread = threading.Thread(target=print, args=("of a thread",), kwargs={"file": sys.stderr})
        thread.start()
        thread.join()
        sys.stderr.write(" at once\n")
    assert [line["message"] for line in lines(capsys)] == ["a bar", "that moves", "of a thread", "no end at once"]


def test_standard_error_is_itself_again_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    before, handlers = sys.stderr, list(logging.getLogger().handlers)
    monkeypatch.setenv(events.MODE, "json")
    with events.written():
        assert sys.stderr is not before
        assert events.are_json()
    assert sys.stderr is before
    assert logging.getLogger().handlers == handlers
    assert not events.are_json()


def test_json_is_what_there_is_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.delenv(events.MODE)
    for stream, expected in ((io.StringIO(), True), (Terminal(), False)):
        monkeypatch.setattr(sys, "stderr", stream)
        with events.written():
            assert events.are_json() is expected
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv(events.MODE, "json")
    with events.written():
        assert events.are_json()


def test_secrets_are_in_no_field(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush-hush-hush")
    for mode in ("json", "text"):
        monkeypatch.setenv(events.MODE, mode)
        with events.written():
            fields = {"where": ["s3://me:hush-hush-hush@host/x"], "more": {"a": "hush-hush-hush"}}
            events.tell("audit_started", "with hush-hush-hush", **fields)
            if mode == "json":
                print("hush-hush-hush", file=sys.stderr)
            try:
                raise ValueError("hush-hush-hush")
            except ValueError:
                logging.getLogger("pipeline").exception("failed")
    written = capsys.readouterr().err
    assert "hush" not in written
    assert written.count('"traceback"') == 1  # as text, a traceback is for --debug


def test_as_text_an_event_is_its_message(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(events.MODE, "text")
    with events.written():
        events.tell("run_planned", "run 000001: 4 rows new", run="000001")
        events.tell("shard_published", "of no interest to people", shard=1)
        logging.getLogger("actors.seats").info("nor this")
        logging.getLogger("actors.seats").warning("but this")
    assert capsys.readouterr().err == "run 000001: 4 rows new\nbut this\n"


def test_progress_is_an_event(capsys: pytest.CaptureFixture[str], as_json: None) -> None:
    with events.written(), ProgressLine(interval=0.0) as line:
        line.report(Progress(rows_total=5))
        line.report(Progress(rows_done=2, error_rows=1, new_tokens=30, steps=10, drafted=20, accepted=15))
    first, last = lines(capsys)
    assert first["rows_total"] == 5
    assert (last["event"], last["rows_done"], last["error_rows"], last["new_tokens"]) == ("progress", 2, 1, 30)
    assert last["accepted_per_step"] == 1.5
    assert last["message"].startswith("2/5 rows")


@pytest.mark.parametrize("mode", ["json", "text"])
def test_the_last_line_of_a_failed_command_says_why(tmp_path: Path, mode: str) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    command = [sys.executable, "-m", "jobs", "run", str(tmp_path / "job.yaml"), "--set", "tasks.0.promt=x"]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {events.MODE: mode}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    if mode == "text":
        assert last.startswith("nightdesk: --set: tasks.0.promt: unknown key")
        return
    parsed = [json.loads(line) for line in done.stderr.splitlines()]
    assert (parsed[-1]["event"], parsed[-1]["level"], parsed[-1]["exit_code"]) == ("failed", "error", 2)
    assert parsed[-1]["message"].startswith("--set: tasks.0.promt: unknown key")


def test_a_bug_has_its_traceback_in_the_same_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(events.MODE, "json")
    monkeypatch.setenv("NIGHTDESK_DEBUG", "1")
    monkeypatch.setattr("jobs.cli.load_config", lambda *_: 1 / 0)
    assert cli.main(["run", str(tmp_path)]) == 1
    (line,) = lines(capsys)
    assert "ZeroDivisionError" in line["traceback"]
    assert line["message"] == "internal error: ZeroDivisionError: division by zero"


def test_a_reader_who_is_gone_ends_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setenv(events.MODE, "json")
    monkeypatch.setattr(sys, "stderr", Gone())
    with events.written():
        events.tell("audit_started", "x")


def told_events() -> set[str]:
    """The names in the code: first arguments of tell() and about(), and `extra={"event": …}`."""
    names: set[str] = set()
    for folder in ("pipeline", "actors", "jobs"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
                    called = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
                    if called in ("tell", "about") and node.args and isinstance(node.args[0], ast.Constant):
                        names.add(str(node.args[0].value))
                if isinstance(node, ast.Dict):
                    for key, value in zip(node.keys, node.values, strict=True):
                        if isinstance(key, ast.Constant) and key.value == "event" and isinstance(value, ast.Constant):
                            names.add(str(value.value))
    return names


def test_every_kind_of_event_is_told_somewhere_and_no_other_is() -> None:
    assert told_events() | {events.OTHER} == set(events.BY_NAME)
