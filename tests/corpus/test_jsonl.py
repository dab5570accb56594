"""Dirty JSON Lines: every line is one row, whatever is in it."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from tests.corpus.reading import open_corpus, read_corpus, read_file, texts


def test_each_bad_line_is_one_error_row_and_the_others_are_read(tmp_path: Path) -> None:
    long = "word " * 630_000  # 3 MiB
    lines = [
        b"\xef\xbb\xbf" + b'{"id": 1, "text": "after a mark"}',
        json.dumps({"id": 2, "text": long}).encode(),
        b'{"id": 3, "text": ',
        b"",
        b'{"id": 5, "text": "half \\ud83d of it"}',
        b'{"id": 6, "text": "first", "text": "second"}',
        b'{"id": 7, "text": "NUL \\u0000 and raw \x00 here"}',
        b'{"id": 8, "text": "caf\xe9"}',
        b"[1, 2]",
        b"17",
        b"[" * 5000,
        b'{"id": 12, "text": "last"}\r',
    ]
    documents = read_file(tmp_path / "a.jsonl", b"\n".join(lines) + b"\n", id="id")
    assert texts(documents) == [
        "after a mark",
        long.rstrip(),
        "a.jsonl, row 3: not valid JSON: Expecting value (character 19)",
        "a.jsonl, row 4: the line is blank",
        "half \ufffd of it",
        "second",
        "NUL  and raw  here",
        "café",
        "a.jsonl, row 9: not a JSON object but an array",
        "a.jsonl, row 10: not a JSON object but a number",
        "a.jsonl, row 11: not valid JSON: nested too deeply",
        "last",
    ]
    assert [document.id for document in documents if not document.error] == ["1", "2", "5", "6", "7", "8", "12"]
    assert len({document.doc_hash for document in documents}) == len(documents)


def test_ids_are_exact_whatever_their_kind(tmp_path: Path) -> None:
    ids = ["1", '"a"', "18446744073709551615", "18446744073709551616", "-9223372036854775809", '"00123"', "1.0", "1.5"]
    content = "".join(f'{{"id": {id}, "text": "x"}}\n' for id in ids).encode()
    documents = read_file(tmp_path / "a.jsonl", content, id="id")
    assert [document.id for document in documents] == [
        "1", "a", "18446744073709551615", "18446744073709551616", "-9223372036854775809", "00123", "1", "1.5"
    ]  # fmt: skip


def test_a_row_without_a_readable_id_gets_the_hash_of_its_place(tmp_path: Path) -> None:
    rows = ['{"text": "x"}', '{"id": null, "text": "x"}', '{"id": "", "text": "x"}', '{"id": [1], "text": "x"}', "bad"]
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.jsonl").write_text("\n".join([*rows, '{"id": 6, "text": "x"}']))
    first = read_corpus(open_corpus(tmp_path, id="id"), 1)[0]
    assert [len(document.id) for document in first] == [32] * 5 + [1]
    assert len({document.id for document in first}) == 6
    (tmp_path / "moved").mkdir()
    (tmp_path / "sub").rename(tmp_path / "moved" / "sub")
    again = read_corpus(open_corpus(tmp_path / "moved", id="id"), 1)[0]
    assert [document.id for document in again] == [document.id for document in first]


def test_a_gzip_cut_in_the_middle_gives_the_rows_before_and_one_error(tmp_path: Path) -> None:
    content = "".join(f'{{"id": {n}, "text": "story {n * 7919}"}}\n' for n in range(20_000)).encode()
    documents = read_file(tmp_path / "a.jsonl.gz", gzip.compress(content)[:-9000], id="id")
    *good, bad = documents
    assert len(good) > 1000
    assert [document.text for document in good] == [f"story {n * 7919}" for n in range(len(good))]
    assert bad.error is not None
    assert bad.error.startswith(f"a.jsonl.gz, row {len(good) + 1}: the gzip data is cut or damaged")


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
@pytest.mark.parametrize("rows", [1, 255, 256, 257, 1000])
def test_a_range_in_the_middle_gives_its_own_rows(tmp_path: Path, name: str, rows: int) -> None:
    count = 1031 if rows > 1 else 272
    content = "\n".join(f'{{"text": "story {n}"}}' if n % 7 else "" for n in range(count)).encode()
    content = b"\xef\xbb\xbf \n" + content
    documents = read_file(tmp_path / name, gzip.compress(content) if name.endswith("gz") else content, rows)
    wanted = [f"story {n}" if n % 7 else f"{name}, row {n + 2}: the line is blank" for n in range(count)]
    assert texts(documents)[1:] == wanted


def test_a_range_of_a_plain_file_is_entered_near_its_first_row(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(f'{{"text": "{n:06d}"}}\n' for n in range(1000)))
    index = open_corpus(tmp_path).count_rows(0)
    assert index.range(0, 600, 700).offset == 512 * 19
    assert index.range(0, 10, 20).offset == 0


@pytest.mark.parametrize("content", [b"", b"\xef\xbb\xbf"])
def test_an_empty_file_has_no_rows(tmp_path: Path, content: bytes) -> None:
    assert read_file(tmp_path / "a.jsonl", content) == []


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b'[{"text": "one"}, {"text": "two"}, 3]', ["one", "two", "a.json, row 3: not a JSON object but a number"]),
        (b'\xef\xbb\xbf \n[\n {"text": "one"}\n]\n', ["one"]),
        (b'{"text": "one"}\n{"text": "two"}\n', ["one", "two"]),
        (b'{\n "text": "one"\n}\n', ["one"]),
        (b'[{"text": "one"}, {"te', ["a.json, row 1: not valid JSON: "]),
        (b"[]", []),
        (b"", []),
    ],
)
def test_a_json_file_is_an_array_or_an_object_or_lines(tmp_path: Path, content: bytes, expected: list[str]) -> None:
    found = texts(read_file(tmp_path / "a.json", content))
    assert len(found) == len(expected)
    assert all(text.startswith(start) for text, start in zip(found, expected, strict=True))


def test_a_cut_json_array_is_one_error_row(tmp_path: Path) -> None:
    packed = gzip.compress(json.dumps([{"text": str(n * 7919)} for n in range(1000)]).encode())
    (document,) = read_file(tmp_path / "a.json.gz", packed[:-100])
    assert document.error is not None
    assert document.error.startswith("a.json.gz, row 1: the gzip data is cut")


def test_other_encodings_are_read(tmp_path: Path) -> None:
    line = '{"id": "é", "text": "élan vital €"}\n'
    assert read_file(tmp_path / "a.jsonl", line.encode("utf-16"), id="id")[0].text == "élan vital €"
    assert read_file(tmp_path / "b.jsonl", line.encode("cp1252"), id="id", encoding="cp1252")[0].id == "é"


def test_the_same_bytes_always_give_the_same_hash_and_others_another(tmp_path: Path) -> None:
    bad = read_file(tmp_path / "a.jsonl", b'{"text": \n{"text":\n')
    again = read_file(tmp_path / "b.jsonl", b'{"text": \n')
    assert bad[0].doc_hash == again[0].doc_hash != bad[1].doc_hash
    assert all(len(document.doc_hash) == 32 for document in bad)
