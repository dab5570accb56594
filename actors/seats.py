"""Where workers sit on the cluster: placements as Ray's placement groups, and actors in them.

A placement group holds the cores and GPUs; the actors in it take none of the cores for themselves. So a worker's
replacement never waits for the resources of a dead or hung predecessor. A group is bound to the node that was planned
for it; if that node is dead, or has no room (another job, perhaps) for work on GPUs, to any other that the job allows.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import ray
from ray._private.label_utils import validate_label_selector
from ray.exceptions import RayError
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

    from actors.node import Node
    from actors.placement import Bundle, ReplicaPlacement

LOG = logging.getLogger(__name__)
QUIET_SECONDS = 5.0  # wait so long for the planned node before asking others
LOOK_SECONDS = 0.02  # between two looks, where one waits
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
        """A new actor here; returns its handle at once. `actor.CONCURRENCY` is how many calls it answers at once."""
        return (
            ray.remote(actor)
            .options(
                num_cpus=0,
                num_gpus=self.gpus,
                max_restarts=0,
                max_concurrency=getattr(actor, "CONCURRENCY", 1),
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=self.group, placement_group_bundle_index=self.bundle
                ),
            )
            .remote(*arguments)
        )

    def stands(self) -> bool:
        """Is it still there? Not so once its node is dead: then release it and reserve another."""
        return stands(self.group)

    def release(self) -> None:
        """Give its group back; whoever sits there is ended."""
        remove_placement_group(self.group)


@dataclass(frozen=True)
class Seats:
    """What is reserved for one replica; colocated where `ranks` is empty."""

    group: PlacementGroup
    bundles: tuple[Bundle, ...]
    replica: Seat
    ranks: tuple[Seat, ...]  # of the target
    careful: bool = False  # of a colocated job, and yet with a target in a process of its own

    @classmethod
    def of(cls, replica: ReplicaPlacement, group: PlacementGroup) -> Seats:
        """The seats that a replica's group holds."""
        ranks = tuple(Seat(group, i, bundle.threads, bundle.gpus) for i, bundle in enumerate(replica.ranks))
        if not replica.separate:
            return cls(group, replica.bundles, ranks[0], ())
        own = Seat(group, 0 if replica.replica is None else len(ranks), 1, 0)
        return cls(group, replica.bundles, own, ranks)

    @property
    def node(self) -> Node:
        """Where all of it is."""
        return self.bundles[0].node

    def apart(self) -> Seats:
        """The same for a careful replica: it survives what kills its target, and it drafts with no model."""
        if self.ranks:
            return self
        return replace(self, replica=replace(self.replica, threads=1, gpus=0), ranks=(self.replica,), careful=True)

    def stands(self) -> bool:
        """Is it still there? Not so once its node is dead: then release it and reserve anew."""
        return stands(self.group)

    def release(self) -> None:
        """Give everything back; whoever still sits there is ended."""
        remove_placement_group(self.group)


class Reservation:
    """A group on one node, asked for and not there yet. Whoever owns it looks from time to time, and never waits."""

    def __init__(
        self,
        bundles: Sequence[Bundle],
        timeout: float,
        planned: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`timeout` in seconds; `planned`: on the bundles' node, else on any that the job allows."""
        self.bundles = tuple(bundles)
        self.timeout = timeout
        self.planned = planned
        self.clock = clock
        self.deadline = clock() + timeout
        self.quiet_until = clock() + QUIET_SECONDS
        self.overdue = False  # it has not been had at once: somebody may want to know
        self._ask()

    def look(self) -> PlacementGroup | None:
        """The group as soon as it is there. WorkerLost when time is up: then nothing stays behind."""
        try:
            done, _ = ray.wait([self._ready], timeout=0)
            if done:
                ray.get(self._ready)
                return self.group
        except RayError as error:  # its node died at this moment, perhaps
            LOG.info("asking again for %s: %s", self.describe(), error, extra={"event": "placement"})
            self._ask_again()
        now = self.clock()
        if now >= self.deadline:
            self.cancel()
            raise WorkerLost(
                f"decoding.placement_timeout: the cluster has not offered {self.describe()} within {self.timeout:g} s; "
                "the same command continues when it does"
            )
        if now >= self.quiet_until:
            self.quiet_until += QUIET_SECONDS
            self.overdue = True
            self._widen()
        return None

    def cancel(self) -> None:
        """It is not wanted any more."""
        remove_placement_group(self.group)

    def home(self) -> str:
        """Ray's id of the node that the group is on; empty where it is not there (any more)."""
        nodes = placement_group_table(self.group).get("bundles_to_node_id") or {}
        return str(next(iter(nodes.values()), ""))

    def describe(self) -> str:
        """What it asks for, in words."""
        return " + ".join(bundle.describe() for bundle in self.bundles)

    def _widen(self) -> None:
        """The planned node does not offer it: to any other, unless it is only a matter of cores.

        For those one waits: Ray might take the last one of a GPU node.
        """
        if self.planned and (any(bundle.gpus for bundle in self.bundles) or not _is_alive(self.bundles[0].node.id)):
            self.planned = False
            self._ask_again()

    def _ask_again(self) -> None:
        remove_placement_group(self.group)
        self._ask()

    def _ask(self) -> None:
        self.group = ask(self.bundles, self.planned)
        self._ready = self.group.ready()


def reserve_replica(replica: ReplicaPlacement, timeout: float) -> Seats:
    """Wait for a replica's seats. WorkerLost if the cluster does not offer the resources within `timeout` seconds."""
    reservation = Reservation(replica.bundles, timeout)
    said = False
    with _released_on_failure(reservation):
        while (group := reservation.look()) is None:
            if reservation.overdue and not said:
                LOG.warning("waiting for the cluster to offer %s", reservation.describe(), extra={"event": "placement"})
                said = True
            time.sleep(LOOK_SECONDS)
        return Seats.of(replica, group)


@contextmanager
def _released_on_failure(reservation: Reservation) -> Iterator[None]:
    """Whatever ends the block early, Ctrl-C included, gives the group back and goes on to whoever owns it."""
    try:
        yield
    except BaseException:
        reservation.cancel()
        raise


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


def stands(group: PlacementGroup) -> bool:
    """Is it there, all of it?"""
    return bool(placement_group_table(group).get("state") == "CREATED")
