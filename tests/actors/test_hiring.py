"""Where replicas are put, and what happens where there is no room: on clusters that a test makes up, without Ray."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from actors import hiring as module
from actors.hiring import BROKEN, Hiring
from actors.node import Node
from actors.placement import Bundle, place
from pipeline.errors import WorkerLost
from tests.actors.test_cluster import Sky
from tests.actors.test_placement import job


@dataclass(eq=False)
class FakeAsked:
    """A reservation that is had when a test says so."""

    bundles: Sequence[Bundle]
    planned: bool
    on: str | None = None  # where it was had
    late: bool = False
    overdue: bool = False
    cancelled: bool = False

    def look(self) -> Any:
        assert not self.cancelled
        if self.late:
            raise WorkerLost(f"not offered: {self.describe()}")
        return self.on

    def home(self) -> str:
        assert self.on is not None
        return self.on

    def cancel(self) -> None:
        self.cancelled = True

    def describe(self) -> str:
        return " + ".join(bundle.describe() for bundle in self.bundles)


class Office:
    """A `Hiring`, what it has asked for and what it has said."""

    def __init__(self, sky: Sky, **target: Any) -> None:
        self.sky = sky
        self.asked: list[FakeAsked] = []
        self.notices: list[str] = []
        config = job(**target)
        self.hiring = Hiring(config, place(config, sky.cluster.nodes), sky.cluster, self.notices.append, self._ask)

    def _ask(self, bundles: Sequence[Bundle], seconds: float, planned: bool) -> FakeAsked:
        assert seconds == 300
        self.asked.append(FakeAsked(bundles, planned))
        return self.asked[-1]

    @property
    def open(self) -> list[FakeAsked]:
        return [each for each in self.asked if not each.cancelled and each.on is None and not each.late]

    def seek(self, wanted: int, *taken: Bundle, nobody: bool = False) -> list[str]:
        """The nodes that are asked, and * for any."""
        self.hiring.seek(wanted, [*taken, *self.hiring.bundles], nobody)
        return [each.bundles[0].node.id if each.planned else "*" for each in self.open]

    def grant(self, *nodes: str) -> list[str]:
        """Each of the searches is had on a node; the nodes of the seats that are found."""
        for asked, node in zip(self.open, nodes, strict=True):
            asked.on = node
        return [seats.node.id for seats in self.hiring.found()]


def sky(*names: str, cores: int = 4, gpus: int = 0) -> Sky:
    return Sky(*(Node(name, cores, gpus, id=name) for name in names))


def on(office: Office, node: str, cores: int = 4) -> Bundle:
    there = office.sky.cluster.node(node)
    assert there is not None
    return Bundle(there, cores)


@pytest.fixture(autouse=True)
def nobody_adds_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "autoscales", lambda: False)


def test_the_plan_is_carried_out_first_and_no_more_of_it_than_is_wanted() -> None:
    office = Office(sky("a", "b", "c"))
    assert office.seek(2) == ["a", "b"]
    assert office.seek(2) == ["a", "b"], "they are on their way"
    assert office.grant("a", "b") == ["a", "b"]
    assert office.seek(1, on(office, "a"), on(office, "b")) == ["c"]


def test_what_is_not_wanted_any_more_is_given_up() -> None:
    office = Office(sky("a", "b"))
    office.seek(2)
    assert office.seek(1) == ["a"]
    assert office.asked[1].cancelled
    office.hiring.cancel()
    assert office.open == []


def test_a_node_that_joins_is_used_and_one_that_is_full_is_not() -> None:
    office = Office(sky("a"))
    office.seek(1)
    office.grant("a")
    assert office.seek(5, on(office, "a")) == []
    office.sky.nodes.append(Node("b", 4, id="b"))
    office.sky.later()
    assert office.seek(5, on(office, "a")) == ["b"]
    assert office.seek(5, on(office, "a")) == ["b"], "what is asked for is not free"


def test_a_planned_node_that_has_died_is_left_out() -> None:
    office = Office(sky("a", "b"))
    office.sky.nodes = office.sky.nodes[1:]
    office.sky.later()
    assert office.seek(2) == ["b"]


def test_seats_are_where_the_group_really_is() -> None:
    office = Office(sky("a", "b", gpus=1), gpus=1, replicas=1)
    office.seek(1)
    office.sky.nodes.append(Node("new", 8, 1, id="new"))
    assert office.grant("new") == ["new"], "also on a node that has only just joined"


def test_a_search_that_takes_too_long_is_mentioned_once_and_repeated() -> None:
    office = Office(sky("a", "b"))
    office.seek(2)
    for _ in range(3):
        office.open[-1].late = True
        assert office.hiring.found() == []
        assert office.hiring.failure is not None
        assert len(office.seek(2)) == 2
    assert office.notices == ["not offered: 4 cores"]
    office.grant("a", "b")
    assert office.hiring.failure is None


def test_that_one_waits_is_mentioned_once() -> None:
    office = Office(sky("a"))
    office.seek(1)
    office.open[0].overdue = True
    office.hiring.found()
    office.hiring.found()
    assert office.notices == ["waiting for the cluster to offer 4 cores"]


def test_where_nobody_works_and_nothing_is_free_a_node_to_come_is_waited_for() -> None:
    office = Office(sky("a"))
    office.seek(1)
    office.grant("a")
    office.sky.nodes = []
    office.sky.later()
    assert office.seek(1) == [], "others work"
    assert office.seek(1, nobody=True) == ["*"]
    assert office.seek(1, nobody=True) == ["*"]
    office.sky.nodes = [Node("b", 2, id="b")]
    office.sky.later()
    assert office.seek(1, nobody=True) == ["b"], "it is not like the old one, and does as well"


def test_an_autoscaler_sees_what_a_fixed_number_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "autoscales", lambda: True)
    for replicas, expected in (("auto", []), (2, ["*"])):
        office = Office(sky("a", "b"), replicas=replicas)
        office.seek(2)
        office.grant("a", "b")
        office.sky.nodes = office.sky.nodes[:1]
        office.sky.later()
        assert office.seek(1, on(office, "a")) == expected


def test_a_node_where_replicas_are_lost_before_they_begin_is_not_used_any_more() -> None:
    office = Office(sky("a", "b"))
    a, b = office.sky.nodes
    for _ in range(BROKEN - 1):
        office.hiring.lost(a, began=False)
    office.hiring.lost(a, began=True)
    for _ in range(BROKEN):
        assert office.hiring.is_usable(a)
        office.hiring.lost(a, began=False)
    assert not office.hiring.is_usable(a)
    assert office.hiring.is_usable(b)
    assert office.seek(2) == ["b"]
    assert office.notices == ["3 replicas in a row were lost on a before they began: it is not used again"]
