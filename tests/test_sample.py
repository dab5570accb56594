"""The bundled stories and the demo job are what their README and comments say (configs/sample, configs/demo.yaml)."""

from __future__ import annotations

import unicodedata
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.config import load_config

ROOT = Path(__file__).parent.parent
SAMPLE = ROOT / "configs" / "sample"
COLUMNS = ["doc_id", "headline", "dateline", "published_at", "source", "section", "body"]


@pytest.fixture(scope="module")
def stories() -> pa.Table:
    return pq.read_table(SAMPLE / "stories.parquet")


def word_counts(stories: pa.Table) -> list[int]:
    return sorted(len(body.split()) for body in stories["body"].to_pylist())


def test_sample_has_48_complete_rows_of_strings_and_one_zoned_timestamp(stories: pa.Table) -> None:
    assert stories.num_rows == 48
    assert stories.schema.names == COLUMNS
    assert stories["published_at"].type == pa.timestamp("us", tz="UTC")
    assert all(stories[name].type == pa.string() for name in COLUMNS if name != "published_at")
    assert all(column.null_count == 0 for column in stories.columns)


def test_ids_are_unique_and_keep_their_leading_zeros(stories: pa.Table) -> None:
    ids = stories["doc_id"].to_pylist()
    assert len(set(ids)) == 48
    assert all(len(id) == 6 and id.isdecimal() and id.startswith("000") for id in ids)


def test_exactly_one_text_was_carried_twice(stories: pa.Table) -> None:
    repeated = {body: times for body, times in Counter(stories["body"].to_pylist()).items() if times > 1}
    assert list(repeated.values()) == [2]
    carriers = [row for row in stories.to_pylist() if row["body"] in repeated]
    assert [row["doc_id"] for row in carriers] == ["000519", "000523"]
    assert carriers[0]["source"] != carriers[1]["source"]


def test_lengths_spread_from_60_to_900_words(stories: pa.Table) -> None:
    counts = word_counts(stories)
    assert 60 <= counts[0] < 65
    assert 850 < counts[-1] <= 900
    assert sum(count > 750 for count in counts) >= 3
    for start, stop in ((60, 120), (120, 250), (250, 450), (450, 901)):
        assert sum(start <= count < stop for count in counts) == 12


def test_stories_are_in_order_of_publication_within_two_weeks(stories: pa.Table) -> None:
    times = stories["published_at"].to_pylist()
    assert times == sorted(times)
    assert datetime(2025, 3, 3, tzinfo=UTC) <= times[0] < times[-1] < datetime(2025, 3, 15, tzinfo=UTC)


def test_every_story_opens_with_its_dateline_and_is_clean_text(stories: pa.Table) -> None:
    for row in stories.to_pylist():
        opening = row["body"][:400].casefold()
        assert row["dateline"].casefold() in opening or row["headline"].startswith("UPDATE"), row["doc_id"]
        for text in (row["headline"], row["body"]):
            assert text == text.strip() == unicodedata.normalize("NFC", text)
            assert not [char for char in text if unicodedata.category(char) == "Cc" and char != "\n"]


def test_sample_is_small_and_compressed_in_several_row_groups() -> None:
    path = SAMPLE / "stories.parquet"
    metadata = pq.read_metadata(path)
    assert path.stat().st_size < 200_000
    assert metadata.num_row_groups == 3
    assert metadata.row_group(0).column(0).compression == "ZSTD"


def test_readme_says_that_the_stories_are_invented_and_names_every_source(stories: pa.Table) -> None:
    readme = (SAMPLE / "README.md").read_text()
    assert "They are invented" in readme
    assert all(f"`{column}`" in readme for column in COLUMNS)
    assert all(f"`{source}`" in readme for source in set(stories["source"].to_pylist()))
    assert f"({len(set(stories['section'].to_pylist()))} in all)" in readme


def test_demo_job_loads_and_names_columns_of_the_sample(
    stories: pa.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    load_config("configs/cluster.yaml")
    config = load_config("configs/demo.yaml")
    assert [Path(path) for path in config.input.paths] == [SAMPLE / "stories.parquet"]
    assert {config.input.id, config.input.text, *config.input.keep} <= set(stories.schema.names)
    assert [draft.kind for draft in config.draft] == ["ngram"]
    assert [(task.name, task.temperature) for task in config.tasks] == [("summary", 0.0)]
    assert "{body}" in config.tasks[0].prompt
