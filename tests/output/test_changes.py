"""The comparison of input and output against counting, and its memory."""

from __future__ import annotations

import hashlib
import random
import tracemalloc
from collections import Counter
from collections.abc import Set as AbstractSet
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from pipeline.output.changes import CURRENT, HELD, Comparison, Found, joined

Document = tuple[str, str]  # id, content


def hashed(content: str) -> str:
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()


def compared(
    held: list[list[Document]], current: list[list[Document]], redo: AbstractSet[Document] = frozenset()
) -> Found:
    """Parts and files of the same numbers; file n of both sides is the same path."""
    with Comparison() as comparison:
        for part, rows in enumerate(held):
            comparison.add_held(
                pa.chunked_array([pa.array([i for i, _ in rows], pa.string())]),
                pa.chunked_array([pa.array([hashed(c) for _, c in rows], pa.string())]),
                part, 0, np.arange(len(rows)), np.full(len(rows), part, np.int32),
                np.array([row in redo for row in rows], dtype=bool),
                np.zeros(len(rows), dtype=bool),
            )  # fmt: skip
        for file, rows in enumerate(current):
            comparison.add_current(
                pa.array([i for i, _ in rows], pa.string()), pa.array([hashed(c) for _, c in rows], pa.string()),
                file, np.arange(len(rows)), np.zeros(len(rows), np.int32),
            )  # fmt: skip
        parts = list(comparison.found())
    return Found(
        joined([p.same for p in parts]), joined([p.redone for p in parts]), joined([p.changed for p in parts]),
        np.concatenate([p.gone for p in parts]),
    )  # fmt: skip


def documents(records: Any, side: list[list[Document]], place: str) -> list[Document]:
    return [side[int(r[place])][int(r["row"])] for r in records]


@pytest.mark.parametrize("seed", range(40))
def test_every_row_is_found_where_counting_says(seed: int) -> None:
    rng = random.Random(seed)
    ids = [f"é{n}" for n in range(rng.choice([2, 5, 40]))]

    def some() -> list[list[Document]]:
        rows = [[(rng.choice(ids), rng.choice("xyz")) for _ in range(rng.randrange(20))] for _ in range(3)]
        return rows

    held, current = some(), some()
    redo = {(rng.choice(ids), "x")}
    found = compared(held, current, redo)
    before, now = Counter(chain(*held)), Counter(chain(*current))
    for pairs in (found.same, found.redone):
        assert documents(pairs.held, held, "part") == documents(pairs.current, current, "path")
    unchanged = documents(found.same.held, held, "part") + documents(found.redone.held, held, "part")
    assert Counter(unchanged) == before & now
    assert all(document in redo for document in documents(found.redone.held, held, "part"))
    assert not any(document in redo for document in documents(found.same.held, held, "part"))
    old, new = documents(found.changed.held, held, "part"), documents(found.changed.current, current, "path")
    assert [i for i, _ in old] == [i for i, _ in new]
    left, came = before - now, now - before
    by_id = Counter(i for i, _ in left.elements()) & Counter(i for i, _ in came.elements())
    assert Counter(i for i, _ in old) == by_id
    gone = documents(found.gone, held, "part")
    assert Counter(old) + Counter(gone) == left
    assert Counter(new) <= came
    for side, records, place in (
        (held, [found.same.held, found.redone.held, found.changed.held, found.gone], "part"),
        (current, [found.same.current, found.redone.current, found.changed.current], "path"),
    ):
        used = [(int(r[place]), int(r["row"])) for some_records in records for r in some_records]
        assert len(used) == len(set(used)), "a row was used twice"
        assert set(used) <= {(n, row) for n, rows in enumerate(side) for row in range(len(rows))}


def test_of_equal_documents_those_of_the_same_file_are_paired() -> None:
    found = compared([[("a", "x")], [("a", "x")], [("a", "x")]], [[], [("a", "x")], [("a", "x"), ("a", "y")]])
    assert found.same.held["path"].tolist() == found.same.current["path"].tolist() == [1, 2]
    assert found.changed.held["path"].tolist() == [0]


def test_memory_is_a_fraction_of_what_is_compared() -> None:
    size, pieces = 50_000, 12
    ids = pa.array([f"{n:08d}" for n in range(size)])
    numbers, zeros = np.arange(size), np.zeros(size, np.int32)
    tracemalloc.start()
    try:
        with Comparison() as comparison:
            for piece in range(pieces):
                hashes = pa.array([f"{piece:08x}{n:024x}" for n in range(size)])
                comparison.add_held(
                    pa.chunked_array([ids]), pa.chunked_array([hashes]), piece, 0, numbers, zeros,
                    zeros.astype(bool), zeros.astype(bool),
                )
                comparison.add_current(ids, hashes, 0, numbers, zeros)
            del hashes
            before = tracemalloc.get_traced_memory()[0]
            tracemalloc.reset_peak()
            assert sum(len(found.same.held) for found in comparison.found()) == size * pieces
            used = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert used < size * pieces * (HELD.itemsize + CURRENT.itemsize) / 4, used
