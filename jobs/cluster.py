"""Where a run's workers would sit on the cluster: what `check --cluster` prints."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from actors.autoscaler import autoscales
from actors.node import Node
from actors.placement import Placement, place
from actors.session import nodes, ray_session
from pipeline.config import JobConfig
from pipeline.errors import ConfigError


@dataclass(frozen=True)
class ClusterPlan:
    """What a run would do with the cluster as it is now, in use or not."""

    nodes: tuple[Node, ...]
    placement: Placement | None  # None: the cluster is too small, and an autoscaler may change that
    lacking: str = ""  # the arithmetic, where `placement` is None
    patience: float = 0.0  # seconds that a run would wait

    def as_json(self) -> dict[str, Any]:
        if self.placement is None:
            return {"placed": False, "lacking": self.lacking, "waits_seconds": self.patience}
        workers = {node.name: lines for node, lines in self.placement.by_node()}
        left = {node.name: node for node in self.placement.left(self.nodes)}
        return {
            "placed": True,
            "separate": self.placement.separate,
            "replicas": len(self.placement.replicas),
            "drafts": len(self.placement.drafts),
            "nodes": [
                {
                    "name": node.name,
                    "cpus": node.cpus,
                    "gpus": node.gpus,
                    "accelerators": sorted(node.accelerators),
                    "workers": list(workers.get(node.name, ())),
                    "cpus_left": left[node.name].cpus,
                    "gpus_left": left[node.name].gpus,
                }
                for node in self.nodes
            ],
        }

    def rows(self) -> Iterator[tuple[str, str]]:
        """Label and text of each line of the table."""
        if self.placement is None:
            yield "cluster", f"a run would wait up to {self.patience:g} s for the autoscaler: {self.lacking}"
            return
        replicas, drafts = len(self.placement.replicas), len(self.placement.drafts)
        how = "separate" if self.placement.separate else "colocated"
        workers = f" and {drafts} draft worker{'s' * (drafts != 1)}" if drafts else ""
        machines = f"{len(self.nodes)} node{'s' * (len(self.nodes) != 1)}"
        yield "cluster", f"{replicas} replica{'s' * (replicas != 1)}{workers} on {machines}, {how}"
        left = {node.name: node for node in self.placement.left(self.nodes)}
        seated = dict((node.name, lines) for node, lines in self.placement.by_node())
        for node in self.nodes:
            lines = "; ".join(seated.get(node.name, ("nobody",)))
            yield "", f"{node.name} ({node.describe()}) ← {lines}; left: {left[node.name].describe()}"


def plan_on_cluster(config: JobConfig) -> ClusterPlan:
    """Connect as a run would, and place the job. ConfigError where a run would be refused."""
    with ray_session():
        cluster = tuple(nodes())
        try:
            return ClusterPlan(cluster, place(config, cluster))
        except ConfigError as refusal:
            if not autoscales():
                raise
            return ClusterPlan(cluster, None, str(refusal), config.decoding.placement_timeout)
