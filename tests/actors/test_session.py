"""The command on a Ray of its own and on one that is there: what it says, and what it leaves behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from ruamel.yaml import YAML

from actors.session import ROOT, failures_to_begin, ray_session
from pipeline.config import JobConfig
from pipeline.errors import ConfigError, WorkerLost
from tests.actors.processes import wait_gone
from tests.actors.tiny_job import alone, answers, tiny_job
from tests.models import tiny_folder


def command(config: JobConfig, file: Path, **environment: str) -> subprocess.Popen[str]:
    """`python -m jobs run` in a process group of its own, as a terminal starts it."""
    document: dict[str, Any] = config.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    document["draft"] = document["draft"][0]
    YAML().dump(document, file)
    inherited = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    return subprocess.Popen(
        [sys.executable, "-m", "jobs", "run", str(file)],
        cwd=ROOT, env=inherited | environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True, preexec_fn=_listen_to_interrupts,
    )  # fmt: skip


def _listen_to_interrupts() -> None:
    """A shell that runs the tests in the background makes everything below it deaf to Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    return tuple(tiny_folder(folder / str(i), seed=i, num_hidden_layers=1) for i in range(2))  # type: ignore[return-value]


def test_a_ray_that_is_there_is_used_and_stays(ray_address: str, models: tuple[Path, Path], tmp_path: Path) -> None:
    config = tiny_job(tmp_path, models, rows=4, tokens=8)
    run = command(config, tmp_path / "job.yaml", RAY_ADDRESS=ray_address)
    out, err = run.communicate(timeout=120)
    assert run.returncode == 0, err
    assert answers(config) == alone(config, 4)
    said = (out + err).replace(str(tmp_path), "").splitlines()
    assert [line for line in said if "ray" in line.lower()] == []
    import ray

    assert ray.is_initialized()
    assert sum(node["Alive"] for node in ray.nodes()) == 1


def test_an_interrupted_run_leaves_neither_processes_nor_files(models: tuple[Path, Path], tmp_path: Path) -> None:
    config = tiny_job(tmp_path, models, rows=2000, tokens=400)
    run = command(config, tmp_path / "job.yaml")
    workers = _started(run)
    os.killpg(run.pid, signal.SIGINT)  # as Ctrl-C does
    out, err = run.communicate(timeout=60)
    assert run.returncode == 4, err
    assert err.splitlines()[-1].startswith("nightdesk: stopped: ")
    assert "Traceback" not in out + err
    assert all(wait_gone(process, 10) for process in workers)
    assert not list(Path("/tmp").glob(f"nd-{run.pid}-*"))


def _started(run: subprocess.Popen[str]) -> list[psutil.Process]:
    """All processes of a run, once its replica is there."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and run.poll() is None:
        family = psutil.Process(run.pid).children(recursive=True)
        titles = [" ".join(p.cmdline()) for p in family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
        if any(title.startswith("ray::Replica") for title in titles):
            return family
        time.sleep(0.2)
    raise AssertionError(run.communicate())


def test_an_address_where_nothing_listens_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
    monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setattr("actors.session.ray.is_initialized", lambda: False)
    with pytest.raises(WorkerLost, match=address), ray_session():
        pass


def test_a_ray_that_does_not_come_up_in_time_is_no_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    said = "The current node timed out during startup. This could happen because the GCS has become overloaded."
    with pytest.raises(WorkerLost, match=r"not be started here \(The current node timed out"), failures_to_begin():
        raise Exception(said)


def test_a_token_that_a_cluster_refuses_is_the_users_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray.exceptions import AuthenticationError

    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    with pytest.raises(ConfigError, match="RAY_ADDRESS: head:6379 refuses the token"), failures_to_begin():
        raise AuthenticationError("Invalid authentication token")
