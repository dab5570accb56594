"""A part as Parquet, whole in memory: its rows, and a footer that says whose it is. Knows nothing of where it goes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.output.names import run_name
from pipeline.stats import Progress

ROWS_PER_GROUP = 50_000  # a reader's unit of work; a part of the default size is one group
PREFIX = b"nightdesk."


@dataclass(frozen=True)
class Edit:
    """What the last run to change a published part did: the shard whose rows it took in, and whether it was cut."""

    run: int
    shard: int | None = None
    cut: bool = False
    counts: Progress = field(default_factory=Progress)  # of that shard


@dataclass(frozen=True)
class Footer:
    """`shard` is None in the part without rows. `pieces`: folder → the shard's rows there, by range of the shard."""

    run: int
    shard: int | None
    fingerprint: str = ""
    counts: Progress = field(default_factory=Progress)
    pieces: Mapping[str, Sequence[int]] = field(default_factory=dict)
    edit: Edit | None = None

    def metadata(self) -> dict[bytes, bytes]:
        told: dict[str, str] = {
            "run": run_name(self.run),
            "shard": "schema" if self.shard is None else str(self.shard),
        }
        if self.shard is not None:
            told |= {"fingerprint": self.fingerprint, "counts": json.dumps(dataclasses.asdict(self.counts))}
        if self.pieces:
            told["pieces"] = json.dumps(self.pieces)
        if self.edit is not None:
            told["edit"] = json.dumps(dataclasses.asdict(self.edit))
        return {PREFIX + key.encode(): value.encode() for key, value in told.items()}


def footer_of(metadata: Mapping[bytes, bytes]) -> Footer:
    """What a part's metadata says."""
    told = {key.removeprefix(PREFIX).decode(): value.decode() for key, value in metadata.items() if PREFIX in key}
    edit = json.loads(told["edit"]) if "edit" in told else None
    return Footer(
        run=int(told["run"]),
        shard=None if told["shard"] == "schema" else int(told["shard"]),
        fingerprint=told.get("fingerprint", ""),
        counts=counts_from(json.loads(told["counts"])) if "counts" in told else Progress(),
        pieces=json.loads(told.get("pieces", "{}")),
        edit=None if edit is None else Edit(**{**edit, "counts": counts_from(edit["counts"])}),
    )


def read_footer(file: BinaryIO) -> Footer:
    return footer_of(pq.read_metadata(file).metadata)


def part_bytes(table: pa.Table, footer: Footer, compression: str = "zstd") -> bytes:
    """The part, rows in the table's order."""
    sink = pa.BufferOutputStream()
    pq.write_table(
        table.replace_schema_metadata(footer.metadata()), sink, compression=compression, row_group_size=ROWS_PER_GROUP
    )
    return bytes(sink.getvalue())


def schema_bytes(schema: pa.Schema) -> bytes:
    """The part without rows that readers meet first."""
    empty = pa.Table.from_batches([], schema)  # `schema.empty_table()` knows no extension types inside of others
    return part_bytes(empty, Footer(0, None))


def counts_from(document: dict[str, Any]) -> Progress:
    """Counts that were JSON."""
    values: dict[str, Any] = {
        field.name: document[field.name] for field in dataclasses.fields(Progress) if field.name in document
    }
    for name in {"drafted_at", "accepted_at"} & set(values):
        values[name] = tuple(values[name])
    return Progress(**values)


def part_table(schema: pa.Schema, kept: Sequence[pa.RecordBatch], columns: dict[str, list[Any]]) -> pa.Table:
    """Rows of the output: kept columns as Arrow has them, the others from lists of Python values."""
    kept_table = pa.Table.from_batches(kept)
    arrays = [
        pa.chunked_array([pa.array(columns[field.name], type=field.type)])
        if field.name in columns
        else kept_table.column(field.name)
        for field in schema
    ]
    return pa.Table.from_arrays(arrays, schema=schema)
