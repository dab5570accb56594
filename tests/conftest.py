"""What all tests share: one Ray and one S3 server for the whole session, each started by the first test that asks."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ["NIGHTDESK_LOG"] = "text"  # as on a terminal; tests of the other way say so


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


@pytest.fixture(scope="session")
def s3_proxy(s3_server: Any) -> Iterator[Any]:
    """A proxy (`tests.s3.proxy.Proxy`) before that server."""
    from tests.s3.proxy import Proxy

    with Proxy(s3_server.endpoint, s3_server.access_key, s3_server.secret_key) as between:
        yield between


@pytest.fixture(scope="session")
def s3_connections() -> dict[str, Any]:
    """By endpoint, the connections of tests that change nobody's credentials: making one takes its time."""
    return {}


@pytest.fixture
def s3(s3_server: Any, s3_connections: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """A fresh bucket (`tests.s3.bucket.Bucket`) on the server that the environment of this test points at."""
    from tests.s3.bucket import Bucket, point_at

    bucket = Bucket(s3_server.endpoint, s3_server.access_key, s3_server.secret_key)
    point_at(monkeypatch, bucket.endpoint, bucket.access_key, bucket.secret_key)
    monkeypatch.setattr("pipeline.remote.files._CONNECTIONS", s3_connections.setdefault(bucket.endpoint, {}))
    return bucket


@pytest.fixture
def proxy(s3: Any, s3_proxy: Any, s3_connections: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """A proxy without faults, through which all requests of this test go but those of its bucket."""
    from tests.s3.bucket import point_at

    s3_proxy.reset()
    point_at(monkeypatch, s3_proxy.endpoint, s3.access_key, s3.secret_key)
    monkeypatch.setattr("pipeline.remote.files._CONNECTIONS", s3_connections.setdefault(s3_proxy.endpoint, {}))
    return s3_proxy
