"""The one schema that all parts of an output share (DESIGN section 8)."""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa

from pipeline.config import JobConfig


def output_schema(config: JobConfig, kept: pa.Schema) -> pa.Schema:
    """Id, `doc_hash`, the kept columns, the columns of every task, `error`; no metadata.

    Every type is explicit and plain, because readers take the first file's: no dictionaries, no null type.
    """
    fields = [pa.field(config.input.id_column, pa.string()), pa.field("doc_hash", pa.string())]
    fields += [pa.field(field.name, plain(field.type)) for field in kept]
    for task in config.tasks:
        fields += task_fields(task.name, task.n)
    fields.append(pa.field("error", pa.string()))
    return pa.schema(fields)


def kept_schema(schema: pa.Schema, kept: Iterable[str]) -> pa.Schema:
    """The part of an output's schema that comes from the input."""
    return pa.schema([schema.field(name) for name in kept])


def task_fields(task: str, samples: int = 1) -> list[pa.Field]:
    """The columns of a task whose answer is text; lists of one length where it gives several samples."""
    kinds = {"": pa.string(), "_finish": pa.string(), "_tokens": pa.int32()}
    kinds |= {"_logprob": pa.float64(), "_error": pa.string()}
    return [
        pa.field(task + suffix, kind if samples == 1 else pa.list_(kind)) for suffix, kind in kinds.items()
    ]


def plain(kind: pa.DataType) -> pa.DataType:
    """The type that a column of `kind` has in the output: values instead of dictionaries, one string type."""
    if pa.types.is_dictionary(kind):
        return plain(kind.value_type)
    if pa.types.is_null(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return pa.string()
    return kind
