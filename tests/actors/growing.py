"""Nodes that are added to the tests' Ray for a while, with GPUs and labels that they only pretend to have."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import ray

from actors.placement import Bundle
from actors.seats import Reservation, Seat


def like(kind: str, gpus: int, cpus: int, **labels: str) -> dict[str, Any]:
    """Settings of a node with GPUs of one accelerator type."""
    return {
        "num_cpus": cpus,
        "num_gpus": gpus,
        "resources": {f"accelerator_type:{kind}": 1},
        "labels": {"ray.io/accelerator-type": kind, **labels},
    }


@contextmanager
def nodes_added(cluster: Any, settings: Sequence[dict[str, Any]]) -> Iterator[list[Any]]:
    """They start side by side, and are gone again afterwards."""
    before = alive()
    added = []
    try:
        for each in settings:
            added.append(cluster.add_node(wait=False, object_store_memory=80 * 2**20, **each))
        wait_until(lambda: alive() == before + len(added))
        yield added
    finally:
        for node in added:
            if node in cluster.worker_nodes:
                cluster.remove_node(node)
        wait_until(lambda: alive() == before)


def alive() -> int:
    return sum(node["Alive"] for node in ray.nodes())


def wait_until(condition: Any, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


def draft_seat(bundle: Bundle) -> Seat:
    """The seat of a draft worker."""
    reservation = Reservation((bundle,), 10)
    wait_until(lambda: reservation.look() is not None)
    return Seat(reservation.group, 0, bundle.threads, bundle.gpus)


def homes(groups: Sequence[Any]) -> list[list[str]]:
    """Ray's ids of the nodes that the bundles of placement groups are on."""
    from ray.util.placement_group import placement_group_table

    tables = [placement_group_table(group)["bundles_to_node_id"] for group in groups]
    return [[table[i] for i in range(len(table))] for table in tables]


def standing_groups() -> int:
    """Placement groups that are not removed."""
    from ray.util.placement_group import placement_group_table

    return sum(group["state"] != "REMOVED" for group in placement_group_table().values())
