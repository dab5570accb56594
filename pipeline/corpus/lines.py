"""The bytes of a file, unpacked, as blocks and as lines with their places in the file.

A compressed file that is damaged or cut gives everything before the damage and then says so: `blocks` raises
`Damaged`, `lines` marks its last line. Storage that fails is another matter: `StoreError`, and the run can be
repeated.
"""

from __future__ import annotations

import bz2
import codecs
import gzip
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any, NamedTuple

from pipeline.corpus.encoding import SAMPLE_BYTES, Encoding, find_encoding
from pipeline.corpus.listing import InputFile, compression
from pipeline.errors import StoreError
from pipeline.remote.files import Listed, split
from pipeline.remote.stream import RemoteStream
from pipeline.remote.urls import is_remote

_BLOCK_BYTES = 1 << 20
_REMOTE_BLOCK_BYTES = 4 << 20  # a request has its price, whatever it fetches


class Damaged(Exception):
    """The compressed data ends or breaks here; what came before is good."""


class Line(NamedTuple):
    """One line without its newline; `offset` is where it begins, in unpacked bytes.

    `damage` says why the file ends here although it should not; then `data` is what is left of the line.
    """

    offset: int
    data: bytes
    damage: str | None = None


class Source:
    """One input file as bytes or lines. `encoding` is an encoding's name or `auto`."""

    def __init__(self, file: InputFile, encoding: str) -> None:
        self.file = file
        self._encoding = encoding
        self._packed = compression(file.path)

    @cached_property
    def encoding(self) -> Encoding:
        return find_encoding(self._encoding, self.sample)

    @cached_property
    def sample(self) -> bytes:
        """The first bytes of the file, for looking at."""
        pieces: list[bytes] = []
        try:
            for block in self.blocks():
                pieces.append(block)
                if sum(map(len, pieces)) >= SAMPLE_BYTES:
                    break
        except Damaged:
            pass
        return b"".join(pieces)[:SAMPLE_BYTES]

    @property
    def seekable(self) -> bool:
        """Whether a line's offset is a place where reading can begin."""
        return self._packed is None and self.encoding.keeps_lines

    def blocks(self, offset: int = 0) -> Iterator[bytes]:
        with opened(self.file) as raw:
            stream = _unpacked(raw, self._packed)
            if offset:
                stream.seek(offset)
            while block := self._read(stream):
                yield block

    def _read(self, stream: Any) -> bytes:
        try:
            return bytes(stream.read1(_BLOCK_BYTES) if self._packed else stream.read(_BLOCK_BYTES))
        except (OSError, EOFError, zlib.error) as error:
            if self._packed is None or getattr(error, "errno", None) is not None:
                raise StoreError(f"{self.file.path}: {error}; run again to continue") from error
            raise Damaged(f"the {self._packed} data is cut or damaged ({error})") from error

    def lines(self, offset: int = 0) -> Iterator[Line]:
        """Lines from `offset` on; from 0 a byte-order mark is left out. A newline at the end begins no line."""
        blocks = self.blocks(offset)
        if not self.encoding.keeps_lines:
            blocks = self.encoding.to_utf8(blocks)
        return split_lines(blocks, offset)

    @property
    def line_encoding(self) -> Encoding:
        """The encoding of what `lines` gives."""
        return self.encoding if self.encoding.keeps_lines else Encoding("utf-8")


@contextmanager
def opened(file: InputFile) -> Iterator[Any]:
    """The file, open for reading with seeks. Raises `StoreError` where it can't be opened."""
    with _stream(file) as stream:
        yield stream


def _stream(file: InputFile) -> Any:
    if is_remote(file.path):
        files, path = split(file.path)
        return RemoteStream(files, Listed(path, file.size, file.etag, 0.0), _REMOTE_BLOCK_BYTES)
    try:
        return open(file.path, "rb")
    except OSError as error:
        raise StoreError(f"{file.path}: {error}; run again to continue") from error


def split_lines(blocks: Iterable[bytes], offset: int = 0) -> Iterator[Line]:
    """Cut blocks at newlines. Memory: one block and the longest line."""
    pieces: list[bytes] = []
    first = offset == 0
    try:
        for block in blocks:
            if first and block.startswith(codecs.BOM_UTF8):
                block, offset = block[len(codecs.BOM_UTF8) :], len(codecs.BOM_UTF8)
            first = False
            *whole, rest = block.split(b"\n")
            for data in whole:
                if pieces:
                    data = b"".join([*pieces, data])
                    pieces.clear()
                yield Line(offset, data)
                offset += len(data) + 1
            if rest:
                pieces.append(rest)
    except Damaged as damage:
        yield Line(offset, b"".join(pieces), str(damage))
        return
    if pieces:
        yield Line(offset, b"".join(pieces))


def _unpacked(raw: Any, packed: str | None) -> Any:
    if packed == "gzip":
        return gzip.GzipFile(fileobj=raw)
    return bz2.BZ2File(raw) if packed == "bz2" else raw
