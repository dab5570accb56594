"""The plan of a run: which rows of which files it answers, in which shards, under which fingerprint.

Immutable, and small whatever the archive's size: ranges of rows, never ids. Knows nothing of storage.
"""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pipeline.corpus.listing import InputFile
from pipeline.corpus.readers import RowRange
from pipeline.fingerprint import digest
from pipeline.output.names import run_name
from pipeline.output.schema import kept_schema

T = TypeVar("T")
Span = tuple[int, int]  # rows start <= row < stop of one file or part


@dataclass(frozen=True)
class Amendment:
    """Rows of a published part that are answered anew: the n-th of `rows` gives way to the shard's n-th row.

    `version` is that of the stored part when the plan was made (`Store.version`).
    """

    part: str
    version: str
    rows: tuple[Span, ...]


@dataclass(frozen=True)
class Shard:
    """The unit of work, of commit and of retry: rows in the order in which the part holds them.

    Its rows are a part of their own, or `amends` says where in a published part they belong.
    """

    index: int
    ranges: tuple[RowRange, ...]
    amends: Amendment | None = None

    @property
    def rows(self) -> int:
        return sum(r.stop - r.start for r in self.ranges)


@dataclass(frozen=True)
class Cut:
    """Rows that a published part loses after every shard of the plan is there.

    `rows` and `version` are those of the part when the plan was made; amendments of the same plan move no row.
    """

    part: str
    version: str
    rows: tuple[Span, ...]

    @property
    def count(self) -> int:
        return sum(stop - start for start, stop in self.rows)


@dataclass(frozen=True)
class Rehoming:
    """Rows of a published part whose documents were found unchanged in another file: place `file` in the plan."""

    part: str
    rows: tuple[Span, ...]
    file: int


@dataclass(frozen=True)
class Merge:
    """Published parts of one folder that become one, in this order; `versions` as in `Cut`."""

    sources: tuple[str, ...]
    versions: tuple[str, ...]


@dataclass(frozen=True)
class PlannedFile:
    """An input file as it was when the plan was made.

    `known` are rows that the output held already (found unchanged in a file that has grown, say).
    """

    file: InputFile
    rows: int
    known: tuple[Span, ...] = ()

    @property
    def missing(self) -> list[Span]:
        return complement(self.known, self.rows)


@dataclass(frozen=True)
class Plan:
    """What one run works from. `RowRange.file` counts in `files`."""

    run: int
    fresh: bool  # all earlier runs are void
    salt: int
    answers: Mapping[str, Any]  # what decides an answer, by key; its digest is the fingerprint
    columns: Mapping[str, Any]  # input.id, input.keep, output.partition_by and format: what decides the other columns
    filters: Mapping[str, Any]  # what narrows the run
    context: int  # tokens of prompt and answer together, at most
    schema: pa.Schema
    files: tuple[PlannedFile, ...]
    shards: tuple[Shard, ...]
    created: str  # ISO 8601, UTC
    cuts: tuple[Cut, ...] = ()
    rehomed: tuple[Rehoming, ...] = ()
    merges: tuple[Merge, ...] = ()  # of a plan that only compacts; its new parts are numbered like shards

    @cached_property
    def fingerprint(self) -> str:
        return digest(self.answers)

    @property
    def rows(self) -> int:
        return sum(shard.rows for shard in self.shards)

    @property
    def partition_by(self) -> tuple[str, ...]:
        return tuple(self.columns["output.partition_by"])

    @property
    def format(self) -> str:
        return str(self.columns.get("output.format", "parquet"))

    @property
    def kept_schema(self) -> pa.Schema:
        """The types that every column taken from the input has, in whichever file."""
        kept = self.columns["input.keep"]
        return kept_schema(self.schema, [*kept, *(name for name in self.partition_by if name not in kept)])

    @property
    def part_schema(self) -> pa.Schema:
        """What is in a part: everything but the columns that its folder names."""
        return pa.schema([field for field in self.schema if field.name not in self.partition_by])

    @property
    def input_files(self) -> tuple[InputFile, ...]:
        return tuple(planned.file for planned in self.files)

    def to_json(self) -> bytes:
        document = {
            "run": run_name(self.run),
            "created": self.created,
            "fresh": self.fresh,
            "fingerprint": self.fingerprint,
            "answers": self.answers,
            "salt": self.salt,
            "columns": self.columns,
            "filters": self.filters,
            "context": self.context,
            "schema": {
                "columns": {field.name: str(field.type) for field in self.schema},
                "arrow": base64.b64encode(self.schema.serialize().to_pybytes()).decode(),
            },
            "files": [{**dataclasses.asdict(p.file), "rows": p.rows, "known": p.known} for p in self.files],
            "shards": [[dataclasses.astuple(r) for r in shard.ranges] for shard in self.shards],
            "amendments": {s.index: dataclasses.asdict(s.amends) for s in self.shards if s.amends is not None},
            "cuts": [dataclasses.asdict(cut) for cut in self.cuts],
            "rehomed": [dataclasses.asdict(rehoming) for rehoming in self.rehomed],
            "merges": [dataclasses.asdict(merge) for merge in self.merges],
        }
        return json.dumps(document, separators=(",", ":")).encode()

    @staticmethod
    def from_json(data: bytes) -> Plan:
        document = json.loads(data)
        amendments = {int(i): _tupled(Amendment, entry) for i, entry in document.get("amendments", {}).items()}
        return Plan(
            run=int(document["run"]),
            created=document["created"],
            fresh=document["fresh"],
            answers=document["answers"],
            salt=document["salt"],
            columns=document["columns"],
            filters=document["filters"],
            context=document["context"],
            schema=pa.ipc.read_schema(pa.py_buffer(base64.b64decode(document["schema"]["arrow"]))),
            files=tuple(_planned_file(entry) for entry in document["files"]),
            shards=tuple(
                Shard(index, tuple(RowRange(*numbers) for numbers in ranges), amendments.get(index))
                for index, ranges in enumerate(document["shards"])
            ),
            cuts=tuple(_tupled(Cut, entry) for entry in document.get("cuts", ())),
            rehomed=tuple(_tupled(Rehoming, entry) for entry in document.get("rehomed", ())),
            merges=tuple(_tupled(Merge, entry) for entry in document.get("merges", ())),
        )


