"""Token ids to text and words to token ids, as the target's tokenizer has them. Knows nothing of sequences or laws."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

BROKEN = "\ufffd"  # what a decoder writes for bytes that are no character
ANCHORS = ("\n", ".", "0")  # what a word may follow without a space; a tokenizer may merge one of them with it


class Wording:
    """Around a fast tokenizer of transformers."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer
        self._found: dict[str, tuple[tuple[int, ...], ...]] = {}

    # token ids to text

    def raw(self, ids: list[int]) -> str:
        """What token ids write, special tokens left out; may end in U+FFFD for an unfinished character."""
        text = self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str), type(text)
        return text

    def __call__(self, ids: list[int]) -> str:
        """The text of a whole completion: bytes at its end that are no character are left out.

        A U+FFFD that the model wrote as such stays. Where a decoder gives up a whole run of byte tokens for its
        unfinished end, the characters before that end are kept.
        """
        text = self.raw(ids)
        if not text.endswith(BROKEN):
            return text
        if self._byte_level:
            written = b"".join(map(self._bytes, self._ordinary(ids)))
            lost = written[_whole(written) :].decode("utf-8", errors="replace")
            return text[: len(text) - len(lost)]
        if self._byte_fallback:
            return self._without_broken_run(ids, text)
        return text

    def _without_broken_run(self, ids: list[int], text: str) -> str:
        """Byte tokens at the end count as characters only if all of them do, together."""
        ordinary = self._ordinary(ids)
        first = len(ordinary)
        while first and ordinary[first - 1] in self._byte_tokens:
            first -= 1
        run = bytes(self._byte_tokens[i] for i in ordinary[first:])
        whole = _whole(run)
        if whole == len(run):
            return text
        if _valid(run[:whole]):
            return self.raw(ordinary[: first + whole])
        return text[: len(text) - len(run)]

    def _ordinary(self, ids: list[int]) -> list[int]:
        return [i for i in ids if i not in self._special]

    def _bytes(self, token: int) -> bytes:
        """What a token of a byte-level vocabulary writes; added tokens may be spelled out, as the decoder has it."""
        name = self.tokenizer.convert_ids_to_tokens(token) or ""
        assert isinstance(name, str), type(name)
        try:
            return bytes(_BYTE_OF[character] for character in name)
        except KeyError:
            return name.encode()

    @cached_property
    def _special(self) -> frozenset[int]:
        added = self.tokenizer.backend_tokenizer.get_added_tokens_decoder()
        return frozenset(i for i, token in added.items() if token.special)

    @cached_property
    def _decoder(self) -> str:
        decoder = self.tokenizer.backend_tokenizer.decoder
        return "" if decoder is None else decoder.__getstate__().decode()  # its JSON

    @property
    def _byte_level(self) -> bool:
        return '"ByteLevel"' in self._decoder

    @property
    def _byte_fallback(self) -> bool:
        return '"ByteFallback"' in self._decoder

    @cached_property
    def _byte_tokens(self) -> dict[int, int]:
        """Token id → byte, of a vocabulary that falls back to bytes."""
        vocabulary = self.tokenizer.get_vocab()
        names = {f"<0x{byte:02X}>": byte for byte in range(256)}
        return {vocabulary[name]: byte for name, byte in names.items() if name in vocabulary}

    # words to token ids

    def spellings(self, word: str) -> tuple[tuple[int, ...], ...]:
        """Token sequences that write a word, for a ban of each one's last token behind the others.

        At the beginning of a text and inside of it, with a space before it and without. Byte-level vocabularies hold
        the space in the word's first token and leave the beginning of a text alone; sentencepiece's put a space
        there, so that encoding a word gives the spelling with it, and only behind other text the one without.

        No special tokens: the name of one is written like any other text. None for an empty word, nor where the
        vocabulary can't write the word.
        """
        if word not in self._found:
            unknown = self.tokenizer.unk_token_id
            spaced = [word, " " + word] if word else []
            found = [self._encode(text) for text in spaced] + [self._behind_text(text) for text in spaced]
            self._found[word] = tuple(dict.fromkeys(ids for ids in found if ids and unknown not in ids))
        return self._found[word]

    def _behind_text(self, text: str) -> tuple[int, ...]:
        for anchor in ANCHORS:
            before, both = self._encode(anchor), self._encode(anchor + text)
            if before and both[: len(before)] == before:
                return both[len(before) :]
        return ()

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._literal.encode(text, add_special_tokens=False).ids)

    @cached_property
    def _literal(self) -> Tokenizer:
        """A tokenizer of our own to which special tokens' names are ordinary text; a file may switch on truncation."""
        tokenizer = Tokenizer.from_str(self.tokenizer.backend_tokenizer.to_str())
        tokenizer.encode_special_tokens = True
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer


def _whole(written: bytes) -> int:
    """Where the last whole UTF-8 character ends."""
    for end in range(len(written), 0, -1):
        if any(_valid(written[start:end]) for start in range(max(0, end - 4), end)):
            return end
    return 0


def _valid(written: bytes) -> bool:
    try:
        written.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _byte_alphabet() -> dict[str, int]:
    """Character → byte in byte-level vocabularies: printable Latin-1 stands for itself, the others from U+0100 on.

    Radford et al. 2019, the encoder of GPT-2.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
