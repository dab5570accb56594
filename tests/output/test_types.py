"""Kept columns of every type that Parquet can hold, from an input file to each reader of the output.

One job keeps them all. Its first input file has none of these columns, so that the first part holds only nulls; the
others are spread over two parts. What comes out must be what the same reader finds in a single file of the values that
were put in, or in `BECOMES` where a type does not survive.
"""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from jobs.run import execute
from tests.stub_engine import job, local, stub_models

NOON = dt.datetime(2024, 5, 17, 12)
DAY = dt.date(2024, 5, 17)
PAST = dt.datetime(1960, 1, 1)
FUTURE = dt.datetime(9998, 1, 1)
TIME = dt.time(23, 59, 58)
ZONES = ("UTC", "Europe/Paris", "+02:00")
LONG = "a text that is too long to be kept inside of a view"
ROWS = 3  # of every column below; the second value is null


def _integers() -> dict[str, pa.Array]:
    signed = {f"int{n}": [-(2 ** (n - 1)), None, 2 ** (n - 1) - 1] for n in (8, 16, 32, 64)}
    unsigned = {f"uint{n}": [0, None, 2**n - 1] for n in (8, 16, 32, 64)}
    return {name: pa.array(values, getattr(pa, name)()) for name, values in (signed | unsigned).items()}


def _numbers() -> dict[str, pa.Array]:
    prices = [Decimal("1.25"), None, Decimal("-3.10")]
    decimals = {f"decimal{bits}": (bits, digits) for bits, digits in ((32, 9), (64, 18), (128, 38))}
    return {
        "half": pa.array([np.float16(1.5), None, np.float16("nan")], pa.float16()),
        "single": pa.array([0.1, None, math.inf], pa.float32()),
        "double": pa.array([0.1, None, -math.inf], pa.float64()),
        "not_a_number": pa.array([math.nan, None, -0.0], pa.float64()),
        "boolean": pa.array([True, None, False]),
        "decimal_of_whole_numbers": pa.array([Decimal(2**64 - 1), None, Decimal(0)], pa.decimal128(20, 0)),
    } | {name: pa.array(prices, getattr(pa, f"decimal{bits}")(n, 2)) for name, (bits, n) in decimals.items()}


def _texts() -> dict[str, pa.Array]:
    text, raw = ["ä", None, LONG], [b"", None, b"\xff\x00" + LONG.encode()]
    texts = {name: pa.array(text, getattr(pa, name)()) for name in ("string", "large_string", "string_view")}
    binaries = {name: pa.array(raw, getattr(pa, name)()) for name in ("binary", "large_binary", "binary_view")}
    return texts | binaries | {"bytes_of_two": pa.array([b"ab", None, b"\xff\x00"], pa.binary(2))}


def _times() -> dict[str, pa.Array]:
    columns = {
        "date32": pa.array([DAY, None, dt.date(1, 1, 1)], pa.date32()),
        "date64": pa.array([DAY, None, dt.date(1, 1, 1)], pa.date64()),
        "time_s": pa.array([TIME, None, dt.time(0)], pa.time32("s")),
        "time_ms": pa.array([TIME.replace(microsecond=7000), None, dt.time(0)], pa.time32("ms")),
        "time_us": pa.array([TIME.replace(microsecond=7), None, dt.time(0)], pa.time64("us")),
        "time_ns": pa.array([TIME.replace(microsecond=7), None, dt.time(0)], pa.time64("ns")),
        "far": pa.array([FUTURE, None, dt.datetime(2, 1, 1)], pa.timestamp("us")),
        "far_in_paris": pa.array([FUTURE, None, dt.datetime(2, 1, 1)], pa.timestamp("us", "Europe/Paris")),
        "nanosecond": pa.array([1, None, -1], pa.timestamp("ns")),
        "nanosecond_in_tokyo": pa.array([1, None, -1], pa.timestamp("ns", "Asia/Tokyo")),
    }
    spans = [dt.timedelta(days=1, seconds=5), None, -dt.timedelta(seconds=1)]
    for unit in ("s", "ms", "us", "ns"):
        columns[f"naive_{unit}"] = pa.array([NOON, None, PAST], pa.timestamp(unit))
        columns[f"duration_{unit}"] = pa.array(spans, pa.duration(unit))
        for zone in ZONES:
            columns[f"{zone}_{unit}"] = pa.array([NOON, None, PAST], pa.timestamp(unit, zone))
    return columns


