"""Parquet, one row group after another; values stay Arrow's own.

A file whose footer can't be read is one error row. Where a row group is damaged, the rows not yet read of it
become error rows, and the next group is tried: the footer says how many rows there are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.corpus.lines import opened
from pipeline.corpus.listing import InputFile
from pipeline.corpus.rows import FileColumns, RowIndex, RowRange, Rows, within
from pipeline.errors import StoreError

_BATCH_ROWS = 512
_BATCH_BYTES = 8 << 20


class ParquetRows:
    """One Parquet file. Columns are found by their exact top-level name; of two of one name the first counts."""

    def __init__(self, file: InputFile, wanted: Sequence[str]) -> None:
        self._file = file
        self._wanted = tuple(wanted)

    def columns(self) -> FileColumns:
        with self._parquet() as parquet:
            if not isinstance(parquet, pq.ParquetFile):
                return FileColumns((), {})
            schema = parquet.schema_arrow
            present = [name for name in self._wanted if name in schema.names]
            return FileColumns(tuple(schema.names), {name: schema.types[schema.names.index(name)] for name in present})

    def count(self) -> RowIndex:
        if self._file.size == 0:
            return RowIndex(0)
        with self._parquet() as parquet:
            return RowIndex(parquet.metadata.num_rows if isinstance(parquet, pq.ParquetFile) else 1)

    def rows(self, span: RowRange) -> Iterator[Rows]:
        with self._parquet() as parquet:
            if not isinstance(parquet, pq.ParquetFile):
                if span.start == 0 < span.stop:
                    yield self._unreadable(0, 1, parquet)
                return
            first = 0
            for group in range(parquet.metadata.num_row_groups):
                stop = first + parquet.metadata.row_group(group).num_rows
                if first < span.stop and span.start < stop:
                    for rows in self._group(parquet, group, first, stop):
                        yield from within(rows, span)
                first = stop

    def _group(self, parquet: pq.ParquetFile, group: int, start: int, stop: int) -> Iterator[Rows]:
        names = [name for name in self._wanted if name in parquet.schema_arrow.names]
        if not names:
            for first in range(start, stop, _BATCH_ROWS):
                yield Rows(first, min(stop - first, _BATCH_ROWS), {}, {}, {})
            return
        mean = parquet.metadata.row_group(group).total_byte_size // max(stop - start, 1)
        size = max(min(_BATCH_ROWS, _BATCH_BYTES // (mean + 1)), 1)
        try:
            for batch in parquet.iter_batches(size, row_groups=[group], columns=names):
                found = batch.schema.names
                columns = {name: batch.column(found.index(name)) for name in names}
                yield Rows(start, batch.num_rows, columns, {}, {})
                start += batch.num_rows
        except (pa.ArrowException, OSError) as error:
            self._raise_if_storage(error)
            yield from self._unreadable_rows(start, stop, f"the file is damaged ({error})")

    def _unreadable_rows(self, start: int, stop: int, reason: str) -> Iterator[Rows]:
        for first in range(start, stop, _BATCH_ROWS):
            yield self._unreadable(first, min(stop - first, _BATCH_ROWS), reason)

    def _unreadable(self, start: int, length: int, reason: str) -> Rows:
        relative = self._file.relative
        errors = {place: f"{relative}, row {start + place + 1}: {reason}" for place in range(length)}
        raw = {place: f"{relative}\n{start + place}".encode() for place in range(length)}
        columns = {name: [None] * length for name in self._wanted}
        return Rows(start, length, columns, errors, raw)

    @contextmanager
    def _parquet(self) -> Iterator[pq.ParquetFile | str]:
        """The open file, or why it is not Parquet."""
        with opened(self._file) as stream:
            try:
                parquet = pq.ParquetFile(stream, pre_buffer=False, buffer_size=1 << 20)
            except (pa.ArrowException, OSError) as error:
                self._raise_if_storage(error)
                yield f"not a readable Parquet file ({error})"
                return
            yield parquet

    def _raise_if_storage(self, error: Exception) -> None:
        """Arrow reports damage as an `OSError` too, but only failing storage sets `errno` or a class of its own."""
        if isinstance(error, OSError) and (error.errno is not None or type(error) is not OSError):
            raise StoreError(f"{self._file.path}: {error}; run again to continue") from error
