"""Proposes with a draft model: one packed pass for what is to be caught up, then one per further token.

The draft's law at each position is its own law under all of the sequence's decoding parameters, cut to its `support`
likeliest tokens. Exactly these numbers are drawn from and shipped, so whatever was cut away stays exact. Under the
rule `coupled` the token is the one that the target's own noise would choose from this law.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from pipeline import speculation
from pipeline.engine.drafters.merging import merged, split
from pipeline.engine.edits import Positions, edited
from pipeline.engine.laws import Decoding, Laws
from pipeline.engine.memory import released_on_exhaustion
from pipeline.engine.token_store import TokenStore
from pipeline.errors import CacheMiss
from pipeline.messages import DraftRequest, Feed, Opening, PrefixCopy, Proposal
from pipeline.randomness import Stream, coupled_uniforms, uniforms
from pipeline.step import empty_proposal

Sampling = Literal["sample", "greedy", "auto"]


class DraftRunner(Protocol):
    """What drafting needs of a model with a slot cache: a `Runner`, or one that speaks another vocabulary."""

    vocabulary: int
    openings: dict[int, Opening]
    texts: TokenStore

    def open(self, openings: tuple[Opening, ...], copies: tuple[PrefixCopy, ...], feed: Feed) -> None:
        """See `Runner.open`."""
        ...

    def forward(self, feed: Feed, extra_tokens: list[np.ndarray], wanted_R: np.ndarray) -> Tensor:
        """See `Runner.forward`."""
        ...

    def scrub(self, slot: int) -> None:
        """See `Runner.scrub`."""
        ...

    def release(self) -> None:
        """See `Runner.release`."""
        ...


class ModelDrafter:
    """Drafts with the model of a `Runner` (protocol `decode.Drafter`)."""

    keeps_proposals = True

    def __init__(
        self,
        runner: DraftRunner,
        support: int,
        sampling: Sampling,
        chunk: int,
        coupled: bool = False,
        eos: Iterable[int] = (),
    ) -> None:
        """`sampling` greedy proposes the likeliest token with a one-hot law, whatever the temperature; auto does so
        where the request says so. `coupled` draws with the noise that the target draws with; `eos` as in `edits`.
        """
        self.runner = runner
        self.support = support
        self.sampling: Sampling = sampling
        self.chunk: int | None = chunk
        self.coupled = coupled
        self.eos = tuple(eos)

    def ready(self) -> bool:
        """Always: it lives in this process."""
        return True

    def propose(self, request: DraftRequest) -> Proposal:
        """See `decode.Drafter`. OutOfMemory: the model ran out of it, and nothing is cached any more."""
        [answer] = self.propose_all([request])
        if isinstance(answer, CacheMiss):
            raise answer
        return answer

    def propose_all(self, requests: Sequence[DraftRequest]) -> list[Proposal | CacheMiss]:
        """Answer several requests, which share no slot, in one pass: every row gets what it would get alone.

        One that names a prefix which is not held is left out. OutOfMemory: see `propose`.
        """
        with released_on_exhaustion(self.runner, "the draft model"):
            misses = [self._open(request) for request in requests]
            held = [request for request, miss in zip(requests, misses, strict=True) if miss is None]
            proposals = iter(split(self._draft(merged(held)), held) if held else ())
            return [next(proposals) if miss is None else miss for miss in misses]

    def _open(self, request: DraftRequest) -> CacheMiss | None:
        try:
            self.runner.open(request.openings, request.copies, request.feed)
        except CacheMiss as miss:
            return miss
        return None

    @torch.inference_mode()
    def _draft(self, request: DraftRequest) -> Proposal:
        """Feed every row, then draft token by token; a row leaves when it has what it wants."""
        feed, wanted_B = request.feed, np.asarray(request.wanted)
        positions = int(wanted_B.max())
        support = 1 if self.sampling == "greedy" else min(self.support, self.runner.vocabulary)
        proposal = empty_proposal(len(wanted_B), positions, support)
        rows = np.flatnonzero(wanted_B > 0)
        wanted_R = np.cumsum(feed.lengths)[rows] - 1
        logits = self.runner.forward(feed, [_NONE] * len(wanted_B), wanted_R)
        for k in range(positions):
            rows = self._draw(request, proposal, rows, k, logits)
            rows = rows[wanted_B[rows] > k + 1]
            if not len(rows):
                break
            step = Feed(
                sequences=feed.sequences[rows],
                slots=feed.slots[rows],
                cached=feed.cached[rows] + feed.lengths[rows] + k,
                lengths=np.ones(len(rows), dtype=np.int64),
                tokens=proposal.tokens[rows, k],
            )
            logits = self.runner.forward(step, [_NONE] * len(rows), np.arange(len(rows)))
        return proposal

    def _draw(
        self, request: DraftRequest, proposal: Proposal, rows: np.ndarray, k: int, logits: Tensor
    ) -> np.ndarray:
        """Write position k of the named rows, and return those written: non-finite logits end a row's draft."""
        feed, starts = request.feed, request.starts[rows]
        openings = [self.runner.openings[int(s)] for s in feed.sequences[rows]]
        before = feed.cached[rows] + feed.lengths[rows] + k
        positions = Positions(np.arange(len(rows)), feed.slots[rows], before, starts + k)
        decoding = Decoding.of(o.params for o in openings)
        if self.sampling != "sample":
            decoding = decoding.greedy_where((self.sampling == "greedy") | np.asarray(request.greedy)[rows])
        laws = Laws(edited(logits, openings, positions, self.runner.texts, self.eos), decoding)
        ids, probs = laws.top(proposal.support_ids.shape[2])
        keys = np.array([o.philox_key for o in openings], dtype=np.uint64)
        if self.coupled:
            noise = coupled_uniforms(keys, starts + k, ids.clamp(min=0).cpu().numpy())
            chosen_ids = speculation.race(ids, probs.log(), torch.as_tensor(noise, device=laws.device))
        else:
            u = uniforms(keys, starts, np.array([k]), Stream.DRAFT)[:, 0]
            chosen = speculation.draw(probs.double(), torch.as_tensor(u, device=laws.device))
            chosen_ids = torch.where(chosen >= 0, ids.gather(1, chosen.clamp(min=0)[:, None])[:, 0], -1)
        sound = (laws.finite_R & (chosen_ids >= 0)).cpu().numpy()
        tokens = chosen_ids.cpu().numpy()
        kept = rows[sound]
        proposal.tokens[kept, k] = tokens[sound]
        proposal.support_ids[kept, k] = ids.cpu().numpy()[sound]
        proposal.support_probs[kept, k] = probs.cpu().numpy()[sound]
        proposal.lengths[kept] = k + 1
        for row in rows[~sound]:
            self.runner.scrub(int(request.feed.slots[row]))
        return kept


_NONE = np.empty(0, dtype=np.int64)
