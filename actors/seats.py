"""Where workers sit on the cluster: placements as Ray's placement groups, and actors in them.

A placement group holds the cores and GPUs; the actors in it take none of the cores for themselves. So a worker's
replacement never waits for the resources of a dead or hung predecessor. A group is bound to the node that was planned
for it; if that node is dead, or has no room (another job, perhaps) for work on GPUs, to any other that the job allows.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray
from ray._private.label_utils import validate_label_selector
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.node import ACCELERATOR_LABEL
from pipeline.errors import ConfigError, WorkerLost

if TYPE_CHECKING:
    from collections.abc import Iterator

    from actors.placement import Bundle, Placement, ReplicaPlacement

LOG = logging.getLogger(__name__)
QUIET_SECONDS = 5.0  # wait so long for resources before saying that one waits
NODE_LABEL = "ray.io/node-id"
TYPE_SHARE = 0.001  # of the resource that stands for an accelerator type: what Ray itself asks for


@dataclass(frozen=True)
class Seat:
    """Where actors of one kind are put."""

    group: PlacementGroup
    bundle: int
    threads: int  # for torch
    gpus: int

    def create(self, actor: type, *arguments: Any) -> Any:
        """A new actor here; returns its handle at once."""
        return (
            ray.remote(actor)
            .options(
                num_cpus=0,
                num_gpus=self.gpus,
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=self.group, placement_group_bundle_index=self.bundle
                ),
            )
            .remote(*arguments)
        )

    def stands(self) -> bool:
        """Is it still there? Not so once its node is dead: then release it and reserve another."""
        return _stands(self.group)

    def release(self) -> None:
        """Give its group back; whoever sits there is ended."""
        remove_placement_group(self.group)


@dataclass(frozen=True)
class Seats:
    """What is reserved for one replica; colocated where `ranks` is empty."""

    groups: tuple[PlacementGroup, ...]
    replica: Seat
    ranks: tuple[Seat, ...]  # of the target, on one node
    drafts: tuple[Seat, ...]  # each in a group of its own

    def stands(self) -> bool:
        """Is all of it still there? Not so once a node is dead: then release it and reserve anew."""
        return all(_stands(group) for group in self.groups)

    def release(self) -> None:
        """Give everything back; whoever still sits there is ended."""
        for group in self.groups:
            remove_placement_group(group)


def reserve(placement: Placement, timeout: float, number: int = 0) -> Seats:
    """Replica `number` and all draft workers, within `timeout` seconds or WorkerLost."""
    deadline = time.monotonic() + timeout
    seats = reserve_replica(placement.replicas[number], timeout)
    with _released_on_failure([*seats.groups]):
        drafts = reserve_drafts(placement.drafts, max(deadline - time.monotonic(), 0))
    groups = seats.groups + tuple(seat.group for seat in drafts)
    return Seats(groups, seats.replica, seats.ranks, drafts)


def reserve_replica(replica: ReplicaPlacement, timeout: float) -> Seats:
    """A replica without draft workers. WorkerLost if the cluster does not offer the resources within `timeout` s."""
    group = _reserve(replica.bundles, timeout)
    ranks = tuple(Seat(group, i, bundle.threads, bundle.gpus) for i, bundle in enumerate(replica.ranks))
    if not replica.separate:
        return Seats((group,), ranks[0], (), ())
    own = Seat(group, 0 if replica.replica is None else len(ranks), 1, 0)
    return Seats((group,), own, ranks, ())


def reserve_drafts(drafts: Sequence[Bundle], timeout: float) -> tuple[Seat, ...]:
    """Draft workers, each in a group of its own: all of them, or WorkerLost and none."""
    deadline = time.monotonic() + timeout
    groups: list[PlacementGroup] = []
    with _released_on_failure(groups):
        for bundle in drafts:
            groups.append(_reserve((bundle,), max(deadline - time.monotonic(), 0)))
    return tuple(Seat(group, 0, b.threads, b.gpus) for group, b in zip(groups, drafts, strict=True))


@contextmanager
def _released_on_failure(groups: list[PlacementGroup]) -> Iterator[None]:
    """Whatever ends the block early, Ctrl-C included, gives the groups back and goes on to whoever owns it."""
    try:
        yield
    except BaseException:
        for group in groups:
            remove_placement_group(group)
        raise


def _reserve(bundles: Sequence[Bundle], timeout: float) -> PlacementGroup:
    """One group on one node."""
    deadline = time.monotonic() + timeout
    group = ask(bundles, planned=True)
    with _released_on_failure([group]):
        if group.wait(min(QUIET_SECONDS, timeout)):
            return group
    wanted = " + ".join(bundle.describe() for bundle in bundles)
    LOG.warning("waiting for the cluster to offer %s", wanted)
    # For cores alone one waits: Ray might take the last one of a GPU node.
    if any(bundle.gpus for bundle in bundles) or not _is_alive(bundles[0].node.id):
        remove_placement_group(group)
        group = ask(bundles, planned=False)
    with _released_on_failure([group]):
        if group.wait(max(deadline - time.monotonic(), 0)):
            return group
        raise WorkerLost(
            f"decoding.placement_timeout: the cluster has not offered {wanted} within {timeout:g} s; "
            "the same command continues when it does"
        )


def ask(bundles: Sequence[Bundle], planned: bool) -> PlacementGroup:
    """A group on one node, to be waited for: the one that was planned, or any that the job allows."""
    return placement_group(
        [_resources(bundle, planned) for bundle in bundles],
        strategy="STRICT_PACK",
        bundle_label_selector=[_labels(bundle, planned) for bundle in bundles],
    )


def _resources(bundle: Bundle, planned: bool) -> dict[str, float]:
    wanted = {"CPU": float(bundle.cores), "GPU": float(bundle.gpus)}
    if not planned and bundle.choice.accelerator and ACCELERATOR_LABEL not in bundle.node.labels:
        wanted[f"accelerator_type:{bundle.choice.accelerator}"] = TYPE_SHARE
    return {name: amount for name, amount in wanted.items() if amount}


def _labels(bundle: Bundle, planned: bool) -> dict[str, str]:
    if planned and bundle.node.id:
        return {NODE_LABEL: bundle.node.id}
    labels = dict(bundle.choice.labels)
    if bundle.choice.accelerator and ACCELERATOR_LABEL in bundle.node.labels:
        labels[ACCELERATOR_LABEL] = bundle.choice.accelerator
    problem = validate_label_selector(labels)
    if problem is not None:
        raise ConfigError(f"label_selector: {problem}")
    return labels


def _is_alive(node: str) -> bool:
    return any(found["Alive"] and found["NodeID"] == node for found in ray.nodes())


def _stands(group: PlacementGroup) -> bool:
    return bool(placement_group_table(group).get("state") == "CREATED")