def _nested() -> dict[str, pa.Array]:
    paris = pa.timestamp("ms", "Europe/Paris")
    record = pa.struct([("when", paris), ("day", pa.date64()), ("price", pa.decimal32(5, 2)), ("id", pa.binary(2))])
    row = {"when": NOON, "day": DAY, "price": Decimal("1.50"), "id": b"ab"}
    pair = pa.struct([("a", pa.int32()), ("b", pa.string())])
    deep = pa.struct([("a", pa.struct([("b", pa.list_(pa.int8()))]))])
    whole = pa.field("item", pa.int32(), nullable=False)
    kinds: dict[str, tuple[pa.DataType, list[Any]]] = {
        "list": (pa.list_(pa.int32()), [[1, None], None, []]),
        "large_list": (pa.large_list(pa.string()), [["a", None], None, []]),
        "list_of_two": (pa.list_(pa.int32(), 2), [[1, None], None, [3, 4]]),
        "list_view": (pa.list_view(pa.int32()), [[1, None], None, []]),
        "large_list_view": (pa.large_list_view(pa.string()), [["a", None], None, []]),
        "lists": (pa.list_(pa.list_(pa.int32())), [[[1], None, []], None, []]),
        "lists_of_two": (pa.list_(pa.list_(pa.int32(), 2)), [[[1, 2], None], None, []]),
        "list_of_times": (pa.list_(paris), [[NOON, None], None, []]),
        "list_without_nulls": (pa.list_(whole), [[1, 2], None, []]),
        "struct": (pair, [{"a": 1, "b": "x"}, None, {"a": None, "b": None}]),
        "struct_without_nulls": (pa.struct([whole]), [{"item": 1}, None, {"item": 2}]),
        "structs": (deep, [{"a": {"b": [1, None]}}, None, {"a": None}]),
        "records": (pa.list_(record), [[row, None], None, []]),
        "map": (pa.map_(pa.string(), pa.int32()), [[("a", 1), ("b", None)], None, []]),
        "map_of_lists": (pa.map_(pa.int32(), pa.list_(pa.string())), [[(1, ["x", None]), (2, None)], None, []]),
        "sorted_map": (pa.map_(pa.string(), pa.int32(), keys_sorted=True), [[("a", 1), ("b", None)], None, []]),
        "list_of_bytes_of_two": (pa.list_(pa.binary(2)), [[b"ab", None], None, []]),
        "list_of_decimals": (pa.list_(pa.decimal64(12, 2)), [[Decimal("1.25"), None], None, []]),
        "list_of_views": (pa.list_(pa.list_view(pa.string_view())), [[["a", None], None], None, []]),
        "map_of_views": (pa.map_(pa.string(), pa.list_view(pa.int32())), [[("a", [1]), ("b", None)], None, []]),
        "two_views": (pa.list_(pa.list_view(pa.int32()), 2), [[[1], [2, None]], None, [None, []]]),
        "struct_of_views": (pa.struct([("a", pa.list_view(pa.int32()))]), [{"a": [1, 2]}, None, {"a": None}]),
    }
    return {name: pa.array(values, kind) for name, (kind, values) in kinds.items()}


def _others() -> dict[str, pa.Array]:
    uuids = _extension(pa.uuid(), [bytes(16), None, b"\xff" * 16])
    texts = _extension(pa.json_(), ['{"a": 1}', None, "[]"])
    pairs = pa.array([0, 2, 2, 3])
    return {
        "null": pa.nulls(ROWS),
        "list_of_nulls": pa.array([[None], None, []], pa.list_(pa.null())),
        "struct_of_nulls": pa.array([{"a": 1, "b": None}, None, None], pa.struct([("a", pa.int8()), ("b", pa.null())])),
        "dictionary": pa.array(["a", None, "b"], pa.dictionary(pa.int8(), pa.string())),
        "ordered_dictionary": pa.array(["a", None, "b"], pa.dictionary(pa.int32(), pa.string(), ordered=True)),
        "dictionary_of_times": pa.array([NOON, None, PAST], pa.timestamp("us", "Europe/Paris")).dictionary_encode(),
        "dictionary_of_bytes": pa.array([b"a", None, b"b"]).dictionary_encode(),
        "list_of_dictionaries": pa.array([["a", None], None, []], pa.list_(pa.dictionary(pa.int8(), pa.string()))),
        "uuid": uuids,
        "json": texts,
        "bool8": _extension(pa.bool8(), [1, None, 0]),
        "opaque": _extension(pa.opaque(pa.int32(), "kind", "vendor"), [1, None, 2]),
        "tensor": _extension(pa.fixed_shape_tensor(pa.float32(), [2]), [[1, 2], None, [3, 4]]),
        "struct_of_json": pa.StructArray.from_arrays([texts], names=["a"]),
        "list_of_json": pa.ListArray.from_arrays(pairs, texts),
        "list_of_uuids": pa.ListArray.from_arrays(pairs, uuids),
        "records_of_uuids": pa.ListArray.from_arrays(pairs, pa.StructArray.from_arrays([uuids], names=["a"])),
    }


