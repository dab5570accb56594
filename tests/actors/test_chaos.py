"""Jobs whose workers and nodes are killed at random moments: every row once, the same text, in time, nothing left."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from actors.executor import RayExecutor
from jobs.run import execute
from pipeline.config import JobConfig
from pipeline.errors import NightdeskError
from tests.actors.chaos import Chaos, stormy_nodes
from tests.actors.gpu_nodes import DRAFT, TARGET, seated, state_of_cluster
from tests.actors.growing import alive, standing_groups, wait_until
from tests.actors.tiny_job import alone, answers, nearly, tiny_job
from tests.models import tiny_folder

ROWS, TOKENS = 40, 24
DEADLINE = 240.0  # seconds a run may take, whatever is killed: an undisturbed one takes 20 to 40, most of it imports
VICTIMS = ("Draft", "Draft", "Target", "Replica", "draft node", "target node")
RUNS = 30


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    target = tiny_folder(folder / "target", "qwen2", 3)
    return target, nearly(target, folder / "draft")


def job(folder: Path, models: tuple[Path, Path], replicas: int, drafts: int) -> JobConfig:
    target, draft = {**TARGET, "replicas": replicas}, {**DRAFT, "replicas": drafts}
    return tiny_job(folder, models, ROWS, TOKENS, 4, target=target, draft=draft, step_timeout=20.0, batch=2)


def survive(config: JobConfig, chaos: Chaos, expected: dict[str, str]) -> float:
    """Run the job in it, and check all that is promised; the seconds that it took."""
    began = time.monotonic()
    with chaos.raging():
        try:
            assert execute(config, executor=RayExecutor(config)) == 0
        except NightdeskError:
            print(f"struck {chaos.struck}; {state_of_cluster()}")
            raise
    taken = time.monotonic() - began
    assert taken < DEADLINE
    assert answers(config) == expected
    wait_until(lambda: not seated() and not standing_groups(), 30)
    return taken


def test_a_run_survives_the_loss_of_its_draft_workers_and_ranks(
    ray_cluster: Any, models: tuple[Path, Path], tmp_path: Path
) -> None:
    """The short form."""
    with stormy_nodes(ray_cluster, targets=1, drafts=2) as nodes:
        config = job(tmp_path, models, 1, 2)
        chaos = Chaos(ray_cluster, nodes, ["Draft", "Target"], [11.0, 16.0, 21.0], seed=1)
        survive(config, chaos, alone(config, ROWS))
    assert chaos.struck


@pytest.fixture(scope="module")
def stormy(ray_cluster: Any) -> Iterator[tuple[list[Any], int]]:
    """Two target nodes and three draft nodes, and how many nodes there are with them."""
    with stormy_nodes(ray_cluster, targets=2, drafts=3) as nodes:
        yield nodes, alive()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(RUNS))
def test_thirty_runs_survive_random_kills_of_everything(
    ray_cluster: Any, stormy: tuple[list[Any], int], models: tuple[Path, Path], tmp_path: Path, seed: int
) -> None:
    nodes, present = stormy
    wait_until(lambda: alive() == present, 60)  # whoever was killed in the last run is back
    rng = random.Random(seed)
    config = job(tmp_path, models, replicas=1 + seed % 2, drafts=2)
    moments = sorted(rng.uniform(0, 25) for _ in range(rng.randint(2, 4)))
    moments[0] = min(moments[0], 8.0)  # before the quickest of runs is over
    chaos = Chaos(ray_cluster, nodes, VICTIMS, moments, seed)
    taken = survive(config, chaos, alone(config, ROWS))
    print(f"run {seed}: {taken:.0f} s, struck {chaos.struck}")
    assert chaos.struck, "nothing was hit"
