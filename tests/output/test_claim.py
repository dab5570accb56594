"""The claim shows who is at work, and disappears with them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeline.output import claim as claims
from pipeline.output.claim import CLAIM, SILENT_SECONDS, Claim, Holder, holder_of
from pipeline.output.local_store import LocalStore


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "out")


def put_up(store: LocalStore, host: str, pid: int, age: float = 0.0) -> None:
    holder = {"id": "other", "host": host, "pid": pid, "heartbeat": time.time() - age}
    store.replace(CLAIM, json.dumps(holder).encode())


def test_a_claim_is_up_while_it_is_open(store: LocalStore) -> None:
    with Claim(store) as claim:
        holder = holder_of(store)
        assert holder is not None
        assert (holder.id, holder.pid, holder.is_alive()) == (claim.id, os.getpid(), True)
        assert claim.other is None
    assert holder_of(store) is None


def test_another_living_claim_is_seen_and_left_alone(store: LocalStore) -> None:
    put_up(store, "elsewhere", 1)
    with Claim(store) as claim:
        assert claim.other is not None
        assert claim.other.host == "elsewhere"
    assert holder_of(store) == claim.other


def test_a_silent_claim_is_nobodys(store: LocalStore) -> None:
    put_up(store, "elsewhere", 1, age=SILENT_SECONDS + 1)
    with Claim(store) as claim:
        assert claim.other is None
        assert holder_of(store) != claim.other


def test_a_claim_from_before_the_clock_was_put_back_is_nobodys(store: LocalStore) -> None:
    put_up(store, "elsewhere", 1, age=-SILENT_SECONDS - 10)
    with Claim(store) as claim:
        assert claim.other is None


def test_a_claim_of_a_process_that_is_gone_from_this_machine_is_nobodys(store: LocalStore) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    put_up(store, socket.gethostname(), gone.pid)
    with Claim(store) as claim:
        assert claim.other is None


def test_the_heartbeat_is_renewed_and_a_claim_left_by_another_is_taken(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "HEARTBEAT_SECONDS", 0.01)
    put_up(store, "elsewhere", 1)
    with Claim(store) as claim:
        store.remove(CLAIM)
        first = wait_for(store, claim.id, after=0.0)
        assert wait_for(store, claim.id, after=first.heartbeat).heartbeat > first.heartbeat


def wait_for(store: LocalStore, identity: str, after: float) -> Holder:
    for _ in range(500):
        holder = holder_of(store)
        if holder is not None and holder.id == identity and holder.heartbeat > after:
            return holder
        time.sleep(0.01)
    raise AssertionError("no heartbeat")


def test_a_claim_that_cannot_be_read_is_none(store: LocalStore) -> None:
    store.replace(CLAIM, b"{")
    assert holder_of(store) is None


def test_a_sign_that_nobody_can_read_is_replaced(store: LocalStore) -> None:
    store.create(CLAIM, b'{"id": "x')
    with Claim(store) as claim:
        holder = holder_of(store)
        assert holder is not None
        assert holder.id == claim.id
    assert not store.exists(CLAIM)
