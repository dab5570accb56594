"""Input on a real S3 server: listed without caches, read in pieces, and failures that are told apart."""

from __future__ import annotations

import bz2
import gzip
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.config import InputConfig
from pipeline.corpus.lines import opened
from pipeline.corpus.listing import InputFile, list_files, refuse_overlap
from pipeline.corpus.readers import Corpus, RowRange
from pipeline.errors import CorpusError, OutputError, StoreError
from pipeline.output.ledger import same_content
from pipeline.remote import files
from tests.corpus.reading import read_corpus, texts
from tests.s3.bucket import Bucket
from tests.s3.proxy import Proxy, answer, break_off, of


def listed(*paths: str, format: str = "auto") -> list[InputFile]:
    return list_files(SimpleNamespace(paths=paths, format=format))


def relative(*paths: str, format: str = "auto") -> list[str]:
    return [file.relative for file in listed(*paths, format=format)]


@pytest.fixture
def archive(s3: Bucket) -> str:
    for name in ("b.jsonl", "a.csv", "2024/05/c.parquet", "2024/d.JSONL.GZ", "2024/e.txt", "notes.docx", "_x/f.csv",
                 ".hidden.csv", "_SUCCESS", "2024/_tmp/g.csv"):  # fmt: skip
        s3.put(f"archive/{name}", b"x")
    s3.put("archive/empty/")
    s3.put("archives/other.csv", b"x")
    return f"{s3.url}/archive"


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(files, "PATIENCE_SECONDS", 1.0)


# --- listing


def test_a_folder_is_read_with_its_subfolders_in_the_order_of_paths(archive: str) -> None:
    found = listed(archive)
    assert [file.relative for file in found] == [
        "2024/05/c.parquet",
        "2024/d.JSONL.GZ",
        "2024/e.txt",
        "a.csv",
        "b.jsonl",
    ]
    assert found[0].path == f"{archive}/2024/05/c.parquet"
    assert (found[0].size, found[0].etag) == (1, "9dd4e461268c8034f5c8564e155c67a6")
    assert relative(f"{archive}/") == [file.relative for file in found]


def test_a_whole_bucket_is_a_folder(archive: str, s3: Bucket) -> None:
    assert relative(s3.url)[-2:] == ["archive/b.jsonl", "archives/other.csv"]


def test_globs_go_down_and_count_paths_from_their_fixed_part(archive: str) -> None:
    assert relative(f"{archive}/**/*.csv") == ["a.csv"]
    assert relative(f"{archive}/2024/**/*.parquet") == ["05/c.parquet"]
    assert relative(f"{archive}/20*/e.txt") == ["2024/e.txt"]
    assert relative(f"{archive}/[ab].*") == ["a.csv", "b.jsonl"]
    assert relative(f"{archive}/?.csv") == ["a.csv"]
    assert relative(f"{archive}*/*.csv") == ["archive/a.csv", "archives/other.csv"]


def test_a_glob_lists_no_more_than_what_begins_as_it_does(archive: str, s3: Bucket, proxy: Proxy) -> None:
    assert relative(f"{archive}/2024/e*") == ["e.txt"]
    (listing,) = [seen.query for seen in proxy.seen if seen.method == "GET"]
    assert "prefix=archive%2F2024%2Fe&" in f"{listing}&"


def test_a_glob_without_matches_is_an_empty_corpus(archive: str, caplog: pytest.LogCaptureFixture) -> None:
    assert listed(f"{archive}/*.tsv") == []
    assert "no input files" in caplog.text


def test_several_paths_have_one_root_and_each_file_once(archive: str, s3: Bucket) -> None:
    assert relative(f"{archive}/2024", f"{archive}/b.jsonl", f"{archive}/2024/*.txt") == [
        "2024/05/c.parquet",
        "2024/d.JSONL.GZ",
        "2024/e.txt",
        "b.jsonl",
    ]


def test_local_paths_and_buckets_go_together(archive: str, tmp_path: Path) -> None:
    (tmp_path / "z.csv").write_bytes(b"x")
    assert [file.path for file in listed(f"{archive}/a.csv", str(tmp_path))] == [
        f"{tmp_path}/z.csv",
        f"{archive}/a.csv",
    ]


def test_a_name_with_wildcard_characters_that_exists_is_a_file(s3: Bucket) -> None:
    s3.put("in/a[1].csv", b"x")
    assert relative(f"{s3.url}/in/a[1].csv") == ["a[1].csv"]


