"""The target's side of a step: one packed pass, laws where they are asked for, and a verdict per row.

Judges on the drafted tokens' probabilities and draws from one law per row, instead of writing out every law over
the vocabulary; `speculation.verify` is the same thing on whole laws, and a test ties the two together.

Shapes: B rows, K draft positions, M drafted support, R positions with logits, V vocabulary, L alternatives.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from pipeline import speculation
from pipeline.engine.edits import Positions, edited
from pipeline.engine.laws import Decoding, Laws, raw_log_probabilities
from pipeline.engine.memory import released_on_exhaustion
from pipeline.engine.runner import Runner
from pipeline.messages import Feed, Opening, Proposal, Scores, Verdict, VerifyReply, VerifyRequest
from pipeline.randomness import verdict_uniforms
from pipeline.speculation import Drafted

Rule = Literal["ratio", "block", "coupled"]


class TargetVerifier:
    """Verifies proposals with the model of a `Runner` (protocol `decode.Verifier`)."""

    def __init__(
        self, runner: Runner, rule: Rule = "ratio", eos: Iterable[int] = (), compare_sampling: bool = False
    ) -> None:
        """`eos` are kept out of answers below their minimum length; `compare_sampling` fills `VerifyReply.overlap`."""
        self.runner = runner
        self.rule: Rule = rule
        self.eos = tuple(eos)
        self.compare_sampling = compare_sampling

    def verify(self, request: VerifyRequest) -> VerifyReply:
        """Run the fed and drafted tokens and judge the rows that are final; the others get `next_token` -1.

        OutOfMemory: the model ran out of it, and nothing is cached any more.
        """
        with released_on_exhaustion(self.runner, "the target"):
            return self._verify(request)

    @torch.inference_mode()
    def _verify(self, request: VerifyRequest) -> VerifyReply:
        feed, proposal = request.feed, request.proposal
        self.runner.open(request.openings, request.copies, feed)
        drafted_B = np.where(request.final, np.asarray(proposal.lengths), 0)
        tokens = np.asarray(proposal.tokens)
        extra = [tokens[b, : drafted_B[b]] for b in range(len(drafted_B))]
        wanted_R, counts_B = _wanted(feed.lengths, drafted_B, request.final)
        logits_RV = self.runner.forward(feed, extra, wanted_R)
        final = np.flatnonzero(request.final)
        if not len(final):
            rows = len(drafted_B)
            return VerifyReply(Verdict(np.zeros(rows, dtype=np.int64), np.full(rows, -1, dtype=np.int64)))
        return self._judge(request, final, counts_B[final], logits_RV)

    def _judge(
        self, request: VerifyRequest, final: np.ndarray, counts_B: np.ndarray, logits_RV: Tensor
    ) -> VerifyReply:
        """The reply, given the logits of the final rows' positions."""
        feed, starts_B = request.feed, request.starts[final]
        openings = [self.runner.openings[int(s)] for s in feed.sequences[final]]
        before_B = feed.cached[final] + feed.lengths[final]
        positions = Positions.of_blocks(feed.slots[final], before_B, starts_B, counts_B)
        decoding = Decoding.of(o.params for o in openings).repeat(counts_B)
        laws = Laws(edited(logits_RV, openings, positions, self.runner.texts, self.eos), decoding)
        drafted = speculation.read(_rows(request.proposal, final), laws.device)
        base_B = torch.as_tensor(np.cumsum(counts_B) - counts_B, device=laws.device)
        broken = np.flatnonzero((_finite_places(laws, base_B, drafted) <= drafted.lengths_B).cpu().numpy())
        if len(broken):
            for i in broken:
                first = int(base_B[i])
                self._spare(request, int(final[i]), logits_RV[first : first + int(counts_B[i])])
                self.runner.scrub(int(feed.slots[final[i]]))  # goes on or not: what it holds may not be finite
            laws = Laws(edited(logits_RV, openings, positions, self.runner.texts, self.eos), decoding)
        keys = np.array([o.philox_key for o in openings], dtype=np.uint64)
        if self.rule == "coupled":
            accepted_B, next_B = match(laws, base_B, drafted, keys, starts_B)
        else:
            numbers = verdict_uniforms(keys, starts_B, drafted.tokens_BK.shape[1] + 1)
            uniforms_BK2 = torch.as_tensor(numbers, device=laws.device)
            accepted_B, next_B = judge(laws, base_B, drafted, uniforms_BK2, self.rule)
        rows = len(feed.slots)
        scores = _scores(laws, logits_RV, openings, base_B, drafted, accepted_B, next_B)
        overlap = _overlap(laws, base_B, drafted, accepted_B) if self.compare_sampling else None
        verdict = Verdict(_spread(accepted_B, final, rows, 0), _spread(next_B, final, rows, -1))
        return VerifyReply(
            verdict,
            None if scores is None else Scores(*(_spread(s, final, rows, p) for s, p in scores)),
            None if overlap is None else _spread(overlap, final, rows, 0.0),
        )


    def _spare(self, request: VerifyRequest, b: int, logits_TV: Tensor) -> None:
        """Give the positions before a drafted token that breaks a row the logits that they have without it, in place.

        A masked value of NaN still spoils its row's attention (0 times NaN), so a token that was only proposed, and
        may well be rejected, would make an error of an answer. The row is run again alone, token by token.
        """
        feed, draft = request.feed, np.asarray(request.proposal.tokens)[b]
        if bool(torch.isfinite(logits_TV.amax(-1)).all()):
            return  # the model did nothing wrong: the parameters leave no token
        logits_TV[:] = torch.nan
        one, fed, end = np.array([b]), int(feed.lengths[b]), int(feed.lengths[: b + 1].sum())
        tokens = feed.tokens[end - fed : end]
        alone = Feed(feed.sequences[one], feed.slots[one], feed.cached[one], feed.lengths[one], tokens)
        for kept in range(max(len(logits_TV) - 1, 0)):
            last_V = self.runner.forward(alone, [draft[:kept]], np.array([fed + kept - 1]))[0]
            if not bool(torch.isfinite(last_V.amax())):
                return
            logits_TV[kept] = last_V


