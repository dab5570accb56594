"""The corpus as a whole: files that differ, columns that are missing, hashes."""

from __future__ import annotations

import datetime as dt
import gzip
import json
import random
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.corpus.listing import list_files
from pipeline.corpus.readers import Corpus, RowRange
from pipeline.errors import CorpusError
from tests.corpus.reading import open_corpus, read_corpus, read_file, texts


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize(
    ("fields", "settings", "message"),
    [
        ((), {}, "input.text: no input file has a column 'text'; a.jsonl has 'id', 'body'"),
        ((), {"text": "body", "id": "no"}, "input.id: no input file has a column 'no'"),
        ((), {"text": "body", "keep": ["no"]}, "input.keep or output.partition_by: no input file has a column 'no'"),
        (("headline",), {"text": "body"}, "tasks: a prompt .*: no input file has a column 'headline'"),
    ],
)
def test_a_column_that_no_file_has_is_a_mistake_in_the_job(
    tmp_path: Path, fields: tuple[str, ...], settings: dict[str, Any], message: str
) -> None:
    write_lines(tmp_path / "a.jsonl", [{"id": 1, "body": "x"}])
    corpus = open_corpus(tmp_path, fields, **settings)
    with pytest.raises(CorpusError, match=message):
        _ = corpus.kept_schema


