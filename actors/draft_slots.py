"""Which slot of a draft worker belongs to whom: (replica, that replica's slot) → a slot of this worker's cache.

Slots are numbered from 0 without gaps. One that nobody has asked about for a while is given to somebody else, and so is
the one that was asked about longest ago where the worker holds as many as it may. Knows nothing of caches but that
what somebody else left in a slot is not his successor's.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pipeline.errors import CacheMiss
from pipeline.messages import DraftRequest, PrefixCopy, replica_of

RECENT_SECONDS = 60.0  # asked about within: a sequence that its replica works on
IDLE_SECONDS = 120.0  # not asked about for: its replica is gone, or has no use for that slot

Key = tuple[int, int]  # replica, its slot


@dataclass(slots=True)
class Place:
    """A slot that belongs to somebody."""

    slot: int
    used_at: float


class SlotTable:
    """The slots of one worker, the one asked about longest ago first."""

    def __init__(self, most: int) -> None:
        """It may hold `most` slots, but always as many as one pass needs."""
        self.most = most
        self.places: OrderedDict[Key, Place] = OrderedDict()

    def localise(self, requests: Sequence[DraftRequest], now: float) -> list[DraftRequest | CacheMiss]:
        """Requests of replicas in this worker's slots; a CacheMiss for one that relies on what is not held for it."""
        fresh = self._seat({key for request in requests for key in keys_of(request)}, now)
        return [self._localised(request, fresh) for request in requests]

    def in_use(self, now: float, apart_from: int) -> int:
        """Sequences of other replicas that were asked about lately."""
        return sum(
            replica != apart_from and now - place.used_at <= RECENT_SECONDS
            for (replica, _), place in self.places.items()
        )

    def exhausted(self) -> None:
        """The worker could not hold as many as it did, and holds none any more."""
        self.most = max(1, len(self.places) // 2)
        self.places.clear()

    def _seat(self, keys: set[Key], now: float) -> set[Key]:
        """Give each a slot. Returns those who had none."""
        fresh = {key for key in keys if key not in self.places}
        for key in sorted(keys - fresh):
            self.places[key].used_at = now
            self.places.move_to_end(key)
        for key in sorted(fresh):  # a replica's neighbouring slots are neighbours here: they are read as one view
            self.places[key] = Place(self._slot(keys, now), now)
        return fresh

    def _slot(self, needed: Collection[Key], now: float) -> int:
        eldest = next(iter(self.places), None)
        if eldest is None or eldest in needed:
            return len(self.places)
        if len(self.places) < self.most and now - self.places[eldest].used_at <= IDLE_SECONDS:
            return len(self.places)
        return self.places.pop(eldest).slot

    def _localised(self, request: DraftRequest, fresh: Collection[Key]) -> DraftRequest | CacheMiss:
        """What was held for somebody else must never pass for this sequence's prefix."""
        feed, keys = request.feed, keys_of(request)
        replica = keys[0][0]
        held = {slot for of, slot in self.places if of == replica and (of, slot) not in fresh}
        copies = []
        for copy in request.copies:  # one by one: a copy may be the source of a later one
            if copy.source not in held:
                return CacheMiss(feed.sequences[feed.slots == copy.target])
            held.add(copy.target)
            source, target = (self.places[replica, slot].slot for slot in (copy.source, copy.target))
            copies.append(PrefixCopy(source, target, copy.length))
        missing = (feed.cached > 0) & ~np.isin(feed.slots, list(held))
        if missing.any():
            return CacheMiss(feed.sequences[missing])
        slots = np.array([self.places[key].slot for key in keys], dtype=np.int64)
        return replace(request, feed=replace(feed, slots=slots), copies=tuple(copies))


def keys_of(request: DraftRequest) -> list[Key]:
    """Whose slots a request is about, row by row."""
    pairs = zip(request.feed.sequences.tolist(), request.feed.slots.tolist(), strict=True)
    return [(replica_of(sequence), slot) for sequence, slot in pairs]