def _extension(kind: pa.BaseExtensionType, values: list[Any]) -> pa.Array:
    return pa.ExtensionArray.from_storage(kind, pa.array(values, kind.storage_type))


COLUMNS = _integers() | _numbers() | _texts() | _times() | _nested() | _others()

# What does not survive, and what it becomes. The first group is Parquet's doing: it has no such type.
BECOMES: dict[str, pa.DataType] = {
    "date64": pa.date32(),
    "time_s": pa.time32("ms"),
    "naive_s": pa.timestamp("ms"),
    **{f"{zone}_s": pa.timestamp("ms", zone) for zone in ZONES},
    "records": pa.list_(
        pa.struct(
            [
                ("when", pa.timestamp("ms", "Europe/Paris")),
                ("day", pa.date32()),
                ("price", pa.decimal32(5, 2)),
                ("id", pa.binary(2)),
            ]
        )
    ),
    # One string type and no views: what they hold is the same.
    "large_string": pa.string(),
    "string_view": pa.string(),
    "binary_view": pa.binary(),
    "list_view": pa.list_(pa.int32()),
    "large_list_view": pa.large_list(pa.string()),
    "list_of_views": pa.list_(pa.list_(pa.string())),
    "map_of_views": pa.map_(pa.string(), pa.list_(pa.int32())),
    "two_views": pa.list_(pa.list_(pa.int32()), 2),
    "struct_of_views": pa.struct([("a", pa.list_(pa.int32()))]),
    # What could not be null now can, because a row that could not be read is.
    "list_without_nulls": pa.list_(pa.int32()),
    "struct_without_nulls": pa.struct([("item", pa.int32())]),
    # A dictionary is its values, or the first file would make categories of them. Of times, Arrow's own reader of
    # Parquet loses the zone's name (not the instant) before we see it.
    "dictionary": pa.string(),
    "ordered_dictionary": pa.string(),
    "dictionary_of_times": pa.timestamp("us", "UTC"),
    "dictionary_of_bytes": pa.binary(),
    "list_of_dictionaries": pa.list_(pa.string()),
    # Where nothing but nulls was seen, the type is text.
    "null": pa.string(),
    "list_of_nulls": pa.list_(pa.string()),
    "struct_of_nulls": pa.struct([("a", pa.int8()), ("b", pa.string())]),
    # pandas reads no lists of these: they become what it reads, with the same bytes and the same numbers.
    "list_of_bytes_of_two": pa.list_(pa.binary()),
    "list_of_uuids": pa.list_(pa.binary()),
    "list_of_decimals": pa.list_(pa.decimal128(12, 2)),
}
POLARS_CANNOT: dict[str, pa.Array] = {  # open, neither here nor in the input, whatever other columns there are
    "decimal256": pa.array([Decimal("1.25"), None, Decimal("-3.10")], pa.decimal256(76, 2)),
    "half_an_hour": pa.array([NOON, None, PAST], pa.timestamp("us", "-09:30")),
}


def become(name: str) -> pa.Array:
    """The values that must come out, made without nightdesk."""
    given, kind = COLUMNS[name], BECOMES.get(name)
    if name == "list_of_uuids":
        return pa.array([[bytes(16), None], [], [b"\xff" * 16]], kind)
    return given if kind is None else pa.array(given.to_pylist(), kind)


class Opened(NamedTuple):
    """A column as a reader has it."""

    kind: Any
    values: list[Any]


def by_pandas(path: str, name: str) -> Opened:
    frame = pd.read_parquet(path, columns=["doc_id", name]).sort_values("doc_id")
    return Opened(frame[name].dtype, frame[name].tolist())


def by_polars(path: str, name: str) -> Opened:
    frame = pl.read_parquet(f"{path}/*.parquet", columns=["doc_id", name]).sort("doc_id")
    return Opened(frame[name].dtype, frame[name].to_list())


