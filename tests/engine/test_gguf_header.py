"""Our reader of GGUF headers agrees with the gguf package."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest

from pipeline.engine.gguf_header import read_header
from tests.gguf_file import tiny_gguf


def test_it_agrees_with_the_gguf_package(tmp_path: Path) -> None:
    tiny_gguf(tmp_path / "tiny.gguf")
    fields = gguf.GGUFReader(tmp_path / "tiny.gguf").fields
    expected = {
        name: field.contents()
        for name, field in fields.items()
        if not name.startswith("GGUF.") and field.types[0] is not gguf.GGUFValueType.ARRAY
    }
    assert read_header(tmp_path / "tiny.gguf") == expected
    assert len(expected) > 10


def test_values_behind_arrays_of_every_kind_are_found(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "kinds.gguf", "llama")
    for name, array in {"words": ["a", "bcd"], "whole": [1, 2, 3], "parts": [0.5], "flags": [True]}.items():
        writer.add_array(name, array)
    writer.add_float64("last", 0.1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert read_header(tmp_path / "kinds.gguf") == {"general.architecture": "llama", "last": 0.1}


@pytest.mark.parametrize("content", [b"", b"GGUF", b"PK\x03\x04" + bytes(40), b"GGUF\x03\0\0\0" + b"\xff" * 40])
def test_what_is_not_gguf_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.gguf").write_bytes(content)
    with pytest.raises(ValueError, match=r"header|starts with"):
        read_header(tmp_path / "x.gguf")