def test_a_folder_that_holds_nothing_but_its_own_mark_is_empty(archive: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert listed(f"{archive}/empty") == []
    assert "no input files" in caplog.text


@pytest.mark.parametrize("path", ["nowhere", "nowhere/*.csv", "archive/nowhere.csv", "arch"])
def test_a_path_that_does_not_exist_is_refused(archive: str, s3: Bucket, path: str) -> None:
    with pytest.raises(CorpusError, match="does not exist"):
        listed(f"{s3.url}/{path}")


@pytest.mark.parametrize("path", ["s3://no-such-bucket/x", "s3://no-such-bucket", "s3://no-such-bucket/*.csv"])
def test_a_bucket_that_does_not_exist_is_refused(s3: Bucket, path: str) -> None:
    with pytest.raises(CorpusError, match=r"input\.path: s3://no-such-bucket.*correct the path"):
        listed(path)


def test_a_file_that_was_added_since_is_seen(archive: str, s3: Bucket) -> None:
    before = listed(archive)
    s3.put("archive/2024/new.csv", b"x")
    assert len(listed(archive)) == len(before) + 1


def test_a_file_that_was_changed_since_has_another_etag(archive: str, s3: Bucket) -> None:
    (before,) = listed(f"{archive}/a.csv")
    s3.put("archive/a.csv", b"y")
    (after,) = listed(f"{archive}/a.csv")
    assert not same_content(before, after)


def test_a_format_narrows_a_folder_to_the_names_that_agree(archive: str) -> None:
    assert relative(archive, format="csv") == ["a.csv"]
    assert relative(f"{archive}/notes.docx", format="text") == ["notes.docx"]


# --- reading


def test_all_formats_are_read_from_a_bucket(s3: Bucket, tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["in parquet"]}), tmp_path / "a.parquet")
    s3.put("in/2024/a.parquet", (tmp_path / "a.parquet").read_bytes())
    lines = b'{"text": "in lines"}\n' * 600
    s3.put("in/b.jsonl", lines)
    s3.put("in/c.csv", b"text\nin csv\n")
    s3.put("in/d.txt", "in a text".encode("utf-16"))
    s3.put("in/e.jsonl.gz", gzip.compress(lines))
    s3.put("in/f.jsonl.bz2", bz2.compress(lines))
    s3.put("in/g.csv")
    input = InputConfig(path=f"{s3.url}/in", text="text")
    documents = read_corpus(Corpus(input, (), list_files(input)), 7, rows=300)[0]
    assert texts(documents) == ["in parquet", *["in lines"] * 600, "in csv", "in a text", *["in lines"] * 1200]


