"""The cluster on EC2: valid by Ray's own rules, and its autoscaler gives the jobs their nodes, spot first."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest
from ray.autoscaler._private.util import prepare_config, validate_config

from tests.infra.manifests import documents
from tests.infra.scaling import launched


@pytest.fixture
def cluster() -> Any:
    (found,) = documents("aws-cluster.yaml")
    return found


def test_ray_takes_it(cluster: Any) -> None:
    validate_config(prepare_config(cluster))


def test_a_key_that_ray_does_not_know_is_found(cluster: Any) -> None:
    cluster["available_node_types"]["draft-spot"]["max_worker"] = 1
    with pytest.raises(jsonschema.ValidationError, match="max_worker"):
        validate_config(prepare_config(cluster))


def test_the_head_is_no_gpu_node_and_no_place_for_workers(cluster: Any) -> None:
    head = cluster["available_node_types"][cluster["head_node_type"]]
    assert (head["resources"], head["max_workers"]) == ({"CPU": 0}, 0)
    assert "InstanceMarketOptions" not in head["node_config"]
    assert any("--num-cpus=0" in command for command in cluster["head_start_ray_commands"])


@pytest.mark.parametrize(("group", "instance", "gpus"), [("target", "p5.48xlarge", 8), ("draft", "g6.xlarge", 1)])
def test_spot_and_on_demand_are_the_same_machine(cluster: Any, group: str, instance: str, gpus: int) -> None:
    spot, other = (cluster["available_node_types"][f"{group}-{market}"] for market in ("spot", "on-demand"))
    assert spot["resources"] == other["resources"]
    assert spot["resources"]["GPU"] == gpus
    assert {node["node_config"]["InstanceType"] for node in (spot, other)} == {instance}
    assert spot["node_config"]["InstanceMarketOptions"] == {"MarketType": "spot"}
    assert "InstanceMarketOptions" not in other["node_config"]


def test_no_more_nodes_are_promised_than_may_be(cluster: Any) -> None:
    assert sum(node["max_workers"] for node in cluster["available_node_types"].values()) <= cluster["max_workers"]
    assert all(node["min_workers"] == 0 for node in cluster["available_node_types"].values())


def test_a_job_gets_spot_nodes(cluster: Any) -> None:
    assert launched(cluster, "nightly-s3.yaml") == {"target-spot": 1, "draft-spot": 4}
    assert launched(cluster, "72b-four-h100.yaml") == {"target-spot": 1, "draft-spot": 2}


def test_where_there_are_none_it_gets_the_others(cluster: Any) -> None:
    gone = {"target-spot": 0.0, "draft-spot": 0.0}
    assert launched(cluster, "nightly-s3.yaml", gone) == {"target-on-demand": 1, "draft-on-demand": 4}


def test_workers_have_other_rights_than_the_head(cluster: Any) -> None:
    head = cluster["available_node_types"]["head"]["node_config"]["IamInstanceProfile"]["Arn"]
    workers = {
        node["node_config"]["IamInstanceProfile"]["Arn"]
        for name, node in cluster["available_node_types"].items()
        if name != "head"
    }
    assert len(workers) == 1
    assert head not in workers


def test_all_that_is_copied_is_the_token(cluster: Any) -> None:
    assert list(cluster["file_mounts"].values()) == ["~/.ray/auth_token"]
    assert not cluster["cluster_synced_files"]


def test_nobody_gets_in_without_the_token(cluster: Any) -> None:
    assert "--env RAY_AUTH_MODE=token" in cluster["docker"]["run_options"]
    assert any("--dashboard-host=127.0.0.1" in command for command in cluster["head_start_ray_commands"])
    assert cluster["provider"]["use_internal_ips"] is True
