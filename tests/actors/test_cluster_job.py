"""A whole job on several nodes with pretended GPUs: a target of two ranks, draft workers elsewhere, one text."""

from __future__ import annotations

import json
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from actors.executor import RayExecutor
from jobs.run import execute
from pipeline.config import JobConfig
from tests.actors.gpu_nodes import DRAFT, TARGET, gpu_nodes, seated, seating
from tests.actors.growing import standing_groups, wait_until
from tests.actors.tiny_job import alone, answers, nearly, tiny_job
from tests.models import tiny_folder

STORIES, TOKENS = 40, 24


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    target = tiny_folder(folder / "target", "qwen2", 3)
    return target, nearly(target, folder / "draft")


class Watched:
    """Runs a job and remembers the most actors of each class that were seen on each kind of node."""

    def __init__(self, config: JobConfig) -> None:
        self.most: Counter[tuple[str, str]] = Counter()
        self._over = threading.Event()
        thread = threading.Thread(target=self._look)
        thread.start()
        try:
            self.code = execute(config, executor=RayExecutor(config))
        finally:
            self._over.set()
            thread.join()

    def _look(self) -> None:
        while not self._over.wait(0.3):
            self.most |= seating()


def check(config: JobConfig, rows: int) -> None:
    """Every row once, with the text that one process gives; nothing is left behind."""
    plan = next(Path(config.output.path).glob("_nightdesk/runs/*/plan.json"))
    expected = alone(config, rows, json.loads(plan.read_text())["fingerprint"])
    found = answers(config)
    assert found == expected, [i for i in expected if found.get(i) != expected[i]]
    assert len(set(expected.values())) > rows // 2, "texts differ, or equality says little"
    wait_until(lambda: not seated() and not standing_groups(), 30)


def test_a_target_of_two_ranks_and_two_drafts_answer_as_one_process(
    ray_cluster: Any, models: tuple[Path, Path], tmp_path: Path
) -> None:
    with gpu_nodes(ray_cluster, targets=1, drafts=2):
        draft = {**DRAFT, "replicas": 2}
        config = tiny_job(tmp_path, models, 16, TOKENS, target=TARGET, draft=draft, placement="separate")
        watched = Watched(config)
        assert watched.code == 0
        check(config, 16)
    assert watched.most == {("Replica", "H100"): 1, ("Target", "H100"): 2, ("Draft", "L4"): 2}


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["greedy", "coupled"])
def test_two_targets_and_three_drafts_on_five_nodes_answer_as_one_process(
    ray_cluster: Any, models: tuple[Path, Path], tmp_path: Path, rule: str
) -> None:
    """Float32: the two ranks' sums may round otherwise, so near-ties would part; none do."""
    task = {} if rule == "greedy" else {"temperature": 0.9, "top_p": 0.95}
    decoding = {} if rule == "greedy" else {"rule": rule}
    target, draft = {**TARGET, "replicas": 2}, {**DRAFT, "replicas": 3}
    with gpu_nodes(ray_cluster):
        config = tiny_job(tmp_path, models, STORIES, 48, 4, target=target, draft=draft, task=task, **decoding)
        watched = Watched(config)
        assert watched.code == 0
        check(config, STORIES)
    assert watched.most == {("Replica", "H100"): 2, ("Target", "H100"): 4, ("Draft", "L4"): 3}
