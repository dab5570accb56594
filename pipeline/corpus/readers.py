"""The corpus: all input files as one sequence of documents, read in ranges.

Every range gives exactly its number of documents: what can't be read is a document with an error. A mistake that
concerns all files (no file has the text column) is a `CorpusError`, raised when the columns are looked at.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Protocol

import pyarrow as pa

from pipeline.corpus.delimited import DelimitedRows
from pipeline.corpus.documents import DocumentBatch, DocumentBuilder
from pipeline.corpus.jsonl import JsonRows
from pipeline.corpus.kept import common, settled
from pipeline.corpus.lines import Source
from pipeline.corpus.listing import InputFile
from pipeline.corpus.parquet import ParquetRows
from pipeline.corpus.rows import RowIndex, RowRange, RowReader, Rows, within
from pipeline.corpus.text import TextRows
from pipeline.errors import CorpusError

__all__ = ["Corpus", "CorpusInput", "DocumentBatch", "RowIndex", "RowRange"]

_MISSING_ROWS = 512
_NEAR_ROWS = 2048  # between two ranges: as many are read over sooner than a file is entered anew


class CorpusInput(Protocol):
    """What of `config.InputConfig` decides how files become documents."""

    @property
    def id(self) -> str | None: ...
    @property
    def text(self) -> str: ...
    @property
    def keep(self) -> tuple[str, ...]: ...
    @property
    def encoding(self) -> str: ...


class Corpus:
    """Documents of `files`. `fields` are the columns that prompts name, besides or with the text column.

    `kept_schema` is the plan's, where there is a plan; without it the beginnings of all files are looked at. Knows
    nothing of shards.
    """

    def __init__(
        self,
        input: CorpusInput,
        fields: tuple[str, ...],
        files: Sequence[InputFile],
        kept_schema: pa.Schema | None = None,
    ) -> None:
        self._input = input
        self._files = tuple(files)
        self._fields = tuple(dict.fromkeys(fields))
        self._given_schema = kept_schema
        named = [input.text, *([input.id] if input.id is not None else []), *input.keep, *self._fields]
        self._wanted = tuple(dict.fromkeys(named))

    @property
    def files(self) -> tuple[InputFile, ...]:
        return self._files

    @property
    def id_column(self) -> str:
        """The name that the id has in the output."""
        return "id" if self._input.id is None else self._input.id

    @cached_property
    def kept_schema(self) -> pa.Schema:
        """The kept columns with the types that hold for all files.

        Raises `CorpusError` if a column that the job names is in none of the files.
        """
        if self._given_schema is not None:
            return self._given_schema
        found: dict[str, pa.DataType] = {}
        examples: dict[str, tuple[str, ...]] = {}
        for file in self._files:
            columns = self._reader(file).columns()
            if columns.names:
                examples[file.relative] = columns.names
            for name, type in columns.types.items():
                found[name] = common(found[name], type) if name in found else type
        self._require(found, examples)
        return pa.schema([(name, settled(found.get(name, pa.null()))) for name in self._input.keep])

    def count_rows(self, file_index: int) -> RowIndex:
        """How many rows a file has, and where reading can begin in it. Reads through files other than Parquet."""
        return self._reader(self._files[file_index]).count()

    def read(self, ranges: Iterable[RowRange]) -> Iterator[DocumentBatch]:
        """The documents of the ranges, in order, in batches of bounded size, none across two ranges."""
        input = self._input
        builder = DocumentBuilder(input.id, input.text, self._fields, self.kept_schema)
        for near in _neighbours(ranges):
            file = self._files[near[0].file]
            for rows in self._rows(file, near):
                yield builder.build(rows, file.relative)

    def _rows(self, file: InputFile, ranges: Sequence[RowRange]) -> Iterator[Rows]:
        """The rows of ascending ranges of one file, which is read once through."""
        pending = deque(ranges)
        reached = ranges[0].start
        for rows in self._reader(file).rows(replace(ranges[0], stop=ranges[-1].stop)):
            end = rows.start + rows.length
            while pending and pending[0].start < end:
                span = pending[0]
                yield from within(rows, span)
                reached = min(span.stop, end)
                if span.stop > end:
                    break
                pending.popleft()
        for span in pending:
            yield from _missing(file, max(span.start, reached), span.stop)

    def _reader(self, file: InputFile) -> RowReader:
        if file.format == "parquet":
            return ParquetRows(file, self._wanted)
        source = Source(file, self._input.encoding)
        if file.format in ("jsonl", "json"):
            return JsonRows(source, self._wanted, lines_only=file.format == "jsonl")
        if file.format in ("csv", "tsv"):
            return DelimitedRows(source, self._wanted, None if file.format == "csv" else "\t")
        assert file.format == "text", file
        return TextRows(source, self._wanted)

    def _require(self, found: Mapping[str, pa.DataType], examples: Mapping[str, tuple[str, ...]]) -> None:
        if not examples:
            return
        relative, names = next(iter(examples.items()))
        for key, wanted in self._keys():
            if wanted not in found:
                raise CorpusError(
                    f"{key}: no input file has a column {wanted!r}; {relative} has {', '.join(map(repr, names))}"
                )

    def _keys(self) -> Iterator[tuple[str, str]]:
        """Every column that the job names, with the key that names it."""
        yield "input.text", self._input.text
        if self._input.id is not None:
            yield "input.id", self._input.id
        yield from (("input.keep or output.partition_by", name) for name in self._input.keep)
        yield from (("tasks: a prompt (where braces that name no column are doubled)", name) for name in self._fields)


def _neighbours(ranges: Iterable[RowRange]) -> Iterator[list[RowRange]]:
    """Ranges that follow each other closely in one file, together."""
    near: list[RowRange] = []
    for span in ranges:
        if near and not (span.file == near[-1].file and 0 <= span.start - near[-1].stop <= _NEAR_ROWS):
            yield near
            near = []
        near.append(span)
    if near:
        yield near


def _missing(file: InputFile, start: int, stop: int) -> Iterator[Rows]:
    """Error rows for what the plan counted and the file no longer has."""
    for first in range(start, stop, _MISSING_ROWS):
        length = min(stop - first, _MISSING_ROWS)
        places = range(length)
        reason = "the row is gone: the file changed after the plan was made"
        errors = {place: f"{file.relative}, row {first + place + 1}: {reason}" for place in places}
        raw = {place: f"{file.relative}\n{first + place}".encode() for place in places}
        yield Rows(first, length, {}, errors, raw)
