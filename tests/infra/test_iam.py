"""The policy: enough for every call that the code makes, on two prefixes, and nothing else."""

from __future__ import annotations

import json
import re
from fnmatch import fnmatchcase
from typing import Any

import pytest

from pipeline.config import load_config
from tests.infra.manifests import CONFIGS, INFRA, ROOT

POLICY = json.loads((INFRA / "iam-policy.json").read_text())
STATEMENTS: list[dict[str, Any]] = POLICY["Statement"]
# What S3 asks to be allowed for a call. For a name that does not exist, HEAD gives 404 only to those who may list.
NEEDS = {
    "head_object": ("s3:GetObject", "s3:ListBucket"),
    "get_object": ("s3:GetObject",),
    "put_object": ("s3:PutObject",),
    "delete_object": ("s3:DeleteObject",),
    "list_objects_v2": ("s3:ListBucket",),
}
ARN = "arn:aws:s3:::"


def actions(statement: dict[str, Any]) -> list[str]:
    found = statement["Action"]
    return [found] if isinstance(found, str) else found


def allows(action: str, bucket: str, key: str | None = None, prefix: str | None = None) -> bool:
    """Would the policy allow it? `prefix`: of a listing; None where the call has none (a HEAD)."""
    resource = f"{ARN}{bucket}" + ("" if key is None else f"/{key}")
    for statement in STATEMENTS:
        patterns = statement.get("Condition", {}).get("StringLikeIfExists", {}).get("s3:prefix", ["*"])
        if (
            action in actions(statement)
            and fnmatchcase(resource, statement["Resource"])
            and (prefix is None or any(fnmatchcase(prefix, pattern) for pattern in patterns))
        ):
            return True
    return False


def places() -> tuple[str, str, str, str]:
    """(bucket, prefix) of the input and of the output of the nightly job."""
    config = load_config(CONFIGS / "nightly-s3.yaml")
    source = config.input.paths[0].removeprefix("s3://").partition("*")[0].rstrip("/")
    output = config.output.path.removeprefix("s3://")
    return *source.partition("/")[::2], *output.partition("/")[::2]  # type: ignore[return-value]


def test_it_is_a_policy_of_named_actions_on_named_resources() -> None:
    assert POLICY["Version"] == "2012-10-17"
    for statement in STATEMENTS:
        assert set(statement) <= {"Sid", "Effect", "Action", "Resource", "Condition"}
        assert statement["Effect"] == "Allow"
        assert all(re.fullmatch(r"s3:[A-Za-z]+", action) for action in actions(statement))
        assert isinstance(statement["Resource"], str)


def test_its_places_are_those_of_the_nightly_job() -> None:
    source, source_prefix, output, output_prefix = places()
    assert {statement["Resource"] for statement in STATEMENTS} == {
        f"{ARN}{source}", f"{ARN}{source}/{source_prefix}/*", f"{ARN}{output}", f"{ARN}{output}/{output_prefix}/*",
    }  # fmt: skip


def test_every_call_that_the_code_makes_is_known_here() -> None:
    code = (ROOT / "pipeline" / "remote" / "s3.py").read_text()
    made = set(re.findall(r'"((?:head|get|put|delete|list|copy|create|upload|complete|abort)_\w+)"', code))
    assert made == set(NEEDS)


@pytest.mark.parametrize("call", ["head_object", "get_object", "list_objects_v2"])
def test_the_input_can_be_listed_and_read(call: str) -> None:
    bucket, prefix, _, _ = places()
    for action in NEEDS[call]:
        listing = action == "s3:ListBucket"
        where = {"prefix": f"{prefix}/2026/"} if call == "list_objects_v2" else {}
        assert allows(action, bucket, None if listing else f"{prefix}/2026/a.parquet", **where)


@pytest.mark.parametrize("call", sorted(NEEDS))
def test_the_output_can_be_listed_read_and_written(call: str) -> None:
    _, _, bucket, prefix = places()
    for action in NEEDS[call]:
        listing = action == "s3:ListBucket"
        where = {"prefix": f"{prefix}/"} if call == "list_objects_v2" else {}
        assert allows(action, bucket, None if listing else f"{prefix}/_SUCCESS", **where)


@pytest.mark.parametrize("action", ["s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload"])
def test_the_input_cannot_be_written(action: str) -> None:
    bucket, prefix, output, _ = places()
    assert bucket != output
    assert not allows(action, bucket, f"{prefix}/a.parquet")


@pytest.mark.parametrize("action", ["s3:GetObject", "s3:PutObject", "s3:DeleteObject"])
def test_nothing_beside_the_prefixes_can_be_touched(action: str) -> None:
    source, source_prefix, output, output_prefix = places()
    for bucket, prefix in ((source, source_prefix), (output, output_prefix)):
        assert not allows(action, bucket, "secret")
        assert not allows(action, bucket, f"{prefix}-other/x")
        assert not allows("s3:ListBucket", bucket, prefix="secret/")
        assert not allows("s3:ListBucket", bucket, prefix=f"{prefix}-other/")


def test_the_readme_says_what_each_action_is_for() -> None:
    readme = (INFRA / "README.md").read_text()
    for action in {action for statement in STATEMENTS for action in actions(statement)}:
        assert f"`{action}`" in readme
