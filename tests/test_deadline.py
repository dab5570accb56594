"""Which moment a time means."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest

from pipeline.deadline import Deadline, parse_deadline
from pipeline.errors import ConfigError


@pytest.fixture(autouse=True)
def _in_berlin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def at(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


@pytest.mark.parametrize(
    ("text", "now", "expected"),
    [
        ("06:00", "2024-05-17T22:00+02:00", "2024-05-18T06:00+02:00"),
        ("6:00", "2024-05-17T05:59+02:00", "2024-05-17T06:00+02:00"),
        ("06:00", "2024-05-17T06:00+02:00", "2024-05-18T06:00+02:00"),  # now is not until
        ("06:00", "2024-03-30T22:00+01:00", "2024-03-31T06:00+02:00"),  # the night that loses an hour
        ("06:00", "2024-10-26T22:00+02:00", "2024-10-27T06:00+01:00"),  # and the one that gains one
        ("06:00America/New_York", "2024-05-17T22:00+02:00", "2024-05-18T06:00-04:00"),
        ("06:00 UTC", "2024-05-18T03:00+02:00", "2024-05-18T06:00+00:00"),
        ("2024-05-18T06:00+09:00", "2024-05-01T00:00+02:00", "2024-05-18T06:00+09:00"),
        ("2024-05-18T06:00", "2024-05-01T00:00+02:00", "2024-05-18T06:00+02:00"),
    ],
)
def test_a_time_of_day_is_the_next_one_where_it_is_meant(text: str, now: str, expected: str) -> None:
    assert parse_deadline(text, at(now)).at == at(expected)


WRONG = ["", "24:00", "6", "06:60", "06:00Europe/Nowhere", "tomorrow", "2024-05-18", "06:00/.."]


@pytest.mark.parametrize("text", WRONG)
def test_anything_else_is_refused_with_examples(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--until: .* write 06:00, "):
        parse_deadline(text)


def test_a_deadline_says_how_long_it_is_till_then_and_when_that_is() -> None:
    moment = datetime(2024, 5, 18, 4, 0, tzinfo=UTC).timestamp()
    deadline = Deadline(moment, clock=lambda: moment - 5)
    assert (deadline.left, deadline.passed) == (5, False)
    assert Deadline(moment, clock=lambda: moment).passed
    assert str(deadline) == "2024-05-18T06:00+02:00"
