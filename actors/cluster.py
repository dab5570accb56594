"""The cluster as it was a moment ago: which nodes are there, and which of them somebody is about to take away.

Knows nothing of who sits where.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from actors.node import Node
from actors.placement import Bundle
from actors.session import draining, living, nodes

LOOK_SECONDS = 2.0  # between two looks
MARGIN_SECONDS, MARGIN_SHARE = 5.0, 0.25  # before a node's end, whichever is less: then nobody works there any more


class Cluster:
    """The nodes, the living and the drained, as Ray told them at most `LOOK_SECONDS` ago."""

    def __init__(
        self,
        nodes: Callable[[], list[Node]] = nodes,
        living: Callable[[], frozenset[str]] = living,
        draining: Callable[[], Mapping[str, float | None]] = draining,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`clock` tells Unix time, as Ray's deadlines are."""
        self._nodes = nodes
        self._living = living
        self._draining = draining
        self._clock = clock
        self._looked_at = -math.inf
        self.nodes: list[Node] = []  # on which something can be put
        self.living: frozenset[str] = frozenset()
        self._said: dict[str, float | None] = {}
        self.ends: dict[str, float] = {}  # node → Unix time when work on it must end; infinite: nobody has said

    def look(self, at_once: bool = False) -> None:
        """Ask Ray, unless that was done a moment ago."""
        now = self._clock()
        if now - self._looked_at < LOOK_SECONDS and not at_once:
            return
        self._looked_at = now
        self.nodes, self.living = self._nodes(), self._living()
        said = dict(self._draining())
        for node in self._said.keys() - said.keys():
            del self.ends[node]
        for node, end in said.items():
            if self._said.get(node, 0.0) != end:
                self.ends[node] = math.inf if end is None else end - min(MARGIN_SECONDS, MARGIN_SHARE * (end - now))
        self._said = said

    def must_leave(self, node: str) -> bool:
        """Has the time come when nobody may work there any more?"""
        return self._clock() >= self.ends.get(node, math.inf)

    def here(self, bundles: Iterable[Bundle]) -> list[Bundle]:
        """The bundles with their nodes as they are called now, without those whose node is gone."""
        known = {node.id: node for node in self.nodes}
        return [replace(bundle, node=known[bundle.node.id]) for bundle in bundles if bundle.node.id in known]

    def node(self, identity: str) -> Node | None:
        """A node by Ray's id."""
        return next((node for node in self.nodes if node.id == identity), None)
