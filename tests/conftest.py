"""What all tests share: one Ray for the whole session, started by the first test that asks for it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def ray_address(ray_cluster: Any) -> str:
    """The address of a Ray with two cores, to which this process is connected."""
    return str(ray_cluster.address)


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[Any]:
    """The `ray.cluster_utils.Cluster` behind it: whoever adds nodes removes them."""
    import ray
    from ray.cluster_utils import Cluster

    import actors.session  # noqa: F401 - sets what Ray reads when it is imported

    folder = tempfile.mkdtemp(prefix="nt-", dir="/tmp")  # socket paths are limited to 107 bytes
    Path("/tmp/ray").mkdir(exist_ok=True)  # Cluster notes its address there, and expects the folder
    head = {"num_cpus": 2, "include_dashboard": False, "object_store_memory": 128 * 2**20, "temp_dir": folder}
    cluster = Cluster(initialize_head=True, head_node_args={**head, "no_monitor": True, "include_log_monitor": False})
    ray.init(address=cluster.address, log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()
    shutil.rmtree(folder, ignore_errors=True)
