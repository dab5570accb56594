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
from typing import Any

import pyarrow as pa

from pipeline.corpus.listing import InputFile
from pipeline.corpus.readers import RowRange
from pipeline.fingerprint import digest
from pipeline.output.schema import kept_schema

Span = tuple[int, int]  # rows start <= row < stop of one file


@dataclass(frozen=True)
class Shard:
    """The unit of work, of commit and of retry: rows in the order in which the part holds them."""

    index: int
    ranges: tuple[RowRange, ...]

    @property
    def rows(self) -> int:
        return sum(r.stop - r.start for r in self.ranges)


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
    columns: Mapping[str, Any]  # input.id, input.keep, output.partition_by: what decides the other columns
    filters: Mapping[str, Any]  # what narrows the run
    context: int  # tokens of prompt and answer together, at most
    schema: pa.Schema
    files: tuple[PlannedFile, ...]
    shards: tuple[Shard, ...]
    created: str  # ISO 8601, UTC

    @cached_property
    def fingerprint(self) -> str:
        return digest(self.answers)

    @property
    def rows(self) -> int:
        return sum(shard.rows for shard in self.shards)

    @property
    def kept_schema(self) -> pa.Schema:
        """The types that every kept column has, in whichever file."""
        return kept_schema(self.schema, self.columns["input.keep"])

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
        }
        return json.dumps(document, separators=(",", ":")).encode()

    @staticmethod
    def from_json(data: bytes) -> Plan:
        document = json.loads(data)
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
                Shard(index, tuple(RowRange(*numbers) for numbers in ranges))
                for index, ranges in enumerate(document["shards"])
            ),
        )


def run_name(run: int) -> str:
    return f"{run:06d}"


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


def _planned_file(entry: dict[str, Any]) -> PlannedFile:
    rows, known = entry.pop("rows"), entry.pop("known")
    return PlannedFile(InputFile(**entry), rows, tuple((start, stop) for start, stop in known))
