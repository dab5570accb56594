"""What is known of the cluster between two looks."""

from __future__ import annotations

import math

from actors.cluster import LOOK_SECONDS, MARGIN_SECONDS, Cluster
from actors.node import Node
from actors.placement import Bundle


class Sky:
    """A cluster that does as a test says."""

    def __init__(self, *nodes: Node) -> None:
        self.nodes = list(nodes)
        self.draining: dict[str, float | None] = {}
        self.now = 1000.0
        self.cluster = Cluster(
            lambda: [node for node in self.nodes if node.id not in self.draining],
            lambda: frozenset(node.id for node in self.nodes),
            lambda: self.draining,
            lambda: self.now,
        )
        self.cluster.look()

    def later(self, seconds: float = LOOK_SECONDS) -> Cluster:
        self.now += seconds
        self.cluster.look()
        return self.cluster


def test_ray_is_asked_every_few_seconds_or_when_it_matters() -> None:
    sky = Sky(Node("a", 4, id="a"))
    sky.nodes.append(Node("b", 4, id="b"))
    assert len(sky.later(LOOK_SECONDS / 2).nodes) == 1
    sky.cluster.look(at_once=True)
    assert len(sky.cluster.nodes) == 2
    assert sky.cluster.node("b") == Node("b", 4, id="b")
    assert sky.cluster.node("c") is None


def test_bundles_are_found_on_their_nodes_by_identity() -> None:
    sky = Sky(Node("host", 4, id="a"))
    bundles = [Bundle(sky.nodes[0], 2)]
    sky.nodes = [Node("host-a", 4, id="a"), Node("host-b", 4, id="b")]  # as they are called once there are two
    assert sky.later().here(bundles) == [Bundle(sky.nodes[0], 2)]
    sky.nodes = sky.nodes[1:]
    assert sky.later().here(bundles) == []


def test_a_node_that_is_drained_is_there_but_not_for_anything_new() -> None:
    sky = Sky(Node("a", 4, id="a"), Node("b", 4, id="b"))
    sky.draining = {"a": sky.now + 60, "b": None}
    cluster = sky.later()
    assert cluster.nodes == []
    assert cluster.living == {"a", "b"}
    assert cluster.ends == {"a": 1060 - MARGIN_SECONDS, "b": math.inf}
    sky.now = 1060 - MARGIN_SECONDS - 1
    assert not cluster.must_leave("a")
    sky.now += 1
    assert cluster.must_leave("a")
    assert not cluster.must_leave("b")


def test_the_margin_is_what_it_was_when_the_end_was_first_heard_of() -> None:
    sky = Sky(Node("a", 4, id="a"))
    sky.draining = {"a": sky.now + LOOK_SECONDS + 8}
    assert sky.later().ends == {"a": 1000 + LOOK_SECONDS + 8 - 2}
    assert sky.later().ends == {"a": 1000 + LOOK_SECONDS + 8 - 2}
    sky.draining = {"a": sky.now + 3}  # it goes earlier
    assert sky.later(LOOK_SECONDS).ends == {"a": sky.now + 1 - 0.25}
    sky.draining = {}
    assert sky.later().ends == {}
