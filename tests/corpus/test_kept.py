"""Types of kept columns, and what fits them."""

from __future__ import annotations

import io
from decimal import Decimal
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.types as kinds
import pytest

from pipeline.corpus.kept import common, fit, infer, plain, settled

BERLIN = pa.timestamp("ns", "Europe/Berlin")


@pytest.mark.parametrize(
    ("values", "type"),
    [
        ([None, 1, 2], pa.int64()),
        ([1, 2.5], pa.float64()),
        (["2024-05-01T10:00:00+02:00"], pa.string()),
        ([2**64 - 1], pa.uint64()),
        ([2**64], pa.null()),
        ([1, "a"], pa.int64()),
        (["a", 1], pa.string()),
        ([{"a": 1}, {"b": "x"}], pa.struct([("a", pa.int64()), ("b", pa.string())])),
        ([["x"], []], pa.list_(pa.string())),
        (["\ud83d"], pa.string()),
        ([None], pa.null()),
    ],
)
def test_types_of_json_values(values: list[Any], type: pa.DataType) -> None:
    assert infer(values).equals(type)


@pytest.mark.parametrize(
    ("first", "second", "joined"),
    [
        (pa.int32(), pa.int64(), pa.int64()),
        (pa.float32(), pa.float64(), pa.float64()),
        (pa.int64(), pa.float64(), pa.float64()),
        (pa.null(), pa.string(), pa.string()),
        (pa.string(), pa.int64(), pa.string()),
        (pa.string(), pa.binary(), pa.string()),
        (pa.timestamp("us"), BERLIN, BERLIN),
        (BERLIN, pa.timestamp("s", "UTC"), BERLIN),
        (pa.dictionary(pa.int8(), pa.string()), pa.string(), pa.string()),
        (pa.list_(pa.int32()), pa.list_(pa.int64()), pa.list_(pa.int64())),
    ],
)
def test_types_of_two_files_are_joined_where_no_value_changes(
    first: pa.DataType, second: pa.DataType, joined: pa.DataType
) -> None:
    assert common(first, second).equals(joined)


@pytest.mark.parametrize("view", [pa.string_view(), pa.binary_view(), pa.dictionary(pa.int8(), pa.string())])
def test_nested_views_and_dictionaries_are_written_plainly_and_read_by_pandas(view: pa.DataType) -> None:
    columns = {
        "list": pa.array([["a"], None], pa.list_(view)),
        "large": pa.array([["a"], None], pa.large_list(view)),
        "fixed": pa.array([["a"], None], pa.list_(view, 1)),
        "struct": pa.array([{"x": "a"}, None], pa.struct([("x", view)])),
        "map": pa.array([[("k", "a")], None], pa.map_(pa.string(), view)),
        "deep": pa.array([[{"x": ["a"]}], None], pa.list_(pa.struct([("x", pa.list_(view))]))),
    }
    fitted = {name: fit(column, settled(column.type), name) for name, column in columns.items()}
    assert [misfits for _, misfits in fitted.values()] == [{}] * len(columns)
    sink = pa.BufferOutputStream()
    table = pa.table({name: array for name, (array, _) in fitted.items()})
    pq.write_table(pa.concat_tables([table.slice(0, 1), table.slice(1)]), sink, row_group_size=2)
    frame = pd.read_parquet(io.BytesIO(sink.getvalue().to_pybytes()))
    value = b"a" if kinds.is_binary_view(view) else "a"
    assert frame["struct"][0] == {"x": value}
    assert [list(frame[name][0]) for name in ("list", "large", "fixed")] == [[value]] * 3
    assert list(frame["map"][0]) == [("k", value)]


@pytest.mark.parametrize("wrap", [pa.list_, pa.large_list, lambda item: pa.list_(item, 2)])
def test_lists_hold_what_pandas_reads(wrap: Any) -> None:
    assert settled(wrap(pa.binary(16))) == wrap(pa.binary())
    assert settled(wrap(pa.uuid())) == wrap(pa.binary())
    assert settled(wrap(pa.decimal32(5, 2))) == wrap(pa.decimal128(5, 2))
    assert settled(wrap(pa.json_())) == wrap(pa.json_())
    assert settled(pa.struct([("a", pa.binary(16))])) == pa.struct([("a", pa.binary(16))])


def test_nothing_that_is_written_must_not_be_null() -> None:
    whole = pa.field("a", pa.int32(), nullable=False)
    fitted, misfits = fit(pa.array([{"a": 1}], pa.struct([whole])), settled(pa.struct([whole])), "c")
    table = pa.table({"c": pa.concat_arrays([fitted, pa.nulls(1, fitted.type)])})
    pq.write_table(table, pa.BufferOutputStream())
    assert misfits == {}
    assert settled(pa.list_(whole)) == pa.list_(pa.int32())


