"""Credentials that expire in the middle of a run are made anew by whoever gave them."""

from __future__ import annotations

import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import OutputError, StoreError
from pipeline.output.object_store import ObjectStore
from pipeline.remote import files
from tests.s3.bucket import Bucket
from tests.s3.proxy import Proxy, answer, of

LATER = ("laterkey", "latersecret")


@pytest.fixture(scope="module")
def later(s3_server: Any) -> tuple[str, str]:
    """Keys beside those of the server's user."""
    s3_server.add_key(*LATER)
    return LATER


class SharedFile:
    """The provider that reads ~/.aws/credentials."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path = folder / "credentials"
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(self.path))

    def give(self, access_key: str, secret_key: str) -> None:
        self.path.write_text(f"[default]\naws_access_key_id={access_key}\naws_secret_access_key={secret_key}\n")


class Process:
    """The provider that runs a program."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answer = folder / "answer.json"
        program = folder / "program.py"
        program.write_text(f"print(open({str(self.answer)!r}).read())")
        (folder / "config").write_text(f"[default]\ncredential_process = {sys.executable} {program}\n")
        monkeypatch.setenv("AWS_CONFIG_FILE", str(folder / "config"))

    def give(self, access_key: str, secret_key: str) -> None:
        keys = {"Version": 1, "AccessKeyId": access_key, "SecretAccessKey": secret_key}
        self.answer.write_text(json.dumps(keys))


@pytest.fixture(params=[SharedFile, Process])
def provider(
    request: pytest.FixtureRequest, proxy: Proxy, s3: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> SharedFile | Process:
    """Where a new connection gets its credentials from, since the environment has none; those of the bucket now."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setattr(files, "_CONNECTIONS", {})
    monkeypatch.setattr(files, "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(files, "PATIENCE_SECONDS", 2.0)
    made: SharedFile | Process = request.param(tmp_path, monkeypatch)
    made.give(s3.access_key, s3.secret_key)
    return made


def test_expired_credentials_are_made_anew_in_mid_run(
    provider: SharedFile | Process, s3: Bucket, proxy: Proxy, later: tuple[str, str]
) -> None:
    store = ObjectStore(f"{s3.url}/out")
    assert store.create("a", b"1" * 1_000_000)
    with store.open("a") as file:
        file.read(1)
        proxy.expired.add(s3.access_key)
        provider.give(*later)
        file.seek(900_000)
        assert file.read(1) == b"1"
    for act in (lambda: store.create("b", b"2"), lambda: store.exists("b"), store.names, store.visible):
        assert act()
    assert store.read("b") == b"2"


def test_a_head_that_says_nothing_but_400_is_taken_for_expired_credentials(
    provider: SharedFile | Process, s3: Bucket, proxy: Proxy, later: tuple[str, str]
) -> None:
    store = ObjectStore(f"{s3.url}/out")
    store.create("a", b"")
    proxy.expired.add(s3.access_key)
    provider.give(*later)
    assert store.exists("a")


def test_credentials_that_are_renewed_a_little_late_are_waited_for(
    provider: SharedFile | Process, s3: Bucket, proxy: Proxy, later: tuple[str, str]
) -> None:
    store = ObjectStore(f"{s3.url}/out")
    store.create("a", b"")
    proxy.expired.add(s3.access_key)
    timer = threading.Timer(0.5, provider.give, later)
    timer.start()
    assert store.read("a") == b""
    timer.join()


def test_many_at_once_renew_once(
    provider: SharedFile | Process, s3: Bucket, proxy: Proxy, later: tuple[str, str]
) -> None:
    store = ObjectStore(f"{s3.url}/out")
    store.create("a", b"1")
    proxy.expired.add(s3.access_key)
    provider.give(*later)
    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(lambda _: store.read("a"), range(8))) == {b"1"}
    (connection,) = files._CONNECTIONS.values()
    assert connection.age == 1


def test_credentials_that_nobody_renews_end_the_run_resumably(
    provider: SharedFile | Process, s3: Bucket, proxy: Proxy
) -> None:
    store = ObjectStore(f"{s3.url}/out")
    store.create("a", b"")
    proxy.expired.add(s3.access_key)
    with pytest.raises(StoreError, match=r"ExpiredToken.*renew them and run the same command again"):
        store.read("a")


def test_keys_that_were_replaced_are_taken_from_the_provider_once(
    provider: SharedFile | Process, s3: Bucket, proxy: Proxy
) -> None:
    provider.give("nosuchkey", "nosuchsecret")
    with pytest.raises(OutputError, match="InvalidAccessKeyId"):
        ObjectStore(f"{s3.url}/out").names()
    assert proxy.count("GET") == 2
    provider.give(s3.access_key, s3.secret_key)
    assert ObjectStore(f"{s3.url}/out").names() == []


def test_a_passing_refusal_is_asked_about_once_more(proxy: Proxy, s3: Bucket) -> None:
    proxy.fail(of("PUT"), answer(403, "AccessDenied"))
    assert ObjectStore(f"{s3.url}/out").create("a", b"")


def test_no_credentials_at_all_is_told_at_once(proxy: Proxy, s3: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setattr(files, "_CONNECTIONS", {})
    with pytest.raises(OutputError, match=r"Unable to locate credentials.*in the environment or a profile"):
        ObjectStore(f"{s3.url}/out").names()
