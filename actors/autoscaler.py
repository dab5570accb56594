"""From a job to a placement on the cluster that is there, or that an autoscaler makes of it."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import ray
from ray._private.ray_constants import DEBUG_AUTOSCALING_STATUS
from ray._private.state import state
from ray.autoscaler.v2.sdk import get_cluster_status
from ray.experimental.internal_kv import _internal_kv_get
from ray.util.placement_group import PlacementGroup, remove_placement_group

from actors.placement import Bundle, Placement, demand, place
from actors.seats import ask
from actors.session import nodes
from pipeline.config import JobConfig
from pipeline.errors import ConfigError, WorkerLost

LOG = logging.getLogger(__name__)
LOOK_SECONDS = 1.0  # between two looks at a cluster that grows


def arrange(config: JobConfig) -> Placement:
    """Place a job on the cluster.

    ConfigError where the cluster is too small; where an autoscaler may make it larger, WorkerLost when that has not
    happened within `decoding.placement_timeout`.
    """
    try:
        return place(config, nodes())
    except ConfigError as refusal:
        if not autoscales():
            raise
        return _arrange_when_grown(config, refusal)


def _arrange_when_grown(config: JobConfig, refusal: ConfigError) -> Placement:
    seconds = config.decoding.placement_timeout
    deadline = time.monotonic() + seconds
    LOG.warning("waiting up to %g s for the autoscaler: %s", seconds, refusal, extra={"event": "placement"})
    with _demanded(demand(config)):
        while time.monotonic() < deadline:
            try:
                return place(config, nodes())
            except ConfigError as still:
                refusal = still
            time.sleep(min(LOOK_SECONDS, max(deadline - time.monotonic(), 0)))
    raise WorkerLost(
        f"decoding.placement_timeout: after {seconds:g} s the autoscaler has not made enough room: {refusal}"
    )


@contextmanager
def _demanded(demands: Sequence[Sequence[Bundle]]) -> Iterator[None]:
    """An autoscaler makes nodes for placement groups that wait."""
    groups: list[PlacementGroup] = []
    try:
        for bundles in demands:
            groups.append(ask(bundles, planned=False))
        yield
    finally:
        for group in groups:
            remove_placement_group(group)


def autoscales() -> bool:
    """Does somebody add nodes to this cluster?

    Ray runs the autoscaler's monitor on every cluster, where nothing is to be scaled with a read-only provider. That
    one calls each node's type `node_<id>`; a real one knows types with names (version 1 in the status that it leaves in
    the internal key-value store, version 2 in the state of the nodes), or has reported its configuration.
    """
    configured = state.get_cluster_config()
    if configured is not None and configured.node_group_configs:
        return True
    left = _internal_kv_get(DEBUG_AUTOSCALING_STATUS)
    report = (json.loads(left).get("autoscaler_report") or {}) if left else {}
    types = set(report.get("active_nodes") or {}) | set(report.get("pending_launches") or {})
    status = get_cluster_status(ray.get_runtime_context().gcs_address)
    types |= {node.ray_node_type_name for node in (*status.active_nodes, *status.idle_nodes)}
    return bool(status.pending_launches) or any(not _is_read_only(name) for name in types)


def _is_read_only(node_type: str) -> bool:
    head, _, identity = node_type.partition("_")
    return head == "node" and len(identity) == 56 and set(identity) <= set("0123456789abcdef")