def by_duckdb(path: str, name: str) -> Opened:
    query = f"""select typeof("{name}"), "{name}" from read_parquet('{path}/*.parquet') order by doc_id"""
    rows = duckdb.sql(query).fetchall()
    return Opened({kind for kind, _ in rows}, [value for _, value in rows])


def same(one: Any, other: Any) -> bool:
    """Equal, where NaN is NaN, NaT is NaT, and a list is a list whoever made it."""
    if isinstance(one, np.ndarray | list | tuple) and isinstance(other, np.ndarray | list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, float | np.floating) and isinstance(other, float | np.floating):
        return bool(one == other or (one != one and other != other))
    return type(one) is type(other) and bool(one == other or one is other or (one != one and other != other))


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What a run leaves of an input whose first file lacks the columns."""
    folder = tmp_path_factory.mktemp("types")
    write_input(folder, lambda table, path: pq.write_table(table, path))
    run(folder)
    return str(folder / "out")


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same rows in one file, for readers to compare with."""
    folder = tmp_path_factory.mktemp("expected")
    columns = {name: pa.chunked_array([pa.nulls(1, become(name).type), become(name)]) for name in COLUMNS}
    pq.write_table(pa.table({"doc_id": ["0", "1", "2", "3"], **columns}), folder / "all.parquet")
    return str(folder)


def write_input(folder: Path, write: Callable[[pa.Table, Path], None]) -> None:
    (folder / "in").mkdir()
    pq.write_table(pa.table({"doc_id": ["0"], "body": ["story"]}), folder / "in" / "a.parquet")
    write(pa.table({"doc_id": ["1", "2", "3"], "body": ["story"] * ROWS, **COLUMNS}), folder / "in" / "b.parquet")


def run(folder: Path, names: list[str] | None = None) -> None:
    config = job(folder, input__keep=names or list(COLUMNS), output__rows_per_shard=2)
    assert execute(config, executor=local(), models=stub_models()) == 0


@pytest.mark.parametrize("name", COLUMNS)
def test_pyarrow_reads_the_type_and_the_values(output: str, name: str) -> None:
    column = ds.dataset(output).to_table(columns=["doc_id", name]).sort_by("doc_id")[name].combine_chunks()
    wanted = become(name)
    assert column.type == wanted.type
    assert not column[0].is_valid
    assert same(column[1:].to_pylist(), wanted.to_pylist())
    if pa.types.is_temporal(wanted.type):  # Python's own times have no nanoseconds
        bits = pa.int32() if wanted.type.bit_width == 32 else pa.int64()
        assert column[1:].cast(bits).equals(wanted.cast(bits))


@pytest.mark.parametrize("read", [by_pandas, by_polars, by_duckdb])
@pytest.mark.parametrize("name", COLUMNS)
def test_every_reader_finds_what_it_would_find_in_one_file_of_the_values(
    output: str, expected: str, read: Callable[[str, str], Opened], name: str
) -> None:
    found, wanted = read(output, name), read(expected, name)
    assert found.kind == wanted.kind
    assert same(found.values, wanted.values)


def test_pandas_reads_all_columns_at_once(output: str) -> None:
    frame = pd.read_parquet(output)
    assert (len(frame), frame["error"].notna().sum()) == (1 + ROWS, 0)
    assert str(frame["Europe/Paris_us"].dtype) == "datetime64[us, Europe/Paris]"
    assert set(COLUMNS) < set(frame.columns)


@pytest.mark.parametrize("name", POLARS_CANNOT)
def test_what_polars_cannot_open_others_can(tmp_path: Path, name: str) -> None:
    (tmp_path / "in").mkdir()
    table = pa.table({"doc_id": ["0", "1", "2"], "body": ["story"] * ROWS, name: POLARS_CANNOT[name]})
    pq.write_table(table, tmp_path / "in" / "a.parquet")
    run(tmp_path, [name])
    column = ds.dataset(tmp_path / "out").to_table().sort_by("doc_id")[name].combine_chunks()
    assert column.equals(POLARS_CANNOT[name])
    for read in (by_pandas, by_duckdb):
        found, wanted = read(str(tmp_path / "out"), name), read(str(tmp_path / "in"), name)
        assert found.kind == wanted.kind
        assert same(found.values, wanted.values)


