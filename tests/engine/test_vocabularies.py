"""Every token's bytes, whatever way its tokenizer spells them."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from pipeline.engine.vocabularies import Vocabulary, token_bytes
from pipeline.errors import ModelError
from tests.engine.vocabulary_pairs import merged_tokenizer, sentencepiece_tokenizer
from tests.models import BOS, EOS, PAD, TOKENS, byte_tokenizer

TEXT = "the tea    and thé\n\torange 😀 «añb» \x00\x7f the and"
TOKENIZERS = [byte_tokenizer, merged_tokenizer, sentencepiece_tokenizer]


@pytest.mark.parametrize("make", TOKENIZERS)
def test_bytes_of_the_tokens_of_a_text_are_the_bytes_of_the_text(make: Any) -> None:
    tokenizer = make()
    written = token_bytes(tokenizer)
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    parts = [written[token] for token in ids]
    assert b"".join(part for part in parts if part is not None).removeprefix(b" ") == TEXT.encode()
    assert None not in parts


@pytest.mark.parametrize("make", TOKENIZERS)
def test_bytes_decode_to_what_the_tokenizer_itself_decodes(make: Any) -> None:
    """A character in front, since the first space of a text may be left out."""
    tokenizer = make()
    front = tokenizer.encode("a", add_special_tokens=False)
    for token, text in enumerate(token_bytes(tokenizer)):
        if text is not None and text.isascii():
            assert tokenizer.decode([*front, token], clean_up_tokenization_spaces=False) == "a" + text.decode()


def test_all_bytes_have_a_token_each() -> None:
    for make in TOKENIZERS:
        single = {text for text in token_bytes(make()) if text is not None and len(text) == 1}
        assert len(single) == 256


def test_special_tokens_have_no_bytes_and_are_known_by_content() -> None:
    vocabulary = Vocabulary.of(byte_tokenizer(), TOKENS)
    assert [vocabulary.written[t] for t in (BOS, EOS, PAD)] == [None] * 3
    assert vocabulary.specials == {"<bos>": BOS, "<eos>": EOS, "<pad>": PAD}
    assert (vocabulary.bos, vocabulary.eos) == (BOS, EOS)
    assert b"<eos>" not in vocabulary.ids


def test_added_token_that_is_not_special_is_text() -> None:
    tokenizer = merged_tokenizer()
    vocabulary = Vocabulary.of(tokenizer, len(tokenizer))
    assert vocabulary.ids[b"    "] == tokenizer.convert_tokens_to_ids("    ")


def test_byte_fallback_stands_for_a_byte_only_where_nothing_else_does() -> None:
    tokenizer = sentencepiece_tokenizer()
    ids = Vocabulary.of(tokenizer, len(tokenizer)).ids
    assert ids[b"a"] == tokenizer.convert_tokens_to_ids("a")
    assert ids[b" "] == tokenizer.convert_tokens_to_ids("▁")
    assert ids[b"\n"] == tokenizer.convert_tokens_to_ids("<0x0A>")


def test_ids_beyond_the_size_are_left_out_and_missing_ones_have_no_bytes() -> None:
    tokenizer = byte_tokenizer()
    few = Vocabulary.of(tokenizer, 40)
    assert len(few.written) == 40
    assert max(few.ids.values()) == 39
    assert few.specials == {}
    assert few.eos is None
    many = Vocabulary.of(tokenizer, TOKENS + 5)
    assert many.written[TOKENS:] == [None] * 5


@pytest.mark.parametrize("decoder", [None, decoders.WordPiece(), decoders.Sequence([decoders.CTC(), decoders.Fuse()])])
def test_decoder_of_another_kind_is_refused_by_name(decoder: Any) -> None:
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    if decoder is not None:
        tokenizer.decoder = decoder
    with pytest.raises(ModelError, match=r"none|WordPiece|CTC"):
        token_bytes(PreTrainedTokenizerFast(tokenizer_object=tokenizer))


def test_metaspace_and_nested_sequences_are_understood() -> None:
    tokenizer = Tokenizer(models.BPE(vocab={"▁a": 0, "b▁": 1, "<0x41>": 2}, merges=[]))
    tokenizer.decoder = decoders.Sequence([decoders.Sequence([decoders.Metaspace()]), decoders.Fuse()])
    assert token_bytes(PreTrainedTokenizerFast(tokenizer_object=tokenizer)) == [b" a", b"b ", b"<0x41>"]


def test_alphabet_of_byte_level_vocabularies_is_that_of_the_tokenizers_library() -> None:
    from pipeline.engine.vocabularies import _BYTE_OF

    assert set(_BYTE_OF) == set(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(_BYTE_OF.values()) == list(range(256))
