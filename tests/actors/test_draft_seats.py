"""Where draft workers are put, and where they go when their machine does. Without Ray."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from actors import draft_seats as module
from actors.draft_seats import DraftSeats
from actors.node import Node
from actors.placement import Bundle, place
from tests.actors.test_cluster import Sky
from tests.actors.test_hiring import FakeAsked
from tests.actors.test_placement import MODEL, job


class FakeSeat:
    """Where the last one was made is noted in `released` when it is given back."""

    released: list[str] = []  # noqa: RUF012 - one for the test that runs

    def __init__(self, group: str, bundle: int, threads: int, gpus: int) -> None:
        self.group = group

    def stands(self) -> bool:
        return True

    def release(self) -> None:
        self.released.append(self.group)


class Office:
    def __init__(self, replicas: int) -> None:
        self.sky = Sky(Node("t", 8, id="t"), *(Node(name, 1, id=name, labels={"draft": "yes"}) for name in "abc"))
        config = job({**MODEL, "replicas": replicas, "label_selector": {"draft": "yes"}}, replicas=1)
        self.placement = place(config, self.sky.cluster.nodes)
        self.asked: list[FakeAsked] = []
        self.notices: list[str] = []
        args = (config, self.placement.drafts, self.sky.cluster, self._employ, self.notices.append, self._ask)
        self.seats = DraftSeats(*args)

    def _employ(self, seat: Any, name: str) -> str:
        return f"{name} on {seat.group}"

    def _ask(self, bundles: Sequence[Bundle], seconds: float, planned: bool) -> FakeAsked:
        self.asked.append(FakeAsked(bundles, planned))
        return self.asked[-1]

    def seek(self) -> list[str]:
        """The nodes that are asked."""
        self.seats.seek([*self.placement.replicas[0].bundles, *self.seats.bundles])
        return [each.bundles[0].node.id for each in self.asked if each.on is None and not each.late]

    def grant(self) -> list[str]:
        """All that is asked for is had; the names of those who must move."""
        for each in self.asked:
            each.on = each.on or each.bundles[0].node.id
        return self.seats.arrived()


@pytest.fixture(autouse=True)
def seats_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "Seat", FakeSeat)
    monkeypatch.setattr(FakeSeat, "released", [])


def test_each_is_made_where_there_is_a_seat_and_waited_for_by_nobody() -> None:
    office = Office(2)
    assert office.seats.create(0) is None
    office.asked[1].on = "b"
    assert office.seats.arrived() == [], "nobody has sat elsewhere"
    assert [office.seats.create(i) for i in range(2)] == [None, "draft worker 1 on b"]
    office.grant()
    assert office.seats.create(0) == "draft worker 0 on a"
    assert office.seek() == []


def test_one_whose_node_dies_sits_elsewhere_next_time() -> None:
    office = Office(1)
    office.grant()
    office.sky.nodes = [node for node in office.sky.nodes if node.id != "a"]
    office.sky.later()
    assert office.seats.create(0) is None
    assert FakeSeat.released == ["a"]
    assert office.seek() == ["b"]
    assert office.grant() == []
    assert office.seats.create(0) == "draft worker 0 on b"


def test_one_whose_node_is_drained_moves_as_soon_as_there_is_a_seat() -> None:
    office = Office(1)
    office.grant()
    office.sky.draining = {"a": None}
    office.sky.later()
    assert office.seek() == ["b"]
    assert FakeSeat.released == [], "it may go on until then"
    assert office.grant() == ["draft worker 0"]
    assert FakeSeat.released == ["a"]
    assert office.seats.create(0) == "draft worker 0 on b"


def test_two_that_must_move_do_not_ask_for_the_same_seat() -> None:
    office = Office(2)
    office.grant()
    office.sky.draining = {"a": None, "b": None}
    office.sky.later()
    assert office.seek() == ["c"]


def test_a_seat_that_is_not_to_be_had_is_mentioned_and_asked_for_again() -> None:
    office = Office(1)
    office.asked[0].late = True
    assert office.seats.arrived() == []
    assert office.notices == ["not offered: 1 core; going on with fewer draft workers"]
    assert office.seek() == ["a"]


def test_everything_is_given_back() -> None:
    office = Office(2)
    office.asked[0].on = "a"
    office.seats.arrived()
    office.seats.release()
    assert FakeSeat.released == ["a"]
    assert office.asked[1].cancelled
