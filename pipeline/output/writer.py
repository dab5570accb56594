"""A finished shard as one Parquet part, whole in memory. Knows nothing of where it goes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.output.plan import Plan, Shard, run_name
from pipeline.stats import Progress

ROWS_PER_GROUP = 50_000  # a reader's unit of work; a part of the default size is one group
PREFIX = b"nightdesk."


def part_bytes(
    plan: Plan, shard: Shard, table: pa.Table, counts: Progress, compression: str = "zstd"
) -> bytes:
    """The part of `shard`, its rows as they come in `table`; the footer says whose it is and what it counts.

    `compression` is one of `config.Compression`.
    """
    assert table.num_rows == shard.rows, f"shard {shard.index}: {table.num_rows} rows of {shard.rows}"
    return _parquet(
        table,
        {
            "run": run_name(plan.run),
            "shard": str(shard.index),
            "fingerprint": plan.fingerprint,
            "counts": json.dumps(dataclasses.asdict(counts)),
        },
        compression,
    )


def schema_bytes(schema: pa.Schema) -> bytes:
    """The part without rows that readers meet first."""
    empty = pa.Table.from_batches([], schema)  # `schema.empty_table()` knows no extension types inside of others
    return _parquet(empty, {"run": run_name(0), "shard": "schema"})


def part_counts(file: BinaryIO) -> Progress:
    """The counts in a part's footer."""
    metadata = pq.read_metadata(file).metadata
    return counts_from(json.loads(metadata[PREFIX + b"counts"]))


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


def _parquet(table: pa.Table, metadata: dict[str, str], compression: str = "zstd") -> bytes:
    footer = {PREFIX + key.encode(): value.encode() for key, value in metadata.items()}
    sink = pa.BufferOutputStream()
    pq.write_table(
        table.replace_schema_metadata(footer), sink, compression=compression, row_group_size=ROWS_PER_GROUP
    )
    return bytes(sink.getvalue())
