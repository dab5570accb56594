"""Placement groups on the tests' Ray of two cores: what is reserved, and that nothing stays behind."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest
import ray
from ray.util.placement_group import remove_placement_group

from actors import seats
from actors.node import Node
from actors.placement import Bundle, ReplicaPlacement
from actors.seats import Reservation, reserve_replica
from actors.session import nodes
from pipeline.errors import WorkerLost
from tests.actors.growing import homes, standing_groups, wait_until

pytestmark = pytest.mark.usefixtures("ray_address")


@pytest.fixture
def here(ray_address: str) -> Node:
    (node,) = nodes()
    return node


class Sitter:
    """An actor that says where it is."""

    def node(self) -> str:
        return str(ray.get_runtime_context().get_node_id())


def test_a_node_is_described_with_what_it_has(here: Node) -> None:
    assert (here.cpus, here.gpus, here.accelerators, here.head) == (2, 0, frozenset(), True)
    assert here.labels == {"ray.io/node-id": here.id}
    assert here.id == ray.nodes()[0]["NodeID"]


def test_the_colocated_replica_sits_in_the_only_bundle(here: Node) -> None:
    taken = reserve_replica(ReplicaPlacement(False, (Bundle(here, 2),)), 10)
    assert (taken.ranks, taken.replica.threads, taken.node, taken.careful) == ((), 2, here, False)
    assert ray.get(taken.replica.create(Sitter).node.remote(), timeout=60) == here.id
    assert taken.stands()
    taken.release()
    assert not standing_groups()


def test_a_replica_without_a_core_of_its_own_shares_its_targets_bundle(here: Node) -> None:
    taken = reserve_replica(ReplicaPlacement(True, (Bundle(here, 2),)), 10)
    (rank,) = taken.ranks
    assert taken.replica == replace(rank, threads=1)
    assert taken.apart() == taken, "it is apart already"
    taken.release()


def test_a_process_of_its_own_has_the_last_bundle(here: Node) -> None:
    taken = reserve_replica(ReplicaPlacement(True, (Bundle(here, 1),), Bundle(here, 1)), 10)
    assert (taken.ranks[0].bundle, taken.replica.bundle) == (0, 1)
    assert taken.replica.group.bundle_specs == [{"CPU": 1.0}, {"CPU": 1.0}]
    taken.release()


def test_a_careful_replica_has_its_target_beside_it_on_the_same_seat(here: Node) -> None:
    taken = reserve_replica(ReplicaPlacement(False, (Bundle(here, 2),)), 10)
    careful = replace(taken, replica=replace(taken.replica, gpus=1)).apart()
    assert careful.careful
    assert (careful.replica.gpus, careful.replica.threads) == (0, 1)
    assert [(rank.gpus, rank.threads) for rank in careful.ranks] == [(1, 2)]
    sitters = [seat.create(Sitter) for seat in (taken.apart().replica, *taken.apart().ranks)]
    assert ray.get([sitter.node.remote() for sitter in sitters], timeout=60) == [here.id] * 2
    taken.release()


class Waiter:
    """Answers one call only while it is asked another."""

    CONCURRENCY = 2

    def __init__(self) -> None:
        self.called = threading.Event()

    def wait(self) -> bool:
        return self.called.wait(60)

    def call(self) -> None:
        self.called.set()


def test_an_actor_answers_as_many_calls_at_once_as_its_class_says(here: Node) -> None:
    taken = reserve_replica(ReplicaPlacement(False, (Bundle(here, 1),)), 10)
    waiter = taken.replica.create(Waiter)
    waiting = waiter.wait.remote()
    ray.get(waiter.call.remote(), timeout=60)
    assert ray.get(waiting, timeout=60)
    taken.release()


def test_a_reservation_is_there_when_it_is_there_and_nobody_waits(here: Node) -> None:
    first = Reservation((Bundle(here, 2),), 10)
    wait_until(lambda: first.look() is not None)
    assert first.home() == here.id
    second = Reservation((Bundle(here, 1),), 10)
    started = time.monotonic()
    assert second.look() is None
    assert time.monotonic() - started < 1
    first.cancel()
    wait_until(lambda: second.look() is not None)
    second.cancel()
    assert not standing_groups()


def test_what_is_not_to_be_had_in_time_leaves_nothing_reserved(here: Node) -> None:
    with pytest.raises(WorkerLost, match=r"has not offered 3 cores within 0.3 s; the same command continues"):
        reserve_replica(ReplicaPlacement(True, (Bundle(here, 3),)), 0.3)
    assert not standing_groups()


def test_nothing_stays_reserved_when_the_wait_is_interrupted(here: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(seats.time, "sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        reserve_replica(ReplicaPlacement(True, (Bundle(here, 3),)), 10)
    assert not standing_groups()


def test_a_plan_for_a_node_that_has_died_is_carried_out_elsewhere(here: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seats, "QUIET_SECONDS", 0.1)
    taken = reserve_replica(ReplicaPlacement(False, (Bundle(replace(here, id="d" * 56), 2),)), 10)
    assert homes([taken.group]) == [[here.id]]
    taken.release()


def test_a_group_that_is_taken_away_while_it_is_waited_for_is_asked_for_again(here: Node) -> None:
    full = Reservation((Bundle(here, 2),), 10)
    wait_until(lambda: full.look() is not None)
    waiting = Reservation((Bundle(here, 1),), 10)
    remove_placement_group(waiting.group)
    full.cancel()
    wait_until(lambda: waiting.look() is not None)
    waiting.cancel()
    assert not standing_groups()


def test_a_wait_is_mentioned(here: Node, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(seats, "QUIET_SECONDS", 0.1)
    with pytest.raises(WorkerLost):
        reserve_replica(ReplicaPlacement(False, (Bundle(here, 3),)), 0.3)
    assert caplog.messages == ["waiting for the cluster to offer 3 cores"]
