"""Which types a Delta table holds: what is let through comes back as it was, what is not is named."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from pipeline.errors import OutputError
from pipeline.output.delta import AddedPart, DeltaLog, refuse_undeltable

NOON = dt.datetime(2024, 5, 17, 12, 0, 0, 123000)
DAY = dt.date(2024, 5, 17)
HELD: list[tuple[pa.DataType, Any]] = [
    *((kind, 7) for kind in (pa.int8(), pa.int16(), pa.int32(), pa.int64())),
    (pa.float32(), 1.5),
    (pa.float64(), 1.5),
    (pa.bool_(), True),
    (pa.decimal32(5, 2), Decimal("1.25")),
    (pa.decimal64(12, 2), Decimal("1.25")),
    (pa.decimal128(38, 2), Decimal("1.25")),
    *((kind, "ä") for kind in (pa.string(), pa.large_string())),
    *((kind, b"ab") for kind in (pa.binary(), pa.large_binary(), pa.binary(2))),
    (pa.date32(), DAY),
    (pa.timestamp("s"), NOON.replace(microsecond=0)),
    (pa.timestamp("ms"), NOON),
    (pa.timestamp("us"), NOON),
    (pa.timestamp("s", "Europe/Paris"), NOON.replace(microsecond=0)),
    (pa.timestamp("ms", "UTC"), NOON),
    (pa.timestamp("us", "Europe/Paris"), NOON),
    (pa.timestamp("us", "+02:00"), NOON),
    (pa.list_(pa.timestamp("us", "Europe/Paris")), [NOON, None]),
    (pa.large_list(pa.string()), ["a", None]),
    (pa.struct([("a", pa.int32()), ("b", pa.list_(pa.string()))]), {"a": None, "b": []}),
    (pa.map_(pa.string(), pa.int32()), [("a", 1), ("b", None)]),
]
# polars' `read_delta` takes the type that the part names over that of the log, and stumbles over the difference
HELD_NOT_FOR_POLARS: list[tuple[pa.DataType, Any]] = [(pa.date64(), DAY), (pa.list_(pa.int32(), 2), [1, None])]
REFUSED = [
    pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64(), pa.float16(), pa.decimal256(50, 2), pa.time32("s"),
    pa.time64("us"), pa.duration("us"), pa.timestamp("ns"), pa.timestamp("ns", "UTC"), pa.uuid(), pa.json_(),
    pa.month_day_nano_interval(), pa.null(), pa.list_(pa.uint8()), pa.struct([("a", pa.list_(pa.time32("ms")))]),
    pa.map_(pa.string(), pa.float16()), pa.dictionary(pa.int8(), pa.uint16()),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "value"), HELD + HELD_NOT_FOR_POLARS, ids=str)
def test_what_delta_holds_comes_back(tmp_path: Path, kind: pa.DataType, value: Any) -> None:
    values = pa.array([value, None], kind)
    pq.write_table(pa.table({"c": values}), tmp_path / "part.parquet")
    part = AddedPart("part.parquet", (tmp_path / "part.parquet").stat().st_size, 2, {}, 0)
    DeltaLog(str(tmp_path), pa.schema([("c", kind)]), []).commit(1, [part], [], fresh=False)
    found = DeltaTable(tmp_path).to_pyarrow_table()["c"].to_pylist()
    assert found == values.to_pylist()
    assert len(DeltaTable(tmp_path).to_pandas()) == 2
    if (kind, value) not in HELD_NOT_FOR_POLARS:
        expected = [dict(v) if pa.types.is_map(kind) and v is not None else v for v in values.to_pylist()]
        assert pl.read_delta(str(tmp_path))["c"].to_list() == expected


@pytest.mark.parametrize("kind", REFUSED, ids=str)
def test_what_delta_cannot_hold_is_named_with_the_remedy(kind: pa.DataType) -> None:
    with pytest.raises(OutputError) as caught:
        refuse_undeltable(pa.schema([("id", pa.string()), ("size", kind)]))
    message = str(caught.value)
    assert message.startswith(f"output.format: column 'size' is of type {kind}, and Delta has no ")
    assert "use output.format: parquet" in message
    assert "\n" not in message


def test_dictionaries_are_as_good_as_their_values() -> None:
    refuse_undeltable(pa.schema([("a", pa.dictionary(pa.int8(), pa.string()))]))


def test_columns_that_differ_only_in_case_are_refused() -> None:
    with pytest.raises(OutputError, match="'Title' and 'title' are one name to Delta"):
        refuse_undeltable(pa.schema([("Title", pa.string()), ("title", pa.string())]))


def test_the_log_of_a_table_that_delta_cannot_hold_is_not_begun(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="'n'"):
        DeltaLog(str(tmp_path), pa.schema([("n", pa.uint8())]), [])
    assert list(tmp_path.iterdir()) == []
