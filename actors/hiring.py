"""Finds seats for replicas, as many as are wanted and the cluster has room for. Never waits.

Knows nothing of shards or of what a replica does; how a group of bundles is reserved is its own affair
(`actors.seats.Reservation`).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from actors.autoscaler import autoscales
from actors.cluster import Cluster
from actors.node import Node
from actors.placement import Bundle, Placement, ReplicaPlacement, place_replica
from actors.seats import Reservation, Seats
from pipeline.config import JobConfig
from pipeline.errors import WorkerLost

BROKEN = 3  # replicas in a row that were lost on a node before they began: it is not used any more


class Asked(Protocol):
    """A reservation as it is used here."""

    overdue: bool

    def look(self) -> Any:
        """The group, or None as long as it is not there; WorkerLost when time is up."""
        ...

    def cancel(self) -> None: ...

    def home(self) -> str:
        """Ray's id of the node that the group is on."""
        ...

    def describe(self) -> str: ...


Ask = Callable[[Sequence[Bundle], float, bool], Asked]  # bundles, seconds, on the planned node


@dataclass
class Search:
    """Seats for one replica, on their way."""

    placement: ReplicaPlacement
    asked: Asked
    anywhere: bool  # on no node that we know: on one to come, perhaps


class Hiring:
    """The places of a job's replicas."""

    def __init__(
        self,
        config: JobConfig,
        placement: Placement,
        cluster: Cluster,
        notice: Callable[[str], None],
        ask: Ask = Reservation,
    ) -> None:
        """`placement` says where the first ones sit; later ones go where there is room."""
        self.config = config
        self.cluster = cluster
        self.notice = notice
        self.ask = ask
        self.separate = placement.separate
        self.template = placement.replicas[0]
        self.planned = deque(placement.replicas)
        self.searches: list[Search] = []
        self.failure: WorkerLost | None = None  # of the last search that came to nothing, until one comes to something
        self._broken: Counter[str] = Counter()  # by node: losses in a row
        self._said: set[str] = set()  # since seats were last found
        self._grows: bool | None = None

    @property
    def bundles(self) -> list[Bundle]:
        """What is asked for on nodes that we know."""
        return [b for search in self.searches if not search.anywhere for b in search.placement.bundles]

    def seek(self, wanted: int, taken: Sequence[Bundle], nobody: bool) -> None:
        """See to it that `wanted` searches are under way, as far as there is room.

        `taken`: by others, and by the searches here. `nobody`: no replica is at work, so if there is no room, wait for
        it; so does an autoscaler.
        """
        beside = self.cluster.here(taken)
        while len(self.searches) > wanted:
            self.searches.pop().asked.cancel()
        while sum(not search.anywhere for search in self.searches) < wanted:
            placement = self._room(beside)
            if placement is None:
                break
            beside += placement.bundles
            vain = next((search for search in self.searches if search.anywhere), None)
            if vain is not None:
                self._give_up(vain)
            self._search(placement, anywhere=False)
        if len(self.searches) < wanted and (self._awaits_nodes() or (nobody and not self.searches)):
            self._search(self.template, anywhere=True)

    def found(self) -> list[Seats]:
        """The seats that have been had since the last call."""
        seats = []
        for search in list(self.searches):
            try:
                group = search.asked.look()
            except WorkerLost as failure:
                self.searches.remove(search)
                self.failure = failure
                self._say(str(failure))
                continue
            if group is None:
                if search.asked.overdue:
                    self._say(f"waiting for the cluster to offer {search.asked.describe()}")
                continue
            self.searches.remove(search)
            self.failure = None
            self._said.clear()
            seats.append(Seats.of(self._where(search), group))
        return seats

    def is_usable(self, node: Node) -> bool:
        """May replicas be put there?"""
        return self._broken[node.id] < BROKEN and self.cluster.node(node.id) is not None

    def lost(self, node: Node, began: bool) -> None:
        """A replica was lost there."""
        self._broken[node.id] = 0 if began else self._broken[node.id] + 1
        if self._broken[node.id] == BROKEN:
            self.notice(f"{BROKEN} replicas in a row were lost on {node.name} before they began: it is not used again")

    def cancel(self) -> None:
        """Nothing is looked for any more."""
        for search in self.searches:
            search.asked.cancel()
        self.searches.clear()

    def _room(self, beside: Sequence[Bundle]) -> ReplicaPlacement | None:
        while self.planned:
            placement = self.planned.popleft()
            if self.is_usable(placement.node):
                return placement
        nodes = [node for node in self.cluster.nodes if self.is_usable(node)]
        return place_replica(self.config, nodes, beside, self.separate)

    def _awaits_nodes(self) -> bool:
        """Is a certain number of replicas wanted, and somebody there to add nodes for them?"""
        if self.config.target.replicas == "auto":
            return False
        if self._grows is None:
            self._grows = autoscales()
        return self._grows

    def _search(self, placement: ReplicaPlacement, anywhere: bool) -> None:
        asked = self.ask(placement.bundles, self.config.decoding.placement_timeout, not anywhere)
        self.searches.append(Search(placement, asked, anywhere))

    def _give_up(self, search: Search) -> None:
        search.asked.cancel()
        self.searches.remove(search)

    def _where(self, search: Search) -> ReplicaPlacement:
        """Where it really is, which need not be the planned node."""
        planned, home = search.placement, search.asked.home()
        if home == planned.node.id:
            return planned
        self.cluster.look(at_once=True)
        node = self.cluster.node(home) or replace(planned.node, id=home)
        ranks = tuple(replace(bundle, node=node) for bundle in planned.ranks)
        own = None if planned.replica is None else replace(planned.replica, node=node)
        return replace(planned, ranks=ranks, replica=own)

    def _say(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            self.notice(line)
