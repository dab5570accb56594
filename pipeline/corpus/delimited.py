"""CSV and TSV: a header, and rows of strings (`NA` and an empty field are text like any other).

Parsed by Python's csv module record by record, because a range in the middle must be entered without parsing what
comes before it, and a row of the wrong width must stay in its place: pyarrow's reader does neither. A blank line is no
row. Where a CSV header has no comma but semicolons or tabs, these delimit.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import pyarrow as pa

from pipeline.corpus.lines import Line, Source
from pipeline.corpus.rows import STRIDE, FileColumns, Record, RowIndex, RowRange, Rows, collect, entered

_FIELD_CHARACTERS = 1 << 28  # a quote that is never closed takes no more than this with it
csv.field_size_limit(_FIELD_CHARACTERS)


class DelimitedRows:
    """One CSV or TSV file; `delimiter` None finds it from the header."""

    def __init__(self, source: Source, wanted: Sequence[str], delimiter: str | None) -> None:
        self._source = source
        self._wanted = tuple(wanted)
        self._given = delimiter

    def columns(self) -> FileColumns:
        return FileColumns(self._header, {name: pa.string() for name in self._wanted if name in self._header})

    def count(self) -> RowIndex:
        rows, offsets = 0, []
        for record in self._after_header():
            if rows % STRIDE == 0:
                offsets.append(record.offset)
            rows += 1
        return RowIndex(rows, tuple(offsets) if self._source.seekable else ())

    def rows(self, span: RowRange) -> Iterator[Rows]:
        records = self._from(span.offset) if span.offset else self._after_header()
        return collect(entered(records, span), span.start, self._wanted, self._source.file.relative)

    @cached_property
    def _header(self) -> tuple[str, ...]:
        for parsed in _Parser(self._source, self._delimiter, 0):
            return () if parsed.error else tuple(parsed.fields)
        return ()

    @cached_property
    def _delimiter(self) -> str:
        if self._given:
            return self._given
        first = next((line.data for line in self._source.lines() if line.data.strip()), b"")
        header = self._source.line_encoding.decode(first)
        return next((mark for mark in ",;\t" if mark in header), ",")

    def _after_header(self) -> Iterator[Record]:
        records = self._from(0)
        first = next(records, None)
        if first is not None and first.error and not self._header:
            yield first
        yield from records

    def _from(self, offset: int) -> Iterator[Record]:
        header = self._header
        places = {name: header.index(name) for name in self._wanted if name in header}
        for parsed in _Parser(self._source, self._delimiter, offset):
            error = parsed.error
            if error is None and len(parsed.fields) != len(header):
                error = f"{len(parsed.fields)} fields where the header has {len(header)}"
            values = None if error else {name: parsed.fields[place] for name, place in places.items()}
            yield Record(parsed.offset, parsed.raw, values, error)


class _Parsed(NamedTuple):
    """One record: its fields, or why there are none."""

    offset: int
    raw: bytes
    fields: list[str]
    error: str | None


class _Parser:
    """The records from an offset on, blank lines left out."""

    def __init__(self, source: Source, delimiter: str, offset: int) -> None:
        self._lines = source.lines(offset)
        self._encoding = source.line_encoding
        self._taken: list[Line] = []
        self._fault: str | None = None
        self._reader = csv.reader(self._feed(), delimiter=delimiter)

    def __iter__(self) -> Iterator[_Parsed]:
        while True:
            self._taken.clear()
            try:
                fields, error = next(self._reader), None
            except StopIteration:
                if self._taken or self._fault:
                    yield self._parsed([], self._fault)
                return
            except csv.Error as problem:
                fields, error = [], f"not valid CSV: {problem}"
            if fields or error or self._fault:
                yield self._parsed(fields, error or self._fault)
            if self._fault:
                return

    def _parsed(self, fields: list[str], error: str | None) -> _Parsed:
        offset = self._taken[0].offset if self._taken else 0
        return _Parsed(offset, b"\n".join(line.data for line in self._taken), fields, error)

    def _feed(self) -> Iterator[str]:
        """Lines for the csv module. It asks for more only inside a record, so an end there is a fault."""
        for line in self._lines:
            self._taken.append(line)
            if line.damage:
                self._fault = line.damage
                return
            yield self._encoding.decode(line.data) + "\n"
        if self._taken:
            self._fault = "a quote is opened and never closed"
