"""Placement groups on the tests' Ray of two cores: what is reserved, and that nothing stays behind."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import ray
from ray.util.placement_group import PlacementGroup

from actors import seats
from actors.node import Node
from actors.placement import Bundle, Placement, ReplicaPlacement
from actors.seats import reserve, reserve_drafts, reserve_replica
from actors.session import nodes
from pipeline.errors import WorkerLost
from tests.actors.growing import homes, standing_groups

pytestmark = pytest.mark.usefixtures("ray_address")


@pytest.fixture
def here(ray_address: str) -> Node:
    (node,) = nodes()
    return node


def separate(here: Node, cores: int, *drafts: int) -> Placement:
    replica = ReplicaPlacement(True, (Bundle(here, cores),))
    return Placement((replica,), tuple(Bundle(here, draft) for draft in drafts))


class Sitter:
    """An actor that says where it is."""

    def node(self) -> str:
        return str(ray.get_runtime_context().get_node_id())


def cores_left() -> float:
    return float(ray.available_resources().get("CPU", 0))


def test_a_node_is_described_with_what_it_has(here: Node) -> None:
    assert (here.cpus, here.gpus, here.accelerators, here.head) == (2, 0, frozenset(), True)
    assert here.labels == {"ray.io/node-id": here.id}
    assert here.id == ray.nodes()[0]["NodeID"]


def test_the_colocated_replica_sits_in_the_only_bundle(here: Node) -> None:
    taken = reserve_replica(ReplicaPlacement(False, (Bundle(here, 2),)), 10)
    assert (taken.ranks, taken.drafts, taken.replica.threads, len(taken.groups)) == ((), (), 2, 1)
    assert ray.get(taken.replica.create(Sitter).node.remote(), timeout=20) == here.id
    assert taken.stands()
    taken.release()
    assert not standing_groups()


def test_each_worker_has_its_bundle_and_each_draft_its_group(here: Node) -> None:
    placement = separate(here, 1, 1)
    taken = reserve(placement, 10)
    (rank,), (draft,) = taken.ranks, taken.drafts
    assert taken.replica == replace(rank, threads=1), "the replica shares the target's bundle"
    assert draft.group != rank.group
    assert draft.group in taken.groups
    taken.release()
    assert not standing_groups()


def test_a_process_of_its_own_has_the_last_bundle(here: Node) -> None:
    taken = reserve_replica(ReplicaPlacement(True, (Bundle(here, 1),), Bundle(here, 1)), 10)
    assert (taken.ranks[0].bundle, taken.replica.bundle) == (0, 1)
    assert taken.replica.group.bundle_specs == [{"CPU": 1.0}, {"CPU": 1.0}]
    taken.release()


def test_nothing_stays_reserved_when_one_of_several_is_not_to_be_had(here: Node) -> None:
    for drafts in ([2], [1, 1]):
        with pytest.raises(WorkerLost, match=r"has not offered . cores? within .* s; the same command continues"):
            reserve(separate(here, 1, *drafts), 0.3)
        assert not standing_groups()
    with pytest.raises(WorkerLost):
        reserve_drafts([Bundle(here, 1), Bundle(here, 1), Bundle(here, 1)], 0.3)
    assert not standing_groups()


def test_nothing_stays_reserved_when_the_wait_is_interrupted(here: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    def wait(group: Any, timeout: float) -> bool:
        waits.append(timeout)
        if len(waits) == 3:
            raise KeyboardInterrupt
        return len(waits) == 1

    monkeypatch.setattr(PlacementGroup, "wait", wait)
    with pytest.raises(KeyboardInterrupt):
        reserve(separate(here, 1, 2), 10)
    assert len(waits) == 3
    assert not standing_groups()


def test_a_plan_for_a_node_that_has_died_is_carried_out_elsewhere(here: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seats, "QUIET_SECONDS", 0.1)
    taken = reserve_replica(ReplicaPlacement(False, (Bundle(replace(here, id="d" * 56), 2),)), 10)
    assert homes(taken.groups) == [[here.id]]
    taken.release()


def test_a_wait_is_mentioned(here: Node, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(seats, "QUIET_SECONDS", 0.1)
    with pytest.raises(WorkerLost):
        reserve_replica(ReplicaPlacement(False, (Bundle(here, 3),)), 0.3)
    assert caplog.messages == ["waiting for the cluster to offer 3 cores"]
