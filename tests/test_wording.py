"""What token ids write, and which token ids write a word, for byte-level and sentencepiece-style vocabularies."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from itertools import product
from pathlib import Path

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import NoBadWordsLogitsProcessor, PreTrainedTokenizerFast

from pipeline.wording import Wording
from tests.models import byte_tokenizer
from tests.prompts.tiny_tokenizers import tiny_tokenizer

ROOT = Path(__file__).resolve().parents[1]
YOU = "你".encode()  # three bytes
PIECES = ["▁", "▁▁", "w", "o", "r", "d", "S", "T", ".", "▁w", "or", "ord", "▁word", "word", "\ufffd"]
MERGES = [("▁", "w"), ("o", "r"), ("or", "d"), ("▁w", "ord"), ("w", "ord"), ("▁", "▁")]


@cache
def sentencepiece(prefix: str = "always", byte_fallback: bool = True) -> Wording:
    """As converted from sentencepiece: Llama 2 puts a space before all texts (`always`), others do not (`never`)."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256) if byte_fallback), *PIECES]
    model = models.BPE({n: i for i, n in enumerate(names)}, MERGES, unk_token="<unk>", byte_fallback=byte_fallback)
    tokenizer = Tokenizer(model)
    if prefix == "always":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme=prefix, split=False)
    drops = [decoders.Strip(" ", 1, 0)] if prefix != "never" else []
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *drops]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(["<s>", "</s>"])
    names_of = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return Wording(PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names_of))


@cache
def byte_level() -> Wording:
    return Wording(byte_tokenizer())


def ids(wording: Wording, *names: str | bytes | int) -> list[int]:
    """Token ids by name; bytes as one token each."""
    vocabulary, found = wording.tokenizer.get_vocab(), []
    for name in names:
        if isinstance(name, bytes):
            fallback = "<0x0A>" in vocabulary
            found += [vocabulary[f"<0x{b:02X}>" if fallback else byte_name(b)] for b in name]
        else:
            found.append(name if isinstance(name, int) else vocabulary[name])
    return found


@cache
def byte_name(byte: int) -> str:
    """What a byte-level tokenizer calls a byte: seen by encoding it, alone or as the last of two; high ones stay."""
    encoder = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return encoder.pre_tokenize_str(chr(byte))[0][0][-1] if byte < 0xC0 else chr(byte)


WORDINGS = {
    "bytes": byte_level,
    "llama 2": sentencepiece,
    "first": lambda: sentencepiece("first"),
    "never": lambda: sentencepiece("never"),
}


# ------------------------------------------------------------------------------------------------ ids to text


@pytest.mark.parametrize("make", WORDINGS.values(), ids=WORDINGS)
def test_text_is_what_the_tokens_write_without_special_ones(make) -> None:
    wording = make()
    eos = wording.tokenizer.eos_token_id
    tokens = ids(wording, b"S", YOU[:2], eos, YOU[2:], b"T")
    assert wording(tokens) == wording.raw(tokens) == "S你T"
    assert wording([]) == wording.raw([]) == wording([eos]) == ""


@pytest.mark.parametrize("make", WORDINGS.values(), ids=WORDINGS)
@pytest.mark.parametrize("held", [1, 2])
@pytest.mark.parametrize("before", [b"", b"S", YOU, YOU + "é".encode(), "\ufffd".encode()])
def test_text_never_ends_in_half_a_character_and_loses_no_whole_one(make, held: int, before: bytes) -> None:
    wording = make()
    tokens = ids(wording, before, YOU[:held])
    assert wording.raw(tokens).endswith("\ufffd")
    assert wording(tokens) == before.decode()
    assert wording([*tokens, wording.tokenizer.eos_token_id]) == before.decode()


@pytest.mark.parametrize("make", WORDINGS.values(), ids=WORDINGS)
@pytest.mark.parametrize("broken", [b"\xff", b"\xa0", b"\xff\xff", YOU[:1] + YOU[:1], b"\xff" + YOU[:2]])
def test_bytes_at_the_end_that_are_no_character_are_left_out(make, broken: bytes) -> None:
    wording = make()
    text = wording(ids(wording, "S", broken))
    assert text == "S"


@pytest.mark.parametrize("make", WORDINGS.values(), ids=WORDINGS)
def test_a_replacement_character_that_the_model_wrote_is_kept(make) -> None:
    wording = make()
    tokens = ids(wording, "S", "\ufffd".encode())
    assert wording(tokens) == "S\ufffd"
    assert wording(tokens[:-1]) == "S"


def test_a_replacement_character_that_is_a_token_is_kept() -> None:
    wording = sentencepiece()
    assert wording(ids(wording, "word", "\ufffd")) == "word\ufffd"
    assert wording(ids(wording, "word", "\ufffd", YOU[:1])) == "word\ufffd"


def test_broken_bytes_inside_a_text_stay_visible() -> None:
    for make in WORDINGS.values():
        wording = make()
        assert wording(ids(wording, b"\xff", "T")) == "\ufffdT"


def test_a_spelled_out_token_counts_as_its_text() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([AddedToken("你", normalized=False)])
    wording = Wording(tokenizer)
    tool, you = tokenizer.convert_tokens_to_ids(["<tool>", "你"])
    assert wording(ids(wording, tool, YOU[:1])) == "<tool>"
    assert wording(ids(wording, YOU[:1], you)) == "\ufffd你"
    assert wording(ids(wording, you, YOU[:1])) == "你"


