"""Encoding: the same as the tokenizer's own, but for special tokens in a document."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.prompts.encoder import Piece, PromptEncoder
from tests.prompts.tiny_tokenizers import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
ENCODER = PromptEncoder(TOKENIZER, chat=True)
HOSTILE = st.lists(st.sampled_from(["<|im_start|>", "<|im_end|>", "</s>", "<|im_", "end|>", "dog ", "é🎉", "\n"])).map(
    "".join
)


def own_ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


@given(st.text())
def test_ordinary_text_is_encoded_in_one_go(text: str) -> None:
    pieces = [Piece("<|im_start|>user\nthe qu"), Piece(text, trusted=False), Piece("ck<|im_end|>")]
    assert ENCODER.encode(pieces) == own_ids("".join(piece.text for piece in pieces))


@given(HOSTILE, HOSTILE)
def test_no_document_makes_a_special_token(first: str, second: str) -> None:
    pieces = [
        Piece("<|im_start|>user\n"),
        Piece(first, trusted=False),
        Piece("|> and <|im_"),
        Piece(second, trusted=False),
        Piece("<|im_end|>"),
    ]
    ids = ENCODER.encode(pieces)
    assert [id for id in ids if id < 4] == [2, 3]
    assert TOKENIZER.decode(ids) == "".join(piece.text for piece in pieces)


def test_an_added_token_that_is_not_special_stays_ordinary_text() -> None:
    tool = TOKENIZER.convert_tokens_to_ids("<tool>")
    assert ENCODER.encode([Piece("a "), Piece("<tool>", trusted=False)])[-1] == tool


@pytest.mark.parametrize("eos", [False, True])
def test_a_plain_prompt_has_one_bos_and_no_eos(eos: bool) -> None:
    encoder = PromptEncoder(tiny_tokenizer(bos=True, eos=eos), chat=False)
    assert encoder.encode([Piece("the dog")]) == [0, *own_ids("the dog")]
    assert encoder.encode([Piece("<s>the dog")]) == [0, *own_ids("the dog")]
    assert encoder.encode([Piece("<s>", trusted=False)]) == [0, *(own_ids(c)[0] for c in "<s>")]


def test_truncation_and_padding_of_the_tokenizer_file_do_not_count() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.enable_truncation(2)
    tokenizer.backend_tokenizer.enable_padding(length=50)
    assert PromptEncoder(tokenizer, chat=True).encode([Piece("the lazy dog")]) == own_ids("the lazy dog")


@given(st.text())
def test_boundaries_never_fall_inside_a_token_or_character(text: str) -> None:
    ends = ENCODER.boundaries(text)
    assert ends == sorted(set(ends))
    assert not text or ends[-1] == len(text)
    ids = own_ids(text)
    for end in ends[:3]:
        head = own_ids(text[:end])
        assert ids[: len(head)] == head
