"""JSON Lines, and JSON files that hold one array (or one object) of rows.

Every line is a row: a blank or broken one is an error row. Integers are exact whatever their size; of a key that
comes twice the last value counts. A JSON array is read whole, so its size bounds the memory: lines are better.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import islice
from typing import Any

import orjson

from pipeline.corpus.encoding import UTF8
from pipeline.corpus.kept import infer
from pipeline.corpus.lines import Damaged, Line, Source
from pipeline.corpus.rows import STRIDE, FileColumns, Record, RowIndex, RowRange, Rows, collect, entered

_SAMPLE_ROWS = 1000
_SAMPLE_BYTES = 4 << 20


class JsonRows:
    """A file of JSON rows. `lines_only` says that every line is a row, whatever it looks like."""

    def __init__(self, source: Source, wanted: Sequence[str], lines_only: bool) -> None:
        self._source = source
        self._wanted = tuple(wanted)
        self._lines_only = lines_only

    def columns(self) -> FileColumns:
        sample = [record.values for record in islice(self._sampled(), _SAMPLE_ROWS) if record.values is not None]
        names = dict.fromkeys(name for row in sample for name in row)
        types = {name: infer([row.get(name) for row in sample]) for name in self._wanted if name in names}
        return FileColumns(tuple(names), types)

    def count(self) -> RowIndex:
        if self._whole:
            return RowIndex(sum(1 for _ in self._elements()))
        rows, offsets = 0, []
        for line in self._source.lines():
            if rows % STRIDE == 0:
                offsets.append(line.offset)
            rows += 1
        return RowIndex(rows, tuple(offsets) if self._source.seekable else ())

    def rows(self, span: RowRange) -> Iterator[Rows]:
        records = self._elements() if self._whole else self._records(span.offset)
        return collect(entered(records, span), span.start, self._wanted, self._source.file.relative)

    @cached_property
    def _whole(self) -> bool:
        """Whether the file is one array, or one object spread over several lines."""
        if self._lines_only:
            return False
        first = next((line.data.strip() for line in self._source.lines() if line.data.strip()), b"")
        return first.startswith(b"[") or first == b"{"

    def _sampled(self) -> Iterator[Record]:
        size = 0
        for record in self._elements() if self._whole else self._records(0):
            yield record
            size += len(record.raw)
            if size > _SAMPLE_BYTES:
                return

    def _records(self, offset: int) -> Iterator[Record]:
        return (self._record(line) for line in self._source.lines(offset))

    def _record(self, line: Line) -> Record:
        if line.damage:
            return Record(line.offset, line.data, None, line.damage)
        if not line.data.strip():
            return Record(line.offset, line.data, None, "the line is blank")
        try:
            value = self._parse(line.data)
        except (ValueError, RecursionError) as error:
            return Record(line.offset, line.data, None, _reason(error))
        if not isinstance(value, dict):
            return Record(line.offset, line.data, None, f"not a JSON object but {_kind(value)}")
        return Record(line.offset, line.data, value)

    def _parse(self, data: bytes) -> Any:
        """The value of a line or file. Slowly where orjson can't: stray bytes, lone surrogates, control characters
        in strings, integers of more than 64 bits."""
        encoding = self._source.line_encoding
        if encoding.name != "utf-8":
            data, encoding = encoding.decode(data).encode("utf-8", "surrogatepass"), UTF8
        try:
            value = orjson.loads(data)
        except orjson.JSONDecodeError:
            return json.loads(encoding.decode(data), strict=False)
        if isinstance(value, dict) and any(map(_rounded, map(value.get, self._wanted))):
            return json.loads(encoding.decode(data), strict=False)
        return value

    def _elements(self) -> Iterator[Record]:
        try:
            data = b"\n".join(line.data for line in self._undamaged())
        except Damaged as damage:
            yield Record(0, b"", None, str(damage))
            return
        try:
            value = self._parse(data)
        except (ValueError, RecursionError) as error:
            yield Record(0, data, None, _reason(error))
            return
        for element in value if isinstance(value, list) else [value]:
            if isinstance(element, dict):
                yield Record(0, b"", element)
            else:
                yield Record(0, json.dumps(element).encode(), None, f"not a JSON object but {_kind(element)}")

    def _undamaged(self) -> Iterator[Line]:
        for line in self._source.lines():
            if line.damage:
                raise Damaged(line.damage)
            yield line


def _rounded(value: Any) -> bool:
    """Whether an integer may have become a float because it does not fit 64 bits."""
    if isinstance(value, str | int):
        return False
    if isinstance(value, float):
        return abs(value) >= 2.0**63
    if isinstance(value, list):
        return any(map(_rounded, value))
    return isinstance(value, dict) and any(map(_rounded, value.values()))


def _reason(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"not valid JSON: {error.msg} (character {error.pos + 1})"
    return "not valid JSON: nested too deeply" if isinstance(error, RecursionError) else f"not valid JSON: {error}"


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    return {list: "an array", str: "a string", bool: "true or false"}.get(type(value), "a number")
