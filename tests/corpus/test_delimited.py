"""CSV and TSV as people write them."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from tests.corpus.reading import open_corpus, read_corpus, read_file, texts


def test_fields_are_text_as_written(tmp_path: Path) -> None:
    content = b'id,text,n\n00123,"two\nlines, and a ""quote""",NA\n1e5,NA,\n'
    (tmp_path / "a.csv").write_bytes(content)
    documents, kept = read_corpus(open_corpus(tmp_path, id="id", keep=["n"]), 1)
    assert [(d.id, d.text) for d in documents] == [("00123", 'two\nlines, and a "quote"'), ("1e5", "NA")]
    assert kept == [{"n": "NA"}, {"n": ""}]


def test_a_ragged_row_is_an_error_row_in_its_place(tmp_path: Path) -> None:
    content = b"id,text\n1,one\n2,two,too many\n3\n\n4,four\n"
    documents = read_file(tmp_path / "a.csv", content, id="id")
    assert texts(documents) == [
        "one",
        "a.csv, row 2: 3 fields where the header has 2",
        "a.csv, row 3: 1 fields where the header has 2",
        "four",
    ]


def test_a_file_in_cp1252_is_read_as_meant(tmp_path: Path) -> None:
    content = "id,text\n1,“L’été à Orléans” – 5 €\n".encode("cp1252")
    assert read_file(tmp_path / "a.csv", content)[0].text == "“L’été à Orléans” – 5 €"


def test_tabs_and_semicolons_delimit(tmp_path: Path) -> None:
    assert read_file(tmp_path / "a.tsv", b"id\ttext\n1\ta, b; c\n", id="id")[0].text == "a, b; c"
    assert read_file(tmp_path / "b.csv", b"id;text\n1;a, b\n", id="id")[0].text == "a, b"
    assert read_file(tmp_path / "c.csv", b"text\na\n")[0].text == "a"


def test_a_quote_that_is_never_closed_is_one_error_row(tmp_path: Path) -> None:
    documents = read_file(tmp_path / "a.csv", b'id,text\n1,one\n2,"two\n3,three\n', id="id")
    assert texts(documents) == ["one", "a.csv, row 2: a quote is opened and never closed"]


def test_a_bare_carriage_return_spoils_only_its_own_row(tmp_path: Path) -> None:
    documents = read_file(tmp_path / "a.csv", b'id,text\r\n1,one\r\n2,"a\rb"\r\n3,c\rd\r\n4,four\r\n', id="id")
    assert texts(documents)[:2] == ["one", "a\nb"]
    assert texts(documents)[2].startswith("a.csv, row 3: not valid CSV")
    assert texts(documents)[3] == "four"


def test_a_cut_gzip_is_an_error_row_also_inside_quotes(tmp_path: Path) -> None:
    content = "id,text\n" + "".join(f'{n},"story\n{n * 7919}"\n' for n in range(20_000))
    *good, bad = read_file(tmp_path / "a.csv.gz", gzip.compress(content.encode())[:-9000], id="id")
    assert len(good) > 1000
    assert [document.text for document in good] == [f"story\n{n * 7919}" for n in range(len(good))]
    assert bad.error is not None
    assert bad.error.startswith(f"a.csv.gz, row {len(good) + 1}: the gzip data is cut")


def test_a_file_cut_inside_its_header_is_one_error_row(tmp_path: Path) -> None:
    (document,) = read_file(tmp_path / "a.csv", b'id,"text\n1,one\n')
    assert document.error == "a.csv, row 1: a quote is opened and never closed"


@pytest.mark.parametrize("rows", [100, 256, 300])
def test_a_range_in_the_middle_gives_its_own_rows(tmp_path: Path, rows: int) -> None:
    content = "\ufeffid,text\n" + "".join(f'{n},"story\n{n}"\n\n' if n % 5 else f"{n}\n" for n in range(700))
    documents = read_file(tmp_path / "a.csv", content.encode(), rows, id="id")
    ragged = "a.csv, row {}: 1 fields where the header has 2"
    assert texts(documents) == [f"story\n{n}" if n % 5 else ragged.format(n + 1) for n in range(700)]


@pytest.mark.parametrize("content", [b"", b"id,text\n", b"id,text"])
def test_a_file_without_rows_has_none(tmp_path: Path, content: bytes) -> None:
    assert read_file(tmp_path / "a.csv", content) == []


def test_a_ten_megabyte_article_is_read(tmp_path: Path) -> None:
    long = "word " * 2_000_000
    assert len(read_file(tmp_path / "a.csv", f"id,text\n1,{long}\n2,b\n".encode())[0].text) == len(long) - 1


def test_of_two_columns_of_one_name_the_first_counts(tmp_path: Path) -> None:
    assert read_file(tmp_path / "a.csv", b"text,text\na,b\n")[0].text == "a"
