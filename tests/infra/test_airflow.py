"""The Airflow DAG, with a stand-in for Airflow: what it asks for, and what it makes of exit codes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.infra.airflow_stub import Recorder, load_dag
from tests.infra.manifests import INFRA


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


def test_the_dag_imports_nothing_but_airflow(recorder: Recorder) -> None:
    text = (INFRA / "airflow_dag.py").read_text()
    imported = set(re.findall(r"^(?:from|import) (\w+)", text, re.M))
    assert imported - {"airflow"} <= set(sys.stdlib_module_names)


def test_one_night_at_a_time_and_an_end_to_each(recorder: Recorder) -> None:
    load_dag(recorder)
    assert (recorder.dag["max_active_runs"], recorder.dag["catchup"]) == (1, False)
    assert recorder.dag["dagrun_timeout"].total_seconds() < 86400
    assert recorder.task["execution_timeout"]
    assert recorder.task["retries"] > 0


@pytest.mark.parametrize(("code", "retried"), [(0, None), (4, True), (1, False), (2, False), (3, False), (5, False)])
def test_only_a_stopped_run_is_tried_again(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: int, retried: bool | None
) -> None:
    module = load_dag(recorder)
    module.COMMAND[:] = [sys.executable, "-c", f"raise SystemExit({code})"]
    module.FOLDER = str(tmp_path)
    assert recorder.run is not None
    if retried is None:
        recorder.run()
        return
    with pytest.raises(module.AirflowException) as caught:
        recorder.run()
    assert isinstance(caught.value, module.AirflowFailException) is not retried


def test_a_task_that_airflow_ends_ends_the_command(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    module = load_dag(recorder)
    module.FOLDER = str(tmp_path)
    started: list[subprocess.Popen[bytes]] = []

    class Interrupted(subprocess.Popen):  # type: ignore[type-arg]
        def wait(self, timeout: float | None = None) -> int:
            if not started:
                started.append(self)
                raise TimeoutError("the task took too long")
            return super().wait(timeout)

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    with pytest.raises(TimeoutError):
        module.exit_code_of([sys.executable, "-c", "import time; time.sleep(60)"])
    assert started[0].poll() == -15
