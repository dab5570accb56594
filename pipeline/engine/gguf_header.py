"""The keys and values at the head of a GGUF file, without its arrays.

The gguf package reads them too, but takes seconds over a vocabulary. Format: ggml's docs/gguf.md, version 2 and 3.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import BinaryIO

Scalar = int | float | bool | str
# struct formats of the value types, by number; 8 is a string and 9 an array.
FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9


def read_header(path: Path) -> dict[str, Scalar]:
    """All keys with a single value; ValueError if the file is not little-endian GGUF or ends early."""
    with open(path, "rb") as file:
        magic, version, _, count = struct.unpack("<4sIQQ", _read(file, 24))
        if magic != b"GGUF" or version not in (2, 3):
            raise ValueError(f"it starts with {magic!r}, version {version}")
        found: dict[str, Scalar] = {}
        for _ in range(count):
            key = _string(file)
            (kind,) = struct.unpack("<I", _read(file, 4))
            if kind == ARRAY:
                _skip_array(file)
            else:
                found[key] = _scalar(file, kind)
        return found


def _scalar(file: BinaryIO, kind: int) -> Scalar:
    if kind == STRING:
        return _string(file)
    value: Scalar = struct.unpack(f"<{FORMATS[kind]}", _read(file, struct.calcsize(f"<{FORMATS[kind]}")))[0]
    return value


def _skip_array(file: BinaryIO) -> None:
    kind, count = struct.unpack("<IQ", _read(file, 12))
    if kind == STRING:
        for _ in range(count):
            (length,) = struct.unpack("<Q", _read(file, 8))
            file.seek(length, 1)
    elif kind == ARRAY:
        for _ in range(count):
            _skip_array(file)
    else:
        file.seek(count * struct.calcsize(f"<{FORMATS[kind]}"), 1)


def _string(file: BinaryIO) -> str:
    (length,) = struct.unpack("<Q", _read(file, 8))
    if length > 1 << 28:
        raise ValueError(f"a text of {length} bytes in its header")
    return _read(file, length).decode("utf-8", "replace")


def _read(file: BinaryIO, size: int) -> bytes:
    data = file.read(size)
    if len(data) < size:
        raise ValueError("the file ends in its header")
    return data
