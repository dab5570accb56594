"""The documents that the input has now against the rows that the output holds: what is unchanged, changed, new, gone.

Both sides are multisets of (id, doc_hash) and are compared in columns, a bucket of ids at a time from temporary files,
so that memory does not grow with the archive. Knows nothing of plans and files beyond numbers for them.
"""

from __future__ import annotations

import binascii
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa

BUCKETS = 64
HASH_DIGITS = 32

# An id's 64-bit hash stands for it beside the 128 bits of doc_hash: two documents could be mixed up only if their
# contents were the same.
_KEY = [("id", "<u8"), ("hash", "<u8", (2,))]
CURRENT = np.dtype([*_KEY, ("path", "<i4"), ("row", "<i8"), ("folder", "<i4")])
HELD = np.dtype(
    [*_KEY, ("path", "<i4"), ("row", "<i8"), ("folder", "<i4"), ("part", "<i4"), ("redo", "?"), ("unreadable", "?")]
)
Records = npt.NDArray[np.void]


@dataclass
class Pairs:
    """Rows of the output with the rows of the input that belong to them: arrays of equal length."""

    held: Records = field(default_factory=lambda: np.empty(0, HELD))
    current: Records = field(default_factory=lambda: np.empty(0, CURRENT))

    def split(self, chosen: npt.NDArray[np.bool_]) -> tuple[Pairs, Pairs]:
        """The pairs that are not chosen, and those that are."""
        return Pairs(self.held[~chosen], self.current[~chosen]), Pairs(self.held[chosen], self.current[chosen])


def joined(pairs: Sequence[Pairs]) -> Pairs:
    return Pairs(np.concatenate([p.held for p in pairs]), np.concatenate([p.current for p in pairs]))


@dataclass
class Found:
    """What a comparison found. `redone` are unchanged documents whose answers are wanted anew."""

    same: Pairs
    redone: Pairs
    changed: Pairs
    gone: Records


class Comparison:
    """A context: fed with both sides in any order and number of pieces, then asked once."""

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory(prefix="nightdesk-")
        self._files: dict[tuple[str, int], Any] = {}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._files.values():
            file.close()
        self._folder.cleanup()

    def add_current(
        self, ids: pa.Array, hashes: pa.Array, path: int, rows: npt.NDArray[np.int64], folders: npt.NDArray[np.int32]
    ) -> None:
        """Documents of one file; `rows` are their numbers in it, `folders` numbers of where their rows belong."""
        records = _records(CURRENT, ids, hashes)
        records["path"], records["row"], records["folder"] = path, rows, folders
        self._spill("current", records)

    def add_held(
        self,
        ids: pa.ChunkedArray,
        hashes: pa.ChunkedArray,
        part: int,
        folder: int,
        rows: npt.NDArray[np.int64],
        paths: npt.NDArray[np.int32],
        redo: npt.NDArray[np.bool_],
        unreadable: npt.NDArray[np.bool_],
    ) -> None:
        """Rows of one part, which of them are to be answered anew even if their documents are unchanged, and which are
        no documents, because they could not be read."""
        records = _records(HELD, ids, hashes)
        records["part"], records["folder"], records["row"] = part, folder, rows
        records["path"], records["redo"], records["unreadable"] = paths, redo, unreadable
        self._spill("held", records)

    def found(self) -> Iterator[Found]:
        """A bucket at a time: every held row in exactly one of the four; current rows that are in none are new."""
        for bucket in range(BUCKETS):
            held, current = self._load("held", bucket, HELD), self._load("current", bucket, CURRENT)
            exact = _paired(held, current, ("id", "hash"))
            unchanged = Pairs(held[exact[0]], current[exact[1]])
            held, current = np.delete(held, exact[0]), np.delete(current, exact[1])
            by_id = _paired(held, current, ("id",))
            same, redone = unchanged.split(unchanged.held["redo"])
            yield Found(
                same, redone, Pairs(held[by_id[0]], current[by_id[1]]), np.delete(held, by_id[0])
            )

    def _spill(self, side: str, records: Records) -> None:
        buckets = (records["id"] % BUCKETS).astype(np.int64)
        order = np.argsort(buckets, kind="stable")
        ends = np.searchsorted(buckets[order], np.arange(1, BUCKETS + 1))
        for bucket, piece in enumerate(np.split(records[order], ends[:-1])):
            if len(piece):
                if (side, bucket) not in self._files:
                    self._files[side, bucket] = (Path(self._folder.name) / f"{side}-{bucket}").open("wb")
                piece.tofile(self._files[side, bucket])

    def _load(self, side: str, bucket: int, kind: np.dtype[Any]) -> Records:
        file = self._files.get((side, bucket))
        if file is None:
            return np.empty(0, kind)
        file.flush()
        return np.fromfile(file.name, kind)


def _records(kind: np.dtype[Any], ids: pa.Array | pa.ChunkedArray, hashes: pa.Array | pa.ChunkedArray) -> Records:
    records = np.zeros(len(ids), kind)
    if len(ids):
        records["id"] = pd.util.hash_array(ids.to_numpy(zero_copy_only=False), categorize=False)
        digits = "".join(hashes.to_pylist()).encode()
        assert len(digits) == HASH_DIGITS * len(ids), "a doc_hash has another length"
        records["hash"] = np.frombuffer(binascii.unhexlify(digits), "<u8").reshape(-1, 2)
    return records


def _paired(
    held: Records, current: Records, key: Sequence[str]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Places of rows with equal keys, each used once; of several with one key those of the same file come first."""
    pairs: list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]] = []
    left = np.arange(len(held)), np.arange(len(current))
    for names in ((*key, "path"), tuple(key)):
        places, others = _meet(held[left[0]], current[left[1]], names)
        pairs.append((left[0][places], left[1][others]))
        left = np.delete(left[0], places), np.delete(left[1], others)
    return np.concatenate([p[0] for p in pairs]), np.concatenate([p[1] for p in pairs])


def _meet(held: Records, current: Records, names: Sequence[str]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    ours, theirs = _ranked(held, names), _ranked(current, names)
    _, places, others = np.intersect1d(ours, theirs, assume_unique=True, return_indices=True)
    return places, others


def _ranked(records: Records, names: Sequence[str]) -> npt.NDArray[np.void]:
    """A unique value per row: its key, and which of the rows with that key it is, in the order of their rows."""
    columns = [column for name in names for column in _columns(records[name])]
    order = np.lexsort([records["row"], *columns])
    ranks = np.zeros(len(records), np.uint64)
    if len(records):
        starts = np.zeros(len(records), bool)
        starts[0] = True
        for column in columns:
            ordered = column[order]
            starts[1:] |= ordered[1:] != ordered[:-1]
        first = np.maximum.accumulate(np.where(starts, np.arange(len(records)), 0))
        ranks[order] = np.arange(len(records)) - first
    return np.ascontiguousarray(np.stack([*columns, ranks], axis=1)).view(f"V{8 * (len(columns) + 1)}").ravel()


def _columns(values: npt.NDArray[Any]) -> list[npt.NDArray[np.uint64]]:
    wide = values.astype(np.uint64)
    return [wide] if wide.ndim == 1 else [wide[:, i] for i in range(wide.shape[1])]
