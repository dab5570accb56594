"""Where workers run: job file and cluster → what each worker gets. A pure function; knows nothing of Ray."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.config import DraftConfig, JobConfig
from pipeline.engine.assembly import drafting
from pipeline.errors import ConfigError


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

    def describe(self) -> str:
        """In a few words, for people."""
        cores = {0: "no core of its own", 1: "1 core"}.get(self.threads, f"{self.threads} cores")
        return f"{cores} and {self.gpus} GPU" if self.gpus else cores


@dataclass(frozen=True, slots=True)
class Placement:
    """One replica's workers. Colocated: `target` is the replica itself, and there are no draft workers.

    Separate: the replica shares the target's bundle, and so do draft workers that compute next to nothing.
    """

    separate: bool
    target: Share
    drafts: tuple[Share, ...] = ()  # one per draft worker

    def describe(self) -> str:
        """In a few words, for people."""
        if not self.separate:
            return f"Ray, colocated, {self.target.describe()}"
        drafts = "".join(f", draft {share.describe()}" for share in self.drafts)
        return f"Ray, separate: target {self.target.describe()}{drafts}"


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
    models_on_gpu = draft is None or draft.kind != "model" or draft.gpus > 0
    if config.target.gpus and models_on_gpu:
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
    workers = [Seeker(home, config.target.gpus, computes=True)]
    if draft is not None:
        others = [node for node in nodes if node is not home and node.gpus >= draft.gpus and node.cpus > 0]
        drafts_home = max(others, key=lambda node: node.cpus) if others and draft.kind == "model" else home
        _check_gpus(config, draft, home, drafts_home)
        workers += [Seeker(drafts_home, draft.gpus, computes=draft.kind == "model")] * draft.replicas
    target, *drafts = (_share(config, worker, workers) for worker in workers)
    return Placement(True, target, tuple(drafts))


@dataclass(frozen=True, slots=True)
class Seeker:
    """A worker that is to get its share of a node. Looking up n-grams is no computation to speak of."""

    node: Node
    gpus: int
    computes: bool

    @property
    def fixed(self) -> int:
        """Cores that it takes however many there are."""
        return min(1, self.node.cpus) if self.gpus else 0

    @property
    def uses_cores(self) -> bool:
        return self.computes and not self.gpus


def _share(config: JobConfig, worker: Seeker, workers: Sequence[Seeker]) -> Share:
    """A worker's part of its node, which it divides with those of `workers` that are there too."""
    if not worker.uses_cores:
        return Share(worker.fixed, worker.gpus)
    node, threads = worker.node, config.target.threads
    there = [other for other in workers if other.node is node]
    free = node.cpus - sum(other.fixed for other in there)
    sharing = sum(other.uses_cores for other in there)
    each = free // sharing if threads == "auto" else threads
    if each * sharing > free or each == 0:
        needed = f"{sharing} workers × {max(each, 1)} threads = {sharing * max(each, 1)} cores"
        raise ConfigError(
            f"decoding.placement: {needed} on one node, and {node.name} has {free}: "
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
