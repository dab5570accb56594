"""An iterator that is read ahead by a thread, so that whoever consumes it need not wait for input."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Generic, Self, TypeVar

Item = TypeVar("Item")
CLOSING_SECONDS = 0.1  # how often a blocked reader looks whether it is still wanted


@dataclass(frozen=True)
class _End:
    error: BaseException | None


class Prefetched(Generic[Item]):
    """At most `depth` items of `source` in hand. A context; leaving it ends the thread.

    `poll` raises what the source raised, in the consumer's thread.
    """

    def __init__(self, source: Iterator[Item], depth: int) -> None:
        self.ended = False
        self._source = source
        self._queue: queue.Queue[Item | _End] = queue.Queue(depth)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._read, name="prefetch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed.set()
        self._thread.join(10 * CLOSING_SECONDS)  # one that waits for its source ends when that answers

    def poll(self) -> Item | None:
        """The next item if there is one now; None otherwise, and for ever once `ended`."""
        if self.ended:
            return None
        try:
            item = self._queue.get_nowait()
        except queue.Empty:
            return None
        if isinstance(item, _End):
            self.ended = True
            if item.error is not None:
                raise item.error
            return None
        return item

    def _read(self) -> None:
        error: BaseException | None = None
        try:
            for item in self._source:
                if not self._put(item):
                    return
        except BaseException as raised:  # noqa: BLE001  carried to the consumer, who owns it
            error = raised
        self._put(_End(error))

    def _put(self, item: Item | _End) -> bool:
        while not self._closed.is_set():
            try:
                self._queue.put(item, timeout=CLOSING_SECONDS)
            except queue.Full:
                continue
            return True
        return False
