"""An output that also remembers which shards it has seen published, and what they counted."""

from __future__ import annotations

import threading

import pyarrow as pa

from pipeline.output.folder import Output
from pipeline.output.plan import Plan, Shard
from pipeline.output.store import Store
from pipeline.stats import Progress


class Publications(Output):
    """`shards` in order; `tally` sums their counts, as they were reported while they were answered."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.shards: list[int] = []
        self.tally = Progress()
        self._lock = threading.Lock()  # one thread reads ahead and finds shards published, another publishes

    def is_published(self, plan: Plan, shard: Shard) -> bool:
        """See `Output`; a shard that somebody else has published is noted too."""
        published = super().is_published(plan, shard)
        if published:
            self._note(shard, Progress(rows_done=shard.rows, shards_done=1))
        return published

    def publish(self, plan: Plan, shard: Shard, table: pa.Table, counts: Progress, seconds: float) -> bool:
        """See `Output`."""
        created = super().publish(plan, shard, table, counts, seconds)
        self._note(shard, counts)
        return created

    def since(self, seen: int) -> tuple[tuple[int, ...], Progress]:
        """The shards after the first `seen`, and the tally of all, as of one moment."""
        with self._lock:
            return tuple(self.shards[seen:]), self.tally

    def _note(self, shard: Shard, counts: Progress) -> None:
        with self._lock:
            if shard.index not in self.shards:
                self.tally += counts
                self.shards.append(shard.index)
