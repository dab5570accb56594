"""The line for cron: its fields, what it prints, and that two nights do not run at once."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.infra.manifests import INFRA


def crontab() -> tuple[dict[str, str], list[str], str]:
    """(variables, the five fields, the command) of the table, which has one line."""
    variables: dict[str, str] = {}
    jobs = []
    for line in (INFRA / "crontab").read_text().splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        if re.match(r"[A-Z_]+\s*=", line):
            name, _, value = line.partition("=")
            variables[name.strip()] = value.strip()
        else:
            *fields, command = line.split(maxsplit=5)
            jobs.append((fields, command))
    ((fields, command),) = jobs
    return variables, fields, command


def test_cron_understands_the_line() -> None:
    variables, fields, command = crontab()
    ranges = [(0, 59), (0, 23), (1, 31), (1, 12), (0, 7)]
    for field, (low, high) in zip(fields, ranges, strict=True):
        assert field == "*" or low <= int(field) <= high
    assert "%" not in command  # a line's end, for cron
    assert (variables["SHELL"], variables["MAILTO"]) == ("/bin/bash", "REPLACE_MAIL")


@pytest.mark.parametrize(("code", "said"), [(0, []), (4, ["nightdesk: exit code 4", "summary", "why"])])
def test_cron_mails_why_a_night_did_not_end_well(tmp_path: Path, code: int, said: list[str]) -> None:
    assert night(tmp_path, f"echo progress; echo summary; echo why >&2; exit {code}") == said


def test_two_nights_do_not_run_at_once(tmp_path: Path) -> None:
    if shutil.which("flock") is None:
        pytest.skip("flock is not installed")
    night(tmp_path, "true")
    holder = subprocess.Popen(["flock", ".nightly.lock", "sh", "-c", "echo held; read x"], cwd=tmp_path, text=True,
                              stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip
    assert holder.stdin is not None
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    assert night(tmp_path, "echo began >> began") == ["nightdesk: exit code 75"]
    holder.communicate("\n", timeout=10)
    assert not (tmp_path / "began").exists()


def night(folder: Path, script: str) -> list[str]:
    """What cron's line prints, with `script` for the program."""
    if shutil.which("flock") is None:
        pytest.skip("flock is not installed")
    program = folder / ".venv" / "bin" / "python"
    program.parent.mkdir(parents=True, exist_ok=True)
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    command = crontab()[2].replace("cd /opt/nightdesk", f"cd {folder}")
    done = subprocess.run(["/bin/bash", "-c", command], capture_output=True, text=True, timeout=20)
    return (done.stdout + done.stderr).splitlines()
