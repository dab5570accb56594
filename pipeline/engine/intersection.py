"""Two vocabularies side by side: the tokens that both have, and every token of one written in tokens of the other.

For drafting with another tokenizer than the target's (Timor et al. 2025, "Accelerating LLM Inference with Lossless
Speculative Decoding Algorithms for Heterogeneous Vocabularies", token-level intersection). What is proposed are common
tokens alone; how well the other ones are written decides how good the drafts are, never which texts come out.

Two tokens are the same if they stand for the same bytes; special tokens, if they have the same content. Where that
leaves the token that begins or that ends a text without a partner on both sides, these two are partners: the model's
first token is what it leans on, and a draft that wants to end should be able to say so.

Shapes: V the target's vocabulary, C common tokens, N tokens, P draft tokens that write them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pipeline.engine.checkpoint import Checkpoint
from pipeline.engine.vocabularies import Vocabulary
from pipeline.errors import ModelError


@dataclass(frozen=True, slots=True, eq=False)
class Intersection:
    """Common tokens, one to one, and the draft tokens that write each of the target's. Arrays are int64."""

    target_ids: np.ndarray  # [C] ascending
    draft_ids: np.ndarray  # [C] the same tokens as the draft numbers them
    lengths: np.ndarray  # [V] draft tokens that write each target token, at least 1
    firsts: np.ndarray  # [V] where they begin in `pieces`
    pieces: np.ndarray  # [P] those draft tokens, one target token after the other
    draft_vocabulary: int  # all draft ids here are below it

    @classmethod
    def of(cls, target: Vocabulary, draft: Vocabulary) -> Intersection:
        """There must be a common token.

        A target token that the draft does not have is written byte by byte with the longest tokens that fit, a
        special one as its content is. Bytes that no draft token stands for are left out, and a space stands where
        nothing else would be left.
        """
        pairs = _pairs(target, draft)
        assert pairs, "vocabularies without a common token"
        common = np.array(sorted(pairs.items()), dtype=np.int64)
        nothing = draft.ids.get(b" ", int(common[0, 1]))
        texts = {token: text or b"" for token, text in enumerate(target.written)}
        texts |= {token: content.encode() for content, token in target.specials.items()}
        longest = max(map(len, draft.ids), default=0)
        pieces = [
            [pairs[token]] if token in pairs else _spell(text, draft.ids, longest) or [nothing]
            for token, text in texts.items()
        ]
        lengths = np.array([len(p) for p in pieces], dtype=np.int64)
        return cls(
            common[:, 0],
            common[:, 1],
            lengths,
            np.cumsum(lengths) - lengths,
            np.array([token for p in pieces for token in p], dtype=np.int64),
            draft.size,
        )

    @property
    def vocabulary(self) -> int:
        """The target's: ids below it can be written."""
        return len(self.lengths)

    def write(self, tokens_N: np.ndarray) -> np.ndarray:
        """`[P]` the draft tokens for some target tokens, end to end; token i takes `lengths[tokens_N[i]]` of them."""
        lengths_N = self.lengths[tokens_N]
        within_P = np.arange(lengths_N.sum()) - np.repeat(np.cumsum(lengths_N) - lengths_N, lengths_N)
        return self.pieces[np.repeat(self.firsts[tokens_N], lengths_N) + within_P]


def check_vocabularies(target: Checkpoint, draft: Checkpoint) -> Intersection:
    """What the vocabularies of two models have in common; ModelError where no draft can come of it.

    Reads the tokenizers and configurations, no weights. That the token which ends a text is not common is no reason to
    refuse: it is then never drafted, and drawn by the target all the same.
    """
    ours, theirs = _vocabulary(target), _vocabulary(draft)
    if not ours.ids.keys() & theirs.ids.keys():
        raise ModelError(
            f"draft.vocabulary: {draft.name} has no token of text in common with {target.name}; choose another draft"
        )
    return Intersection.of(ours, theirs)


def _vocabulary(checkpoint: Checkpoint) -> Vocabulary:
    """Ids beyond the tokenizer's are padding of the embedding; beyond the embedding there is nothing to look up."""
    tokenizer = checkpoint.tokenizer()
    try:
        return Vocabulary.of(tokenizer, min(len(tokenizer), int(checkpoint.config().vocab_size)))
    except ModelError as error:
        raise ModelError(f"draft.vocabulary: {checkpoint.name}: {error}") from error


def _pairs(target: Vocabulary, draft: Vocabulary) -> dict[int, int]:
    """Target ids to draft ids, one to one."""
    pairs = {token: draft.ids[text] for text, token in target.ids.items() if text in draft.ids}
    pairs |= {token: draft.specials[content] for content, token in target.specials.items() if content in draft.specials}
    for ours, theirs in ((target.bos, draft.bos), (target.eos, draft.eos)):
        if ours is not None and theirs is not None and ours not in pairs and theirs not in pairs.values():
            pairs[ours] = theirs
    return pairs


def _spell(text: bytes, ids: dict[bytes, int], longest: int) -> list[int]:
    """Tokens that write a text, each the longest that fits; bytes without any are skipped."""
    tokens, start = [], 0
    while start < len(text):
        ends = range(min(start + longest, len(text)), start, -1)
        end = next((end for end in ends if text[start:end] in ids), start)
        if end > start:
            tokens.append(ids[text[start:end]])
        start = max(end, start + 1)
    return tokens
