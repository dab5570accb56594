"""How a call is repeated, by a clock that the test turns."""

from __future__ import annotations

import logging
import pickle
import time
from collections.abc import Callable
from typing import Any

import pytest

from pipeline.remote import files
from pipeline.remote.failures import Kind, RemoteFailure
from pipeline.remote.files import Connection, Files, files_of


class Expired(OSError):
    pass


class Faked(Files):
    """Files of nothing: its calls are what a test gives it."""

    def kind_of(self, error: BaseException) -> Kind:
        return Kind.EXPIRED if isinstance(error, Expired) else super().kind_of(error)

    def make(self) -> Any:
        return object()

    @property
    def connection(self) -> Connection:
        return self._connection()


@pytest.fixture
def faked(monkeypatch: pytest.MonkeyPatch) -> Faked:
    monkeypatch.setattr(files, "_CONNECTIONS", {})
    return Faked("faked")


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What was slept, on a clock that nothing else moves."""
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    monkeypatch.setattr(time, "monotonic", lambda: sum(slept))
    return slept


def failing(*errors: BaseException) -> Callable[[Any], str]:
    """A call that fails so, one after the other, and then does not."""
    left = list(errors)

    def act(filesystem: Any) -> str:
        if left:
            raise left.pop(0)
        return "done"

    return act


def test_pauses_grow_and_are_not_the_same_for_all(faked: Faked, pauses: list[float]) -> None:
    assert faked.call("reading", "b/a", failing(*[ConnectionResetError()] * 8)) == "done"
    for place, pause in enumerate(pauses):
        longest = min(files.FIRST_PAUSE_SECONDS * 2**place, files.LONGEST_PAUSE_SECONDS)
        assert longest / 2 <= pause <= longest
    assert len({pause / 2**place for place, pause in enumerate(pauses[:6])}) == 6


def test_patience_ends(faked: Faked, pauses: list[float], caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(RemoteFailure, match=r"^faked://b/a: reading failed \(timed out\); what is published stays"),
    ):
        faked.call("reading", "b/a", failing(*[TimeoutError("timed out")] * 1000))
    assert files.PATIENCE_SECONDS - files.LONGEST_PAUSE_SECONDS <= sum(pauses) <= files.PATIENCE_SECONDS
    assert [record.message for record in caplog.records] == ["faked://b/a: reading fails (timed out); trying again"]


def test_what_does_not_pass_fails_at_once(faked: Faked, pauses: list[float]) -> None:
    with pytest.raises(RemoteFailure, match="broken") as failure:
        faked.call("reading", "b/a", failing(OSError("broken")))
    assert failure.value.kind is Kind.OTHER
    assert pauses == []


def test_whoever_finds_new_credentials_does_not_renew_them_again(faked: Faked, pauses: list[float]) -> None:
    failed: list[bool] = []

    def act(filesystem: Any) -> str:
        if failed:
            return "done"
        failed.append(True)
        faked.connection.renew(0)  # by another thread, while this call is under way
        raise Expired

    assert faked.call("reading", "b/a", act) == "done"
    assert faked.connection.age == 1


def test_a_refusal_is_asked_about_once_more_with_new_credentials(faked: Faked, pauses: list[float]) -> None:
    assert faked.call("reading", "b/a", failing(PermissionError())) == "done"
    assert faked.connection.age == 1
    with pytest.raises(RemoteFailure) as failure:
        faked.call("reading", "b/a", failing(PermissionError(), PermissionError()))
    assert failure.value.kind is Kind.DENIED


def test_an_interruption_passes(faked: Faked) -> None:
    with pytest.raises(KeyboardInterrupt):
        faked.call("reading", "b/a", failing(KeyboardInterrupt()))


def test_a_failure_keeps_its_kind_on_the_way_to_another_process() -> None:
    failure = pickle.loads(pickle.dumps(RemoteFailure("gone", Kind.DENIED)))
    assert (str(failure), failure.kind) == ("gone", Kind.DENIED)


def test_a_connection_is_made_once_per_process(faked: Faked) -> None:
    assert faked.connection is faked.connection is Faked("faked").connection


def test_s3a_is_another_spelling_of_s3() -> None:
    assert files_of("s3a").url("b/a") == "s3://b/a"
