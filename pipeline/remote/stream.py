"""A file of storage elsewhere, for reading with seeks: blocks of it, the last few of which are kept.

Always the same version of the file: one that is replaced meanwhile is a failure, never a mixture.
"""

from __future__ import annotations

import io
from collections import OrderedDict
from typing import TYPE_CHECKING

from pipeline.remote.failures import Kind, RemoteFailure
from pipeline.remote.files import Files, Listed

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

KEPT_BLOCKS = 8  # a column of a Parquet file is read as one stream, beside those of the others


class RemoteStream(io.RawIOBase):
    """Fetches blocks of `block` bytes, in one request those that are wanted at once."""

    def __init__(self, files: Files, file: Listed, block: int) -> None:
        self._files = files
        self._file = file
        self._block = block
        self._place = 0
        self._blocks: OrderedDict[int, bytes] = OrderedDict()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._file.size}[whence]
        self._place = max(start + offset, 0)
        return self._place

    def read(self, size: int | None = -1) -> bytes:
        stop = self._file.size if size is None or size < 0 else min(self._place + size, self._file.size)
        if self._place >= stop:
            return b""
        first, last = self._place // self._block, (stop - 1) // self._block
        blocks = self._fetched(first, last)
        data = b"".join(blocks)[self._place - first * self._block : stop - first * self._block]
        self._place = stop
        return data

    def readall(self) -> bytes:
        return self.read()

    def readinto(self, buffer: WriteableBuffer) -> int:
        view = memoryview(buffer).cast("B")
        data = self.read(len(view))
        view[: len(data)] = data
        return len(data)

    def _fetched(self, first: int, last: int) -> list[bytes]:
        """Blocks `first` to `last`, in one request those between the first and the last that are not at hand."""
        missing = [i for i in range(first, last + 1) if i not in self._blocks]
        fresh: dict[int, bytes] = {}
        if missing:
            start, stop = missing[0] * self._block, min((missing[-1] + 1) * self._block, self._file.size)
            data = self._get(start, stop)
            for place in range(missing[0], missing[-1] + 1):
                offset = place * self._block - start
                fresh[place] = data[offset : offset + self._block]
        blocks = [fresh[i] if i in fresh else self._blocks[i] for i in range(first, last + 1)]
        for place in range(max(first, last + 1 - KEPT_BLOCKS), last + 1):
            self._blocks[place] = blocks[place - first]
            self._blocks.move_to_end(place)
        while len(self._blocks) > KEPT_BLOCKS:
            self._blocks.popitem(last=False)
        return blocks

    def _get(self, start: int, stop: int) -> bytes:
        path = self._file.path
        try:
            data = self._files.get(path, start, stop, self._file.version if self._files.has_versions else None)
        except RemoteFailure as failure:
            if failure.kind is Kind.CONDITION:
                raise self._changed() from failure
            raise
        except FileNotFoundError as error:
            raise self._changed() from error
        if len(data) != stop - start:
            raise self._changed()
        return data

    def _changed(self) -> RemoteFailure:
        return RemoteFailure(
            f"{self._files.url(self._file.path)}: replaced or removed while it was read; run again to continue",
            Kind.CONDITION,
        )
