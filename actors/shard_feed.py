"""The shards that a replica has been given and not yet begun: filled by polls, emptied by the thread that reads."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator

from pipeline.output.plan import Shard

AHEAD = 2  # shards to have at hand: one is read while the one before it drains


class ShardFeed:
    """An iterator that waits for more until it is closed. A shard that is given twice comes once."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[Shard] = deque()
        self._given: set[int] = set()
        self._returned: tuple[int, ...] = ()
        self._reading = False
        self._closed = False

    def give(self, shards: Iterable[Shard]) -> None:
        """Add shards."""
        with self._changed:
            for shard in shards:
                if shard.index not in self._given:
                    self._given.add(shard.index)
                    self._waiting.append(shard)
            self._changed.notify_all()

    def close(self) -> None:
        """No more are to come; whatever was not begun will not be."""
        with self._changed:
            self._closed = True
            self._returned += tuple(shard.index for shard in self._waiting)
            self._waiting.clear()
            self._changed.notify_all()

    @property
    def returned(self) -> tuple[int, ...]:
        """The shards that were given and not begun before it was closed."""
        with self._changed:
            return self._returned

    @property
    def wants(self) -> int:
        """How many more to give; none before the reader is there."""
        with self._changed:
            return max(0, AHEAD - len(self._waiting)) if self._reading and not self._closed else 0

    def __iter__(self) -> Iterator[Shard]:
        with self._changed:
            self._reading = True
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or bool(self._waiting))
                if self._closed:
                    return
                shard = self._waiting.popleft()
            yield shard
