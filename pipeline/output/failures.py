"""Why rows have no answer: the reasons in published parts, grouped, with an example of each. Knows nothing of plans.

Reasons that differ only in numbers, in quoted text or in the place that they name are one kind.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pyarrow.types as kinds

from pipeline.output.store import Store

READERS = 8  # parts that are looked into at once
KINDS = 1000  # that are told apart; an archive with more has a reason of its own in every row
OTHER = "other reasons"
_PLACE = re.compile(r"^.{1,1000}?, row \d+: ")
_QUOTED = re.compile(r"""(?<!\w)(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")(?!\w)""")
_HASH = re.compile(r"\b(?=[0-9a-f]*\d)[0-9a-f]{12,}\b")
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
_NUMBERS = re.compile(r"N(?:, N)+")


@dataclass
class Kind:
    """Rows that failed alike; `example_id` is the first one's."""

    rows: int
    example_id: str


@dataclass
class Failures:
    """`error_rows` are rows with any error; by (task, reason) their kinds, task None where the row can't be read."""

    rows: int = 0
    error_rows: int = 0
    kinds: dict[tuple[str | None, str], Kind] = field(default_factory=dict)

    def add(self, other: Failures) -> None:
        """Take in what comes after in the order of parts."""
        self.rows += other.rows
        self.error_rows += other.error_rows
        for key, kind in other.kinds.items():
            self.count(key, kind.rows, kind.example_id)

    def count(self, key: tuple[str | None, str], rows: int, example_id: str) -> None:
        if key not in self.kinds and len(self.kinds) >= KINDS:
            key = (key[0], OTHER)
        known = self.kinds.setdefault(key, Kind(0, example_id))
        known.rows += rows


def kind_of(reason: str) -> str:
    """What a reason has in common with others of its kind."""
    text = _QUOTED.sub("'…'", _PLACE.sub("", " ".join(reason.split())))
    return _NUMBERS.sub("N, …", _NUMBER.sub("N", _HASH.sub("N", text)))


def failures_of(
    store: Store, parts: Iterable[str], id_column: str, tasks: Sequence[str]
) -> tuple[Failures, int]:
    """Over all `parts`, and how many of them could not be read because a run replaced or removed them just now."""

    def look(name: str) -> Failures | None:
        for _ in range(2):
            try:
                with store.open(name) as file:
                    return failures_in(file, id_column, tasks)
            except FileNotFoundError:
                return None
            except pa.ArrowException:  # replaced between two reads of it
                continue
        return None

    total, unreadable = Failures(), 0
    with ThreadPoolExecutor(READERS) as pool:
        for found in pool.map(look, parts):
            if found is None:
                unreadable += 1
            else:
                total.add(found)
    return total, unreadable


def failures_in(file: BinaryIO, id_column: str, tasks: Sequence[str]) -> Failures:
    """The failed rows of a part. Where its statistics say that a column of reasons is empty, it is not read."""
    parquet = pq.ParquetFile(file)
    found = Failures(rows=parquet.metadata.num_rows)
    columns: list[tuple[str | None, str]] = [(None, "error"), *((task, f"{task}_error") for task in tasks)]
    filled = [(task, name) for task, name in columns if not _is_empty(parquet.metadata, name)]
    if not filled:
        return found
    table = parquet.read(columns=[id_column, *(name for _, name in filled)])
    ids = table.column(id_column)
    failed = np.zeros(table.num_rows, dtype=bool)
    for task, name in filled:
        rows, reasons = _reasons(table.column(name).combine_chunks())
        failed[rows] = True
        seen: set[tuple[int, str]] = set()
        for row, reason in zip(rows.tolist(), map(kind_of, reasons), strict=True):
            if (row, reason) not in seen:  # several samples of a row may fail alike
                seen.add((row, reason))
                found.count((task, reason), 1, ids[row].as_py())
    found.error_rows = int(failed.sum())
    return found


def _is_empty(metadata: pq.FileMetaData, name: str) -> bool:
    """Do the statistics of every row group say that the column holds only nulls?"""
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        leaves = [group.column(i) for i in range(group.num_columns)]
        for leaf in (leaf for leaf in leaves if leaf.path_in_schema.split(".")[0] == name):
            counted = leaf.statistics
            if counted is None or counted.null_count is None or counted.null_count < leaf.num_values:
                return False
    return True


def _reasons(column: pa.Array) -> tuple[npt.NDArray[np.int64], list[str]]:
    """Row and reason of every failure in a column of reasons, or of lists of them."""
    rows = np.arange(len(column))
    if kinds.is_list(column.type):
        rows, column = pc.list_parent_indices(column).to_numpy(), pc.list_flatten(column)
    there = column.is_valid()
    return rows[there.to_numpy(zero_copy_only=False)], column.filter(there).to_pylist()
