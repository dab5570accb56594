"""The Kubernetes resources: valid by KubeRay's own schemas and Kubernetes', alike where they say the same, and safe."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray._private.label_utils import validate_node_labels
from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr

from tests.infra.manifests import documents, kind, pinned, problems, schema_of
from tests.infra.scaling import launched

RESOURCES = [("raycluster", "RayCluster"), ("rayjob", "RayJob"), ("raycronjob", "RayCronJob")]
FILES = ["raycluster", "rayjob", "raycronjob", "cronjob", "access"]


def cluster_spec(name: str) -> Any:
    spec = kind(f"kuberay/{name}.yaml", dict(RESOURCES)[name])["spec"]
    return {"raycluster": spec, "rayjob": spec.get("rayClusterSpec")}.get(name) or spec["jobTemplate"]["rayClusterSpec"]


def pods() -> dict[str, Any]:
    """All pod templates, by where they are."""
    found: dict[str, Any] = {}
    for name, _ in RESOURCES:
        spec = cluster_spec(name)
        found[f"{name} head"] = spec["headGroupSpec"]["template"]["spec"]
        found |= {f"{name} {group['groupName']}": group["template"]["spec"] for group in spec["workerGroupSpecs"]}
    cron = kind("kuberay/cronjob.yaml", "CronJob")
    return found | {"cronjob": cron["spec"]["jobTemplate"]["spec"]["template"]["spec"]}


class TestSchemas:
    @pytest.mark.parametrize(("name", "wanted"), RESOURCES)
    def test_kuberay_takes_them_and_drops_nothing(self, name: str, wanted: str) -> None:
        assert problems(kind(f"kuberay/{name}.yaml", wanted), schema_of(wanted)) == []

    @pytest.mark.parametrize(
        ("path", "value"),
        [
            (("spec", "backofLimit"), 0),
            (("spec", "backoffLimit"), "none"),
            (("spec", "rayClusterSpec", "headGroupSpec", "template", "spec", "containers", 0, "imagePullPolcy"), "x"),
            (("spec", "rayClusterSpec", "workerGroupSpecs", 0, "maxReplicas"), None),
            (("spec", "rayClusterSpec", "authOptions", "mode"), "password"),
        ],
    )
    def test_a_mistake_is_found(self, path: tuple[str | int, ...], value: Any) -> None:
        resource = kind("kuberay/rayjob.yaml", "RayJob")
        at: Any = resource
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = value
        assert problems(resource, schema_of("RayJob"))

    def test_the_cron_jobs_pod_is_one_by_the_schema_that_kuberay_embeds(self) -> None:
        schema = schema_of("RayCluster")["properties"]["spec"]["properties"]["headGroupSpec"]["properties"]["template"]
        template = kind("kuberay/cronjob.yaml", "CronJob")["spec"]["jobTemplate"]["spec"]["template"]
        assert problems(template, schema) == []

    @pytest.mark.parametrize("name", ["cronjob", "access"])
    def test_kubernetes_takes_the_others(self, name: str) -> None:
        validator = pytest.importorskip("kubernetes_validate", reason="no Kubernetes schemas: pip install -e '.[dev]'")
        for document in documents(f"kuberay/{name}.yaml"):
            validator.validate(document, "1.33", strict=True)


class TestAlike:
    def test_the_three_clusters_are_one(self) -> None:
        assert cluster_spec("raycluster") == cluster_spec("rayjob") == cluster_spec("raycronjob")

    def test_the_two_jobs_are_one(self) -> None:
        job = kind("kuberay/rayjob.yaml", "RayJob")["spec"]
        assert kind("kuberay/raycronjob.yaml", "RayCronJob")["spec"]["jobTemplate"] == job

    def test_both_schedules_are_one(self) -> None:
        cron, ray_cron = kind("kuberay/cronjob.yaml", "CronJob"), kind("kuberay/raycronjob.yaml", "RayCronJob")
        for key in ("schedule", "timeZone"):
            assert cron["spec"][key] == ray_cron["spec"][key]

    def test_rays_version_is_that_of_the_dependencies(self) -> None:
        assert cluster_spec("rayjob")["rayVersion"] == pinned("ray")


class TestNights:
    def test_every_limit_is_later_than_what_it_guards(self) -> None:
        cron, job = kind("kuberay/cronjob.yaml", "CronJob")["spec"], kind("kuberay/rayjob.yaml", "RayJob")["spec"]
        minute, hour = map(int, cron["schedule"].split()[:2])
        until = re.search(r"--until (\d\d):(\d\d)", job["entrypoint"])
        assert until is not None
        night = ((int(until[1]) - hour) % 24 * 60 + int(until[2]) - minute) * 60
        assert cron["timeZone"] == "Etc/UTC"  # the clock of --until is the pods'
        assert night < job["activeDeadlineSeconds"] < cron["jobTemplate"]["spec"]["activeDeadlineSeconds"] < 86400

    def test_one_night_is_tried_once_and_its_cluster_goes(self) -> None:
        cron, job = kind("kuberay/cronjob.yaml", "CronJob")["spec"], kind("kuberay/rayjob.yaml", "RayJob")["spec"]
        assert (cron["concurrencyPolicy"], cron["jobTemplate"]["spec"]["backoffLimit"]) == ("Forbid", 0)
        assert (job["backoffLimit"], job["submitterConfig"]["backoffLimit"]) == (0, 0)
        assert job["shutdownAfterJobFinishes"] is True
        assert job["ttlSecondsAfterFinished"] > 0

    def test_a_code_version_has_a_name_of_its_own(self) -> None:
        environment = yaml.safe_load(kind("kuberay/rayjob.yaml", "RayJob")["spec"]["runtimeEnvYAML"])
        assert re.fullmatch(r"https://.*REPLACE_COMMIT.*\.zip", environment["working_dir"])


class TestRights:
    def test_the_cron_jobs_role_allows_what_its_script_does_and_no_more(self) -> None:
        role = kind("kuberay/access.yaml", "Role")
        (rule,) = role["rules"]
        assert rule == {"apiGroups": ["ray.io"], "resources": ["rayjobs"], "verbs": ["create", "get", "list"]}
        binding = kind("kuberay/access.yaml", "RoleBinding")
        assert binding["roleRef"]["name"] == role["metadata"]["name"]
        script = pods()["cronjob"]["containers"][0]["args"][0]
        assert set(re.findall(r"kubectl (\w+)", script)) == {"get", "create"}

    def test_every_service_account_that_is_used_exists(self) -> None:
        accounts = {d["metadata"]["name"] for d in documents("kuberay/access.yaml") if d["kind"] == "ServiceAccount"}
        (subject,) = kind("kuberay/access.yaml", "RoleBinding")["subjects"]
        assert {pod["serviceAccountName"] for pod in pods().values()} | {subject["name"]} == accounts

    @pytest.mark.parametrize("where", list(pods()))
    def test_no_pod_runs_as_root(self, where: str) -> None:
        pod = pods()[where]
        assert pod["securityContext"]["runAsNonRoot"] is True
        for container in pod["containers"]:
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert "env" not in container  # where a secret would be

    @pytest.mark.parametrize("name", [name for name, _ in RESOURCES])
    def test_a_cluster_wants_a_token(self, name: str) -> None:
        assert cluster_spec(name)["authOptions"] == {"mode": "token"}


class TestScaling:
    """By Ray's own autoscaler, in its second version."""

    def types(self) -> Any:
        cluster = {"metadata": {"name": "nightdesk", "namespace": "default"}, "spec": cluster_spec("rayjob")}
        return _derive_autoscaling_config_from_ray_cr(cluster)

    def test_what_a_group_says_it_has_is_what_its_pod_asks_for(self) -> None:
        for group in cluster_spec("rayjob")["workerGroupSpecs"]:
            limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
            assert (group["resources"]["CPU"], group["resources"]["GPU"]) == (limits["cpu"], limits["nvidia.com/gpu"])

    def test_the_head_has_neither_gpu_nor_room_for_workers(self) -> None:
        head = self.types()["available_node_types"]["headgroup"]["resources"]
        assert (head["CPU"], head.get("GPU", 0)) == (0, 0)

    def test_labels_can_be_set_by_ray(self) -> None:
        for group in cluster_spec("rayjob")["workerGroupSpecs"]:
            assert group["labels"]["ray.io/accelerator-type"] in {"H100", "L4"}
            validate_node_labels({k: v for k, v in group["labels"].items() if not k.startswith("ray.io/")})

    def test_the_nightly_job_gets_its_nodes(self) -> None:
        assert launched(self.types(), "nightly-s3.yaml") == {"target": 1, "draft": 4}

    def test_the_72b_job_gets_its_nodes(self) -> None:
        assert launched(self.types(), "72b-four-h100.yaml") == {"target": 1, "draft": 2}