def judge(
    laws: Laws, base_B: Tensor, drafted: Drafted, uniforms_BK2: Tensor, rule: str = "ratio"
) -> tuple[Tensor, Tensor]:
    """Accepted tokens and the next one, `[B]` each, under the rules `ratio` and `block`.

    Row b's laws are those at `base_B[b] + i` for position i. `uniforms_BK2` is `[B, K+1, 2]` as in
    `speculation.verify`. A row that comes to a non-finite law gets -1 as its next token, as it would without a draft;
    drafted tokens behind such a law are not judged.
    """
    lengths_B = torch.minimum(drafted.lengths_B, _finite_places(laws, base_B, drafted))
    places_BK = _places(laws, base_B, drafted)
    target_BK = _probabilities(laws, places_BK[:, :-1], drafted.tokens_BK)
    scale_B = None
    if rule == "ratio":
        accepted_B = speculation.judge_ratio(target_BK, drafted.chosen_BK, lengths_B, uniforms_BK2[:, :-1, 0])
    else:
        ids_BKM, draft_BKM = speculation.distinct(drafted.ids_BKM, drafted.probs_BKM)
        target_BKM = _probabilities(laws, places_BK[:, :, None].expand_as(ids_BKM), ids_BKM)
        acceptance_BK, weights_BK = speculation.block_acceptance(
            target_BK, drafted.chosen_BK, target_BKM, draft_BKM, lengths_B
        )
        accepted_B = speculation.accepted_tokens(acceptance_BK, uniforms_BK2[:, :-1, 0], rule)
        scale_B = torch.where(accepted_B < lengths_B, speculation.at(weights_BK, accepted_B), 1.0)
    next_B = laws.draw(
        base_B + accepted_B,
        speculation.at(drafted.ids_BKM, accepted_B),
        speculation.at(drafted.probs_BKM, accepted_B),
        speculation.at(uniforms_BK2, accepted_B)[:, 1],
        scale_B,
    )
    return accepted_B, torch.where(laws.finite_R[base_B + accepted_B], next_B, -1)


def match(
    laws: Laws, base_B: Tensor, drafted: Drafted, keys_B3: np.ndarray, starts_B: np.ndarray
) -> tuple[Tensor, Tensor]:
    """As `judge`, under the rule `coupled`: the target draws with its own noise, and drafts count while they are equal.

    A position is only drawn once everything before it matched.
    """
    rows = len(drafted.lengths_B)
    accepted_B = torch.zeros(rows, dtype=torch.int64, device=laws.device)
    next_B = torch.full((rows,), -1, dtype=torch.int64, device=laws.device)
    going = torch.arange(rows, device=laws.device)
    lengths_B = torch.minimum(drafted.lengths_B, _finite_places(laws, base_B, drafted))
    while len(going):
        i_n = accepted_B[going]
        host_n = going.cpu().numpy()
        places_n = starts_B[host_n] + i_n.cpu().numpy()
        next_B[going] = laws.race(base_B[going] + i_n, keys_B3[host_n], places_n)
        going = going[i_n < lengths_B[going]]
        going = going[drafted.tokens_BK[going, accepted_B[going]] == next_B[going]]
        accepted_B[going] += 1
    return accepted_B, torch.where(laws.finite_R[base_B + accepted_B], next_B, -1)


def _places(laws: Laws, base_B: Tensor, drafted: Drafted) -> Tensor:
    """[B, K+1] the row of `laws` at each position; a row's first one beyond its length."""
    within_K = torch.arange(drafted.tokens_BK.shape[1] + 1, device=laws.device)
    return base_B[:, None] + torch.where(within_K <= drafted.lengths_B[:, None], within_K, 0)


