"""Rows as they come out of a file, before they are documents.

A reader of a format knows how to count rows and how to give a range of them; it does not know which column is
the text or what is kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple, Protocol, TypeAlias

import pyarrow as pa

STRIDE = 256
"""An index remembers the offset of every STRIDE-th row: a range is entered at most this many rows before it."""
_BATCH_ROWS = 512
_BATCH_BYTES = 8 << 20

Column: TypeAlias = pa.Array | list[Any]  # Arrow's own where the format has types; else Python values as parsed


@dataclass(frozen=True, slots=True)
class RowRange:
    """Rows `start` to `stop` (excluded) of the file at place `file` of the listing.

    `offset` is the byte at which row `start - start % STRIDE` begins, where the format has such a place; 0 means that
    the file is read from its beginning.
    """

    file: int
    start: int
    stop: int
    offset: int = 0


@dataclass(frozen=True, slots=True)
class RowIndex:
    """How many rows a file has, and the byte offsets of rows 0, STRIDE, 2·STRIDE, … where reading can begin."""

    rows: int
    offsets: tuple[int, ...] = ()

    def range(self, file: int, start: int, stop: int) -> RowRange:
        offset = self.offsets[start // STRIDE] if start // STRIDE < len(self.offsets) else 0
        return RowRange(file, start, stop, offset)


@dataclass(frozen=True, slots=True)
class FileColumns:
    """What the beginning of a file says: the names of its columns, and the types of those asked for."""

    names: tuple[str, ...]
    types: Mapping[str, pa.DataType]


@dataclass(frozen=True, slots=True)
class Rows:
    """Consecutive rows of one file, the first of them row `start`. All columns have `length` values.

    `errors` says, by place in the batch, which rows could not be read and why; `raw` has the bytes of these.
    A column that the file does not have is absent.
    """

    start: int
    length: int
    columns: Mapping[str, Column]
    errors: Mapping[int, str]
    raw: Mapping[int, bytes]


class Record(NamedTuple):
    """One row of a format without types: its values, or what is wrong with it. `raw` are its bytes."""

    offset: int
    raw: bytes
    values: Mapping[str, Any] | None
    error: str | None = None


class RowReader(Protocol):
    """One file of one format. Counting and reading agree to the row, whatever the file holds."""

    def columns(self) -> FileColumns: ...
    def count(self) -> RowIndex: ...
    def rows(self, span: RowRange) -> Iterator[Rows]: ...


def entered(records: Iterator[Record], span: RowRange) -> Iterator[Record]:
    """The records of `span`, from a stream that begins at `span.offset`."""
    skipped = span.start % STRIDE if span.offset else span.start
    return islice(records, skipped, skipped + span.stop - span.start)


def collect(records: Iterator[Record], start: int, columns: Sequence[str], where: str) -> Iterator[Rows]:
    """Records in batches, of bounded rows and bytes. `where` names the file in messages."""
    batch: list[Record] = []
    size = 0
    for record in records:
        batch.append(record)
        size += len(record.raw)
        if len(batch) == _BATCH_ROWS or size >= _BATCH_BYTES:
            yield _rows(batch, start, columns, where)
            start += len(batch)
            batch, size = [], 0
    if batch:
        yield _rows(batch, start, columns, where)


def _rows(batch: Sequence[Record], start: int, columns: Sequence[str], where: str) -> Rows:
    nothing: Mapping[str, Any] = {}
    values = [record.values or nothing for record in batch]
    bad = [place for place, record in enumerate(batch) if record.error]
    return Rows(
        start=start,
        length=len(batch),
        columns={name: [row.get(name) for row in values] for name in columns},
        errors={place: f"{where}, row {start + place + 1}: {batch[place].error}" for place in bad},
        raw={place: batch[place].raw for place in bad},
    )

def within(rows: Rows, span: RowRange) -> Iterator[Rows]:
    """The part of a batch that lies in the range."""
    low, high = max(span.start - rows.start, 0), min(span.stop - rows.start, rows.length)
    if (low, high) == (0, rows.length):
        yield rows
    elif low < high:
        yield Rows(
            start=rows.start + low,
            length=high - low,
            columns={name: column[low:high] for name, column in rows.columns.items()},
            errors={place - low: error for place, error in rows.errors.items() if low <= place < high},
            raw={place - low: raw for place, raw in rows.raw.items() if low <= place < high},
        )
