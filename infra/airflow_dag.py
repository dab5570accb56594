"""nightdesk as an Airflow DAG: one task that submits the night's run to a Ray cluster and follows it.

Copy it into the DAGs folder (Airflow 2.9 or newer, or 3; Python 3.11). It imports Airflow only: nightdesk has a folder
and an environment of its own on the worker, and is called as a command.
"""

from __future__ import annotations

import os
import subprocess
import uuid
from datetime import UTC, datetime, timedelta
from typing import Any

from airflow.decorators import dag, task
from airflow.exceptions import AirflowException, AirflowFailException

FOLDER = "/opt/nightdesk"  # the repository on the worker
CONFIG = "configs/nightly-s3.yaml"
ADDRESS = "http://REPLACE_RAY_HEAD:8265"  # RAY_AUTH_TOKEN comes from the worker's environment, never from this file

STOPPED = 4  # resumable: the same command continues
NIGHT = timedelta(hours=8)  # from the DAG run's start, for all attempts together
MARGIN = timedelta(minutes=30)  # behind that, for a run that does not end by itself
CANCEL_SECONDS = 150  # that a cancelled job has to end


def submit_command(job_id: str, until: datetime) -> list[str]:
    moment = until.isoformat(timespec="minutes")
    submit = [f"{FOLDER}/.venv/bin/python", "-m", "jobs", "submit", CONFIG, "--nightly", "--until", moment]
    return [*submit, "--job-id", job_id, "--address", ADDRESS, "--follow"]


def cancel_command(job_id: str) -> list[str]:
    return [f"{FOLDER}/.venv/bin/python", "-m", "jobs", "submit", "--cancel", job_id, "--address", ADDRESS]


def exit_code_of(command: list[str], cancel: list[str]) -> int:
    """Run `command` to its end. Where Airflow ends the task before (a timeout, a cleared task), `cancel` is run.

    Without that the job would go on: whoever follows a job can leave it.
    """
    environment = {**os.environ, "RAY_AUTH_MODE": "token"}
    follower = subprocess.Popen(command, cwd=FOLDER, env=environment)
    try:
        return follower.wait()
    finally:
        if follower.poll() is None:
            follower.kill()
            follower.wait()
            subprocess.run(cancel, cwd=FOLDER, env=environment, timeout=CANCEL_SECONDS, check=False)


def judge(code: int) -> None:
    """Airflow tries again after an AirflowException, and does not after an AirflowFailException."""
    if code == STOPPED:
        raise AirflowException(f"nightdesk was stopped (exit code {code}); another attempt continues")
    if code != 0:
        raise AirflowFailException(f"nightdesk ended with exit code {code}; its last line says why")


@dag(
    dag_id="nightdesk",
    schedule="0 21 * * *",  # UTC
    start_date=datetime(2026, 1, 1, tzinfo=UTC),
    catchup=False,  # one run answers all that is new, however many nights were missed
    max_active_runs=1,
    dagrun_timeout=NIGHT + MARGIN,
    tags=["nightdesk"],
)
def nightdesk() -> None:
    @task(retries=3, retry_delay=timedelta(minutes=10), execution_timeout=NIGHT + MARGIN)
    def run(dag_run: Any = None) -> None:
        until = dag_run.start_date + NIGHT  # one moment for all attempts: a late one is not given the next night's
        if datetime.now(UTC) >= until:
            raise AirflowFailException("the night is over; the next one continues")
        job_id = f"nightdesk-{uuid.uuid4().hex[:12]}"
        judge(exit_code_of(submit_command(job_id, until), cancel_command(job_id)))

    run()


nightdesk()
