"""What Ray's autoscaler (its second version) makes of a cluster's node types when a job of configs/ asks for room."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from ray.autoscaler.v2.event_logger import AutoscalerEventLogger
from ray.autoscaler.v2.instance_manager.config import AutoscalingConfig
from ray.autoscaler.v2.scheduler import ResourceDemandScheduler, SchedulingRequest
from ray.autoscaler.v2.utils import ResourceRequestUtil

from actors.placement import demand
from actors.seats import _resources
from pipeline.config import load_config
from tests.infra.manifests import CONFIGS


def launched(cluster: Any, job: str, unavailable: Mapping[str, float] | None = None) -> dict[str, int]:
    """Workers that are launched, by node type; `unavailable` are types that could not be had a moment ago."""
    config = AutoscalingConfig(cluster, skip_content_hash=True)
    requests = []
    for group in demand(load_config(CONFIGS / job)):
        wanted: Counter[str] = Counter()  # a group on one node is one request
        for bundle in group:
            for name, amount in _resources(bundle, planned=False).items():
                wanted[name] += amount  # type: ignore[assignment]
        requests.append(ResourceRequestUtil.make(dict(wanted)))
    scores = {name: 1.0 for name in cluster["available_node_types"]} | dict(unavailable or {})
    reply = ResourceDemandScheduler(AutoscalerEventLogger(None)).schedule(
        SchedulingRequest(
            disable_launch_config_check=True,
            node_type_configs=config.get_node_type_configs(),
            max_num_nodes=config.get_max_num_worker_nodes(),
            resource_requests=ResourceRequestUtil.group_by_count(requests),
            cloud_resource_availabilities=scores,
            recoverable_resource_availabilities=scores,
        )
    )
    assert not reply.infeasible_resource_requests, reply.infeasible_resource_requests
    head = config.get_head_node_type()
    return {launch.instance_type: launch.count for launch in reply.to_launch if launch.instance_type != head}
