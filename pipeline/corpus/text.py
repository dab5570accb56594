"""Text files: one document each, with the columns `path` (below the input root) and `text`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa

from pipeline.corpus.lines import Damaged, Source
from pipeline.corpus.rows import FileColumns, Record, RowIndex, RowRange, Rows, collect

_COLUMNS = ("path", "text")


class TextRows:
    """One text file: one row, also where it is empty."""

    def __init__(self, source: Source, wanted: Sequence[str]) -> None:
        self._source = source
        self._wanted = tuple(name for name in wanted if name in _COLUMNS)

    def columns(self) -> FileColumns:
        return FileColumns(_COLUMNS, {name: pa.string() for name in self._wanted})

    def count(self) -> RowIndex:
        return RowIndex(1)

    def rows(self, span: RowRange) -> Iterator[Rows]:
        if span.start == 0 < span.stop:
            yield from collect(iter([self._record()]), 0, self._wanted, self._source.file.relative)

    def _record(self) -> Record:
        blocks: list[bytes] = []
        try:
            blocks.extend(self._source.blocks())
        except Damaged as damage:
            return Record(0, b"".join(blocks), None, str(damage))
        text = self._source.encoding.decode(b"".join(blocks))
        return Record(0, b"", {"path": self._source.file.relative, "text": text})