def test_what_only_nulls_were_seen_of_is_written_as_text() -> None:
    assert settled(pa.null()) == pa.string()
    assert settled(pa.list_(pa.null())) == pa.list_(pa.string())
    assert settled(pa.struct([("a", pa.null())])) == pa.struct([("a", pa.string())])
    assert settled(BERLIN) == BERLIN


@pytest.mark.parametrize(
    ("values", "type", "expected"),
    [
        ([1, 2.0, None], pa.int64(), [1, 2, None]),
        ([1, 2.5], pa.float64(), [1.0, 2.5]),
        (["half \ud83d"], pa.string(), ["half \ufffd"]),
        ([{"a": 1}], pa.struct([("a", pa.int64()), ("b", pa.string())]), [{"a": 1, "b": None}]),
    ],
)
def test_values_that_fit_are_taken(values: list[Any], type: pa.DataType, expected: list[Any]) -> None:
    array, misfits = fit(values, type, "c")
    assert (array.type, array.to_pylist(), misfits) == (type, expected, {})


@pytest.mark.parametrize(
    ("bad", "type"),
    [
        ("a", pa.int64()),
        (1, pa.string()),
        (True, pa.int64()),
        (True, pa.float64()),
        (1, pa.bool_()),
        (1.5, pa.int64()),
        (2**63, pa.int64()),
        (2**53 + 1, pa.float64()),
        ({"a": 1, "new": 2}, pa.struct([("a", pa.int64())])),
        ([1, "x"], pa.list_(pa.int64())),
        ("yesterday", pa.timestamp("us")),
    ],
)
def test_a_value_that_does_not_fit_is_reported_and_null(bad: Any, type: pa.DataType) -> None:
    array, misfits = fit([None, bad], type, "c")
    assert array.to_pylist() == [None, None]
    assert list(misfits) == [1]
    assert misfits[1].startswith("column 'c': ")
    assert str(type) in misfits[1]


def test_an_instant_is_never_lost() -> None:
    naive = pa.array([0], pa.timestamp("s"))
    array, misfits = fit(naive, BERLIN, "c")
    assert (array.cast(pa.int64()).to_pylist(), misfits) == ([0], {})
    array, misfits = fit(["2024-05-01T10:00:00+02:00"], pa.timestamp("s", "UTC"), "c")
    assert (array.cast(pa.int64()).to_pylist(), misfits) == ([1714550400], {})
    array, misfits = fit(pa.array([1], pa.timestamp("ns")), pa.timestamp("s"), "c")
    assert (array.to_pylist(), list(misfits)) == ([None], [0])


def test_columns_of_files_are_cast_only_where_the_meaning_stays() -> None:
    assert fit(pa.array([1, 2**40]), pa.int32(), "c")[1].keys() == {1}
    assert fit(pa.array([1]), pa.string(), "c")[1].keys() == {0}
    assert fit(pa.array(["1"]), pa.int64(), "c")[1].keys() == {0}
    assert fit(pa.array([b"\xff", b"a"]), pa.string(), "c")[0].to_pylist() == [None, "a"]


def test_plain_values_are_the_same_for_every_unit_and_width() -> None:
    def same(*arrays: pa.Array) -> bool:
        return len({repr(plain(array)) for array in arrays}) == 1

    assert same(pa.array([5, None], pa.int8()), pa.array([5, None], pa.uint64()))
    assert same(pa.array([5], pa.timestamp("s")), pa.array([5 * 10**9], BERLIN))
    assert same(pa.array([1], pa.date32()), pa.array([86_400_000], pa.date64()))
    assert same(pa.array([Decimal("1.5")], pa.decimal128(5, 1)), pa.array([Decimal("1.50")], pa.decimal128(9, 2)))
    assert same(pa.array(["a"]), pa.array(["a"]).dictionary_encode(), pa.array(["a"], pa.large_string()))


def test_plain_values_of_nested_columns_are_exact() -> None:
    times = pa.struct([("t", pa.list_(pa.timestamp("ns")))])
    assert plain(pa.array([{"t": [1, None]}, None, {"t": []}, {"t": [7]}], times)) == [
        {"t": [1, None]},
        None,
        {"t": []},
        {"t": [7]},
    ]
    assert plain(pa.array([[("k", 1)], None, []], pa.map_(pa.string(), pa.int8()))) == [
        [{"key": "k", "value": 1}],
        None,
        [],
    ]
    assert plain(pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int8(), 2))[1:]) == [None, [3, 4]]
    assert plain(pa.array([b"\xff", None])) == ["ff", None]
