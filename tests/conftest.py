"""What all tests share: one Ray and one S3 server for the whole session, each started by the first test that asks."""

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


@pytest.fixture(scope="session")
def s3_server() -> Iterator[Any]:
    """A real S3 server (`tests.s3.server.S3Server`); the first test that asks for it may have to fetch it."""
    from tests.s3.server import S3Server, Unavailable

    try:
        server = S3Server()
    except Unavailable as reason:
        pytest.skip(f"no S3 server: {reason}")
    with server:
        yield server


@pytest.fixture
def s3(s3_server: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A fresh bucket (`tests.s3.bucket.Bucket`) on the server that the environment of this test points at."""
    from tests.s3.bucket import Bucket, point_at

    point_at(monkeypatch, s3_server.endpoint, s3_server.access_key, s3_server.secret_key)
    return Bucket(s3_server.endpoint, s3_server.access_key, s3_server.secret_key)
