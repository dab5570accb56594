"""Which bytes mean which characters in a file.

`auto` reads a byte-order mark, else takes UTF-8 where the beginning of the file is UTF-8, or nearly: stray bytes in
such a file are read as cp1252, so that one article pasted from elsewhere does not spoil the rest. A file that is not
UTF-8 is cp1252 where most letters are ASCII (Western languages), else what charset-normalizer finds. A named encoding
is taken at its word; bytes that it has no character for become U+FFFD.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from charset_normalizer import from_bytes

from pipeline.errors import ConfigError

SAMPLE_BYTES = 1 << 20
_STRAY = "nightdesk-stray-bytes"
_MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_WESTERN_SHARE = 0.3  # of letters that are not ASCII; German and French have under 0.1, Greek and Russian over 0.9


@dataclass(frozen=True, slots=True)
class Encoding:
    """A codec and what it does with bytes that it has no character for."""

    name: str
    errors: str = "replace"

    def decode(self, data: bytes) -> str:
        return data.decode(self.name, self.errors)

    @property
    def keeps_lines(self) -> bool:
        """Whether a newline is the byte 10 and nothing else is, so that lines can be cut before decoding."""
        return "a\n".encode(self.name) == b"a\n"

    def to_utf8(self, blocks: Iterable[bytes]) -> Iterator[bytes]:
        decoder = codecs.getincrementaldecoder(self.name)(self.errors)
        for block in blocks:
            yield decoder.decode(block).encode("utf-8", "surrogatepass")
        yield decoder.decode(b"", True).encode("utf-8", "surrogatepass")


UTF8 = Encoding("utf-8", _STRAY)


def find_encoding(name: str, sample: bytes) -> Encoding:
    """The encoding called `name`; for `auto`, the one that the beginning of the file shows."""
    if name != "auto":
        return _named(name)
    for mark, codec in _MARKS:
        if sample.startswith(mark):
            return UTF8 if codec == "utf-8" else Encoding(codec)
    return _guess(sample)


def _named(name: str) -> Encoding:
    try:
        codec = codecs.lookup(name)
        if not isinstance("".encode(codec.name), bytes):
            raise LookupError(name)
    except LookupError:
        raise ConfigError(f"input.encoding: {name!r} is not an encoding; auto, utf-8 or cp1252, say") from None
    return Encoding("utf-8" if codec.name == "utf-8-sig" else codec.name)


def _guess(sample: bytes) -> Encoding:
    if _is_utf8(sample):
        return UTF8
    high = sum(byte >= 0x80 for byte in sample)
    stray = len(sample) - len(sample.decode("utf-8", "ignore").encode())
    if stray * 2 <= high:
        return UTF8
    letters = [character for character in sample.decode("cp1252", "ignore") if character.isalpha()]
    if sum(map(str.isascii, letters)) >= (1 - _WESTERN_SHARE) * len(letters):
        return Encoding("cp1252")
    best = from_bytes(sample[: 1 << 16]).best()
    return Encoding(best.encoding if best else "cp1252")


def _is_utf8(sample: bytes) -> bool:
    try:
        codecs.getincrementaldecoder("utf-8")().decode(sample)
    except UnicodeDecodeError:
        return False
    return True


def _as_cp1252(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return error.object[error.start : error.end].decode("cp1252", "replace"), error.end


codecs.register_error(_STRAY, _as_cp1252)
