"""A bucket of its own for a test, and its test's own eyes on it: another client than the code under test uses."""

from __future__ import annotations

import uuid
from functools import cache
from typing import Any

import botocore.session
import pytest
from botocore.config import Config

# What could lead a client elsewhere, or to other keys.
ELSEWHERE = ("AWS_PROFILE", "AWS_DEFAULT_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL_S3", "AWS_CA_BUNDLE")


@cache
def client_of(endpoint: str, access_key: str, secret_key: str) -> Any:
    """botocore's own client, which this project uses nowhere."""
    return botocore.session.Session().create_client(
        "s3",
        endpoint_url=endpoint,
        region_name="us-east-1",
        aws_access_key_id=access_key,
        aws_secret_access_key=secret_key,
        config=Config(request_checksum_calculation="when_required", max_pool_connections=32),
    )


class Bucket:
    """An empty bucket at `endpoint`."""

    def __init__(self, endpoint: str, access_key: str, secret_key: str) -> None:
        self.endpoint = endpoint
        self.access_key = access_key
        self.secret_key = secret_key
        self.name = f"t-{uuid.uuid4().hex[:12]}"
        self.url = f"s3://{self.name}"
        self.client = client_of(endpoint, access_key, secret_key)
        self.client.create_bucket(Bucket=self.name)

    def put(self, key: str, data: bytes = b"") -> None:
        self.client.put_object(Bucket=self.name, Key=key, Body=data)

    def get(self, key: str) -> bytes | None:
        """None if there is none."""
        try:
            found: bytes = self.client.get_object(Bucket=self.name, Key=key)["Body"].read()
        except self.client.exceptions.NoSuchKey:
            return None
        return found

    def copy(self, key: str, to: str) -> None:
        self.client.copy_object(Bucket=self.name, Key=to, CopySource={"Bucket": self.name, "Key": key})

    def remove(self, key: str) -> None:
        self.client.delete_object(Bucket=self.name, Key=key)

    def keys(self, prefix: str = "") -> list[str]:
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=self.name, Prefix=prefix)
        return [entry["Key"] for page in pages for entry in page.get("Contents", [])]

    def uploads(self) -> list[str]:
        """Multipart uploads that were begun and not ended."""
        return [entry["Key"] for entry in self.client.list_multipart_uploads(Bucket=self.name).get("Uploads", [])]


def point_at(monkeypatch: pytest.MonkeyPatch, endpoint: str, access_key: str, secret_key: str) -> None:
    """Make `endpoint` the S3 of this process and of those that it starts."""
    for name in ELSEWHERE:
        monkeypatch.delenv(name, raising=False)
    for name, value in {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": access_key,
        "AWS_SECRET_ACCESS_KEY": secret_key,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
        "AWS_CONFIG_FILE": "/dev/null",
    }.items():
        monkeypatch.setenv(name, value)
