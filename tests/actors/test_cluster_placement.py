"""Placement on several Ray nodes with pretended GPUs: what is planned is where actors sit."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import ray
from ray.util.placement_group import placement_group, remove_placement_group

from actors import autoscaler, seats
from actors.autoscaler import arrange, autoscales
from actors.placement import place
from actors.seats import Seat, Seats, reserve_replica
from actors.session import nodes
from pipeline.config import JobConfig
from pipeline.errors import ConfigError, WorkerLost
from tests.actors.growing import draft_seat, homes, like, nodes_added, standing_groups, wait_until
from tests.actors.test_placement import MODEL, job

TARGETS = [like("H100", 2, 3, zone=zone) for zone in "ab"]
DRAFTS = [like("L4", 1, 1), like("L4", 1, 1), {"num_cpus": 1, "labels": {"tier": "cheap"}}]


@pytest.fixture(scope="module")
def cluster(ray_cluster: Any) -> Iterator[Any]:
    """Beside the head of two cores: two nodes for targets, three for drafts."""
    with nodes_added(ray_cluster, TARGETS + DRAFTS):
        yield ray_cluster


class Sitter:
    """An actor that says where it is."""

    def place(self) -> tuple[str, int]:
        context = ray.get_runtime_context()
        return str(context.get_node_id()), len(context.get_accelerator_ids()["GPU"])


def kinds() -> dict[str, str]:
    """What to call a node, by Ray's id."""
    return {n.id: n.labels.get("zone") or n.labels.get("tier") or "".join(n.accelerators) or "head" for n in nodes()}


def bundles(*taken: Seats | Seat) -> list[str]:
    """On what node each bundle is."""
    names = kinds()
    return [names[node] for home in homes([each.group for each in taken]) for node in home]


def sits(*where: Seat) -> list[tuple[str, int]]:
    """(what its node is, GPUs that it sees) of an actor in each of the seats."""
    names = kinds()
    actors = [seat.create(Sitter) for seat in where]
    places = ray.get([actor.place.remote() for actor in actors], timeout=60)
    for actor in actors:
        ray.kill(actor)
    return [(names[node], gpus) for node, gpus in places]


def with_drafts(replicas: int, **draft: Any) -> JobConfig:
    return job({**MODEL, "replicas": replicas, **draft}, gpus=2, accelerator="H100")


def test_nodes_are_told_apart(cluster: Any) -> None:
    there = nodes()
    assert len({node.name for node in there}) == 6
    found = Counter((node.cpus, node.gpus, *sorted(node.accelerators), node.head) for node in there)
    assert found == {(2, 0, True): 1, (3, 2, "H100", False): 2, (1, 1, "L4", False): 2, (1, 0, False): 1}


def test_targets_and_drafts_sit_where_they_must(cluster: Any) -> None:
    placement = place(with_drafts(2, accelerator="L4", gpus=1), nodes())
    first, second = (reserve_replica(replica, 10) for replica in placement.replicas)
    drafts = [draft_seat(bundle) for bundle in placement.drafts]
    try:
        here, there = (each.node.labels["zone"] for each in placement.replicas)
        assert sorted((here, there)) == ["a", "b"]
        assert bundles(first, second) == [here] * 3 + [there] * 3
        assert bundles(*drafts) == ["L4", "L4"]
        assert len({home for (home,) in homes([draft.group for draft in drafts])}) == 2
        assert sits(first.ranks[1], first.replica, drafts[1]) == [(here, 1), (here, 0), ("L4", 1)]
    finally:
        for taken in (first, second, *drafts):
            taken.release()
    assert not standing_groups()


def test_labels_choose_the_node(cluster: Any) -> None:
    draft = {**MODEL, "label_selector": {"tier": "cheap"}}
    placement = place(job(draft, gpus=2, label_selector={"zone": "!in(b)"}, accelerator=None), nodes())
    taken, worker = reserve_replica(placement.replicas[0], 10), draft_seat(placement.drafts[0])
    try:
        assert bundles(taken, worker) == ["a", "a", "a", "cheap"]
    finally:
        taken.release()
        worker.release()


