"""Runs on Ray whose replica is killed, hangs or cannot load."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from actors.executor import RayExecutor
from jobs.run import execute
from pipeline.config import JobConfig
from pipeline.deadline import Deadline
from pipeline.errors import ModelError, OutOfTime, WorkerLost
from pipeline.output.plan import Shard
from pipeline.stats import Progress
from pipeline.work import JobWork
from tests.actors.fakes import Dying
from tests.actors.processes import actor_processes, wait_gone
from tests.actors.tiny_job import alone, answers, tiny_job
from tests.models import tiny_folder

pytestmark = pytest.mark.usefixtures("ray_address")
ROWS, TOKENS = 24, 24


class Meddler(RayExecutor):
    """Sends a signal to one replica after the other, to each once it has answered something."""

    def __init__(self, config: JobConfig, signals: list[signal.Signals]) -> None:
        super().__init__(config)
        self.signals = signals
        self.total = Progress()
        self.struck: set[int] = set()

    def run(self, work: JobWork, shards: list[Shard], report: Callable[[Progress], None]) -> None:
        def reported(increment: Progress) -> None:
            report(increment)
            self.total += increment
            if increment.rows_done > 0:
                self._strike()

        super().run(work, shards, reported)

    def _strike(self) -> None:
        for process in actor_processes("Replica"):
            if self.signals and process.pid not in self.struck:
                self.struck.add(process.pid)
                process.send_signal(self.signals.pop(0))


def assert_gone(*actors: str) -> None:
    """They end a moment after the run."""
    for actor in actors:
        for process in actor_processes(actor):
            assert wait_gone(process, 10), process


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    return tuple(tiny_folder(folder / str(i), seed=i, num_hidden_layers=1) for i in range(2))  # type: ignore[return-value]


def test_the_shards_of_lost_replicas_are_answered_by_others(
    models: tuple[Path, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = tiny_job(tmp_path, models, ROWS, TOKENS, placement="colocated", step_timeout=8.0)
    executor = Meddler(config, [signal.SIGKILL, signal.SIGSTOP])
    assert execute(config, executor=executor) == 0
    assert not executor.signals
    assert answers(config) == alone(config, ROWS)
    assert executor.total.rows_done == ROWS, "what was lost is taken back"
    assert executor.total.shards_done == ROWS // 8
    assert caplog.messages == [
        "the replica is gone: its process was killed (for lack of memory, perhaps); replacing it",
        "the replica has not answered for 8 s; replacing it",
        "the replica is a careful one: its target is in a process of its own, and it does not draft",
    ]
    assert executor.describe() == "Ray, colocated, 2 cores"
    assert_gone("Replica", "Target")


def test_a_run_that_meets_its_deadline_leaves_whole_shards_and_the_next_one_the_rest(
    models: tuple[Path, Path], tmp_path: Path
) -> None:
    config = tiny_job(tmp_path, models, ROWS, TOKENS, placement="colocated")
    executor = Meddler(config, [])
    deadline = Deadline(1.0, clock=lambda: float(executor.total.shards_done > 0))
    with pytest.raises(OutOfTime, match=r"of 24 rows are published, and the same command continues"):
        execute(config, executor=executor, deadline=deadline)
    published = answers(config)
    assert 8 <= len(published) < ROWS
    assert len(published) % 8 == 0
    assert_gone("Replica", "Target")
    assert execute(config, executor=RayExecutor(config)) == 0
    assert answers(config) == alone(config, ROWS)


def test_a_model_that_cannot_be_loaded_ends_the_run_with_its_own_error(
    models: tuple[Path, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weights = tiny_folder(tmp_path / "broken", seed=2, num_hidden_layers=1) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    config = tiny_job(tmp_path, (tmp_path / "broken", models[1]), ROWS, TOKENS, placement="separate")
    config = config.model_copy(update={"draft": ()})
    started = time.monotonic()
    with pytest.raises(ModelError) as failure:
        execute(config, executor=RayExecutor(config))
    assert "broken" in str(failure.value)
    assert "\n" not in str(failure.value)
    assert time.monotonic() - started < 60
    assert_gone("Replica", "Target")
    assert not caplog.messages


@pytest.mark.slow
def test_a_replica_that_dies_whenever_it_begins_ends_the_run(
    models: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_job(tmp_path, models, ROWS, TOKENS, placement="colocated")

    monkeypatch.setattr("actors.crew.Replica", Dying)
    lost = r"its process was killed .*; 3 replicas in a row were lost before they began"
    with pytest.raises(WorkerLost, match=lost):
        execute(config, executor=RayExecutor(config))
