"""`check --cluster`: the plan in words and as JSON, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from actors.node import Node
from jobs import cluster
from jobs.check import check_job
from jobs.cluster import ClusterPlan, plan_on_cluster
from pipeline.config import JobConfig, parse_config
from pipeline.errors import ConfigError
from tests.actors.test_placement import ARCHIVE, ON_ARCHIVE, job
from tests.models import tiny_folder


@pytest.fixture
def nodes(ray_address: str, monkeypatch: pytest.MonkeyPatch) -> Callable[[list[Node]], None]:
    """Pretend that Ray has these nodes."""
    return lambda there: monkeypatch.setattr(cluster, "nodes", lambda: there)


def test_every_node_is_listed_with_who_sits_there(nodes: Callable[[list[Node]], None]) -> None:
    nodes(ARCHIVE[:3] + ARCHIVE[-1:])
    plan = plan_on_cluster(job(ON_ARCHIVE, gpus=8, accelerator="H100", replicas=1))
    assert dict(enumerate(text for _, text in plan.rows())) == {
        0: "1 replica and 1 draft worker on 4 nodes, separate",
        1: "head (4 cores) ← nobody; left: 4 cores",
        2: "H100-0 (96 cores, 8 H100) ← target 0: 8 × (1 core and 1 GPU); replica 0: 1 core; left: 87 cores",
        3: "H100-1 (96 cores, 8 H100) ← nobody; left: 96 cores, 8 H100",
        4: "L4-3 (8 cores, 1 L4) ← draft 0: 1 core and 1 GPU; left: 7 cores",
    }
    found = plan.as_json()
    assert (found["placed"], found["separate"], found["replicas"], found["drafts"]) == (True, True, 1, 1)
    assert [(node["cpus_left"], node["gpus_left"]) for node in found["nodes"]] == [(4, 0), (87, 0), (96, 8), (7, 0)]
    assert found["nodes"][3]["workers"] == ["draft 0: 1 core and 1 GPU"]


def test_it_is_refused_as_a_run_is(nodes: Callable[[list[Node]], None]) -> None:
    nodes(ARCHIVE)
    with pytest.raises(ConfigError, match=r"target.gpus: the target needs 16 H100 on one node; the largest node has 8"):
        plan_on_cluster(job(gpus=16, accelerator="H100"))


def test_with_an_autoscaler_it_says_what_a_run_would_wait_for(
    nodes: Callable[[list[Node]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes(ARCHIVE[:1])
    monkeypatch.setattr(cluster, "autoscales", lambda: True)
    plan = plan_on_cluster(job(gpus=1))
    ((label, text),) = plan.rows()
    assert label == "cluster"
    assert text.startswith("a run would wait up to 300 s for the autoscaler: target.gpus: the target needs 1 GPU on")
    assert plan.as_json() == {"placed": False, "lacking": plan.lacking, "waits_seconds": 300.0}


def test_check_prints_the_plan_of_the_ray_that_is_there(
    ray_address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jobs.estimate.PROBE_SIZE", 256)
    monkeypatch.setattr("jobs.estimate.PROBE_SECONDS", 0.01)
    config = small(tmp_path, replicas=1)
    assert check_job(config, as_json=True, cluster=True) == 0
    out = capsys.readouterr().out
    assert "1 replica on 1 node, colocated" in " ".join(out.split())
    assert json.loads(out.splitlines()[-1])["cluster"]["nodes"][0]["cpus_left"] == 0
    assert check_job(config, as_json=True) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["cluster"] is None
    with pytest.raises(ConfigError, match=r"target.accelerator: no node has H100"):
        check_job(small(tmp_path, accelerator="H100"), cluster=True)


def small(folder: Path, **target: Any) -> JobConfig:
    (folder / "stories.jsonl").write_text('{"body": "a story"}\n')
    mapping = {
        "name": "small",
        "input": {"path": str(folder / "stories.jsonl"), "text": "body"},
        "output": {"path": str(folder / "out")},
        "target": {"model": str(tiny_folder(folder / "model", seed=0, num_hidden_layers=1)), **target},
        "tasks": [{"name": "answer", "prompt": "{body}"}],
    }
    return parse_config(mapping, "test")


def test_a_plan_without_a_draft_says_nothing_of_drafts() -> None:
    from actors.placement import place

    laptop = Node("laptop", 6)
    ((_, first), (_, second)) = ClusterPlan((laptop,), place(job(), [laptop])).rows()
    assert first == "1 replica on 1 node, colocated"
    assert second == "laptop (6 cores) ← replica 0: 6 cores; left: 0 cores"
