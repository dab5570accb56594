"""The command line: what each failure ends with, in one line; quick commands stay quick."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jobs import cli
from pipeline.config import JobConfig, json_schema
from pipeline.errors import ConfigError, NightdeskError, OutputError, Stopped, StoreError

ROOT = Path(__file__).resolve().parents[2]
JOB = """
name: small
input: {path: stories, text: body}
output: {path: out}
target: {model: org/model}
tasks:
  - {name: summary, prompt: "{body}"}
"""


@pytest.fixture
def job(tmp_path: Path) -> str:
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    return str(path)


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NIGHTDESK_DEBUG", "0")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def run_calls(monkeypatch: pytest.MonkeyPatch, execute: Callable[..., int]) -> None:
    """Put `execute` in the place of what `run` calls."""
    module = types.ModuleType("jobs.run")
    module.execute = execute  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "jobs.run", module)


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("nightdesk: ")
    return captured.err.removeprefix("nightdesk: ").strip()


@pytest.mark.parametrize("code", [0, 3])
def test_run_ends_with_what_the_run_says(
    monkeypatch: pytest.MonkeyPatch, job: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[Any] = []

    def execute(config: JobConfig, **options: Any) -> int:
        seen.append((config, options))
        return code

    run_calls(monkeypatch, execute)
    assert cli.main(["run", job, "--set", "seed=3", "--set", "tasks.0.top_k=2", "--limit", "7", "--fresh"]) == code
    config, options = seen[0]
    usual = {"limit": None, "fresh": False, "reanswer": False, "retry_failed": False, "allow_deletions": False}
    usual |= {"deadline": None}
    assert (config.seed, config.tasks[0].top_k, options) == (3, 2, usual | {"limit": 7, "fresh": True})
    assert cli.main(["run", job]) == code
    assert seen[1][1] == usual
    assert cli.main(["run", job, "--reanswer", "--retry-failed", "--allow-deletions"]) == code
    assert seen[2][1] == usual | {"reanswer": True, "retry_failed": True, "allow_deletions": True}
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["no-such-command"], "No such command 'no-such-command'"),
        (["bench", "x.yaml"], "No such command"),
        ([], "Missing command"),
        (["run"], "Missing argument 'CONFIG'"),
        (["run", "x.yaml", "y.yaml"], "unexpected extra argument"),
        (["run", "x.yaml", "--reanswer", "--fresh"], "--reanswer"),
        (["compact", "out", "--target", "0"], "'--target'"),
        (["run", "x.yaml", "--limit", "0"], "'--limit'"),
        (["run", "x.yaml", "--limit", "ten"], "'--limit'"),
        (["run", "x.yaml", "--set"], "--set"),
        (["schema", "--json"], "No such option"),
        (["run", "no-such.yaml"], "no-such.yaml: cannot read the job file"),
        (["check", "no-such.yaml"], "no-such.yaml: cannot read the job file"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_exit_code_2(
    args: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(args) == 2
    assert expected in one_line(capsys)


def test_a_wrong_job_file_is_one_line_and_exit_code_2(job: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", job, "--set", "decoding.draft_tokns=4"]) == 2
    assert one_line(capsys) == "--set: decoding.draft_tokns: unknown key; did you mean draft_tokens?"


class Wrapped(Exception):
    """As Ray wraps an error of a worker: the cause is an attribute, the text a trace."""

    def __init__(self, cause: Exception) -> None:
        self.cause = cause
        super().__init__("ray::Worker.run() (pid=1)\n  File …\nOutputError: inside")


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ConfigError("a: b"), 2, "a: b"),
        (OutputError("holds\n  something else"), 2, "holds something else"),
        (StoreError("disk full"), 4, "disk full"),
        (Stopped("at its deadline"), 4, "at its deadline"),
        (NightdeskError("odd"), 1, "odd"),
        (Wrapped(OutputError("inside")), 2, "inside"),
        (KeyboardInterrupt(), 4, "stopped; the same command continues where this one ended"),
    ],
)
def test_named_failures_are_one_line_with_their_exit_code(
    monkeypatch: pytest.MonkeyPatch,
    job: str,
    error: BaseException,
    code: int,
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def execute(config: JobConfig, **options: Any) -> int:
        raise error

    run_calls(monkeypatch, execute)
    assert cli.main(["run", job]) == code
    assert one_line(capsys) == message


@pytest.mark.parametrize("error", [KeyError("x"), EOFError("cut"), BrokenPipeError(32, "pipe"), Wrapped(ValueError())])
def test_a_bug_is_one_line_and_its_traceback_is_in_a_file(
    monkeypatch: pytest.MonkeyPatch, job: str, error: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    def execute(config: JobConfig, **options: Any) -> int:
        raise error

    run_calls(monkeypatch, execute)
    assert cli.main(["run", job]) == 1
    line = one_line(capsys)
    assert line.startswith(f"internal error: {type(error).__name__}")
    log = line.rpartition("traceback in ")[2].rstrip(")")
    assert "in execute" in Path(log).read_text()


@pytest.mark.parametrize("by_option", [True, False])
def test_debug_shows_the_traceback(
    monkeypatch: pytest.MonkeyPatch, job: str, by_option: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    def execute(config: JobConfig, **options: Any) -> int:
        raise KeyError("x")

    run_calls(monkeypatch, execute)
    if not by_option:
        monkeypatch.setenv("NIGHTDESK_DEBUG", "1")
    assert cli.main([*(["--debug"] if by_option else []), "run", job]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("Traceback")
    assert lines[-1] == "nightdesk: internal error: KeyError: 'x'"


def test_a_terminated_run_ends_as_resumable(monkeypatch: pytest.MonkeyPatch, job: str) -> None:
    def execute(config: JobConfig, **options: Any) -> int:
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()
        return 0

    before = signal.getsignal(signal.SIGTERM)
    run_calls(monkeypatch, execute)
    assert cli.main(["run", job]) == 4
    assert signal.getsignal(signal.SIGTERM) is before


def test_help_lists_the_commands_that_are_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(command in text for command in ("run", "check", "schema"))


def test_schema_prints_the_schema_of_the_job_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out) == json_schema()


def test_the_module_is_a_command_and_schema_loads_neither_torch_nor_ray() -> None:
    code = (
        "import sys, jobs.cli; assert jobs.cli.main(['schema']) == 0;"
        "print(sorted({'torch', 'ray', 'transformers', 'pyarrow'} & set(sys.modules)), file=sys.stderr)"
    )
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert out.stderr.strip() == "[]"
    out = subprocess.run([sys.executable, "-m", "jobs", "nope"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (out.returncode, out.stdout) == (2, "")
    assert out.stderr.startswith("nightdesk: No such command")


@pytest.mark.parametrize("debug", ["0", "1"])
def test_no_secret_is_in_a_traceback(
    monkeypatch: pytest.MonkeyPatch, job: str, capsys: pytest.CaptureFixture[str], debug: str
) -> None:
    def execute(config: JobConfig, **options: Any) -> int:
        cause = OSError("AKIAIOSFODNN7EXAMPLE")
        raise RuntimeError("signed with the-operators-secret: X-Amz-Signature=f00ba4") from cause

    monkeypatch.setenv("NIGHTDESK_DEBUG", debug)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "the-operators-secret")
    run_calls(monkeypatch, execute)
    assert cli.main(["run", job]) == 1
    told = capsys.readouterr().err
    if debug == "0":
        told += Path(told.rpartition("traceback in ")[2].strip().rstrip(")")).read_text()
    assert "RuntimeError: signed with" in told
    for secret in ("the-operators-secret", "f00ba4", "AKIAIOSFODNN7EXAMPLE"):
        assert secret not in told


def test_an_interpreter_without_the_dependencies_is_named() -> None:
    command = [sys.executable, "-S", "-m", "jobs", "run", "x.yaml"]  # without site-packages
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith(f"nightdesk: {sys.executable} has no package ")
    assert "submit --python" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("line", "help"),
    [
        (["run", "a.yaml", "--lmit", "3"], "python -m jobs run --help"),
        (["check"], "python -m jobs check --help"),
        (["rnu"], "python -m jobs --help"),
    ],
)
def test_a_wrong_command_line_points_at_the_help_of_its_command(
    line: list[str], help: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(line) == 2
    assert f"(see {help})" in capsys.readouterr().err
