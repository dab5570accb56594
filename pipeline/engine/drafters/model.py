"""Proposes with a draft model: one packed pass for what is to be caught up, then one per further token.

The draft's law at each position is its own law under the sequence's temperature and filters, cut to its `support`
likeliest tokens. Exactly these numbers are drawn from and shipped, so whatever was cut away stays exact.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from torch import Tensor

from pipeline import speculation
from pipeline.engine.laws import Decoding, Laws
from pipeline.engine.runner import Runner
from pipeline.messages import DraftRequest, Feed, Proposal
from pipeline.randomness import Stream, uniforms
from pipeline.step import empty_proposal


class ModelDrafter:
    """Drafts with the model of a `Runner` (protocol `decode.Drafter`)."""

    keeps_proposals = True

    def __init__(self, runner: Runner, support: int, sampling: Literal["sample", "greedy"], chunk: int) -> None:
        """`sampling` greedy proposes the likeliest token with a one-hot law, whatever the temperature."""
        self.runner = runner
        self.support = support
        self.sampling = sampling
        self.chunk: int | None = chunk

    def ready(self) -> bool:
        """Always: it lives in this process."""
        return True

    @torch.inference_mode()
    def propose(self, request: DraftRequest) -> Proposal:
        """Feed every row, then draft token by token; a row leaves when it has what it wants."""
        feed, wanted_B = request.feed, np.asarray(request.wanted)
        self.runner.open(request.openings, request.copies, feed)
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
        openings = [self.runner.openings[int(s)] for s in request.feed.sequences[rows]]
        decoding = Decoding.of(o.params for o in openings)
        if self.sampling == "greedy":
            decoding = Decoding(np.zeros_like(decoding.temperature_R), decoding.top_k_R, decoding.top_p_R)
        laws = Laws(logits, decoding)
        ids, probs = laws.top(proposal.support_ids.shape[2])
        keys = np.array([o.philox_key for o in openings], dtype=np.uint64)
        u = uniforms(keys, request.starts[rows], np.array([k]), Stream.DRAFT)[:, 0]
        chosen = speculation.draw(probs.double(), torch.as_tensor(u, device=laws.device))
        sound = (laws.finite_R & (chosen >= 0)).cpu().numpy()
        tokens = ids.gather(1, chosen.clamp(min=0)[:, None])[:, 0].cpu().numpy()
        kept = rows[sound]
        proposal.tokens[kept, k] = tokens[sound]
        proposal.support_ids[kept, k] = ids.cpu().numpy()[sound]
        proposal.support_probs[kept, k] = probs.cpu().numpy()[sound]
        proposal.lengths[kept] = k + 1
        for row in rows[~sound]:
            self.runner.scrub(int(request.feed.slots[row]))
        return kept


_NONE = np.empty(0, dtype=np.int64)
