"""Plans are small, exact, and the same after a round trip."""

from __future__ import annotations

import itertools

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from pipeline.corpus.listing import InputFile
from pipeline.corpus.readers import RowRange
from pipeline.output.plan import Plan, PlannedFile, Shard, Span, complement, cut, merged

SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("doc_hash", pa.string()),
        ("published_at", pa.timestamp("us", "Europe/Paris")),
        ("tags", pa.list_(pa.string())),
        ("error", pa.string()),
    ]
)


def plan(run: int = 1, rows: int = 10, fresh: bool = False, rows_per_shard: int = 4) -> Plan:
    file = InputFile("/in/a.parquet", "a.parquet", 100, "ff", "parquet")
    return Plan(
        run=run,
        fresh=fresh,
        salt=0,
        answers={"seed": 0, "tasks.t.prompt": "Say: {body} …"},
        columns={"input.id": None, "input.keep": ["published_at", "tags"], "output.partition_by": []},
        filters={"limit": None},
        context=128,
        schema=SCHEMA,
        files=(PlannedFile(file, rows, ((0, 2),)),),
        shards=cut([(0, (2, rows))], rows_per_shard, RowRange),
        created="2024-05-17T12:00:00+00:00",
    )


def test_a_plan_survives_its_json() -> None:
    assert Plan.from_json(plan().to_json()) == plan()
    assert Plan.from_json(plan().to_json()).fingerprint == plan().fingerprint


def test_a_plan_of_ten_million_documents_is_small() -> None:
    assert len(plan(rows=10_000_000, rows_per_shard=2000).to_json()) < 500_000


def test_the_kept_columns_of_a_plan_have_the_types_of_its_schema() -> None:
    assert plan().kept_schema == pa.schema([SCHEMA.field("published_at"), SCHEMA.field("tags")])


def test_shards_are_full_and_may_span_files() -> None:
    shards = cut([(0, (0, 5)), (1, (2, 4)), (2, (0, 1))], 3, RowRange)
    assert shards == (
        Shard(0, (RowRange(0, 0, 3),)),
        Shard(1, (RowRange(0, 3, 5), RowRange(1, 2, 3))),
        Shard(2, (RowRange(1, 3, 4), RowRange(2, 0, 1))),
    )
    assert [shard.rows for shard in shards] == [3, 3, 2]


SPANS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)).map(lambda s: (min(s), max(s))), max_size=6)


def rows_of(spans: list[Span]) -> set[int]:
    return {row for start, stop in spans for row in range(start, stop)}


@given(SPANS)
def test_merged_spans_are_the_same_rows_apart_and_in_order(spans: list[Span]) -> None:
    result = merged(spans)
    assert rows_of(result) == rows_of(spans)
    assert all(first[1] < second[0] for first, second in itertools.pairwise(result))


@given(SPANS, st.integers(30, 35))
def test_the_complement_is_every_other_row(spans: list[Span], rows: int) -> None:
    assert rows_of(complement(spans, rows)) == set(range(rows)) - rows_of(spans)


@given(SPANS, st.integers(1, 7))
def test_shards_hold_every_row_once_in_order(spans: list[Span], rows_per_shard: int) -> None:
    shards = cut([(0, span) for span in spans], rows_per_shard, RowRange)
    rows = [row for shard in shards for r in shard.ranges for row in range(r.start, r.stop)]
    assert rows == [row for start, stop in spans for row in range(start, stop)]
    assert all(shard.rows == rows_per_shard for shard in shards[:-1])
