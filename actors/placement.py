"""Where workers run: job file and cluster → bundles and threads (`place`, a pure function) → seats (`reserve`).

A placement group holds the cores and GPUs; the actors in it take none of the cores for themselves. So a worker's
replacement never waits for the resources of a dead or hung predecessor.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from pipeline.config import DraftConfig, JobConfig
from pipeline.engine.assembly import drafting
from pipeline.errors import ConfigError, WorkerLost

LOG = logging.getLogger(__name__)
QUIET_SECONDS = 5.0  # wait so long for resources before saying that one waits


@dataclass(frozen=True, slots=True)
class Node:
    """What a machine of the cluster offers."""

    name: str
    cpus: int
    gpus: int = 0


@dataclass(frozen=True, slots=True)
class Share:
    """What one worker may use: `threads` of torch, which are cores that its bundle reserves, and GPUs."""

    threads: int
    gpus: int = 0

    @property
    def bundle(self) -> dict[str, float]:
        """As Ray wants it; empty for a worker that reserves nothing."""
        wanted = {"CPU": float(self.threads), "GPU": float(self.gpus)}
        return {name: amount for name, amount in wanted.items() if amount}


@dataclass(frozen=True, slots=True)
class Placement:
    """One replica's workers. Colocated: `target` is the replica itself, and there are no draft workers.

    Separate: the replica shares the target's bundle, and so do draft workers that compute next to nothing.
    """

    separate: bool
    target: Share
    drafts: tuple[Share, ...] = ()  # one per draft worker

    def describe(self) -> str:
        """In a few words, for a summary."""
        if not self.separate:
            return f"Ray, colocated, {_amount(self.target)}"
        drafts = "".join(f", draft {_amount(share)}" for share in self.drafts)
        return f"Ray, separate: target {_amount(self.target)}{drafts}"


def place(config: JobConfig, nodes: Sequence[Node]) -> Placement:
    """ConfigError, with the arithmetic, where the nodes do not suffice."""
    if not nodes:
        raise ConfigError("decoding.placement: the cluster has no nodes")
    draft = drafting(config)
    wanted = config.decoding.placement
    models = draft is not None and draft.kind == "model"
    if wanted == "separate" or (wanted == "auto" and models and len(nodes) > 1):
        return _separate(config, draft, nodes)
    return _colocated(config, draft, nodes)


def _colocated(config: JobConfig, draft: DraftConfig | None, nodes: Sequence[Node]) -> Placement:
    gpus = max(config.target.gpus, draft.gpus if draft is not None else 0)
    node = _roomiest("target.gpus", "the target", gpus, nodes)
    if not _computes_on_cpu(config.target.gpus, "model") and not (draft and _computes_on_cpu(draft.gpus, draft.kind)):
        return Placement(False, Share(min(1, node.cpus), gpus))
    threads = config.target.threads
    if threads == "auto":
        return Placement(False, Share(max(1, node.cpus), gpus))
    if threads > node.cpus:
        raise ConfigError(
            f"target.threads: {threads} threads need {threads} cores, and the largest node has {node.cpus}: "
            f"set it to at most {node.cpus}, or to auto"
        )
    return Placement(False, Share(threads, gpus))


def _separate(config: JobConfig, draft: DraftConfig | None, nodes: Sequence[Node]) -> Placement:
    home = _roomiest("target.gpus", "the target", config.target.gpus, nodes)
    target_on_cpu = _computes_on_cpu(config.target.gpus, "model")
    if draft is None:
        return Placement(True, _share(config, home, config.target.gpus, [home] if target_on_cpu else []))
    others = [node for node in nodes if node is not home and node.gpus >= draft.gpus and node.cpus > 0]
    drafts_home = max(others, key=lambda node: node.cpus) if others and draft.kind == "model" else home
    _check_gpus(config, draft, home, drafts_home)
    draft_on_cpu = _computes_on_cpu(draft.gpus, draft.kind)
    computing = [home] * target_on_cpu + [drafts_home] * (draft.replicas if draft_on_cpu else 0)
    target = _share(config, home, config.target.gpus, computing)
    if draft_on_cpu or draft.gpus:
        drafts = (_share(config, drafts_home, draft.gpus, computing),) * draft.replicas
    else:
        drafts = (Share(0),) * draft.replicas
    return Placement(True, target, drafts)


def _computes_on_cpu(gpus: int, kind: str) -> bool:
    """Look-up in texts is no computation to speak of."""
    return gpus == 0 and kind == "model"


def _share(config: JobConfig, node: Node, gpus: int, computing: Sequence[Node]) -> Share:
    """A worker's part of its node, where `computing` names the node of every worker that uses the processor."""
    if gpus:
        return Share(min(1, node.cpus), gpus)
    workers, threads = sum(other is node for other in computing), config.target.threads
    each = node.cpus // workers if threads == "auto" else threads
    if each * workers > node.cpus or each == 0:
        needed = f"{workers} workers × {max(each, 1)} threads = {workers * max(each, 1)} cores"
        raise ConfigError(
            f"decoding.placement: {needed} on one node, and {node.name} has {node.cpus}: "
            "choose colocated, or a smaller target.threads"
        )
    return Share(each)


def _roomiest(key: str, who: str, gpus: int, nodes: Sequence[Node]) -> Node:
    """The node with most cores among those with enough GPUs."""
    fitting = [node for node in nodes if node.gpus >= gpus]
    if not fitting:
        most = max(node.gpus for node in nodes)
        raise ConfigError(f"{key}: {who} needs {gpus} GPU on one node, and the largest node has {most}: set it to 0")
    return max(fitting, key=lambda node: node.cpus)


def _check_gpus(config: JobConfig, draft: DraftConfig, home: Node, drafts_home: Node) -> None:
    taken = config.target.gpus if drafts_home is home else 0
    wanted = draft.gpus * draft.replicas
    if taken + wanted > drafts_home.gpus:
        raise ConfigError(
            f"draft.gpus: {wanted} GPU for drafts and {taken} for the target are {wanted + taken}, and "
            f"{drafts_home.name} has {drafts_home.gpus}: set draft.gpus to 0, or decoding.placement to colocated"
        )


def _amount(share: Share) -> str:
    cores = {0: "no core of its own", 1: "1 core"}.get(share.threads, f"{share.threads} cores")
    return f"{cores} and {share.gpus} GPU" if share.gpus else cores


# --- from shares to actors ----------------------------------------------------------------------------------


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
        wanted = " + ".join(_amount(share) for share in shares)
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