def cut(
    spans: Iterable[tuple[int, Span]], rows_per_shard: int, ranged: Callable[[int, int, int], RowRange]
) -> tuple[Shard, ...]:
    """Shards of `rows_per_shard` rows, the last one smaller, from (file, rows) in the order given.

    `ranged(file, start, stop)` makes a range that a reader can enter (`RowIndex.range`).
    """
    shards: list[Shard] = []
    current: list[RowRange] = []
    room = rows_per_shard
    for file, (start, stop) in spans:
        while start < stop:
            end = min(stop, start + room)
            current.append(ranged(file, start, end))
            room -= end - start
            start = end
            if room == 0:
                shards.append(Shard(len(shards), tuple(current)))
                current, room = [], rows_per_shard
    if current:
        shards.append(Shard(len(shards), tuple(current)))
    return tuple(shards)


def spans_of(rows: Iterable[int]) -> tuple[Span, ...]:
    """Ascending row numbers as spans that do not touch."""
    spans: list[list[int]] = []
    for row in rows:
        if spans and spans[-1][1] == row:
            spans[-1][1] = row + 1
        else:
            spans.append([row, row + 1])
    return tuple((start, stop) for start, stop in spans)


def rows_of(spans: Iterable[Span]) -> npt.NDArray[np.int64]:
    """The row numbers that `spans` name, in their order."""
    pieces = [np.arange(start, stop) for start, stop in spans]
    return np.concatenate(pieces) if pieces else np.empty(0, np.int64)


def complement(spans: Iterable[Span], rows: int) -> list[Span]:
    """The rows of 0 … `rows` that are in none of `spans`."""
    missing: list[Span] = []
    reached = 0
    for start, stop in merged(spans):
        if start > reached:
            missing.append((reached, start))
        reached = stop
    if reached < rows:
        missing.append((reached, rows))
    return missing


def merged(spans: Iterable[Span]) -> list[Span]:
    """The same rows as sorted spans that neither touch nor overlap."""
    result: list[Span] = []
    for start, stop in sorted(spans):
        if start >= stop:
            continue
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(stop, result[-1][1]))
        else:
            result.append((start, stop))
    return result


def _tupled(kind: type[T], entry: dict[str, Any]) -> T:
    """A flat record whose lists were tuples."""
    return kind(**{key: _as_tuple(value) for key, value in entry.items()})


def _as_tuple(value: Any) -> Any:
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value


def _planned_file(entry: dict[str, Any]) -> PlannedFile:
    rows, known = entry.pop("rows"), entry.pop("known")
    return PlannedFile(InputFile(**entry), rows, tuple((start, stop) for start, stop in known))
