"""The Airflow DAG, with a stand-in for Airflow: what it asks for, and what it makes of exit codes."""

from __future__ import annotations

import re
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.deadline import parse_deadline
from tests.infra.airflow_stub import Recorder, load_dag
from tests.infra.manifests import INFRA


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def module(recorder: Recorder, tmp_path: Path) -> Any:
    loaded = load_dag(recorder)
    loaded.FOLDER = str(tmp_path)
    return loaded


def begun(ago: timedelta) -> Any:
    """What Airflow knows of a DAG run that began so long ago."""
    return SimpleNamespace(start_date=datetime.now(UTC) - ago)


def program(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_the_dag_imports_nothing_but_airflow() -> None:
    text = (INFRA / "airflow_dag.py").read_text()
    imported = set(re.findall(r"^(?:from|import) (\w+)", text, re.MULTILINE))
    assert imported - {"airflow"} <= set(sys.stdlib_module_names)


def test_one_night_at_a_time_and_an_end_to_each(module: Any, recorder: Recorder) -> None:
    assert (recorder.dag["max_active_runs"], recorder.dag["catchup"]) == (1, False)
    assert module.NIGHT < recorder.dag["dagrun_timeout"] < timedelta(days=1)
    assert recorder.task["execution_timeout"] > module.NIGHT
    assert recorder.task["retries"] > 0


@pytest.mark.parametrize(("code", "retried"), [(0, None), (4, True), (1, False), (2, False), (3, False), (5, False)])
def test_only_a_stopped_run_is_tried_again(
    module: Any, recorder: Recorder, monkeypatch: pytest.MonkeyPatch, code: int, retried: bool | None
) -> None:
    monkeypatch.setattr(module, "submit_command", lambda *_: program(f"raise SystemExit({code})"))
    assert recorder.run is not None
    if retried is None:
        recorder.run(dag_run=begun(timedelta(0)))
        return
    with pytest.raises(module.AirflowException) as caught:
        recorder.run(dag_run=begun(timedelta(0)))
    assert isinstance(caught.value, module.AirflowFailException) is not retried


def test_all_attempts_end_at_one_moment(module: Any, recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[datetime] = []
    monkeypatch.setattr(module, "submit_command", lambda _, until: ends.append(until) or program("pass"))
    run = begun(timedelta(hours=3))
    assert recorder.run is not None
    for _ in range(2):
        recorder.run(dag_run=run)
    assert ends == [run.start_date + module.NIGHT] * 2


def test_a_night_that_is_over_is_not_begun(module: Any, recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "submit_command", lambda *_: pytest.fail("submitted"))
    assert recorder.run is not None
    with pytest.raises(module.AirflowFailException, match="the night is over"):
        recorder.run(dag_run=begun(module.NIGHT))


def test_the_deadline_is_one_that_the_command_line_reads(module: Any) -> None:
    until = datetime(2026, 5, 17, 5, 0, 7, tzinfo=UTC)
    command = module.submit_command("x", until)
    moment = parse_deadline(command[command.index("--until") + 1])
    assert moment.at == until.replace(second=0).timestamp()


def test_a_task_that_airflow_ends_cancels_its_job(
    module: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started: list[Any] = []

    class Interrupted(subprocess.Popen):  # type: ignore[type-arg]
        def wait(self, timeout: float | None = None) -> int:
            if not started:
                started.append(self)
                raise TimeoutError("the task took too long")
            return super().wait(timeout)

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    with pytest.raises(TimeoutError):
        module.exit_code_of(program("import time; time.sleep(60)"), program("open('cancelled', 'w')"))
    assert started[0].returncode == -9
    assert (tmp_path / "cancelled").exists()


def test_a_job_that_has_ended_is_not_cancelled(module: Any, tmp_path: Path) -> None:
    assert module.exit_code_of(program("raise SystemExit(3)"), program("open('cancelled', 'w')")) == 3
    assert not (tmp_path / "cancelled").exists()
