"""Reasons are grouped by what they have in common; columns without any are not read."""

from __future__ import annotations

import io
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.output import failures
from pipeline.output.failures import OTHER, Failures, failures_in, kind_of


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ("prompt too long: 5012 of 4,096 tokens", "prompt too long: N of N tokens"),
        ("a/b.jsonl, row 17: not JSON: unexpected 'x' at 3", "not JSON: unexpected '…' at N"),
        ("part 7, row 2.csv, row 9: ragged", "ragged"),
        ('column \'price\': "12 €" is not a value of type int64', "column '…': '…' is not a value of type intN"),
        ("the model's context can't hold 3 tokens", "the model's context can't hold N tokens"),
        ("it's \"quoted, it's\" and 'so'", "it's '…' and '…'"),
        ("column 'a': [1, 22, 3] is no value", "column '…': [N, …] is no value"),
        ("request 00ff00ff00ff00ff is lost", "request N is lost"),
        ("two\nlines", "two lines"),
        ("", ""),
    ],
)
def test_reasons_of_one_kind(reason: str, kind: str) -> None:
    assert kind_of(reason) == kind


def part(**columns: Any) -> io.BytesIO:
    file = io.BytesIO()
    texts = pa.string()
    arrays = {
        name: pa.array(values, pa.list_(texts) if any(isinstance(v, list) for v in values) else texts)
        for name, values in columns.items()
    }
    pq.write_table(pa.table(arrays), file, row_group_size=2)
    return file


def counted(found: Failures) -> dict[tuple[str | None, str], tuple[int, str]]:
    return {key: (kind.rows, kind.example_id) for key, kind in found.kinds.items()}


def test_rows_are_counted_once_and_reasons_by_task() -> None:
    file = part(
        id=["a", "b", "c", "d"],
        error=[None, None, None, "x.csv, row 4: ragged"],
        t_error=[None, "too long: 5", "too long: 77", None],
        u_error=[None, "empty", None, None],
    )
    found = failures_in(file, "id", ["t", "u"])
    assert (found.rows, found.error_rows) == (4, 3)
    assert counted(found) == {
        (None, "ragged"): (1, "d"),
        ("t", "too long: N"): (2, "b"),
        ("u", "empty"): (1, "b"),
    }


def test_samples_that_fail_alike_are_one_failed_row() -> None:
    lists = [[None, None], None, ["bad 1", "bad 2"], [None, "worse"]]
    found = failures_in(part(id=["a", "b", "c", "d"], error=[None] * 4, t_error=lists), "id", ["t"])
    assert (found.rows, found.error_rows) == (4, 2)
    assert counted(found) == {("t", "bad N"): (1, "c"), ("t", "worse"): (1, "d")}


def test_parts_add_up_and_the_first_example_stays() -> None:
    total = Failures()
    for letter in "ab":
        total.add(failures_in(part(id=[letter], error=["bad 1"]), "id", []))
    total.add(failures_in(part(id=["c"], error=[None]), "id", []))
    assert (total.rows, total.error_rows) == (3, 2)
    assert counted(total) == {(None, "bad N"): (2, "a")}


@pytest.mark.parametrize("columns", [{"t_error": [None] * 4}, {"t_error": [[None, None], None, [], [None]]}])
def test_a_part_without_failures_is_told_by_its_statistics(
    monkeypatch: pytest.MonkeyPatch, columns: dict[str, Any]
) -> None:
    file = part(id=list("abcd"), error=[None] * 4, **columns)
    monkeypatch.setattr(pq.ParquetFile, "read", lambda *args, **kwargs: pytest.fail("was read"))
    assert failures_in(file, "id", ["t"]).rows == 4


def test_a_part_without_statistics_is_read() -> None:
    file = io.BytesIO()
    pq.write_table(pa.table({"id": ["a"], "error": ["bad"]}), file, write_statistics=False)
    assert failures_in(file, "id", []).error_rows == 1


def test_kinds_without_end_become_other_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "KINDS", 2)
    words = ["one", "two", "three", "one", "four"]
    found = failures_in(part(id=list("abcde"), error=words), "id", [])
    assert counted(found) == {(None, "one"): (2, "a"), (None, "two"): (1, "b"), (None, OTHER): (2, "c")}
    assert found.error_rows == 5
