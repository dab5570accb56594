"""What the tokens of a vocabulary stand for: bytes of text, or a special token.

Read from the description of the tokenizer's own decoder, since two tokenizers spell the same text differently: `Ġthe`
(byte-level), `▁the` (sentencepiece), `<0x0A>` (byte fallback). Added tokens that are not special (runs of spaces, say)
are text like any other. Special tokens stand for themselves and have no bytes, so that nothing which a document
contains can be taken for one. Knows nothing of models.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from pipeline.errors import ModelError

_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens with an id below `size`."""

    size: int
    written: list[bytes | None]  # [size] the bytes of each; None for special tokens and ids without a token
    ids: dict[bytes, int]  # the token for these bytes; of several, one that is not byte fallback, then the lowest id
    specials: dict[str, int]
    bos: int | None
    eos: int | None

    @classmethod
    def of(cls, tokenizer: Any, size: int) -> Vocabulary:
        """Of a fast tokenizer of transformers. ModelError where its decoder is of a kind that is not known here."""
        written = (token_bytes(tokenizer) + [None] * size)[:size]
        tokens = _tokens(tokenizer)
        ids: dict[bytes, int] = {}
        for last_choice in (False, True):
            for token, text in enumerate(written):
                if text and (_FALLBACK.fullmatch(tokens[token]) is not None) == last_choice:
                    ids.setdefault(text, token)
        specials = {content: token for token, content in _specials(tokenizer).items() if token < size}
        bos, eos = specials.get(tokenizer.bos_token), specials.get(tokenizer.eos_token)
        return cls(size, written, ids, specials, bos, eos)


def token_bytes(tokenizer: Any) -> list[bytes | None]:
    """The bytes that each token adds to a text, by id; None for special tokens and ids without a token.

    What a decoder does to a text's beginning alone (leaving out the first space) is not part of it.
    """
    write, tokens, specials = _writer(tokenizer), _tokens(tokenizer), _specials(tokenizer)
    written: list[bytes | None] = [None] * (max(tokens, default=-1) + 1)
    for token, spelled in tokens.items():
        if token not in specials:
            written[token] = write(spelled)
    return written


def _tokens(tokenizer: Any) -> dict[int, str]:
    return {token: spelled for spelled, token in tokenizer.get_vocab().items()}


def _specials(tokenizer: Any) -> dict[int, str]:
    return {token: added.content for token, added in tokenizer.added_tokens_decoder.items() if added.special}


def _writer(tokenizer: Any) -> Callable[[str], bytes]:
    """From a token as the vocabulary spells it to its bytes."""
    description = json.loads(tokenizer.backend_tokenizer.to_str())["decoder"]
    replaced: list[tuple[str, str]] = []
    byte_level = byte_fallback = False
    for step in _steps(description):
        match step:
            case {"type": "ByteLevel"}:
                byte_level = True
            case {"type": "ByteFallback"}:
                byte_fallback = True
            case {"type": "Replace", "pattern": {"String": old}, "content": new}:
                replaced.append((old, new))
            case {"type": "Metaspace", "replacement": old}:
                replaced.append((old, " "))
            case {"type": "Fuse" | "Strip"}:  # join tokens, and change the ends of the whole text
                pass
            case other:
                kind = "none" if other is None else other.get("type")
                raise ModelError(
                    f"a tokenizer whose decoder is {kind} cannot be intersected with another: it is neither "
                    "byte-level nor of sentencepiece's kind; choose a draft with the target's tokenizer"
                )

    def write(spelled: str) -> bytes:
        if byte_fallback and (match := _FALLBACK.fullmatch(spelled)):
            return bytes.fromhex(match[1])
        if byte_level and all(character in _BYTE_OF for character in spelled):
            return bytes(_BYTE_OF[character] for character in spelled)
        for old, new in replaced:
            spelled = spelled.replace(old, new)
        return spelled.encode("utf-8", "surrogatepass")

    return write


def _steps(decoder: dict[str, Any] | None) -> Iterator[dict[str, Any] | None]:
    """A decoder's steps; one within another is laid flat."""
    if decoder is not None and decoder["type"] == "Sequence":
        for step in decoder["decoders"]:
            yield from _steps(step)
    else:
        yield decoder


def _byte_level() -> dict[str, int]:
    """The characters by which byte-level vocabularies spell bytes (Radford et al. 2019, GPT-2's encoder).

    Printable ones of Latin-1 stand for themselves; the others are numbered from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_level()
