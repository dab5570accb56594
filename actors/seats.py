"""Where workers sit on the cluster: placements as Ray's placement groups, and actors in them.

A placement group holds the cores and GPUs; the actors in it take none of the cores for themselves. So a worker's
replacement never waits for the resources of a dead or hung predecessor.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from pipeline.errors import WorkerLost

if TYPE_CHECKING:
    from actors.placement import Placement, Share

LOG = logging.getLogger(__name__)
QUIET_SECONDS = 5.0  # wait so long for resources before saying that one waits


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


@dataclass(frozen=True)
class Seats:
    """What is reserved for one replica; colocated where `target` is None."""

    groups: tuple[PlacementGroup, ...]
    replica: Seat
    target: Seat | None
    drafts: tuple[Seat, ...]

    def release(self) -> None:
        """Give everything back; whoever still sits there is ended."""
        for group in self.groups:
            remove_placement_group(group)


def reserve(placement: Placement, timeout: float) -> Seats:
    """Wait up to `timeout` seconds for the resources; WorkerLost if the cluster does not offer them."""
    own = [share for share in placement.drafts if share.bundle]
    target = _reserve([placement.target], timeout)
    if not placement.separate:
        return Seats((target,), Seat(target, 0, placement.target.threads, placement.target.gpus), None, ())
    groups = [target]
    if own:
        try:
            groups.append(_reserve(own, timeout))
        except BaseException:
            remove_placement_group(target)
            raise
    return Seats(
        groups=tuple(groups),
        replica=Seat(target, 0, 1, 0),
        target=Seat(target, 0, placement.target.threads, placement.target.gpus),
        drafts=tuple(
            Seat(groups[1], i, share.threads, share.gpus) if own else Seat(target, 0, 1, 0)
            for i, share in enumerate(placement.drafts)
        ),
    )


def _reserve(shares: Sequence[Share], timeout: float) -> PlacementGroup:
    group = placement_group([share.bundle for share in shares], strategy="PACK")
    try:
        if group.wait(min(QUIET_SECONDS, timeout)):
            return group
        wanted = " + ".join(share.describe() for share in shares)
        LOG.warning("waiting for the cluster to offer %s", wanted)
        if group.wait(max(timeout - QUIET_SECONDS, 0)):
            return group
    except BaseException:
        remove_placement_group(group)
        raise
    remove_placement_group(group)
    raise WorkerLost(
        f"decoding.placement_timeout: the cluster has not offered {wanted} within {timeout:g} s; "
        "the same command continues when it does"
    )
