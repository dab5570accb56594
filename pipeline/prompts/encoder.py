"""Pieces of a prompt become token ids, and a field of a document never becomes a special token.

Ordinary prompts are encoded in one go, exactly as the tokenizer encodes the whole text. Only where that gives more
special tokens than the trusted pieces hold (a document that contains `<|im_start|>`, say) the prompt is encoded again:
between the trusted special tokens, by a copy of the tokenizer that knows none.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a prompt. Trusted text (the model's frame, the job's own words) may hold special tokens."""

    text: str
    trusted: bool = True


class PromptEncoder:
    """Encodes with a fast tokenizer of transformers. `chat` says that the frame brings the special tokens itself.

    Otherwise the tokenizer's own leading ones (BOS) are put in front, once. What it would put behind (EOS) is left
    out: a prompt is to be continued.
    """

    def __init__(self, tokenizer: Any, chat: bool) -> None:
        self._backend = _copy(tokenizer.backend_tokenizer)
        added = self._backend.get_added_tokens_decoder()
        special = {token.content: id for id, token in added.items() if token.special}
        special.pop(tokenizer.unk_token, None)  # stands for ordinary characters, too
        self._special = special
        self._special_ids = frozenset(special.values())
        longest_first = sorted(special, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._head = [] if chat else self._leading()

    def encode(self, pieces: Sequence[Piece]) -> list[int]:
        """Token ids of the pieces, laid end to end."""
        text = "".join(piece.text for piece in pieces)
        ids: list[int] = self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        expected = sum(len(self._pattern.findall(piece.text)) for piece in pieces if piece.trusted)
        if sum(map(self._special_ids.__contains__, ids)) > expected:
            ids = self._encode_apart(pieces)
        head = self._head
        return ids if ids[: len(head)] == head else head + ids

    def boundaries(self, text: str) -> list[int]:
        """Where a token of the text ends and no other goes on, in characters, ascending."""
        offsets = self._backend.encode(text, add_special_tokens=False).offsets
        following = [start for start, _ in offsets[1:]] + [len(text)]
        ends = (end for (_, end), start in zip(offsets, following, strict=False) if end <= start)
        return list(dict.fromkeys(ends))

    def _leading(self) -> list[int]:
        bare = self._backend.encode("a", add_special_tokens=False).ids
        full = self._backend.encode("a", add_special_tokens=True).ids
        starts = (i for i in range(len(full)) if full[i : i + len(bare)] == bare)
        return full[: next(starts, 0)]

    def _encode_apart(self, pieces: Sequence[Piece]) -> list[int]:
        ids: list[int] = []
        for text, is_special in self._spans(pieces):
            if is_special:
                ids.append(self._special[text])
            else:
                ids += self._literal.encode(text, add_special_tokens=False).ids
        return ids

    def _spans(self, pieces: Sequence[Piece]) -> Iterator[tuple[str, bool]]:
        """The text cut at the special tokens of trusted pieces."""
        ordinary: list[str] = []
        for piece in pieces:
            end = 0
            for match in self._pattern.finditer(piece.text) if piece.trusted else ():
                ordinary.append(piece.text[end : match.start()])
                yield "".join(ordinary), False
                yield match[0], True
                ordinary.clear()
                end = match.end()
            ordinary.append(piece.text[end:])
        yield "".join(ordinary), False

    @cached_property
    def _literal(self) -> Tokenizer:
        tokenizer = _copy(self._backend)
        tokenizer.encode_special_tokens = True
        return tokenizer


def _copy(tokenizer: Tokenizer) -> Tokenizer:
    """A tokenizer of our own, without the truncation and padding that a file may switch on."""
    copy = Tokenizer.from_str(tokenizer.to_str())
    copy.no_truncation()
    copy.no_padding()
    return copy