def test_every_short_sequence_of_awkward_bytes_ends_in_a_character() -> None:
    wording = byte_level()
    for length in range(1, 5):
        for written in product([b"\xef", b"\xbf", b"\xbd", b"\xf0", b"S"], repeat=length):
            data = b"".join(written)
            ends = [n for n in range(length + 1) if any(is_character(data[m:n]) for m in range(n))]
            kept = max(ends, default=0)
            assert wording(ids(wording, data)) == data[:kept].decode(errors="replace"), data


def is_character(data: bytes) -> bool:
    try:
        return len(data.decode()) == 1
    except UnicodeDecodeError:
        return False


# ------------------------------------------------------------------------------------------------ words to ids


def spelled(wording: Wording, word: str) -> set[tuple[str, ...]]:
    found = wording.spellings(word)
    assert len(set(found)) == len(found)
    return {tuple(wording.tokenizer.convert_ids_to_tokens(list(tokens))) for tokens in found}


def test_byte_level_words_are_spelled_with_and_without_a_space() -> None:
    assert spelled(byte_level(), "word") == {("w", "o", "r", "d"), ("Ġ", "w", "o", "r", "d")}
    assert spelled(Wording(tiny_tokenizer()), "fox") == {("fo", "x"), ("Ġfox",)}


def test_a_byte_level_tokenizer_that_prefixes_a_space_still_spells_the_word_without() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    assert {("fo", "x"), ("Ġfox",)} <= spelled(Wording(tokenizer), "fox")


def test_special_tokens_of_the_tokenizer_are_in_no_spelling() -> None:
    for tokenizer in (tiny_tokenizer(bos=True), tiny_tokenizer(eos=True)):
        assert spelled(Wording(tokenizer), "fox") == {("fo", "x"), ("Ġfox",)}


@pytest.mark.parametrize("prefix", ["always", "first", "never"])
def test_sentencepiece_words_are_spelled_with_and_without_a_space(prefix: str) -> None:
    found = spelled(sentencepiece(prefix), "word")
    assert {("▁word",), ("word",)} <= found
    assert found <= {("▁word",), ("word",), ("▁", "▁word")}  # the last: a space at the beginning of a text


@pytest.mark.parametrize("make", [*WORDINGS.values(), lambda: Wording(tiny_tokenizer())])
def test_each_spelling_writes_the_word(make) -> None:
    wording = make()
    anchor = ids(wording, "T")
    for word in ("word", "Wörd 你", "a\nb", "two words"):
        for tokens in wording.spellings(word):
            assert wording.raw([*anchor, *tokens]).removeprefix("T").lstrip(" ") == word


@pytest.mark.parametrize("make", WORDINGS.values(), ids=WORDINGS)
@pytest.mark.parametrize("text", ["word", "T word", "S\nword", "T.word", "S\n word"])
def test_a_banned_word_cannot_be_finished_where_the_tokenizer_would_write_it(make, text: str) -> None:
    wording = make()
    tokens = wording.tokenizer.encode(text, add_special_tokens=False)
    ban = NoBadWordsLogitsProcessor([list(s) for s in wording.spellings("word")], wording.tokenizer.eos_token_id)
    scores = ban(torch.tensor([tokens[:-1]]), torch.zeros(1, len(wording.tokenizer)))
    assert scores[0, tokens[-1]] == -torch.inf


def test_a_word_that_names_a_special_token_does_not_ban_it() -> None:
    for wording in (byte_level(), sentencepiece("first"), Wording(tiny_tokenizer())):
        name, eos = wording.tokenizer.eos_token, wording.tokenizer.eos_token_id
        assert all(eos not in tokens for tokens in wording.spellings(name))
    assert len(byte_level().spellings("<eos>")) == 2


def test_what_the_vocabulary_cannot_write_is_not_banned() -> None:
    bare = sentencepiece(byte_fallback=False)
    assert spelled(bare, "wörd") == set()
    assert ("▁word",) in spelled(bare, "word")


def test_an_empty_word_bans_nothing() -> None:
    for make in WORDINGS.values():
        assert make().spellings("") == ()


def test_a_word_is_looked_up_once() -> None:
    wording = Wording(byte_tokenizer())
    assert wording.spellings("word") is wording.spellings("word")


def test_the_tokenizer_itself_is_left_as_it_was() -> None:
    tokenizer = byte_tokenizer()
    before = tokenizer.backend_tokenizer.to_str()
    Wording(tokenizer).spellings("<eos>")
    assert tokenizer.backend_tokenizer.to_str() == before
    assert tokenizer.encode("<eos>") == [tokenizer.eos_token_id]


def test_truncation_of_a_tokenizer_file_does_not_shorten_a_word() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.enable_truncation(2)
    tokenizer.backend_tokenizer.enable_padding(length=8)
    assert {len(tokens) for tokens in Wording(tokenizer).spellings("word")} == {4, 5}


def test_neither_wording_nor_stopping_loads_torch() -> None:
    heavy = {"torch", "ray", "transformers"}
    code = f"import sys, pipeline.wording, pipeline.stopping; print(sorted({heavy!r} & set(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
