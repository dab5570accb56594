"""nightdesk as an Airflow DAG: one task that submits the night's run to a Ray cluster and follows it.

Copy it into the DAGs folder (Airflow 2.9 or newer, or 3; Python 3.11). It imports Airflow only: nightdesk has a folder
and an environment of its own on the worker, and is called as a command.
"""

from __future__ import annotations

import os
import subprocess
from datetime import UTC, datetime, timedelta

from airflow.decorators import dag, task
from airflow.exceptions import AirflowException, AirflowFailException

FOLDER = "/opt/nightdesk"  # the repository on the worker
CONFIG = "configs/nightly-s3.yaml"
ADDRESS = "http://REPLACE_RAY_HEAD:8265"  # RAY_AUTH_TOKEN comes from the worker's environment, never from this file
COMMAND = [f"{FOLDER}/.venv/bin/python", "-m", "jobs", "submit", CONFIG, "--address", ADDRESS, "--follow"]

STOPPED = 4  # resumable: the same command continues
NIGHT = timedelta(hours=8)  # of all attempts together
STOP_SECONDS = 120  # that the command has to cancel its job


def exit_code_of(command: list[str]) -> int:
    """Run it to its end. Where Airflow ends the task before (a timeout, a cleared task), the command is ended too."""
    environment = {**os.environ, "RAY_AUTH_MODE": "token"}
    process = subprocess.Popen(command, cwd=FOLDER, env=environment)
    try:
        return process.wait()
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


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
    dagrun_timeout=NIGHT,
    tags=["nightdesk"],
)
def nightdesk() -> None:
    @task(retries=3, retry_delay=timedelta(minutes=10), execution_timeout=NIGHT)
    def run() -> None:
        judge(exit_code_of(COMMAND))

    run()


nightdesk()
