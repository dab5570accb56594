"""The rows of a shard by the folder that they belong in. Knows nothing of requests, plans and storage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.types as kinds

from pipeline.errors import ConfigError
from pipeline.output.names import partition_folder


@dataclass(frozen=True)
class Piece:
    """What a shard has for one folder: `rows` are their places in the shard, ascending."""

    folder: str
    rows: npt.NDArray[np.int64]
    table: pa.Table  # without the partition columns


def pieces_of(table: pa.Table, partition_by: Sequence[str]) -> list[Piece]:
    """The table's rows by partition value, in the order of the folders' names; one piece where nothing partitions."""
    if not partition_by:
        return [Piece("", np.arange(table.num_rows), table)]
    folders = folders_of([table.column(name) for name in partition_by], partition_by)
    bare = table.drop_columns(list(partition_by))
    places: dict[str, list[int]] = {}
    for row, folder in enumerate(folders):
        places.setdefault(folder, []).append(row)
    return [Piece(folder, np.array(rows), bare.take(pa.array(rows))) for folder, rows in sorted(places.items())]


def folders_of(columns: Sequence[pa.ChunkedArray | pa.Array], partition_by: Sequence[str]) -> list[str]:
    """Row by row, the folder that its values name. Numbers, dates and times are written as Arrow writes them."""
    texts = [column.cast(pa.string()).to_pylist() for column in columns]
    known: dict[tuple[str | None, ...], str] = {}
    return [
        known[values] if values in known else known.setdefault(values, partition_folder(partition_by, values))
        for values in zip(*texts, strict=True)
    ]


def refuse_unpartitionable(schema: pa.Schema, partition_by: Sequence[str]) -> None:
    """ConfigError for a column whose values are no names of folders."""
    for name in partition_by:
        kind = schema.field(name).type
        if kinds.is_nested(kind) or kinds.is_binary(kind) or kinds.is_large_binary(kind) or kinds.is_duration(kind):
            raise ConfigError(f"output.partition_by: {name!r} is of type {kind}, which names no folder; take another")
