"""Nights: alone on the output, over in time, caught up with, and told of in one line."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from jobs import cli
from jobs.account import Account
from jobs.ending import failure_of
from jobs.nightly import run_night
from jobs.run import execute
from pipeline.config import JobConfig
from pipeline.deadline import Deadline
from pipeline.errors import Busy, ConfigError, NightdeskError, OutOfTime, OutputError
from pipeline.output import claim as claims
from pipeline.output.claim import CLAIM, SILENT_SECONDS, Claim
from pipeline.output.local_store import LocalStore
from pipeline.records import Completion, Request
from tests.stub_engine import (
    FAILS,
    StubEngine,
    answer_to,
    answers,
    expected,
    job,
    local,
    stub_models,
    write_stories,
)


def night(
    config: JobConfig,
    engine: StubEngine | None = None,
    seconds: float | None = None,
    deadline: Deadline | None = None,
    **options: Any,
) -> int:
    """A night of so many seconds, or up to a deadline, or without one."""
    deadline = deadline if seconds is None else Deadline(time.time() + seconds)

    def run(job: JobConfig, account: Account) -> int:
        return execute(
            job, deadline=deadline, alone=True, account=account, executor=local(engine), models=stub_models(), **options
        )

    return run_night("wire", lambda: config, run)


def line(capsys: pytest.CaptureFixture[str]) -> str:
    """The last one on standard output."""
    out = capsys.readouterr().out
    assert out.endswith("\n")
    return str(out.splitlines()[-1])


def hooked(folder: Path, success: str | None = None, failure: str | None = None, **rest: Any) -> JobConfig:
    return job(folder, hooks={"on_success": success, "on_failure": failure, **rest})


class Ticking(StubEngine):
    """An answer a tick."""

    ticks = 0

    def stream(self, requests: Iterable[Request | None]) -> Iterator[Completion]:
        for done in super().stream(requests):
            self.ticks += 1
            yield done


def story(number: int) -> str:
    return f"Say: story {number}"


# --- four nights


def test_nights_that_are_cut_short_or_missed_are_caught_up_with_and_nothing_is_done_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = job(tmp_path)
    write_stories(tmp_path, "1.parquet", 0, 40)
    first = StubEngine()
    assert night(config, first) == 0
    assert re.sub(r"; \d+ s;", "; 5 s;", line(capsys)) == (
        "nightdesk stub: run 000001 complete; 40 rows new, 0 replaced, 0 removed, 0 failed; 5 s; 0 rows left; "
        "next: nothing until there are new documents"
    )

    write_stories(tmp_path, "2.parquet", 40, 80)
    second = StubEngine(seconds=0.03)
    with pytest.raises(OutOfTime, match="same command continues"):
        night(config, second, seconds=0.8)
    done = answers(tmp_path)
    assert 40 < len(done) < 80
    assert len(done) % 4 == 0, "whole shards"
    said = line(capsys)
    assert said.startswith(f"nightdesk stub: run 000002 stopped; {len(done) - 40} rows new, 0 replaced")
    assert f"{80 - len(done)} rows left; stopped for the deadline, 20" in said
    assert said.endswith("next: the same command continues")

    write_stories(tmp_path, "3.parquet", 80, 100)  # the machine is off in the third night

    write_stories(tmp_path, "4.parquet", 100, 110)
    write_stories(tmp_path, "1.parquet", 0, 40, n5="a correction")
    fourth = StubEngine()
    assert night(config, fourth) == 0
    assert answers(tmp_path) == expected((0, 110)) | {"00005": answer_to("Say: a correction")}
    assert "run 000003 complete" in (said := line(capsys))
    assert f"{110 - len(done)} rows new, 1 replaced, 0 removed" in said
    open_rows = {story(n) for n in range(40, 80) if f"{n:05d}" not in done}
    assert sorted(fourth.prompts) == sorted([*open_rows, *map(story, range(80, 110)), "Say: a correction"])
    assert len(set(second.prompts)) == len(second.prompts)

    idle = StubEngine()
    assert night(config, idle) == 0
    assert idle.prompts == []
    assert "run 000003 complete; 0 rows new, 0 replaced, 0 removed, 0 failed" in line(capsys)


def test_a_shard_that_could_not_be_done_by_the_deadline_is_not_begun(tmp_path: Path) -> None:
    write_stories(tmp_path, "a.parquet", 0, 900)
    engine = Ticking()
    with pytest.raises(OutOfTime):
        night(job(tmp_path, output__rows_per_shard=100), engine, deadline=Deadline(670, lambda: engine.ticks))
    assert engine.ticks == 600, "at the end of the sixth shard, for which there was time"
    assert answers(tmp_path) == expected((0, 600))
    assert len(engine.prompts) == 600


def test_a_deadline_that_has_passed_begins_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_stories(tmp_path, "a.parquet", 0, 8)
    engine = StubEngine()
    with pytest.raises(OutOfTime):
        night(job(tmp_path), engine, seconds=-1)
    assert engine.prompts == []
    assert "; 8 rows left; " in line(capsys)
    with pytest.raises(OutOfTime):
        night(job(tmp_path), engine, seconds=-1)
    assert night(job(tmp_path), engine, seconds=60) == 0
    assert answers(tmp_path) == expected((0, 8))


def test_what_was_removed_and_what_failed_is_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = job(tmp_path, max_error_rate=0.05)
    write_stories(tmp_path, "a.parquet", 0, 30, n7=FAILS)
    assert night(config) == 0
    assert "30 rows new, 0 replaced, 0 removed, 1 failed" in line(capsys)
    write_stories(tmp_path, "a.parquet", 1, 30, n7=FAILS)
    assert night(config) == 0
    assert "0 rows new, 0 replaced, 1 removed, 0 failed" in line(capsys)


# --- the lock


@pytest.fixture
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "HEARTBEAT_SECONDS", 0.1)
    monkeypatch.setattr(claims, "WATCH_SECONDS", 0.05)


@pytest.mark.usefixtures("_soon")
def test_another_run_at_work_is_named_and_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_stories(tmp_path, "a.parquet", 0, 8)
    engine = StubEngine()
    with (
        Claim(LocalStore(tmp_path / "out")),
        pytest.raises(Busy, match=f"process {os.getpid()} on {socket.gethostname()} is at work") as busy,
    ):
        night(job(tmp_path), engine)
    assert busy.value.exit_code == 4
    assert engine.prompts == []
    assert not (tmp_path / "out/_nightdesk/runs").exists()
    assert "nightdesk stub: busy; 0 rows new" in (said := line(capsys))
    assert "rows left: unknown" in said
    assert said.endswith("next: nothing: the other run does the work")
    assert night(job(tmp_path), engine) == 0, "the lock went with its holder"


@pytest.mark.usefixtures("_soon")
def test_the_lock_of_one_that_died_elsewhere_is_taken_over_when_it_has_been_silent_long_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "SILENT_SECONDS", 1.0)
    store = LocalStore(tmp_path / "out")
    write_stories(tmp_path, "a.parquet", 0, 8)
    sign = {"id": "dead", "host": "elsewhere", "pid": 1, "heartbeat": time.time()}
    store.replace(CLAIM, json.dumps(sign).encode())
    started = time.monotonic()
    assert night(job(tmp_path)) == 0
    assert 0.9 < time.monotonic() - started < 5
    assert answers(tmp_path) == expected((0, 8))
    assert SILENT_SECONDS == 60


def test_the_lock_of_one_that_died_here_is_taken_over_at_once(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "out")
    write_stories(tmp_path, "a.parquet", 0, 8)
    gone = next(pid for pid in range(99_999, 1, -1) if not Path(f"/proc/{pid}").exists())
    sign = {"id": "dead", "host": socket.gethostname(), "pid": gone, "heartbeat": time.time()}
    store.replace(CLAIM, json.dumps(sign).encode())
    started = time.monotonic()
    assert night(job(tmp_path)) == 0
    assert time.monotonic() - started < 5


# --- hooks


def noted(folder: Path, name: str) -> str:
    """A command that notes its input and an environment variable in a file."""
    return f'cat > {folder}/{name}.json; echo "$NIGHTDESK_OUTCOME $NIGHTDESK_LEFT" > {folder}/{name}.txt; echo loud'


def test_hooks_get_the_summary_and_say_nothing_on_standard_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_stories(tmp_path, "a.parquet", 0, 8)
    config = hooked(tmp_path, noted(tmp_path, "good"), noted(tmp_path, "bad"))
    assert night(config) == 0
    said = line(capsys)
    told = json.loads((tmp_path / "good.json").read_text())
    assert (told["job"], told["run"], told["outcome"], told["exit_code"]) == ("stub", "000001", "complete", 0)
    assert (told["new"], told["left"], told["text"], told["output"]) == (8, 0, said, str(tmp_path / "out"))
    assert (tmp_path / "good.txt").read_text() == "complete 0\n"
    assert not (tmp_path / "bad.json").exists()


@pytest.mark.parametrize(
    ("changes", "code", "outcome"),
    [
        ({"bodies": {"n1": FAILS}}, 3, "too many errors"),
        ({"seconds": -1.0}, 4, "stopped"),
        ({"fresh": True, "claimed": True}, 4, "busy"),
        ({"other": True}, 2, "refused"),
        ({"bug": True}, 1, "internal error"),
        ({"audit": True}, 5, "audit failed"),
    ],
)
@pytest.mark.usefixtures("_soon")
def test_the_hook_for_failures_is_told_of_every_other_end(
    tmp_path: Path, changes: dict[str, Any], code: int, outcome: str
) -> None:
    write_stories(tmp_path, "a.parquet", 0, 8, **changes.get("bodies", {}))
    config = hooked(tmp_path, noted(tmp_path, "good"), noted(tmp_path, "bad"))

    def run(job: JobConfig, account: Account) -> int:
        if changes.get("bug"):
            raise RuntimeError("never")
        if changes.get("other"):
            raise OutputError("output.path: not yours")
        if changes.get("audit"):
            return 5
        deadline = Deadline(time.time() + changes["seconds"]) if "seconds" in changes else None
        return execute(
            job, alone=True, account=account, deadline=deadline, executor=local(), models=stub_models()
        )

    def ended() -> int:
        try:
            return run_night("wire", lambda: config, run)
        except (NightdeskError, RuntimeError) as error:
            return failure_of(error).code

    if changes.get("claimed"):
        with Claim(LocalStore(tmp_path / "out")):
            assert ended() == code
    else:
        assert ended() == code
    told = json.loads((tmp_path / "bad.json").read_text())
    assert (told["outcome"], told["exit_code"]) == (outcome, code)
    assert not (tmp_path / "good.json").exists()


def test_a_hook_that_fails_or_hangs_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_stories(tmp_path, "a.parquet", 0, 8)
    assert night(hooked(tmp_path, "echo no such pager; exit 7")) == 0
    started = time.monotonic()
    assert night(hooked(tmp_path, f"sleep 60 & sleep 60; touch {tmp_path}/late", timeout=0.3)) == 0
    assert time.monotonic() - started < 5
    assert night(hooked(tmp_path, "exec 0<&-; exit 0")) == 0, "its input need not be read"
    assert caplog.messages == [
        "hooks.on_success: exit code 7: no such pager",
        "hooks.on_success: ended after 0.3 s (hooks.timeout)",
    ]


class Posted(BaseHTTPRequestHandler):
    bodies: ClassVar[list[Any]]
    paths: ClassVar[list[str]]
    status = 200
    wait = 0.0

    def do_POST(self) -> None:
        self.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.paths.append(self.path)
        time.sleep(self.wait)
        self.send_response(self.status)
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        return None


@pytest.fixture
def hook_server() -> Iterator[tuple[type[Posted], str]]:
    class Handler(Posted):
        bodies: ClassVar[list[Any]] = []
        paths: ClassVar[list[str]] = []

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield Handler, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_webhook_gets_the_summary_and_its_address_is_never_told(
    tmp_path: Path,
    hook_server: tuple[type[Posted], str],
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    handler, address = hook_server
    monkeypatch.setenv("PAGER", f"{address}/T0/s3cr3t")
    write_stories(tmp_path, "a.parquet", 0, 8)
    assert night(hooked(tmp_path, webhook="$PAGER?channel=s3cr3t")) == 0
    assert handler.bodies[0]["text"].startswith("nightdesk stub: run 000001 complete; 8 rows new")
    assert handler.paths == ["/T0/s3cr3t?channel=s3cr3t"]
    assert caplog.messages == []
    handler.status = 500
    assert night(hooked(tmp_path, webhook="$PAGER")) == 0
    handler.wait = 1.0
    started = time.monotonic()
    assert night(hooked(tmp_path, webhook="$PAGER", timeout=0.2)) == 0
    assert time.monotonic() - started < 0.9
    for wrong in ("http://127.0.0.1:1/s3cr3t", "s3cr3t", "http://127.0.0.1:s3cr3t/", "http://a b/s3cr3t", "$NONE"):
        assert night(hooked(tmp_path, webhook=wrong)) == 0
    assert len(caplog.messages) == 7
    assert caplog.messages[0] == "hooks.webhook: 127.0.0.1 answers 500"
    told = capsys.readouterr()
    assert "s3cr3t" not in caplog.text + told.out + told.err


# --- the command


def test_the_command_ends_with_the_line_whatever_goes_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "broken.yaml"
    file.write_text("name: x\n")
    assert cli.main(["nightly", str(file)]) == 2
    told = capsys.readouterr()
    assert told.out.startswith("nightdesk broken: refused; 0 rows new")
    assert told.out.count("\n") == 1
    assert told.err.startswith("nightdesk: ")
    assert told.err.count("\n") == 1


def test_an_unreadable_time_is_refused_and_told_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(
        "name: small\ninput: {path: in, text: body}\noutput: {path: out}\ntarget: {model: org/model}\n"
        f"tasks: [{{name: a, prompt: '{{body}}'}}]\nhooks: {{on_failure: 'touch {tmp_path}/told'}}\n"
    )
    assert cli.main(["nightly", str(file), "--until", "sixish"]) == 2
    told = capsys.readouterr()
    assert "nightdesk small: refused; " in told.out
    assert "--until: 'sixish' is no time" in told.err
    assert (tmp_path / "told").exists()


def test_strict_hooks(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"hooks\.on_sucess.*did you mean on_success"):
        job(tmp_path, hooks={"on_sucess": "x"})


def test_the_account_is_all_zero_to_begin_with() -> None:
    assert dataclasses.asdict(Account()) == {
        "run": None, "new": 0, "replaced": 0, "removed": 0, "failed": 0, "left": None,
    }  # fmt: skip
