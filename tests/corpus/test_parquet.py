"""Parquet: kept values never pass through Python, and damage costs only the rows it hits."""

from __future__ import annotations

import datetime as dt
import decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.corpus.readers import RowRange
from tests.corpus.reading import open_corpus, read_corpus, read_file, texts


def kept_table(path: Path, names: list[str], rows: int = 10**9) -> pa.Table:
    corpus = open_corpus(path, keep=names)
    batches = []
    index = corpus.count_rows(0)
    for start in range(0, index.rows, rows):
        span = index.range(0, start, min(start + rows, index.rows))
        batches += [batch.kept for batch in corpus.read([span])]
    return pa.Table.from_batches(batches, corpus.kept_schema)


def exact_columns() -> dict[str, pa.Array]:
    return {
        "nanoseconds": pa.array([1, 10**18 + 7, None], pa.timestamp("ns", "Europe/Berlin")),
        "naive": pa.array([1, 2**62, None], pa.timestamp("us")),
        "money": pa.array([decimal.Decimal("0.10"), None, decimal.Decimal("-7.25")], pa.decimal128(20, 2)),
        "nested": pa.array([[{"a": 1, "b": ["x", None]}], [], None], pa.list_(pa.struct([("a", pa.int16()), ("b", pa.list_(pa.string()))]))),  # noqa: E501
        "pairs": pa.array([[("k", 1)], None, []], pa.map_(pa.string(), pa.int64())),
        "day": pa.array([dt.date(2024, 5, 1), None, dt.date(1, 1, 1)], pa.date32()),
        "time": pa.array([1, 86_399_999_999_999, None], pa.time64("ns")),
        "small": pa.array([1, None, 255], pa.uint8()),
        "large": pa.array([2**64 - 1, 0, None], pa.uint64()),
        "half": pa.array([1.5, float("inf"), None], pa.float32()),
        "raw": pa.array([b"\xff\x00", None, b""], pa.binary()),
        "long": pa.array(["a", None, "\u00e9"], pa.large_string()),
        "fixed": pa.array([b"ab", None, b"cd"], pa.binary(2)),
    }  # fmt: skip


def test_kept_columns_come_through_exactly(tmp_path: Path) -> None:
    table = pa.table({"text": ["a", "b", "c"], **exact_columns()})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    names = list(exact_columns())
    assert kept_table(tmp_path, names).equals(table.select(names))
    assert kept_table(tmp_path, names, rows=1).equals(table.select(names))
    (batch,) = open_corpus(tmp_path, keep=names).read([RowRange(0, 0, 2)])
    assert [document.error for document in batch.documents] == [None, None]


def test_a_dictionary_is_kept_as_its_values(tmp_path: Path) -> None:
    column = pa.array(["a", None, "a"]).dictionary_encode()
    pq.write_table(pa.table({"text": column, "source": column}), tmp_path / "a.parquet")
    assert kept_table(tmp_path, ["source"]).column(0).combine_chunks().equals(pa.array(["a", None, "a"]))
    assert texts(read_file(tmp_path / "a.parquet")) == ["a", "text is empty", "a"]


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        (pa.array([18446744073709551615], pa.uint64()), "18446744073709551615"),
        (pa.array(["00123"]), "00123"),
        (pa.array([b"00123"]), "00123"),
        (pa.array([b"\xff\x01"]), "ff01"),
        (pa.array([3.0]), "3"),
        (pa.array([dt.datetime(2024, 5, 1, 7)], pa.timestamp("ms")), "2024-05-01 07:00:00.000"),
        (pa.array([b"\x00" * 15 + b"\x01"], pa.uuid()), "00000000-0000-0000-0000-000000000001"),
        (pa.array(["a"], pa.string_view()), "a"),
        (pa.array([decimal.Decimal("1.50")]), "1.50"),
    ],
)
def test_ids_of_any_type_become_text(tmp_path: Path, ids: pa.Array, expected: str) -> None:
    pq.write_table(pa.table({"id": ids, "text": ["x"]}), tmp_path / "a.parquet")
    assert [document.id for document in read_file(tmp_path / "a.parquet", id="id")] == [expected]