def _finite_places(laws: Laws, base_B: Tensor, drafted: Drafted) -> Tensor:
    """[B] how many of a row's laws come before its first one that is not finite; more than its length if none is."""
    finite_BK = laws.finite_R[_places(laws, base_B, drafted)].long()
    return torch.where(finite_BK.all(-1), finite_BK.shape[1], finite_BK.cumprod(-1).sum(-1))


def _probabilities(laws: Laws, places: Tensor, tokens: Tensor) -> Tensor:
    return laws.probability(places.reshape(-1), tokens.reshape(-1)).view(tokens.shape)


def _overlap(laws: Laws, base_B: Tensor, drafted: Drafted, accepted_B: Tensor) -> Tensor:
    """[B, 3]: see `VerifyReply`. Counts positions whose draft was drawn from a law with more than one token."""
    places_BK = _places(laws, base_B, drafted)[:, :-1]
    ids_BKM, draft_BKM = drafted.ids_BKM[:, :-1], drafted.probs_BKM[:, :-1]
    target_BKM = _probabilities(laws, places_BK[:, :, None].expand_as(ids_BKM), ids_BKM)
    within_K = torch.arange(places_BK.shape[1], device=laws.device)
    judged_BK = (within_K <= accepted_B[:, None]) & (within_K < drafted.lengths_B[:, None])
    judged_BK &= ~laws.greedy_R[places_BK] & ((draft_BKM > 0).sum(-1) > 1)
    drawn_BK = torch.minimum(target_BKM, draft_BKM).sum(-1)
    likeliest_BK = target_BKM.gather(-1, draft_BKM.argmax(-1, keepdim=True))[..., 0]
    kinds = (torch.ones_like(drawn_BK), drawn_BK, likeliest_BK)
    return torch.stack([torch.where(judged_BK, kind, 0.0).sum(-1) for kind in kinds], dim=-1)


def _scores(
    laws: Laws,
    logits_RV: Tensor,
    openings: Sequence[Opening],
    base_B: Tensor,
    drafted: Drafted,
    accepted_B: Tensor,
    next_B: Tensor,
) -> tuple[tuple[Tensor, float], ...] | None:
    """The fields of `Scores` with what pads them, for the tokens of the verdict; None where nobody asked."""
    wanted = np.array([o.params.logprobs != "none" for o in openings])
    if not wanted.any():
        return None
    device, width = laws.device, drafted.tokens_BK.shape[1] + 1
    top = min(max(o.params.top_logprobs for o in openings if o.params.logprobs != "none"), laws.size)
    within_K = torch.arange(width, device=device)
    asked_B = torch.as_tensor(wanted, device=device) & (next_B >= 0)
    rows, at = torch.nonzero((within_K <= accepted_B[:, None]) & asked_B[:, None], as_tuple=True)
    tokens_BK = torch.nn.functional.pad(drafted.tokens_BK, (0, 1), value=-1)
    tokens_BK[torch.arange(len(next_B), device=device), accepted_B] = next_B
    tokens_n, places_n = tokens_BK[rows, at], base_B[rows] + at
    logs_n = tokens_n.new_zeros(len(rows), dtype=torch.float64)
    ids_nL = tokens_n.new_full((len(rows), top), -1)
    top_nL = logs_n.new_full((len(rows), top), torch.nan)
    is_raw_n = torch.as_tensor(np.array([o.params.logprobs == "raw" for o in openings]), device=device)[rows]
    for chosen in (torch.nonzero(is_raw_n)[:, 0], torch.nonzero(~is_raw_n)[:, 0]):
        if not len(chosen):
            continue
        if bool(is_raw_n[chosen[0]]):
            found = raw_log_probabilities(logits_RV, places_n[chosen], tokens_n[chosen], top)
        else:
            found = laws.log_probabilities(places_n[chosen], tokens_n[chosen], top)
        logs_n[chosen], ids_nL[chosen, : found[1].shape[1]], top_nL[chosen, : found[2].shape[1]] = found
    asked_n = torch.as_tensor(np.array([o.params.top_logprobs for o in openings]), device=device)[rows]
    beyond_nL = (torch.arange(top, device=device) >= asked_n[:, None]) | (top_nL == -torch.inf)
    logs_BK = logs_n.new_full((len(openings), width), torch.nan)
    ids_BKL = ids_nL.new_full((len(openings), width, top), -1)
    top_BKL = top_nL.new_full((len(openings), width, top), torch.nan)
    logs_BK[rows, at] = logs_n
    ids_BKL[rows, at] = ids_nL.masked_fill(beyond_nL, -1)
    top_BKL[rows, at] = top_nL.masked_fill(beyond_nL, torch.nan)
    return (logs_BK, torch.nan), (ids_BKL, -1), (top_BKL, torch.nan)


def _spread(values: Tensor, final: np.ndarray, rows: int, elsewhere: float) -> np.ndarray:
    """Values of the final rows as an array over all rows."""
    found = values.cpu().numpy()
    if len(final) == rows:
        return found
    spread = np.full((rows, *found.shape[1:]), elsewhere, dtype=found.dtype)
    spread[final] = found
    return spread


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