def test_a_planned_node_in_use_is_replaced_by_another_that_the_job_allows(
    cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seats, "QUIET_SECONDS", 0.3)
    placement = place(job(gpus=2, accelerator="H100", replicas=1), nodes())
    planned = placement.replicas[0].node
    by_others = placement_group([{"GPU": 1}], bundle_label_selector=[{"ray.io/node-id": planned.id}])
    assert by_others.wait(10)
    taken = reserve_replica(placement.replicas[0], 10)
    try:
        assert bundles(taken) == [{"a": "b", "b": "a"}[planned.labels["zone"]]] * 3
    finally:
        taken.release()
        remove_placement_group(by_others)


def test_what_no_node_has_is_refused_at_once(cluster: Any) -> None:
    started = time.monotonic()
    with pytest.raises(ConfigError, match="the target needs 4 H100 on one node; the largest node has 2"):
        arrange(job(gpus=4, accelerator="H100"))
    with pytest.raises(ConfigError, match=r"3 draft workers of 1 L4 .* has room for 2; set it to at most 2"):
        arrange(with_drafts(3, accelerator="L4", gpus=1))
    assert time.monotonic() - started < 3
    assert not standing_groups()


def test_a_dead_node_is_noticed_and_its_group_hinders_nobody(cluster: Any) -> None:
    with nodes_added(cluster, [like("T4", 1, 1), like("T4", 1, 1)]) as added:
        config = job({**MODEL, "accelerator": "T4", "gpus": 1}, gpus=2, accelerator="H100")
        placement = place(config, nodes())
        draft = draft_seat(placement.drafts[0])
        assert draft.stands()
        dead = next(node for node in added if node.node_id == placement.drafts[0].node.id)
        cluster.remove_node(dead)
        wait_until(lambda: not draft.stands())
        draft.release()
        wait_until(lambda: all(node.id != dead.node_id for node in nodes()))
        another = draft_seat(place(config, nodes()).drafts[0])
        assert another.stands()
        another.release()
        assert not standing_groups()


# --- where nodes are added on demand ------------------------------------------------------------------------


def test_a_cluster_of_fixed_nodes_has_no_autoscaler(cluster: Any) -> None:
    assert not autoscales()


def test_node_types_with_names_are_an_autoscalers(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    read_only = b'{"autoscaler_report": {"active_nodes": {"node_%s": 1}, "pending_launches": {}}}' % (b"a0" * 28)
    monkeypatch.setattr(autoscaler, "_internal_kv_get", lambda key: read_only)
    assert not autoscales()
    for named in (b'{"active_nodes": {"head-group": 1}}', b'{"active_nodes": {}, "pending_launches": {"gpu": 1}}'):
        report = b'{"autoscaler_report": %s}' % named
        monkeypatch.setattr(autoscaler, "_internal_kv_get", lambda key, report=report: report)
        assert autoscales()


def test_a_node_that_an_autoscaler_adds_is_waited_for(
    ray_cluster: Any, cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(autoscaler, "autoscales", lambda: True)
    monkeypatch.setattr(autoscaler, "LOOK_SECONDS", 0.1)
    arranged: list[Any] = []
    waiting = threading.Thread(target=lambda: arranged.append(arrange(job(gpus=1, accelerator="B200"))))
    waiting.start()
    wait_until(lambda: standing_groups() == 1)  # what an autoscaler would see
    with nodes_added(cluster, [like("B200", 1, 1)]):
        waiting.join(20)
        assert arranged[0].replicas[0].node.accelerators == {"B200"}
    assert not standing_groups()


def test_an_autoscaler_is_waited_for_no_longer_than_the_job_says(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autoscaler, "autoscales", lambda: True)
    config = job(gpus=3, accelerator="H100")
    config = config.model_copy(update={"decoding": config.decoding.model_copy(update={"placement_timeout": 0.5})})
    with pytest.raises(WorkerLost, match=r"after 0.5 s .* the target needs 3 H100 on one node; the largest node has 2"):
        arrange(config)
    assert not standing_groups()
