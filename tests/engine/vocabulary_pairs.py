"""Tokenizers that spell the same texts differently, for tests: bytes with merges, and sentencepiece's kind.

The third one is `tests.models.byte_tokenizer`: one token per byte, then `<bos>`, `<eos>`, `<pad>`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

MERGES = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("a", "n"), ("an", "d"), ("Ġ", "and"), ("Ã", "©"), ("e", "Ã©")]
WORDS = ["▁", *"abcdehnorst", "é", "th", "the", "▁the", "an", "▁a", "▁an", "▁tea", "or", "▁or", "▁as"]


def merged_tokenizer(seed: int = 0, lacks: str = "") -> PreTrainedTokenizerFast:
    """Bytes and eight merges of them, all ids shuffled; special tokens in front; spaces as an added token.

    `lacks` are characters of the byte alphabet that it has no token for.
    """
    names = ["<eos>", "<|turn|>", "<s>"]
    alphabet = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(lacks))
    spelled = alphabet + [a + b for a, b in MERGES]
    order = np.random.default_rng(seed).permutation(len(spelled)) + len(names)
    vocabulary = {name: i for i, name in enumerate(names)}
    vocabulary |= {token: int(i) for token, i in zip(spelled, order, strict=True)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken("    ", normalized=False)])
    return _wrapped(tokenizer, names, eos_token="<eos>", bos_token="<s>", pad_token="<eos>", unk_token="<eos>")


def sentencepiece_tokenizer(fallback: bool = True) -> PreTrainedTokenizerFast:
    """Pieces over characters, `▁` for a space, and a token per byte for everything else (none without `fallback`)."""
    names = ["<unk>", "<s>", "</s>"]
    fallbacks = [f"<0x{byte:02X}>" for byte in range(256)] if fallback else []
    vocabulary = {token: i for i, token in enumerate([*names, *fallbacks, *WORDS])}
    merges = [(w[:k], w[k:]) for w in WORDS for k in range(1, len(w)) if w[:k] in WORDS and w[k:] in WORDS]
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=fallback)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _wrapped(tokenizer, names, eos_token="</s>", bos_token="<s>", unk_token="<unk>", pad_token="<unk>")


def _wrapped(tokenizer: Tokenizer, specials: list[str], **named: Any) -> PreTrainedTokenizerFast:
    tokenizer.add_special_tokens(specials)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named)
