"""Lines, their places, and what becomes of damaged files."""

from __future__ import annotations

import bz2
import gzip
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.corpus.lines import Damaged, Line, Source, split_lines
from pipeline.corpus.listing import InputFile
from pipeline.errors import StoreError


def source(path: Path, encoding: str = "auto") -> Source:
    return Source(InputFile(str(path), path.name, path.stat().st_size if path.exists() else 0, "0", "jsonl"), encoding)


@given(st.lists(st.sampled_from([b"\n", b"a", b"bc\n", b"\n\nx", b"\r\n"])))
def test_blocks_are_cut_at_newlines_wherever_they_end(blocks: list[bytes]) -> None:
    data = b"".join(blocks)
    lines = list(split_lines(blocks))
    assert [line.data for line in lines] == data.split(b"\n")[: len(lines)]
    assert len(lines) == data.count(b"\n") + (not data.endswith(b"\n") and data != b"")
    assert all(data[line.offset :].startswith(line.data) for line in lines)


def test_a_byte_order_mark_is_left_out_and_counted_in_offsets() -> None:
    assert list(split_lines([b"\xef\xbb\xbfa\nb\n"])) == [Line(3, b"a"), Line(5, b"b")]
    assert list(split_lines([b"\xef\xbb\xbf"])) == []


def test_damage_ends_the_lines_with_what_is_left() -> None:
    def blocks() -> Iterator[bytes]:
        yield b"a\nb"
        raise Damaged("cut")

    assert list(split_lines(blocks())) == [Line(0, b"a"), Line(2, b"b", "cut")]


@pytest.mark.parametrize(("suffix", "pack"), [(".gz", gzip.compress), (".bz2", bz2.compress)])
def test_packed_files_are_unpacked_also_in_several_members(tmp_path: Path, suffix: str, pack) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(pack(b"a\nb") + pack(b"c\nd\n"))
    assert [line.data for line in source(path).lines()] == [b"a", b"bc", b"d"]
    assert not source(path).seekable


def test_everything_before_a_cut_is_given(tmp_path: Path) -> None:
    content = b"".join(b"%d\n" % (n * 7919) for n in range(50_000))
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(content)[:-5000])
    *lines, last = source(path).lines()
    assert len(lines) > 10_000
    assert content.startswith(b"".join(line.data + b"\n" for line in lines) + last.data)
    assert last.damage is not None
    assert "gzip" in last.damage
    assert all(line.damage is None for line in lines)


def test_a_wrong_checksum_is_damage_after_the_last_line(tmp_path: Path) -> None:
    packed = bytearray(gzip.compress(b"a\nb\n"))
    packed[-8] ^= 1
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(packed)
    assert [(line.data, line.damage is None) for line in source(path).lines()] == [
        (b"a", True),
        (b"b", True),
        (b"", False),
    ]


def test_lines_can_be_entered_at_an_offset(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"one\ntwo\nthree")
    lines = list(source(path).lines())
    assert [line.data for line in source(path).lines(lines[1].offset)] == [b"two", b"three"]


def test_utf16_is_cut_after_decoding(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes("ਊ\nb\n".encode("utf-16"))  # U+0A0A holds two bytes of value 10
    opened = source(path)
    assert [opened.line_encoding.decode(line.data) for line in opened.lines()] == ["ਊ", "b"]
    assert not opened.seekable


def test_a_file_that_is_gone_is_failing_storage(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="run again"):
        list(source(tmp_path / "gone.jsonl").lines())
