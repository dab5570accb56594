"""Folders, globs and lists, and what is passed over."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipeline.corpus.listing import InputFile, compression, format_of, list_files, refuse_overlap
from pipeline.errors import CorpusError, OutputError


def listed(*paths: Path | str, format: str = "auto") -> list[InputFile]:
    return list_files(SimpleNamespace(paths=tuple(map(str, paths)), format=format))


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    for name in ("b.jsonl", "a.csv", "2024/05/c.parquet", "2024/d.JSONL.GZ", "2024/e.txt", "notes.docx", "_x/f.csv"):
        path = tmp_path / "archive" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
    (tmp_path / "archive" / ".hidden.csv").write_bytes(b"x")
    (tmp_path / "archive" / "_SUCCESS").write_bytes(b"")
    return tmp_path / "archive"


def test_a_folder_is_read_with_its_subfolders_in_the_order_of_paths(archive: Path) -> None:
    files = listed(archive)
    assert [file.relative for file in files] == [
        "2024/05/c.parquet",
        "2024/d.JSONL.GZ",
        "2024/e.txt",
        "a.csv",
        "b.jsonl",
    ]
    assert [file.format for file in files] == ["parquet", "jsonl", "text", "csv", "jsonl"]
    assert files[0].path == str(archive / "2024/05/c.parquet")
    assert files[0].size == 1
    assert files[0].etag == f"{(archive / '2024/05/c.parquet').stat().st_mtime_ns:x}"


def test_an_unknown_extension_in_a_folder_is_skipped_with_a_warning(
    archive: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        listed(archive)
    assert [record.getMessage() for record in caplog.records if "notes.docx" in record.getMessage()]
    assert "_SUCCESS" not in caplog.text


def test_a_glob_goes_down_and_counts_paths_from_its_fixed_part(archive: Path) -> None:
    files = listed(f"{archive}/**/*.csv")
    assert [file.relative for file in files] == ["a.csv"]
    assert [file.relative for file in listed(f"{archive}/2024/**/*.parquet")] == ["05/c.parquet"]


def test_a_glob_without_matches_is_an_empty_corpus(archive: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert listed(f"{archive}/*.tsv") == []
    assert "no input files" in caplog.text


def test_overlapping_paths_give_each_file_once_under_one_root(archive: Path) -> None:
    files = listed(archive / "2024", archive / "b.jsonl", f"{archive}/2024/*.txt")
    assert [file.relative for file in files] == ["2024/05/c.parquet", "2024/d.JSONL.GZ", "2024/e.txt", "b.jsonl"]


def test_an_empty_folder_is_an_empty_corpus_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert listed(tmp_path) == []
    assert "no input files" in caplog.text


def test_an_empty_file_is_listed_with_one_warning_unless_it_is_a_text(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("a.csv", "b.txt", "c.docx"):
        (tmp_path / name).touch()
    for _ in range(2):
        assert [file.relative for file in listed(tmp_path)] == ["a.csv", "b.txt"]
    told = [f"{tmp_path}/a.csv is empty: skipped", f"{tmp_path}/c.docx skipped: its extension is not known"]
    assert [record.getMessage() for record in caplog.records] == told


@pytest.mark.parametrize("path", ["nowhere", "nowhere/*.csv", "nowhere/a.csv"])
def test_a_path_that_does_not_exist_is_refused(tmp_path: Path, path: str) -> None:
    with pytest.raises(CorpusError, match="does not exist"):
        listed(tmp_path / path)


def test_a_named_file_of_unknown_format_is_refused_unless_the_job_says_what_it_is(archive: Path) -> None:
    with pytest.raises(CorpusError, match=r"notes\.docx has no extension that is known"):
        listed(archive / "notes.docx")
    assert [file.format for file in listed(archive / "notes.docx", format="text")] == ["text"]
    assert [file.format for file in listed(f"{archive}/*.docx", format="text")] == ["text"]


def test_a_format_narrows_a_folder_to_the_names_that_agree(archive: Path) -> None:
    (archive / "g.json").write_bytes(b"x")
    assert [file.relative for file in listed(archive, format="jsonl")] == ["2024/d.JSONL.GZ", "b.jsonl", "g.json"]
    assert {file.format for file in listed(archive, format="jsonl")} == {"jsonl"}


def test_a_name_with_wildcard_characters_that_exists_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "a[1].csv").write_bytes(b"x")
    assert [file.relative for file in listed(tmp_path / "a[1].csv")] == ["a[1].csv"]


@pytest.mark.parametrize(
    ("name", "format", "packed"),
    [("x.ndjson", "jsonl", None), ("x.csv.gz", "csv", "gzip"), ("x.txt.bz2", "text", "bz2"), ("x.gz", None, "gzip"),
     ("x.parquet.gz", None, "gzip"), ("x.tsv", "tsv", None), ("x.jsonl.zst", None, None)],
)  # fmt: skip
def test_names_say_format_and_compression(name: str, format: str | None, packed: str | None) -> None:
    assert (format_of(name), compression(name)) == (format, packed)


@pytest.mark.parametrize(
    ("path", "format", "output"),
    [
        ("in", "auto", "in/out"),
        ("in", "parquet", "in"),
        ("in/**/*.parquet", "auto", "in/deep/out"),
        ("in/*.jsonl", "auto", "in"),
        ("out/in", "jsonl", "out"),
        ("out/a.jsonl", "auto", "out"),
        ("link", "auto", "in/out"),
        ("in", "auto", "link/out"),
    ],
)
def test_an_output_that_would_be_read_as_input_or_with_it_is_refused(
    tmp_path: Path, path: str, format: str, output: str
) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "in")
    with pytest.raises(OutputError, match=r"output\.path"):
        refuse_overlap(SimpleNamespace(paths=(str(tmp_path / path),), format=format), str(tmp_path / output))


@pytest.mark.parametrize(
    ("path", "format", "output"),
    [
        ("in", "auto", "out"),
        ("in", "auto", "in/_out"),
        ("in", "auto", "inside"),
        ("in", "jsonl", "in/out"),
        ("in/*.parquet", "auto", "in/out"),
        ("in/**/*.csv", "auto", "in/out"),
        ("a.jsonl", "auto", "out"),
        ("out/_in", "auto", "out"),
    ],
)
def test_an_output_beside_the_input_or_hidden_in_it_is_not(
    tmp_path: Path, path: str, format: str, output: str
) -> None:
    refuse_overlap(SimpleNamespace(paths=(str(tmp_path / path),), format=format), str(tmp_path / output))
