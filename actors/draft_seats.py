"""Seats for a job's draft workers, each found by itself and found anew when its node goes. Never waits.

Knows nothing of what draft workers do, or of who keeps them up (`actors.draft_pool`): it makes one where there is a
seat for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from actors.cluster import Cluster
from actors.hiring import Ask, Asked
from actors.placement import Bundle, place_draft
from actors.seats import Reservation, Seat
from pipeline.config import JobConfig
from pipeline.errors import WorkerLost


@dataclass
class Chair:
    """One draft worker's place: where it sits, and where it is going to."""

    seat: Seat | None = None
    bundle: Bundle | None = None  # of the seat
    asked: Asked | None = None
    coming: Bundle | None = None  # what is asked for


class DraftSeats:
    """The places of a job's draft workers, by number."""

    def __init__(
        self,
        config: JobConfig,
        bundles: Sequence[Bundle],
        cluster: Cluster,
        employ: Callable[[Seat, str], Any],
        notice: Callable[[str], None],
        ask: Ask = Reservation,
    ) -> None:
        """`bundles` are the first places; `employ` makes a draft worker of that name on a seat."""
        self.config = config
        self.cluster = cluster
        self.employ = employ
        self.notice = notice
        self.ask = ask
        self.chairs = [Chair() for _ in bundles]
        for chair, bundle in zip(self.chairs, bundles, strict=True):
            self._seek(chair, bundle)

    @staticmethod
    def name(place: int) -> str:
        """What messages call the worker that sits there."""
        return f"draft worker {place}"

    @property
    def bundles(self) -> list[Bundle]:
        """All that is held or asked for."""
        return [b for chair in self.chairs for b in (chair.bundle, chair.coming) if b is not None]

    def create(self, place: int) -> Any:
        """A new worker at that place, or None as long as there is no seat."""
        chair = self.chairs[place]
        if chair.seat is not None and not self._is_good(chair):
            self._leave(chair)
        return None if chair.seat is None else self.employ(chair.seat, self.name(place))

    def seek(self, taken: Sequence[Bundle]) -> None:
        """Look for seats in place of those that are missing or about to go. `taken`: by all, these here included."""
        beside = self.cluster.here(taken)
        for chair in self.chairs:
            if chair.asked is None and (chair.bundle is None or self.cluster.node(chair.bundle.node.id) is None):
                bundle = place_draft(self.config, self.cluster.nodes, beside)
                if bundle is not None:
                    beside.append(bundle)
                    self._seek(chair, bundle)

    def arrived(self) -> list[str]:
        """Take the seats that are there now. Returns the names of workers that sat elsewhere, and must be made anew."""
        moved = []
        for place, chair in enumerate(self.chairs):
            if chair.asked is not None and self._arrived(chair, chair.asked):
                moved.append(self.name(place))
        return moved

    def release(self) -> None:
        """Give everything back; whoever still sits there is ended."""
        for chair in self.chairs:
            if chair.asked is not None:
                chair.asked.cancel()
            self._leave(chair)

    def _is_good(self, chair: Chair) -> bool:
        assert chair.seat is not None
        assert chair.bundle is not None
        return self.cluster.node(chair.bundle.node.id) is not None and chair.seat.stands()

    def _seek(self, chair: Chair, bundle: Bundle) -> None:
        chair.asked, chair.coming = self.ask((bundle,), self.config.decoding.placement_timeout, True), bundle

    def _arrived(self, chair: Chair, asked: Asked) -> bool:
        """Is there a seat now for one who has sat elsewhere?"""
        assert chair.coming is not None
        try:
            group = asked.look()
        except WorkerLost as failure:
            self.notice(f"{failure}; going on with fewer draft workers")
            chair.asked = chair.coming = None
            return False
        if group is None:
            return False
        node = self.cluster.node(asked.home()) or replace(chair.coming.node, id=asked.home())
        bundle = replace(chair.coming, node=node)
        moved = chair.seat is not None
        self._leave(chair)
        chair.seat, chair.bundle = Seat(group, 0, bundle.threads, bundle.gpus), bundle
        chair.asked = chair.coming = None
        return moved

    def _leave(self, chair: Chair) -> None:
        if chair.seat is not None:
            chair.seat.release()
        chair.seat = chair.bundle = None