def test_nanoseconds_of_a_time_of_day_are_kept_though_pandas_has_no_such_times(tmp_path: Path) -> None:
    nanoseconds = pa.array([1, None, 86_399_999_999_999], pa.int64())
    (tmp_path / "in").mkdir()
    table = {"doc_id": ["0", "1", "2"], "body": ["story"] * ROWS, "at": nanoseconds.cast(pa.time64("ns"))}
    pq.write_table(pa.table(table), tmp_path / "in" / "a.parquet")
    run(tmp_path, ["at"])
    column = ds.dataset(tmp_path / "out").to_table().sort_by("doc_id")["at"]
    assert column.cast(pa.int64()).to_pylist() == nanoseconds.to_pylist()
    for path in ("in", "out"):
        with pytest.raises(pa.ArrowInvalid, match="non-zero nanoseconds"):
            pd.read_parquet(tmp_path / path)
    assert len(pd.read_parquet(tmp_path / "out", columns=["doc_id", "summary"])) == ROWS


def without_arrow_schema(table: pa.Table, path: Path) -> None:
    pq.write_table(table, path, store_schema=False)


def with_old_times(table: pa.Table, path: Path) -> None:
    near = table.select([name for name in table.column_names if "far" not in name])
    pq.write_table(near, path, use_deprecated_int96_timestamps=True)


def duckdb_file(table: pa.Table, path: Path) -> None:
    duckdb.sql(
        f"""copy (select (i + 1)::varchar doc_id, 'story' body, interval (i) month span, time '12:00:01' clock,
        timetz '12:00:01+02' clock_in_zone, timestamptz '2024-05-17 12:00:00+02' instant,
        timestamp_ns '2024-05-17 12:00:00.123456789' nanoseconds,
        uuid() identity, 5::hugeint huge, '101'::bit bits, 'a'::enum('a', 'b') choice, union_value(n := 2) either,
        map {{'a': 1}} pairs, [1, 2]::int[2] two, {{'a': {{'b': null}}}} deep, null nothing, '{{}}'::json document
        from range({ROWS}) r(i)) to '{path}'"""
    )


def polars_file(table: pa.Table, path: Path) -> None:
    frame = {
        "doc_id": ["1", "2", "3"],
        "body": ["story"] * ROWS,
        "category": pl.Series(["a", None, "b"], dtype=pl.Categorical),
        "choice": pl.Series(["a", None, "b"], dtype=pl.Enum(["a", "b"])),
        "at": [TIME, None, dt.time(0)],
        "span": [dt.timedelta(1), None, dt.timedelta(2)],
        "price": [Decimal("1.5"), None, Decimal(2)],
        "two": pl.Series([[1, 2], None, [3, 4]], dtype=pl.Array(pl.Int8, 2)),
        "categories": pl.Series([["a", None], None, []], dtype=pl.List(pl.Categorical)),
        "record": [{"a": 1, "b": ["x"]}, None, {"a": None, "b": []}],
        "nothing": pl.Series([None] * ROWS, dtype=pl.Null),
    }
    pl.DataFrame(frame).write_parquet(path)


@pytest.mark.parametrize("write", [without_arrow_schema, with_old_times, duckdb_file, polars_file])
def test_files_of_other_writers_come_out_as_arrow_reads_them(
    tmp_path: Path, write: Callable[[pa.Table, Path], None]
) -> None:
    write_input(tmp_path, write)
    given = pq.read_table(tmp_path / "in" / "b.parquet")  # in the order of its ids
    names = [name for name in given.column_names if name not in ("doc_id", "body")]
    assert len(names) > 8
    run(tmp_path, names)
    found = ds.dataset(tmp_path / "out").to_table().sort_by("doc_id")
    assert len(pd.read_parquet(tmp_path / "out")) == 1 + ROWS
    for name in names:
        wanted = given[name].to_pylist()
        if name == "list_of_uuids":
            wanted = [value and [item and item.bytes for item in value] for value in wanted]
        assert same(found[name].to_pylist()[1:], wanted), name


@pytest.mark.parametrize(
    "array",
    [
        pa.array([pa.MonthDayNano([1, 2, 3])]),
        pa.array([{}], pa.struct([])),
        pa.RunEndEncodedArray.from_arrays(pa.array([1], pa.int32()), pa.array(["a"])),
    ],
    ids=lambda array: str(array.type),
)
def test_the_types_that_are_missing_here_are_in_no_parquet_file(tmp_path: Path, array: pa.Array) -> None:
    with pytest.raises(pa.ArrowNotImplementedError):
        pq.write_table(pa.table({"a": array}), tmp_path / "a.parquet")
