"""The target's side of a step: one packed pass, laws where they are asked for, and a verdict per row.

Judges on the drafted tokens' probabilities and draws from one law per row, instead of writing out every law over
the vocabulary; `speculation.verify` is the same thing on whole laws, and a test ties the two together.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pipeline import speculation
from pipeline.engine.laws import Decoding, Laws
from pipeline.engine.runner import Runner
from pipeline.messages import Proposal, Verdict, VerifyRequest
from pipeline.randomness import verdict_uniforms


class TargetVerifier:
    """Verifies proposals with the model of a `Runner` (protocol `decode.Verifier`)."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner

    @torch.inference_mode()
    def verify(self, request: VerifyRequest) -> Verdict:
        """Run the fed and drafted tokens and judge the rows that are final; the others get `next_token` -1."""
        feed, proposal = request.feed, request.proposal
        self.runner.open(request.openings, request.copies, feed)
        drafted_B = np.where(request.final, np.asarray(proposal.lengths), 0)
        tokens = np.asarray(proposal.tokens)
        extra = [tokens[b, : drafted_B[b]] for b in range(len(drafted_B))]
        wanted_R, counts_B = _wanted(feed.lengths, drafted_B, request.final)
        logits_RV = self.runner.forward(feed, extra, wanted_R)
        accepted = np.zeros(len(drafted_B), dtype=np.int64)
        next_token = np.full(len(drafted_B), -1, dtype=np.int64)
        final = np.flatnonzero(request.final)
        if len(final):
            accepted[final], next_token[final] = self._judge(request, final, counts_B[final], logits_RV)
        for b in final[next_token[final] < 0]:
            self.runner.scrub(int(feed.slots[b]))
        return Verdict(accepted, next_token)

    def _judge(
        self, request: VerifyRequest, final: np.ndarray, counts_B: np.ndarray, logits_RV: Tensor
    ) -> tuple[np.ndarray, np.ndarray]:
        openings = [self.runner.openings[int(s)] for s in request.feed.sequences[final]]
        laws = Laws(logits_RV, Decoding.of(o.params for o in openings).repeat(counts_B))
        drafted = speculation.read(_rows(request.proposal, final), laws.device)
        base_B = np.cumsum(counts_B) - counts_B
        positions = drafted.tokens_BK.shape[1]
        keys = np.array([o.philox_key for o in openings], dtype=np.uint64)
        uniforms_BK2 = torch.as_tensor(
            verdict_uniforms(keys, request.starts[final], positions + 1), device=laws.device
        )
        return judge(laws, torch.as_tensor(base_B, device=laws.device), drafted, uniforms_BK2)


def judge(
    laws: Laws, base_B: Tensor, drafted: speculation.Drafted, uniforms_BK2: Tensor
) -> tuple[np.ndarray, np.ndarray]:
    """Accepted tokens and the next one, `[B]` each, under the rule `ratio`.

    Row b's laws are those at `base_B[b] + i` for position i. `uniforms_BK2` is `[B, K+1, 2]` as in
    `speculation.verify`. A row with a non-finite law anywhere gets -1 as its next token.
    """
    lengths_B = drafted.lengths_B
    rows, positions = drafted.tokens_BK.shape
    places_BK = base_B[:, None] + torch.arange(positions + 1, device=laws.device)
    inside_BK = torch.arange(positions + 1, device=laws.device) <= lengths_B[:, None]
    places_BK = torch.where(inside_BK, places_BK, base_B[:, None])
    target_BK = laws.probability(places_BK[:, :-1].reshape(-1), drafted.tokens_BK.reshape(-1)).view(rows, positions)
    accepted_B = speculation.judge_ratio(target_BK, drafted.chosen_BK, lengths_B, uniforms_BK2[:, :-1, 0])
    here_B = torch.arange(rows, device=laws.device)
    next_B = laws.draw(
        base_B + accepted_B,
        drafted.ids_BKM[here_B, accepted_B],
        drafted.probs_BKM[here_B, accepted_B],
        uniforms_BK2[here_B, accepted_B, 1],
    )
    sound_B = laws.finite_R[places_BK].all(-1)
    next_B = torch.where(sound_B, next_B, -1)
    return accepted_B.cpu().numpy(), next_B.cpu().numpy()


def _wanted(fed_B: np.ndarray, drafted_B: np.ndarray, final_B: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Packed positions whose logits are needed, row by row, and how many per row."""
    ends_B = np.cumsum(fed_B + drafted_B)
    counts_B = np.where(final_B, drafted_B + 1, 0)
    wanted = [np.arange(end - count, end) for end, count in zip(ends_B, counts_B, strict=True)]
    return np.concatenate(wanted).astype(np.int64), counts_B


def _rows(proposal: Proposal, rows: np.ndarray) -> Proposal:
    return Proposal(
        *(np.asarray(getattr(proposal, f))[rows] for f in ("tokens", "lengths", "support_ids", "support_probs"))
    )
