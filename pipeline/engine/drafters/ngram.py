"""Proposes what followed last time: n-gram lookup in a sequence's own prompt and generated text.

The longest suffix of the text that occurs earlier in it is found, and the tokens behind its latest earlier
occurrence are proposed. Where no suffix of at least `shortest` tokens recurs, nothing is. The choice is a function
of the text before the block alone, so a law with all mass on each proposed token is exact (DESIGN section 5).
"""

from __future__ import annotations

import numpy as np

from pipeline.errors import CacheMiss
from pipeline.messages import DraftRequest, Proposal

LONGEST, SHORTEST = 4, 2  # tokens of the suffix that is looked up; single tokens recur too often to mean anything


class History:
    """The final tokens of one sequence, with the latest end of every short n-gram that has a successor."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.ends: dict[tuple[int, ...], int] = {}

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens. The index is made anew, since later entries hid earlier ones."""
        kept = self.tokens[:length]
        self.tokens, self.ends = [], {}
        self.extend(kept)

    def extend(self, tokens: list[int]) -> None:
        """Append tokens; n-grams that end before a token get it as their successor."""
        for token in tokens:
            for n in range(SHORTEST, min(LONGEST, len(self.tokens)) + 1):
                self.ends[tuple(self.tokens[-n:])] = len(self.tokens)
            self.tokens.append(token)

    def propose(self, wanted: int) -> list[int]:
        """Up to `wanted` tokens that followed the longest suffix seen before."""
        for n in range(min(LONGEST, len(self.tokens) - 1), SHORTEST - 1, -1):
            end = self.ends.get(tuple(self.tokens[-n:]))
            if end is not None:
                return self.tokens[end : end + wanted]
        return []


class NgramDrafter:
    """N-gram lookup for the sequences of a replica (protocol `decode.Drafter`)."""

    keeps_proposals = False
    chunk: int | None = None

    def __init__(self, slots: int) -> None:
        self.histories = [History() for _ in range(slots)]
        self.owners = np.full(slots, -1, dtype=np.int64)

    def ready(self) -> bool:
        """Always: it holds no resources."""
        return True

    def propose(self, request: DraftRequest) -> Proposal:
        """Look the suffix of every row up; laws are one-hot."""
        self._open(request)
        feed = request.feed
        bounds = np.cumsum(feed.lengths)[:-1]
        drafts = []
        for b, fed in enumerate(np.split(feed.tokens, bounds)):
            history = self.histories[feed.slots[b]]
            if len(history.tokens) > feed.cached[b]:
                history.truncate(int(feed.cached[b]))
            history.extend(fed.tolist())
            wanted = int(request.wanted[b])
            drafts.append(history.propose(wanted) if wanted else [])
        return one_hot(drafts)

    def _open(self, request: DraftRequest) -> None:
        feed = request.feed
        for copy in request.copies:  # one by one: a copy may be the source of a later one
            held = self.histories[copy.source].tokens
            if len(held) < copy.length:
                raise CacheMiss(feed.sequences[feed.slots == copy.target])
            history = History()
            history.extend(held[: copy.length])
            self.histories[copy.target] = history
        slot_of = dict(zip(feed.sequences.tolist(), feed.slots.tolist(), strict=True))
        for opening in request.openings:
            self.owners[slot_of[opening.sequence]] = opening.sequence
        lengths = np.array([len(self.histories[slot].tokens) for slot in feed.slots], dtype=np.int64)
        missing = (self.owners[feed.slots] != feed.sequences) | (lengths < feed.cached)
        if missing.any():
            raise CacheMiss(feed.sequences[missing])


def one_hot(drafts: list[list[int]]) -> Proposal:
    """Proposal of given tokens, each with all the mass of its law."""
    lengths = np.array([len(d) for d in drafts], dtype=np.int64)
    tokens = np.full((len(drafts), int(lengths.max(initial=0))), -1, dtype=np.int64)
    for b, draft in enumerate(drafts):
        tokens[b, : len(draft)] = draft
    return Proposal(tokens, lengths, tokens[:, :, None].copy(), (tokens[:, :, None] >= 0).astype(np.float32))
