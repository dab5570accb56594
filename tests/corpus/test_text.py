"""Text files: one document each."""

from __future__ import annotations

import gzip
from pathlib import Path

from tests.corpus.reading import open_corpus, read_corpus, read_file


def test_each_file_is_a_document_with_its_path(tmp_path: Path) -> None:
    (tmp_path / "2024").mkdir()
    (tmp_path / "2024" / "b.txt").write_bytes("Élan\r\nvital".encode("cp1252"))
    (tmp_path / "a.txt").write_text("\ufeffone")
    corpus = open_corpus(tmp_path, ("path", "text"), id="path", keep=["path"])
    documents, kept = read_corpus(corpus, 2)
    assert [(d.id, d.text, d.fields["path"]) for d in documents] == [
        ("2024/b.txt", "Élan\nvital", "2024/b.txt"),
        ("a.txt", "one", "a.txt"),
    ]
    assert kept == [{"path": "2024/b.txt"}, {"path": "a.txt"}]


def test_an_empty_file_is_an_error_row_as_a_blank_one_is(tmp_path: Path) -> None:
    assert [document.error for document in read_file(tmp_path / "a.txt", b"")] == ["text is empty"]
    assert [document.error for document in read_file(tmp_path / "b.txt", b" \n")] == ["text is empty"]


def test_a_cut_file_is_an_error_row(tmp_path: Path) -> None:
    (document,) = read_file(tmp_path / "a.txt.gz", gzip.compress(b"one")[:-4])
    assert document.error is not None
    assert document.error.startswith("a.txt.gz, row 1: the gzip data is cut")
