"""A cluster of pretended GPUs: two nodes for targets of two ranks, three for draft workers; and who sits where."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import pytest
import ray
from ray._private.state import actors as actor_table

from pipeline.engine.parallel import PRETEND
from tests.actors.growing import like, nodes_added

TARGETS = [like("H100", 2, 3), like("H100", 2, 3)]
DRAFTS = [like("L4", 1, 1), like("L4", 1, 1), like("L4", 1, 1)]
TARGET: dict[str, Any] = {"gpus": 2, "accelerator": "H100"}
DRAFT: dict[str, Any] = {"gpus": 1, "accelerator": "L4", "sampling": "sample"}
CLASSES = ("Replica", "Target", "Draft")


@contextmanager
def gpu_nodes(cluster: Any, targets: int = 2, drafts: int = 3) -> Iterator[list[Any]]:
    """Added for a while; processes on them, and this one, take processors for GPUs."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv(PRETEND, "1")
        with nodes_added(cluster, TARGETS[:targets] + DRAFTS[:drafts]) as added:
            yield added


def kind(resources: dict[str, float]) -> str:
    """The accelerator of a node, by its resources."""
    return next((name.partition(":")[2] for name in resources if name.startswith("accelerator_type:")), "head")


def seated() -> list[tuple[str, str, int]]:
    """(class, kind of its node, process) of every living actor of a run."""
    kinds = {node["NodeID"]: kind(node["Resources"]) for node in ray.nodes()}
    found = []
    for actor in actor_table().values():
        name = str(actor["ActorClassName"]).rpartition(".")[2]
        if actor["State"] == "ALIVE" and name in CLASSES and psutil.pid_exists(int(actor["Pid"])):
            found.append((name, kinds.get(actor["Address"]["NodeID"], "gone"), int(actor["Pid"])))
    return found


def seating() -> Counter[tuple[str, str]]:
    """How many living actors of each class are on nodes of each kind."""
    return Counter((name, node) for name, node, _ in seated())


def state_of_cluster() -> str:
    """For a failure's message: nodes, what of them is free, and who holds the rest."""
    from ray.util.placement_group import placement_group_table

    nodes = [(node["NodeID"][:8], kind(node["Resources"]), node["Alive"]) for node in ray.nodes()]
    groups = [
        (group["state"], group["bundles"], [str(n)[:8] for n in group["bundles_to_node_id"].values()])
        for group in placement_group_table().values()
        if group["state"] != "REMOVED"
    ]
    free = {name: amount for name, amount in ray.available_resources().items() if name in ("CPU", "GPU")}
    return f"nodes {nodes}; free {free}; groups {groups}"
