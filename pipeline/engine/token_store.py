"""The tokens behind the cache entries of every slot: what penalties and bad words look back at.

Kept beside keys and values and under the same rule: how much of a slot's row is valid is a number held by the
caller, so a rejected token is simply written over. Knows nothing of models or laws.

Shapes: B rows of a feed, C capacity in tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipeline.messages import Feed, PrefixCopy

_FIRST_CAPACITY = 256


class TokenStore:
    """One row of token ids per slot; entry i of a row is the token at position i of the slot's sequence.

    Rows and capacity grow as slots and positions are written to.
    """

    def __init__(self, slots: int) -> None:
        self.tokens = np.zeros((slots, _FIRST_CAPACITY), dtype=np.int64)  # [slots, C]

    def copy(self, copy: PrefixCopy) -> None:
        """The first `copy.length` tokens of one slot become those of another."""
        self._reserve(copy.target + 1, 0)
        self.tokens[copy.target, : copy.length] = self.tokens[copy.source, : copy.length]

    def release(self) -> None:
        """Let go of all rows."""
        self.tokens = np.zeros((0, _FIRST_CAPACITY), dtype=np.int64)

    def write(self, feed: Feed, extra_tokens: Sequence[np.ndarray]) -> None:
        """Every row's fed tokens, and those behind them (drafted ones), at their positions."""
        extra_B = np.array([len(extra) for extra in extra_tokens], dtype=np.int64)
        ends_B = feed.cached + feed.lengths + extra_B
        self._reserve(int(feed.slots.max(initial=-1)) + 1, int(ends_B.max(initial=0)))
        self._put(feed.slots, feed.cached, feed.lengths, feed.tokens)
        if extra_B.any():
            self._put(feed.slots, feed.cached + feed.lengths, extra_B, np.concatenate(list(extra_tokens)))

    def _put(self, slots_B: np.ndarray, starts_B: np.ndarray, lengths_B: np.ndarray, tokens_N: np.ndarray) -> None:
        within_N = np.arange(len(tokens_N)) - np.repeat(np.cumsum(lengths_B) - lengths_B, lengths_B)
        self.tokens[np.repeat(slots_B, lengths_B), np.repeat(starts_B, lengths_B) + within_N] = tokens_N

    def _reserve(self, slots: int, capacity: int) -> None:
        rows, held = self.tokens.shape
        if slots <= rows and capacity <= held:
            return
        shape = (rows if slots <= rows else max(slots, 2 * rows), held if capacity <= held else max(capacity, 2 * held))
        grown = np.zeros(shape, dtype=np.int64)
        grown[:rows, :held] = self.tokens
        self.tokens = grown