KUBECTL = """#!/bin/sh
# Notes what it is asked, and answers from files: what there is, and then one status after another.
echo "$*" >> "$STUB/calls"
case "$1 $2" in
  "get rayjobs") cat "$STUB/there" ;;
  "create -f") printf nightdesk-x7 ;;
  "get rayjob")
    status=$(head -n 1 "$STUB/statuses")
    [ "$(wc -l < "$STUB/statuses")" -gt 1 ] && sed -i 1d "$STUB/statuses"
    [ "$status" = away ] && exit 1
    case "$*" in *message*) echo "$status: told" ;; *) printf %s "$status" ;; esac ;;
esac
"""


class TestScript:
    """The cron job's own shell script, with a kubectl that answers from files."""

    def run(self, folder: Path, there: str, statuses: list[str]) -> tuple[int, list[str], str]:
        kubectl = folder / "kubectl"
        kubectl.write_text(KUBECTL)
        kubectl.chmod(0o755)
        (folder / "there").write_text(there)
        (folder / "statuses").write_text("\n".join(statuses) + "\n")
        container = pods()["cronjob"]["containers"][0]
        path = f"{folder}:/usr/bin:/bin"
        done = subprocess.run(
            [*container["command"], *container["args"]],
            env={"PATH": path, "STUB": str(folder), "POLL_SECONDS": "0"}, capture_output=True, text=True, timeout=20,
        )  # fmt: skip
        return done.returncode, (folder / "calls").read_text().splitlines(), done.stdout + done.stderr

    def test_it_creates_a_job_and_waits_for_its_end(self, tmp_path: Path) -> None:
        code, calls, said = self.run(
            tmp_path, "nightdesk-a1=Complete nightdesk-b2=Failed ", ["", "Initializing", "Running", "Complete"]
        )
        assert code == 0
        assert [call for call in calls if call.startswith("create")] == [
            "create -f /etc/nightdesk/rayjob.yaml -o jsonpath={.metadata.name}"
        ]
        assert "created nightdesk-x7" in said

    @pytest.mark.parametrize("end", ["Failed", "ValidationFailed"])
    def test_a_failed_night_fails_the_job_and_says_why(self, tmp_path: Path, end: str) -> None:
        code, _, said = self.run(tmp_path, "", ["Running", end])
        assert code == 1
        assert f"{end}: told" in said

    @pytest.mark.parametrize("status", ["Running", "", "Retrying"])
    def test_beside_one_that_is_at_work_it_creates_none(self, tmp_path: Path, status: str) -> None:
        code, calls, said = self.run(tmp_path, f"nightdesk-a1=Complete nightdesk-b2={status} ", ["Complete"])
        assert code == 1
        assert not any(call.startswith("create") for call in calls)
        assert "nightdesk-b2 is still at work" in said

    def test_an_api_server_that_is_away_for_a_moment_is_asked_again(self, tmp_path: Path) -> None:
        code, calls, _ = self.run(tmp_path, "", ["Running", "away", "Running", "Complete"])
        assert code == 0
        assert sum(call.startswith("create") for call in calls) == 1

    def test_it_is_a_script_for_the_shell_of_small_images(self) -> None:
        shell = shutil.which("dash") or shutil.which("busybox")
        if shell is None:
            pytest.skip("neither dash nor busybox is here")
        script = pods()["cronjob"]["containers"][0]["args"][0]
        command = [shell, *(["sh"] if shell.endswith("busybox") else []), "-n", "-c", script]
        assert subprocess.run(command, capture_output=True, text=True).stderr == ""