def large_parquet(s3: Bucket, tmp_path: Path) -> int:
    """in/a.parquet, of four row groups with a wide column that no job names; its size."""
    rows = 40_000
    table = pa.table({"text": [f"t{i}" for i in range(rows)], "wide": [f"{i:0900d}" for i in range(rows)]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=rows // 4, compression="none", use_dictionary=False)
    data = (tmp_path / "a.parquet").read_bytes()
    s3.put("in/a.parquet", data)
    return len(data)


def test_of_a_parquet_file_only_the_columns_and_groups_that_are_wanted_are_fetched(
    s3: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = large_parquet(s3, tmp_path)
    monkeypatch.setattr("pipeline.corpus.lines._REMOTE_BLOCK_BYTES", 64 << 10)
    fetched: list[int] = []
    get = files.files_of("s3").__class__.get

    def counted(self: Any, path: str, start: int, stop: int, version: str) -> bytes:
        fetched.append(stop - start)
        return get(self, path, start, stop, version)

    monkeypatch.setattr("pipeline.remote.s3.S3Files.get", counted)
    input = InputConfig(path=f"{s3.url}/in", text="text")
    corpus = Corpus(input, (), list_files(input), pa.schema([]))
    read = [document.text for batch in corpus.read([RowRange(0, 20_000, 20_010)]) for document in batch.documents]
    assert read == [f"t{i}" for i in range(20_000, 20_010)]
    assert sum(fetched) < size / 50
    assert len(fetched) < 8


def test_a_file_that_is_replaced_while_it_is_read_ends_the_run_resumably(s3: Bucket, tmp_path: Path) -> None:
    large_parquet(s3, tmp_path)
    input = InputConfig(path=f"{s3.url}/in", text="text")
    corpus = Corpus(input, (), list_files(input), pa.schema([]))
    s3.put("in/a.parquet", b"other")
    with pytest.raises(StoreError, match=r"a\.parquet: replaced or removed while it was read"):
        list(corpus.read([RowRange(0, 0, 10)]))


@pytest.mark.usefixtures("impatient")
def test_storage_that_is_unwell_for_a_while_is_waited_for(s3: Bucket, proxy: Proxy, tmp_path: Path) -> None:
    large_parquet(s3, tmp_path)
    s3.put("in/b.jsonl", b'{"text": "in lines"}\n' * 600)
    for act in (answer(503, "SlowDown"), break_off, answer(500, "InternalError")):
        proxy.fail(of("GET", "in/"), act)
    proxy.fail(of("GET"), answer(503, "SlowDown"))
    input = InputConfig(path=f"{s3.url}/in", text="text")
    documents = read_corpus(Corpus(input, (), list_files(input)), 2)[0]
    assert len(documents) == 40_600
    assert not any(document.error for document in documents)


@pytest.mark.usefixtures("impatient")
def test_storage_that_fails_is_no_damage_of_the_file(s3: Bucket, proxy: Proxy, tmp_path: Path) -> None:
    large_parquet(s3, tmp_path)
    s3.put("in/b.jsonl.gz", gzip.compress(b'{"text": "in lines"}\n' * 600))
    input = InputConfig(path=f"{s3.url}/in", text="text")
    corpus = Corpus(input, (), list_files(input), pa.schema([]))
    proxy.fail(of("GET", "in/"), answer(503, "SlowDown"), times=1000)
    for file in range(2):
        with pytest.raises(StoreError, match=r"reading failed \(GetObject: SlowDown"):
            list(corpus.read([RowRange(file, 0, 10)]))


@pytest.mark.usefixtures("impatient")
def test_a_listing_that_fails_is_not_taken_for_an_empty_one(s3: Bucket, proxy: Proxy, archive: str) -> None:
    for method in ("GET", "HEAD"):
        proxy.fail(of(method), answer(503, "SlowDown"), times=1000)
        with pytest.raises(StoreError, match="run the same command again"):
            listed(archive)
        proxy.reset()


def test_no_permission_is_told_as_such(s3: Bucket, proxy: Proxy, archive: str) -> None:
    proxy.fail(of("GET"), answer(403, "AccessDenied"), times=2)
    with pytest.raises(CorpusError, match=r"input\.path: .*ListObjectsV2: AccessDenied"):
        listed(archive)


def test_a_file_that_is_gone_is_storage_that_failed(s3: Bucket) -> None:
    s3.put("in/a.csv", b"text\nx\n")
    (file,) = listed(f"{s3.url}/in/a.csv")
    s3.remove("in/a.csv")
    with opened(file) as stream, pytest.raises(StoreError, match="replaced or removed"):
        stream.read()


# --- input and output in one place


@pytest.mark.parametrize(
    ("path", "output"),
    [
        ("s3://b/in", "s3://b/in/out"),
        ("s3://b", "s3://b/out"),
        ("s3a://b/in/", "s3://b/in/out"),
        ("s3://b/in/", "s3a://b/in"),
        ("s3://b/**/*.parquet", "s3://b/out"),
        ("s3://b/in/*.csv", "s3://b/in"),
        ("s3://b/out/in", "s3://b/out"),
        ("s3://b/out/a.csv", "s3://b/out/"),
    ],
)
def test_an_output_among_the_input_is_refused(path: str, output: str) -> None:
    with pytest.raises(OutputError, match=r"^output\.path: "):
        refuse_overlap(SimpleNamespace(paths=(path,), format="auto"), output)


@pytest.mark.parametrize(
    ("path", "output"),
    [
        ("s3://b/in", "s3://b/in2"),
        ("s3://b/in", "s3://c/in"),
        ("s3://b/in", "s3://b/in/_out"),
        ("s3://b/*.parquet", "s3://b/out"),
        ("s3://b/in/*.jsonl", "s3://b/in2"),
        ("gs://b/in", "s3://b/in/out"),
        ("/b/in", "s3://b/in"),
    ],
)
def test_an_output_beside_the_input_is_not(path: str, output: str) -> None:
    refuse_overlap(SimpleNamespace(paths=(path,), format="auto"), output)
