"""A draft model with another tokenizer than the target's, seen through the target's vocabulary.

Outside of this module everything counts in target tokens: feeds, cache lengths, copies, logits. Each target token is
written as the same draft tokens wherever it stands (`Intersection`), so a prefix of a sequence is a prefix in draft
tokens as well, and taking tokens back stays a number: the draft's cache length is a running sum.

Logits of common tokens are moved to the target's ids, all others are -inf. Whatever follows (penalties, temperature,
filters, softmax) then sees exactly the draft's law restricted to common tokens and renormalised (Timor et al. 2025,
token-level intersection).

A text is longer in draft tokens and may outgrow the draft's capacity. Tokens that end beyond it are not fed, and the
law behind them is empty (-inf throughout): nothing is drafted there, nothing is computed, and the sequence goes on.
A worst-case bound in the scheduler would instead cut every text's drafts by the longest spelling in the vocabulary.

Shapes: B rows, N target tokens of a feed, R wanted positions, S of them within the draft's capacity, V the target's
vocabulary, C common tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from pipeline.engine.intersection import Intersection
from pipeline.engine.runner import Runner, grown, slots_named
from pipeline.engine.token_store import TokenStore
from pipeline.errors import CacheMiss
from pipeline.messages import Feed, Opening, PrefixCopy


class TranslatingRunner:
    """A `Runner` of the draft model that is spoken to in target tokens."""

    def __init__(self, inner: Runner, intersection: Intersection) -> None:
        """`inner` must have logits for all of the draft's vocabulary; its capacity counts in draft tokens."""
        assert inner.vocabulary >= intersection.draft_vocabulary, (inner.vocabulary, intersection.draft_vocabulary)
        slots = len(inner.held)
        self.inner = inner
        self.intersection = intersection
        self.model = inner.model
        self.device = inner.device
        self.vocabulary = intersection.vocabulary
        self.openings = inner.openings
        self.texts = TokenStore(slots)
        self.held = np.zeros(slots, dtype=np.int64)  # [slots] target tokens; those beyond the capacity included
        self._ends = TokenStore(slots)  # by target position: draft tokens up to and with this one
        self._target_ids_C = torch.as_tensor(intersection.target_ids, device=inner.device)
        self._draft_ids_C = torch.as_tensor(intersection.draft_ids, device=inner.device)

    @property
    def capacity(self) -> int:
        """Draft tokens that a slot holds at most."""
        return self.inner.cache.limit

    def open(self, openings: Sequence[Opening], copies: Sequence[PrefixCopy], feed: Feed) -> None:
        """As `Runner.open`."""
        self.held = grown(self.held, slots_named(feed, copies), 0)
        for c in copies:  # one by one: a copy may be the source of a later one
            if self.held[c.source] < c.length:
                raise CacheMiss(feed.sequences[feed.slots == c.target])
            written = int(self._written(np.array([c.source]), np.array([c.length]))[0])
            held = min(written, int(self.inner.held[c.source]))  # less is held of a text beyond the capacity
            self.inner.open((), (PrefixCopy(c.source, c.target, held),), _NO_ROWS)
            self.texts.copy(c)
            self._ends.copy(c)
            self.held[c.target] = c.length
        held_B = self.held[feed.slots]
        cached_B = self._written(feed.slots, np.minimum(feed.cached, held_B))
        cached_B = np.where(cached_B <= self.capacity, cached_B, 0)  # beyond it nothing will be fed
        cached_B = np.where(held_B < feed.cached, self.capacity + 1, cached_B)  # more than is ever held: a miss
        self.inner.open(openings, (), replace(feed, cached=cached_B))

    @torch.inference_mode()
    def forward(self, feed: Feed, extra_tokens: Sequence[np.ndarray], wanted_R: np.ndarray) -> Tensor:
        """As `Runner.forward`: logits `[R, V]`, -inf for tokens that are not common and beyond the capacity."""
        feed = _joined(feed, extra_tokens)
        none = [_NONE] * len(feed.slots)
        lengths_N = self.intersection.lengths[feed.tokens]
        before_B = self._written(feed.slots, feed.cached)
        ends_N = np.repeat(before_B, feed.lengths) + _running(lengths_N, feed.lengths)
        self.held[feed.slots] = feed.cached  # should the pass fail, nothing beyond is relied on
        self.texts.write(feed, none)
        self._ends.write(replace(feed, tokens=ends_N), none)
        fits_N = ends_N <= self.capacity  # the first tokens of each row, since ends grow along it
        served_R = fits_N[wanted_R]
        logits_RV = torch.empty(0, self.vocabulary, device=self.device)
        if fits_N.any():
            last_N = np.cumsum(np.where(fits_N, lengths_N, 0)) - 1  # place of each token's last piece in the pass
            logits_RV = self._run(feed, before_B, lengths_N, fits_N, last_N[wanted_R[served_R]])
        if not served_R.all():
            served_SV, logits_RV = logits_RV, logits_RV.new_full((len(wanted_R), self.vocabulary), -torch.inf)
            logits_RV[torch.as_tensor(served_R, device=self.device)] = served_SV
        self.held[feed.slots] = feed.cached + feed.lengths
        return logits_RV

    def _run(
        self, feed: Feed, before_B: np.ndarray, lengths_N: np.ndarray, fits_N: np.ndarray, wanted_S: np.ndarray
    ) -> Tensor:
        """Logits `[S, V]` of a pass over the tokens that fit; `wanted_S` are places in it."""
        row_N = np.repeat(np.arange(len(before_B)), feed.lengths)
        draft_B = np.bincount(row_N[fits_N], lengths_N[fits_N], len(before_B)).astype(np.int64)
        rows = np.flatnonzero(draft_B)
        draft_feed = Feed(
            sequences=feed.sequences[rows],
            slots=feed.slots[rows],
            cached=before_B[rows],
            lengths=draft_B[rows],
            tokens=self.intersection.write(feed.tokens[fits_N]),
        )
        logits = self.inner.forward(draft_feed, [_NONE] * len(rows), wanted_S)
        logits_SV = logits.new_full((len(logits), self.vocabulary), -torch.inf)
        return logits_SV.index_copy_(1, self._target_ids_C, logits.index_select(1, self._draft_ids_C))

    def scrub(self, slot: int) -> None:
        """As `Runner.scrub`. An empty law beyond the capacity is no sign of harm: such a slot is left as it is."""
        if self._written(np.array([slot]), self.held[[slot]])[0] <= self.capacity:
            self.inner.scrub(slot)
            self.held[slot] = 0

    def release(self) -> None:
        """As `Runner.release`."""
        self.inner.release()
        self.texts.release()
        self._ends.release()
        self.held = self.held[:0]

    def _written(self, slots_B: np.ndarray, lengths_B: np.ndarray) -> np.ndarray:
        """Draft tokens that write the first `lengths_B` target tokens of some slots."""
        ends_B = np.zeros(len(slots_B), dtype=np.int64)
        some = lengths_B > 0  # the others' slots may never have been written to
        ends_B[some] = self._ends.tokens[slots_B[some], lengths_B[some] - 1]
        return ends_B


def _joined(feed: Feed, extra_tokens: Sequence[np.ndarray]) -> Feed:
    """Extra tokens as part of the feed."""
    if not any(len(extra) for extra in extra_tokens):
        return feed
    fed = np.split(feed.tokens, np.cumsum(feed.lengths)[:-1])
    joined = [np.concatenate(pair) for pair in zip(fed, extra_tokens, strict=True)]
    return replace(feed, lengths=np.array([len(row) for row in joined]), tokens=np.concatenate(joined))


def _running(values_N: np.ndarray, lengths_B: np.ndarray) -> np.ndarray:
    """Sums along each row, up to and with each place; rows have at least one value."""
    sums_N = np.cumsum(values_N)
    firsts_B = np.cumsum(lengths_B) - lengths_B
    return sums_N - np.repeat(sums_N[firsts_B] - values_N[firsts_B], lengths_B)


_NONE = np.empty(0, dtype=np.int64)
_NO_ROWS = Feed(_NONE, _NONE, _NONE, _NONE, _NONE)
