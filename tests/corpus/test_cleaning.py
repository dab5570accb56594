"""What is taken out of a text, and that cleaning is done once for all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.corpus.cleaning import clean, whole


@pytest.mark.parametrize(
    ("dirty", "text"),
    [
        ("a\x00b\x07c", "abc"),
        ("one\r\ntwo\rthree\x0cfour", "one\ntwo\nthree\nfour"),
        ("\ufeffhead\ufeff", "head"),
        ("half \ud83d an emoji", "half \ufffd an emoji"),
        ("\ud83d\ude00 in two halves", "\U0001f600 in two halves"),
        ("cafe\u0301", "caf\u00e9"),
        ("line  \t\nend \n\n", "line\nend"),
        ("  indented\ttext", "  indented\ttext"),
        ("\x00 \r\n", ""),
    ],
)
def test_what_no_reader_sees_is_removed(dirty: str, text: str) -> None:
    assert clean(dirty) == text


@given(st.text(st.characters(exclude_categories=())))
def test_cleaning_twice_changes_nothing_and_the_result_can_be_written(text: str) -> None:
    once = clean(text)
    assert clean(once) == once
    once.encode()


@given(st.text())
def test_text_that_can_be_written_is_whole(text: str) -> None:
    assert whole(text) is text
