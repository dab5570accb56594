"""Parts as bytes: compressed as asked, rows as planned, and a footer that says whose they are."""

from __future__ import annotations

import dataclasses
import io
import random
from pathlib import Path
from typing import get_args

import duckdb
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.config import Compression
from pipeline.output import writer
from pipeline.output.plan import Plan, Shard
from pipeline.output.rows import ShardRows
from pipeline.output.writer import Edit, Footer, counts_from, part_bytes, read_footer, schema_bytes
from pipeline.records import Completion, CompletionStats, Document, FinishReason
from pipeline.stats import Progress
from tests.output.test_plan import SCHEMA, plan

CODECS = {"zstd": "ZSTD", "snappy": "SNAPPY", "gzip": "GZIP", "lz4": "LZ4", "none": "UNCOMPRESSED"}
ANSWERED = pa.schema(
    [
        ("id", pa.string()),
        ("doc_hash", pa.string()),
        ("source", pa.string()),
        ("t", pa.string()),
        ("t_finish", pa.string()),
        ("t_tokens", pa.int32()),
        ("t_logprob", pa.float64()),
        ("t_error", pa.string()),
        ("error", pa.string()),
    ]
)


def whole_shard(rows: int) -> tuple[Plan, Shard]:
    planned = plan(rows=rows + 2, rows_per_shard=rows)
    return planned, planned.shards[0]


def blank(shard: Shard) -> pa.Table:
    ids = [f"{n:05d}" for n in range(shard.rows)]
    return pa.table({f.name: pa.array(ids if f.name == "id" else [None] * len(ids), f.type) for f in SCHEMA})


def footer(planned: Plan, shard: Shard, counts: Progress | None = None) -> Footer:
    return Footer(planned.run, shard.index, planned.fingerprint, counts or Progress())


def test_every_compression_of_the_job_file_has_a_codec_here() -> None:
    assert set(get_args(Compression)) == set(CODECS)


@pytest.mark.parametrize("compression", CODECS)
def test_a_part_is_compressed_as_asked_and_reads_everywhere(compression: str, tmp_path: Path) -> None:
    planned, shard = whole_shard(rows=50)
    data = part_bytes(blank(shard), footer(planned, shard), compression)
    group = pq.read_metadata(io.BytesIO(data)).row_group(0)
    assert {group.column(n).compression for n in range(group.num_columns)} == {CODECS[compression]}
    path = f"{tmp_path}/part.parquet"
    with open(path, "wb") as file:
        file.write(data)
    expected = blank(shard)["id"].to_pylist()
    assert pd.read_parquet(path)["id"].tolist() == expected
    assert pl.read_parquet(path)["id"].to_list() == expected
    assert [row[0] for row in duckdb.sql(f"select id from '{path}'").fetchall()] == expected


def test_a_part_is_zstd_unless_asked_otherwise() -> None:
    planned, shard = whole_shard(rows=5)
    metadata = pq.read_metadata(io.BytesIO(part_bytes(blank(shard), footer(planned, shard))))
    assert metadata.row_group(0).column(0).compression == "ZSTD"


def test_rows_of_a_part_are_in_the_plans_order_however_answers_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "ROWS_PER_GROUP", 30)
    planned, shard = whole_shard(rows=100)
    rows = ShardRows(shard, ANSWERED, "id", {"t": 1})
    for first in range(0, 100, 25):
        sources = [f"source {n}" for n in range(first, first + 25)]
        rows.kept.append(pa.record_batch({"source": sources}))
        for n in range(first, first + 25):
            rows.add(Document(f"{n:05d}", "h", "", {}, "unreadable" if n == 40 else None))
    order = [n for n in range(100) if n != 40]
    random.Random(0).shuffle(order)
    for n in order:
        rows.answer(n, "t", Completion("k", [1], f"answer {n}", FinishReason.STOP, None, CompletionStats()))
    file = pq.ParquetFile(io.BytesIO(part_bytes(rows.table(), footer(planned, shard))))
    assert file.metadata.num_row_groups == 4
    found = file.read().to_pydict()
    assert found["id"] == [f"{n:05d}" for n in range(100)]
    assert found["source"] == [f"source {n}" for n in range(100)]
    assert found["t"] == [None if n == 40 else f"answer {n}" for n in range(100)]


def test_a_part_says_whose_it_is_and_counts_its_rows() -> None:
    planned, shard = whole_shard(rows=5)
    counts = Progress(rows_done=5, error_rows=1, drafted_at=(3, 2), accepted_at=(2, 1))
    data = part_bytes(blank(shard), footer(planned, shard, counts), "none")
    told = pq.read_metadata(io.BytesIO(data)).metadata
    assert (told[b"nightdesk.run"], told[b"nightdesk.shard"]) == (b"000001", b"0")
    assert told[b"nightdesk.fingerprint"] == planned.fingerprint.encode()
    assert read_footer(io.BytesIO(data)) == footer(planned, shard, counts)


def test_a_footer_remembers_pieces_and_the_last_edit() -> None:
    planned, shard = whole_shard(rows=5)
    edited = dataclasses.replace(
        footer(planned, shard), pieces={"day=mon": [2, 3]}, edit=Edit(2, 7, cut=True, counts=Progress(rows_done=1))
    )
    assert read_footer(io.BytesIO(part_bytes(blank(shard), edited))) == edited


def test_the_part_without_rows_has_the_schema() -> None:
    file = pq.ParquetFile(io.BytesIO(schema_bytes(SCHEMA)))
    assert file.metadata.num_rows == 0
    assert file.schema_arrow.remove_metadata() == SCHEMA


def test_counts_of_older_versions_are_read_without_those_that_they_lack() -> None:
    counts = counts_from({"rows_done": 2, "accepted_at": [3, 1]})
    assert counts == Progress(rows_done=2, accepted_at=(3, 1), truncated=0)
