"""An output that also remembers which shards it has seen published, and what they counted."""

from __future__ import annotations

import threading
import time

import pyarrow as pa

from actors.report import Publication
from pipeline.output.folder import Output
from pipeline.output.plan import Plan, Shard
from pipeline.output.store import Store
from pipeline.stats import Progress


class Publications(Output):
    """Each shard once, in the order of publication, with the counts that were reported while it was answered."""

    def __init__(self, store: Store, compression: str = "zstd") -> None:
        super().__init__(store, compression)
        self._noted: list[Publication] = []
        self._shards: set[int] = set()
        self._lock = threading.Lock()  # one thread reads ahead and finds shards published, another publishes

    def is_published(self, plan: Plan, shard: Shard) -> bool:
        """See `Output`; a shard that somebody else has published is noted too."""
        published = super().is_published(plan, shard)
        if published:
            self._note(Publication(shard.index, Progress(rows_done=shard.rows, shards_done=1), created=False))
        return published

    def publish(self, plan: Plan, shard: Shard, table: pa.Table, counts: Progress, seconds: float) -> bool:
        """See `Output`."""
        began = time.monotonic()
        created = super().publish(plan, shard, table, counts, seconds)
        self._note(Publication(shard.index, counts, created, time.monotonic() - began))
        return created

    def since(self, seen: int) -> tuple[Publication, ...]:
        """Those after the first `seen`."""
        with self._lock:
            return tuple(self._noted[seen:])

    def _note(self, publication: Publication) -> None:
        with self._lock:
            if publication.shard not in self._shards:
                self._shards.add(publication.shard)
                self._noted.append(publication)