def test_a_column_that_one_file_lacks_costs_only_what_needs_it(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", [{"id": 1, "text": "x", "n": 1, "head": "h"}])
    write_lines(tmp_path / "b.jsonl", [{"text": "y"}])
    write_lines(tmp_path / "c.jsonl", [{"id": 3, "n": 3}])
    documents, kept = read_corpus(open_corpus(tmp_path, ("head", "text"), id="id", keep=["n"]), 3)
    assert texts(documents) == ["x", "y", "text is empty"]
    assert [dict(document.fields) for document in documents] == [
        {"head": "h", "text": "x"},
        {"head": "", "text": "y"},
        {},
    ]
    assert [len(document.id) for document in documents] == [1, 32, 1]
    assert kept == [{"n": 1}, {"n": None}, {"n": 3}]


def test_an_empty_corpus_and_an_empty_file_have_a_schema_and_no_rows(tmp_path: Path) -> None:
    assert open_corpus(tmp_path, keep=["n"]).kept_schema == pa.schema([("n", pa.string())])
    (tmp_path / "a.jsonl").touch()
    (tmp_path / "b.parquet").touch()
    corpus = open_corpus(tmp_path, keep=["n"])
    assert corpus.kept_schema == pa.schema([("n", pa.string())])
    assert read_corpus(corpus, 2) == ([], [])


def test_types_of_json_come_from_the_first_rows_of_every_file(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", [{"text": "x", "n": None}, {"text": "x", "n": 1}])
    write_lines(tmp_path / "b.jsonl", [{"text": "x", "n": 2.5}, {"text": "x", "n": "three"}])
    corpus = open_corpus(tmp_path, keep=["n"])
    documents, kept = read_corpus(corpus, 2)
    assert corpus.kept_schema == pa.schema([("n", pa.float64())])
    assert kept == [{"n": None}, {"n": 1.0}, {"n": 2.5}, {"n": None}]
    assert [document.error for document in documents] == [None] * 3 + [
        "column 'n': \"three\" is not a value of type double"
    ]


def test_a_time_with_a_zone_beside_one_without_keeps_its_instant(tmp_path: Path) -> None:
    berlin = dt.timezone(dt.timedelta(hours=2))
    zoned = pa.array([dt.datetime(2024, 5, 1, 10, tzinfo=berlin)], pa.timestamp("us", "+02:00"))
    naive = pa.array([dt.datetime(2024, 5, 1, 10)], pa.timestamp("us"))
    pq.write_table(pa.table({"text": ["x"], "published_at": zoned}), tmp_path / "b.parquet")
    pq.write_table(pa.table({"text": ["x"], "published_at": naive}), tmp_path / "a.parquet")
    corpus = open_corpus(tmp_path, keep=["published_at"])
    assert corpus.kept_schema.field(0).type == pa.timestamp("us", "+02:00")
    instants = [row["published_at"].astimezone(dt.UTC).hour for row in read_corpus(corpus, 2)[1]]
    assert instants == [10, 8]


def test_times_in_json_stay_the_strings_they_are(tmp_path: Path) -> None:
    stamps = ["2024-05-01T10:00:00+02:00", "2024-05-01T10:00:00"]
    for name, stamp in zip("ab", stamps, strict=True):
        write_lines(tmp_path / f"{name}.jsonl", [{"text": "x", "published_at": stamp}])
    assert [row["published_at"] for row in read_corpus(open_corpus(tmp_path, keep=["published_at"]), 2)[1]] == stamps


def test_prompt_fields_are_cleaned_text_whatever_their_type(tmp_path: Path) -> None:
    row = {"text": "x", "n": 5, "f": 1.5, "yes": True, "list": ["é", 1], "none": None, "s": "a\r\nb\x00"}
    names = ("n", "f", "yes", "list", "none", "s")
    write_lines(tmp_path / "a.jsonl", [row])
    (document,) = read_corpus(open_corpus(tmp_path, names), 1)[0]
    assert dict(document.fields) == {
        "n": "5", "f": "1.5", "yes": "true", "list": '["é", 1]', "none": "", "s": "a\nb"
    }  # fmt: skip
    table = pa.table({"text": ["x"], "day": [dt.date(2024, 5, 1)], "at": pa.array([1], pa.timestamp("ns", "UTC"))})
    pq.write_table(table, tmp_path / "b.parquet")
    document = read_corpus(open_corpus(tmp_path / "b.parquet", ("day", "at")), 1)[0][0]
    assert dict(document.fields) == {"day": "2024-05-01", "at": "1970-01-01 00:00:00.000000001Z"}


def hashes(path: Path, fields: tuple[str, ...] = (), **settings: Any) -> list[str]:
    return [document.doc_hash for document in read_corpus(open_corpus(path, fields, **settings), 1)[0]]


def test_the_hash_is_of_text_fields_and_kept_columns_in_any_format(tmp_path: Path) -> None:
    rows = [{"id": n, "text": f"t{n}", "head": "h", "n": n, "other": n} for n in range(600)]
    write_lines(tmp_path / "a.jsonl", rows)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=7)
    settings: dict[str, Any] = {"fields": ("head",), "keep": ["n"], "id": "id"}
    lines = hashes(tmp_path / "a.jsonl", **settings)
    assert hashes(tmp_path / "a.parquet", **settings) == lines
    assert len(set(lines)) == 600
    assert all(len(hash) == 32 and int(hash, 16) >= 0 for hash in lines)
    write_lines(tmp_path / "b.jsonl", [{**row, "id": "z", "other": 0, "text": f"{row['text']}\r\n"} for row in rows])
    assert hashes(tmp_path / "b.jsonl", **settings) == lines
    for change in ({"text": "new"}, {"head": "new"}, {"n": -1}):
        write_lines(tmp_path / "c.jsonl", [{**rows[0], **change}])
        assert hashes(tmp_path / "c.jsonl", **settings)[0] != lines[0]


def test_values_that_can_not_be_used_are_in_the_hash(tmp_path: Path) -> None:
    rows = [{"text": "x", "n": 1}, {"text": "x", "n": "a" * 100 + "1"}, {"text": "x", "n": "a" * 100 + "2"}]
    write_lines(tmp_path / "a.jsonl", [*rows, {"text": 1, "n": 1}, {"text": 2, "n": 1}])
    assert len(set(hashes(tmp_path / "a.jsonl", keep=["n"]))) == 5


def test_rows_that_are_gone_since_the_plan_are_error_rows(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", [{"text": "x"}, {"text": "y"}])
    corpus = open_corpus(tmp_path)
    documents = [document for batch in corpus.read([RowRange(0, 1, 4)]) for document in batch.documents]
    assert texts(documents)[0] == "y"
    assert [document.error is None for document in documents] == [True, False, False]
    assert "a.jsonl, row 4: the row is gone" in str(documents[2].error)
    assert len({document.id for document in documents}) == 3


def test_the_schema_of_a_plan_is_taken_without_looking_at_files(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", [{"text": "x", "n": 1}])
    corpus = open_corpus(tmp_path, keep=["n"])
    planned = Corpus(corpus._input, (), list_files(corpus._input), pa.schema([("n", pa.int8())]))  # type: ignore[arg-type]
    assert planned.kept_schema == pa.schema([("n", pa.int8())])
    assert next(planned.read([RowRange(0, 0, 1)])).kept.schema == pa.schema([("n", pa.int8())])
    assert (corpus.id_column, open_corpus(tmp_path, id="n").id_column) == ("id", "n")


def test_identical_articles_under_different_ids_are_two_documents(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", [{"id": "a", "text": "wire copy"}, {"id": "b", "text": "wire copy"}])
    first, second = read_file(tmp_path / "a.jsonl", id="id")
    assert first.id != second.id
    assert first.doc_hash == second.doc_hash


def test_a_long_file_is_read_in_small_batches(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", [{"text": "x" * 100_000}] * 300)
    corpus = open_corpus(tmp_path)
    sizes = [len(batch.documents) for batch in corpus.read([RowRange(0, 0, 300)])]
    assert sum(sizes) == 300
    assert max(sizes) < 100


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl", "a.csv"])
def test_scattered_ranges_give_what_each_gives_alone_and_close_ones_enter_the_file_once(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    frame = pd.DataFrame({"id": [f"i{n}" for n in range(6000)], "text": [f"text {n}" for n in range(6000)]})
    path = tmp_path / name
    if name == "a.parquet":
        frame.to_parquet(path, row_group_size=700)
    elif name == "a.jsonl":
        frame.to_json(path, orient="records", lines=True)
    else:
        frame.to_csv(path, index=False)
    corpus = open_corpus(tmp_path, id="id")
    index = corpus.count_rows(0)
    entered: list[int] = []
    reader = Corpus._reader
    monkeypatch.setattr(Corpus, "_reader", lambda self, file: entered.append(1) or reader(self, file))
    rng = random.Random(1)
    for _ in range(30):
        spans = []
        for _ in range(rng.randint(1, 6)):
            start = rng.randrange(6000)
            spans.append((start, min(start + rng.choice([1, 3, 700]), 6005)))
        ranges = [index.range(0, *span) for span in spans]
        found = [d.id for batch in corpus.read(ranges) for d in batch.documents if d.error is None]
        assert found == [f"i{n}" for start, stop in spans for n in range(start, min(stop, 6000))]
        count = sum(len(batch.documents) for batch in corpus.read(ranges))
        assert count == sum(stop - start for start, stop in spans), "rows past the end are error rows"
    entered.clear()
    list(corpus.read([index.range(0, n, n + 1) for n in range(100, 4000, 50)]))
    assert len(entered) == 1


def test_a_store_is_read_like_a_folder(tmp_path: Path) -> None:
    store = fsspec.filesystem("memory")
    pq.write_table(pa.table({"text": ["in parquet"]}), tmp_path / "a.parquet")
    store.pipe("/archive/2024/a.parquet", (tmp_path / "a.parquet").read_bytes())
    store.pipe("/archive/b.jsonl", b'{"text": "in lines"}\n' * 600)
    store.pipe("/archive/c.csv", b"text\nin csv\n")
    try:
        input = SimpleNamespace(
            paths=("memory://archive",), format="auto", id=None, text="text", keep=(), encoding="auto"
        )
        files = list_files(input)
        assert [file.relative for file in files] == ["2024/a.parquet", "b.jsonl", "c.csv"]
        documents = read_corpus(Corpus(input, (), files), 3, rows=300)[0]
    finally:
        store.rm("/archive", recursive=True)
    assert texts(documents) == ["in parquet"] + ["in lines"] * 600 + ["in csv"]


NAMES = ["a.jsonl", "a.json", "a.csv", "a.tsv", "a.txt"]
DIRT = [b'"', b",", b"\n", b"\r", b"\0", b"\xff", b"\xef\xbb\xbf", b"text", b'{"text": "x"}', b"[", b"{", b" "]


@given(st.sampled_from(NAMES), st.lists(st.sampled_from(DIRT)), st.booleans())
def test_whatever_the_bytes_each_range_gives_its_rows(name: str, bits: list[bytes], packed: bool) -> None:
    content = b"text\n" * (name[2] in "ct") + b"".join(bits)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / (f"{name}.gz" if packed else name)
        path.write_bytes(gzip.compress(content) if packed else content)
        corpus = open_corpus(path)
        whole = read_corpus(Corpus(corpus._input, (), corpus._files, pa.schema([])), 1)[0]
        pieces = read_corpus(Corpus(corpus._input, (), corpus._files, pa.schema([])), 1, rows=2)[0]
    assert pieces == whole
    assert all(document.text or document.error for document in whole)
