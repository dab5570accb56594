"""The policy on a real S3 server: with nothing but its rights, runs do all that they do, and nothing else is possible.

The server grants rights by policies of buckets: each statement is given to a second user there, and is otherwise what
infra/iam-policy.json says.
"""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from botocore.exceptions import ClientError
from deltalake import DeltaTable

from jobs.compact import compact_output
from jobs.run import execute
from tests.infra.manifests import INFRA
from tests.s3.bucket import Bucket, client_of, point_at
from tests.stub_engine import StubEngine, job, local, stub_models

POLICY = json.loads((INFRA / "iam-policy.json").read_text())


class Places:
    """An archive and a place for answers, of which somebody else has the rights of the policy."""

    def __init__(self, server: Any) -> None:
        self.archive, self.answers = (
            Bucket(server.endpoint, server.access_key, server.secret_key) for _ in range(2)
        )
        self.user = f"u{uuid.uuid4().hex[:8]}"
        self.secret = uuid.uuid4().hex
        server.add_user(self.user, self.user, self.secret)
        self.client = client_of(server.endpoint, self.user, self.secret)

    def grant(self, policy: Any) -> None:
        text = json.dumps(policy).replace("REPLACE_ARCHIVE_BUCKET", self.archive.name)
        statements = json.loads(text.replace("REPLACE_ANSWERS_BUCKET", self.answers.name))["Statement"]
        for bucket in (self.archive, self.answers):
            ours = [
                {**statement, "Principal": {"AWS": [f"arn:aws:iam:::user/{self.user}"]}}
                for statement in statements
                if statement["Resource"].split(":::")[1].partition("/")[0] == bucket.name
            ]
            assert ours
            document = json.dumps({"Version": "2012-10-17", "Statement": ours})
            bucket.client.put_bucket_policy(Bucket=bucket.name, Policy=document)

    def write(self, file: str, texts: dict[str, str]) -> None:
        rows = (json.dumps({"doc_id": id, "body": text, "title": "T", "source": "s"}) for id, text in texts.items())
        self.archive.put(f"stories/{file}", "".join(f"{row}\n" for row in rows).encode())


@pytest.fixture
def places(s3_server: Any, monkeypatch: pytest.MonkeyPatch) -> Places:
    made = Places(s3_server)
    point_at(monkeypatch, s3_server.endpoint, made.user, made.secret)
    monkeypatch.setattr("pipeline.remote.files._CONNECTIONS", {})
    made.grant(POLICY)
    return made


def run(places: Places, folder: Path, format: str, **options: Any) -> int:
    config = job(
        folder,
        input__path=f"{places.archive.url}/stories/**/*.jsonl",
        input__keep=["title"],
        output__path=f"{places.answers.url}/summaries",
        output__partition_by=["source"],
        output__format=format,
    )
    return execute(config, executor=local(StubEngine()), models=stub_models(), allow_deletions=True, **options)


def ids(places: Places, format: str) -> list[str]:
    """As somebody with the same rights reads the output."""
    url = f"{places.answers.url}/summaries"
    if format == "delta":
        frame = DeltaTable(url, storage_options={"AWS_ALLOW_HTTP": "true"}).to_pandas()
    else:
        frame = pd.read_parquet(url)
    return sorted(frame["doc_id"])


@pytest.mark.parametrize("format", ["parquet", pytest.param("delta", marks=pytest.mark.slow)])
def test_it_is_enough_for_all_that_runs_do(places: Places, tmp_path: Path, format: str) -> None:
    places.write("2026/a.jsonl", {"1": "one", "2": "two", "3": "three"})
    assert run(places, tmp_path, format) == 0
    places.write("2026/a.jsonl", {"1": "one", "2": "another"})  # one changed, one gone
    places.write("2026/b.jsonl", {"4": "four"})
    assert run(places, tmp_path, format) == 0
    assert ids(places, format) == ["1", "2", "4"]
    compact_output(f"{places.answers.url}/summaries", 1)
    assert ids(places, format) == ["1", "2", "4"]
    assert run(places, tmp_path, format, fresh=True) == 0
    assert ids(places, format) == ["1", "2", "4"]


def test_nothing_else_is_possible(places: Places) -> None:
    places.write("a.jsonl", {"1": "one"})
    places.archive.put("other/secret", b"x")
    places.answers.put("summaries-of-others/secret", b"x")
    client, archive, answers = places.client, places.archive.name, places.answers.name
    tries = [
        lambda: client.put_object(Bucket=archive, Key="stories/a.jsonl", Body=b""),
        lambda: client.delete_object(Bucket=archive, Key="stories/a.jsonl"),
        lambda: client.get_object(Bucket=archive, Key="other/secret"),
        lambda: client.list_objects_v2(Bucket=archive, Prefix="other/"),
        lambda: client.get_object(Bucket=answers, Key="summaries-of-others/secret"),
        lambda: client.put_object(Bucket=answers, Key="summaries-of-others/x", Body=b""),
        lambda: client.list_objects_v2(Bucket=answers, Prefix="summaries-of-others/"),
        lambda: client.put_bucket_policy(Bucket=answers, Policy="{}"),
    ]
    for attempt in tries:
        with pytest.raises(ClientError, match=r"AccessDenied|403"):
            attempt()


def test_without_if_exists_a_name_that_is_not_there_would_be_forbidden(places: Places) -> None:
    """Why the condition is as it is: asking for one name has no prefix."""
    with pytest.raises(ClientError, match="404"):
        places.client.head_object(Bucket=places.answers.name, Key="summaries/nothing")
    places.grant(json.loads(json.dumps(POLICY).replace("StringLikeIfExists", "StringLike")))
    with pytest.raises(ClientError, match="403"):
        places.client.head_object(Bucket=places.answers.name, Key="summaries/nothing")