@pytest.mark.parametrize("rows", [1, 7, 100])
def test_a_range_in_the_middle_gives_its_own_rows(tmp_path: Path, rows: int) -> None:
    names = [f"story {n}" for n in range(50)]
    pq.write_table(pa.table({"text": names, "n": range(50)}), tmp_path / "a.parquet", row_group_size=12)
    assert texts(read_file(tmp_path / "a.parquet", None, rows)) == names
    assert kept_table(tmp_path, ["n"], rows).column(0).to_pylist() == list(range(50))


def test_text_in_bytes_is_read_and_what_is_no_text_is_an_error_row(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": pa.array(["é".encode(), b"caf\xe9", None])}), tmp_path / "a.parquet")
    assert texts(read_file(tmp_path / "a.parquet")) == ["é", "café", "text is empty"]
    pq.write_table(pa.table({"text": pa.array([1, None])}), tmp_path / "b.parquet")
    assert texts(read_file(tmp_path / "b.parquet")) == [
        "column 'text' holds a value of type int64, not text",
        "text is empty",
    ]


def broken_strings(values: list[bytes]) -> pa.Array:
    return pa.array(values, pa.binary()).view(pa.string())


def test_text_that_is_not_utf8_is_read_as_cp1252_and_such_a_kept_value_is_an_error(tmp_path: Path) -> None:
    column = broken_strings([b"caf\xe9", b"ok"])
    pq.write_table(pa.table({"text": column, "source": column}), tmp_path / "a.parquet")
    assert texts(read_file(tmp_path / "a.parquet")) == ["café", "ok"]
    documents, kept = read_corpus(open_corpus(tmp_path, keep=["source"]), 1)
    assert kept == [{"source": None}, {"source": "ok"}]
    assert documents[0].error is not None
    assert "source" in documents[0].error
    assert documents[1].error is None


def test_a_file_that_is_not_parquet_is_one_error_row(tmp_path: Path) -> None:
    documents = read_file(tmp_path / "a.parquet", b"PAR1 nonsense")
    assert len(documents) == 1
    assert documents[0].error is not None
    assert documents[0].error.startswith("a.parquet, row 1: not a readable Parquet file")


def test_an_empty_file_has_no_rows(tmp_path: Path) -> None:
    assert read_file(tmp_path / "a.parquet", b"") == []
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "b.parquet")
    assert read_file(tmp_path / "b.parquet") == []


def test_a_damaged_row_group_costs_its_own_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    table = pa.table({"text": [f"story {n} " + "x" * 50 for n in range(30)]})
    pq.write_table(table, path, row_group_size=10, compression="none", use_dictionary=False, write_page_checksum=True)
    chunk = pq.read_metadata(path).row_group(1).column(0)
    content = bytearray(path.read_bytes())
    for place in range(chunk.data_page_offset, chunk.data_page_offset + 40):
        content[place] = 0xFF
    documents = read_file(path, bytes(content))
    assert len(documents) == 30
    assert [document.error is None for document in documents] == [True] * 10 + [False] * 10 + [True] * 10
    assert documents[10].error is not None
    assert documents[10].error.startswith("a.parquet, row 11: the file is damaged")
    assert len({document.doc_hash for document in documents}) == 30


def test_a_file_without_any_wanted_column_still_counts_its_rows(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["x"]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"other": range(3)}), tmp_path / "b.parquet")
    documents, _ = read_corpus(open_corpus(tmp_path), 2)
    assert texts(documents) == ["x"] + ["there is no column 'text'"] * 3


def test_names_with_dots_are_not_paths(tmp_path: Path) -> None:
    table = pa.table({"text": ["x"], "a": [{"b": 1}], "a.b": ["dot"]})
    pq.write_table(table, tmp_path / "a.parquet")
    assert kept_table(tmp_path, ["a", "a.b"]).to_pylist() == [{"a": {"b": 1}, "a.b": "dot"}]
