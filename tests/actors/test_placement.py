"""From job file and cluster to bundles and threads."""

from __future__ import annotations

from typing import Any

import pytest

from actors.placement import Node, Placement, Share, place
from pipeline.config import JobConfig, parse_config
from pipeline.errors import ConfigError

NGRAM = {"kind": "ngram"}
MODEL = {"kind": "model", "model": "small"}


def job(draft: dict[str, Any] | None = None, placement: str = "auto", **target: Any) -> JobConfig:
    mapping = {
        "name": "placed",
        "input": {"path": "in", "text": "body"},
        "output": {"path": "out"},
        "target": {"model": "large", **target},
        "draft": draft,
        "decoding": {"placement": placement},
        "tasks": [{"name": "answer", "prompt": "{body}"}],
    }
    return parse_config(mapping, "test")


def on(*cpus: int, gpus: int = 0) -> list[Node]:
    return [Node(f"node-{i}", c, gpus) for i, c in enumerate(cpus)]


def test_one_machine_is_colocated_on_all_its_cores() -> None:
    for draft in (None, NGRAM, MODEL):
        assert place(job(draft), on(6)) == Placement(False, Share(6))


def test_a_draft_model_goes_to_another_node_where_there_is_one() -> None:
    assert place(job(MODEL), on(4, 8)) == Placement(True, Share(8), (Share(4),))
    assert not place(job(NGRAM), on(4, 8)).separate
    assert not place(job(MODEL, "colocated"), on(4, 8)).separate


def test_separate_workers_on_one_machine_divide_its_cores() -> None:
    assert place(job(MODEL, "separate"), on(5)) == Placement(True, Share(2), (Share(2),))


def test_looking_up_n_grams_takes_no_core() -> None:
    placement = place(job(NGRAM, "separate"), on(5))
    assert placement == Placement(True, Share(5), (Share(0),))
    assert placement.drafts[0].bundle == {}


def test_without_a_drafter_separate_is_a_target_alone() -> None:
    for draft in (None, {"kind": "none"}):
        assert place(job(draft, "separate"), on(3)) == Placement(True, Share(3))


def test_threads_are_what_the_job_says() -> None:
    assert place(job(MODEL, threads=2), on(6)) == Placement(False, Share(2))
    assert place(job(MODEL, "separate", threads=3), on(6)) == Placement(True, Share(3), (Share(3),))


def test_threads_never_exceed_the_cores() -> None:
    with pytest.raises(ConfigError, match=r"target.threads: 3 threads need 3 cores, and the largest node has 2"):
        place(job(threads=3), on(1, 2))
    with pytest.raises(ConfigError, match=r"2 workers × 2 threads = 4 cores on one node, and node-0 has 2"):
        place(job(MODEL, "separate", threads=2), on(2))
    with pytest.raises(ConfigError, match=r"2 workers × 1 threads = 2 cores on one node, and node-0 has 1"):
        place(job(MODEL, "separate"), on(1))


def test_a_gpu_target_takes_one_core_and_leaves_the_others_to_a_draft_on_the_processor() -> None:
    assert place(job(gpus=1), on(8, gpus=1)) == Placement(False, Share(1, 1))
    assert place(job(MODEL, gpus=1), on(8, gpus=1)) == Placement(False, Share(8, 1))
    assert place(job(MODEL, "separate", gpus=1), on(8, gpus=1)) == Placement(True, Share(1, 1), (Share(7),))


def test_missing_gpus_are_refused_with_the_arithmetic() -> None:
    with pytest.raises(ConfigError, match=r"target.gpus: the target needs 1 GPU on one node, .* has 0"):
        place(job(gpus=1), on(8, 8))
    with pytest.raises(ConfigError, match=r"1 GPU for drafts and 1 for the target are 2, and node-0 has 1"):
        place(job({**MODEL, "gpus": 1}, "separate", gpus=1), on(8, gpus=1))


def test_a_bundle_names_what_is_reserved() -> None:
    assert Share(2, 1).bundle == {"CPU": 2.0, "GPU": 1.0}
    assert Share(2).bundle == {"CPU": 2.0}


def test_a_placement_describes_itself() -> None:
    assert place(job(MODEL, "separate"), on(3)).describe() == "Ray, separate: target 1 core, draft 1 core"
    assert place(job(gpus=1), on(3, gpus=1)).describe() == "Ray, colocated, 1 core and 1 GPU"
