"""Which encoding a file is read in."""

from __future__ import annotations

import codecs

import pytest

from pipeline.corpus.encoding import UTF8, Encoding, find_encoding
from pipeline.errors import ConfigError

FRENCH = "Le président a déclaré: « cet été, à Orléans, les élèves fêteront l’événement » – 5 €. " * 5
RUSSIAN = "Правительство утвердило новый план развития железных дорог на ближайшие пять лет. " * 5


def test_utf8_cut_inside_a_character_is_utf8() -> None:
    assert find_encoding("auto", "déjà vu é".encode()[:-1]) == UTF8


def test_a_western_file_that_is_not_utf8_is_cp1252() -> None:
    data = FRENCH.encode("cp1252")
    assert find_encoding("auto", data).decode(data) == FRENCH


def test_stray_bytes_in_a_utf8_file_are_read_as_cp1252() -> None:
    data = (FRENCH * 3).encode() + "déjà".encode("cp1252")
    assert find_encoding("auto", data).decode(data) == FRENCH * 3 + "déjà"


@pytest.mark.parametrize("codec", ["cp1251", "koi8-r"])
def test_another_alphabet_is_detected(codec: str) -> None:
    data = RUSSIAN.encode(codec)
    assert find_encoding("auto", data).decode(data) == RUSSIAN


@pytest.mark.parametrize("codec", ["utf-16", "utf-32", "utf-8-sig"])
def test_a_byte_order_mark_decides(codec: str) -> None:
    data = FRENCH.encode(codec)
    assert find_encoding("auto", data).decode(data).lstrip("\ufeff") == FRENCH


def test_a_named_encoding_is_taken_at_its_word() -> None:
    assert find_encoding("utf8", b"caf\xe9").decode(b"caf\xe9") == "caf\ufffd"
    assert find_encoding("latin-1", "é".encode()).decode("é".encode()) == "Ã©"


@pytest.mark.parametrize("name", ["klingon", "rot13", "base64"])
def test_a_name_that_is_no_text_encoding_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="is not an encoding"):
        find_encoding(name, b"")


def test_only_encodings_that_keep_newlines_are_cut_into_lines_as_they_are() -> None:
    assert UTF8.keeps_lines
    assert Encoding("cp1252").keeps_lines
    assert not Encoding("utf-16").keeps_lines
    blocks = [FRENCH.encode("utf-16")[:11], FRENCH.encode("utf-16")[11:]]
    assert b"".join(Encoding("utf-16").to_utf8(blocks)).decode() == FRENCH
    assert codecs.lookup_error("nightdesk-stray-bytes")
