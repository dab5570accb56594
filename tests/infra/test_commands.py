"""Every file calls commands that exist, has placeholders of one form, and holds no secret."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
import typer.main
from typer.exceptions import TyperException

from jobs.cli import app
from tests.infra.airflow_stub import Recorder, load_dag
from tests.infra.manifests import CONFIGS, INFRA, PLACEHOLDER, ROOT, text_files

COMMAND = re.compile(r"(?:^|[\s/`])(?:python3?|nightdesk) -m jobs ((?:[^`;|>&#\n\")]|\"[^\"]*\")+)")


def calls() -> Iterator[tuple[str, list[str]]]:
    """Where a command of nightdesk is called, and its arguments."""
    sources = [*text_files(), *CONFIGS.glob("*.yaml")]
    for path in sources:
        for found in COMMAND.finditer(path.read_text()):
            yield f"{path.relative_to(ROOT)}", shlex.split(re.split(r"\s{3,}", found[1])[0])
    dag = load_dag(Recorder())
    for command in (dag.submit_command("night-1", datetime(2026, 1, 1, tzinfo=UTC)), dag.cancel_command("night-1")):
        yield "infra/airflow_dag.py", command[3:]


CALLS = [pytest.param(words, id=f"{where}: {' '.join(words)}") for where, words in calls()]


def known_commands() -> dict[str, Any]:
    group: Any = typer.main.get_command(app)
    return dict(group.commands)


def test_there_are_calls_in_all_places() -> None:
    where = {place for place, _ in calls()}
    assert {"infra/crontab", "infra/systemd/nightdesk.service", "infra/kuberay/rayjob.yaml", "infra/aws-cluster.yaml",
            "infra/README.md", "infra/airflow_dag.py", "configs/nightly-s3.yaml"} <= where  # fmt: skip


@pytest.mark.parametrize("words", CALLS)
def test_every_command_is_one_that_the_command_line_takes(words: list[str]) -> None:
    command = known_commands().get(words[0])
    assert command is not None, words
    try:
        command.make_context("nightdesk", list(words[1:]), resilient_parsing=False).close()
    except TyperException as error:
        pytest.fail(f"{' '.join(words)}: {error.format_message()}")


@pytest.mark.parametrize("words", CALLS)
def test_every_job_file_that_is_named_is_there(words: list[str]) -> None:
    for word in words:
        if word.startswith("configs/"):
            assert (ROOT / word).is_file()


def test_placeholders_have_one_form_and_the_readme_explains_each() -> None:
    readme = (INFRA / "README.md").read_text()
    for path in [*text_files(), *CONFIGS.glob("*.yaml")]:
        text = path.read_text()
        assert not re.search(r"<[A-Z_-]{3,}>|\bYOUR[_-]|\bCHANGE_?ME\b|\bTODO\b|\bexample\.(com|org)\b", text), path
        for name in set(PLACEHOLDER.findall(text)):
            assert f"| `{name}` |" in readme, (path, name)


def test_no_file_holds_a_secret() -> None:
    for path in text_files():
        text = path.read_text()
        assert not re.search(r"AKIA[0-9A-Z]{12}|aws_secret|hf_[A-Za-z0-9]{20}|password\s*[:=]\s*\S", text, re.I), path
