"""The mathematics of exact speculative decoding; pure functions, independent of models, caches and Ray.

p is the target's law and q the draft's, both at the same prefix; x_1 … x_γ are a row's proposed tokens.

ratio (Leviathan et al. 2023, "Fast inference from transformers via speculative decoding", algorithm 1;
Chen et al. 2023, "Accelerating large language model decoding with speculative sampling", theorem 1):
    keep x_i while u_i < p(x_i) / q(x_i); at the first rejection draw from max(p - q, 0), normalised;
    if all are kept, draw one more token from p.

block (Sun et al. 2024, "Block verification accelerates speculative decoding", algorithm 2):
    P_0 = 1 and P_i = min(P_{i-1} · p(x_i) / q(x_i), 1);
    h_i = S_i / (S_i + 1 - P_i) with S_i = Σ_x max(P_i · p(x) - q(x), 0) at the position after x_i (0/0 = 1),
    and h_γ = P_γ;
    keep x_1 … x_τ for the largest τ with u_τ < h_τ (0 if none); draw from p after τ = γ, else from
    max(P_τ · p - q, 0), normalised.

Both emit exactly the target's law, provided that each x_i was drawn from the q it comes with and that no
uniform is used for anything else. `verify`, `acceptance` and `residual` take whole laws. They are made of the
smaller functions below them, which ask for the laws only where they are needed, so that an engine with a
large vocabulary can call those directly.

Shapes: B rows, K draft positions, M support, V vocabulary. A name that ends in such letters has that shape.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pipeline.messages import Array, Proposal, Verdict

RULES = ("ratio", "block")

# Mass that is only rounding: two float64 laws with the same values, summed in another order, differ by less.
_ROUNDING = 2.0**-48

# Tokens that `draw` looks through at once; vocabularies are mostly padded to a multiple of this.
_RUN = 128


@dataclass(frozen=True, slots=True)
class Drafted:
    """A proposal, cleaned: float64 laws that sum to 1 where something is drafted, nothing elsewhere.

    One position more than K, which is always empty: after a fully accepted block there is no q to subtract.
    A token or id that is no token (a pad, or beyond the row's length) is -1 and has probability 0.
    """

    tokens_BK: Tensor  # int64
    lengths_B: Tensor  # int64
    ids_BKM: Tensor  # int64, [B, K+1, M]
    probs_BKM: Tensor  # float64, [B, K+1, M]

    @property
    def chosen_BK(self) -> Tensor:
        """q(x) of each drafted token; an id that occurs more than once in a support counts with its sum."""
        is_token_BKM = self.ids_BKM[:, :-1] == self.tokens_BK.unsqueeze(-1)
        return torch.where(is_token_BKM, self.probs_BKM[:, :-1], 0.0).sum(-1)


# ---------------------------------------------------------------------------------------------- the contract


def verify(target_probs: Tensor, proposal: Proposal, uniforms: Array, rule: str = "ratio") -> Verdict:
    """Judge a proposal: how many tokens of each row to keep, and the token drawn after them.

    `target_probs` [B, K+1, V], any float dtype, need not be normalised; positions beyond a row's length may
    hold anything. `uniforms` [B, K+1, 2] in [0, 1): [:, i, 0] decides token i, [:, accepted, 1] draws the
    next. Sums are taken in float64. A row whose law is not finite, or has no mass, gets `next_token` -1 and
    leaves its neighbours alone. ValueError for an unknown rule.
    """
    _check_rule(rule)
    drafted = read(proposal, target_probs.device)
    uniforms_BK2 = _tensor(uniforms, target_probs.device, torch.float64)
    acceptance_BK, weights_BK = _acceptance(target_probs, drafted, rule)
    accepted_B = accepted_tokens(acceptance_BK, uniforms_BK2[:, : acceptance_BK.shape[1], 0], rule)
    law_BV = _residual(target_probs, drafted, accepted_B, weights_BK)
    return Verdict(accepted_B, draw(law_BV, at(uniforms_BK2, accepted_B)[:, 1]))


def match(target_tokens: Tensor, proposal: Proposal) -> Verdict:
    """The rule `coupled`: keep tokens while they equal the target's own choice, `target_tokens` [B, K+1]."""
    target_BK = _tensor(target_tokens, target_tokens.device, torch.int64)
    tokens_BK = _tensor(proposal.tokens, target_BK.device, torch.int64)
    drafted_BK = _drafted(tokens_BK, _tensor(proposal.lengths, target_BK.device, torch.int64))
    equal_BK = (target_BK[:, : tokens_BK.shape[1]] == tokens_BK) & drafted_BK
    accepted_B = equal_BK.long().cumprod(-1).sum(-1)
    return Verdict(accepted_B, at(target_BK, accepted_B))


def acceptance(target_probs: Tensor, proposal: Proposal, rule: str) -> Tensor:
    """[B, K] float64 in [0, 1]: token i counts as good if its uniform is strictly below [:, i].

    `ratio` keeps tokens up to the first that is not good, `block` up to the last that is. 0 beyond a row's
    length and where q(x) = 0.
    """
    _check_rule(rule)
    return _acceptance(target_probs, read(proposal, target_probs.device), rule)[0]


def residual(target_probs: Tensor, proposal: Proposal, accepted: Array, rule: str) -> Tensor:
    """[B, V] float64, rows sum to 1: the law of the next token once `accepted` [B] tokens are kept."""
    _check_rule(rule)
    drafted = read(proposal, target_probs.device)
    accepted_B = _tensor(accepted, target_probs.device, torch.int64)
    if bool(((accepted_B < 0) | (accepted_B > drafted.lengths_B)).any()):
        raise ValueError(f"accepted {accepted_B.tolist()} is not within lengths {drafted.lengths_B.tolist()}")
    _, weights_BK = _acceptance(target_probs, drafted, rule)
    law_BV = _residual(target_probs, drafted, accepted_B, weights_BK)
    return law_BV / law_BV.sum(-1, keepdim=True)


# ------------------------------------------------------------------------- its parts, for laws held in pieces


def read(proposal: Proposal, device: torch.device) -> Drafted:
    """The proposal on `device`, its laws normalised in float64, and whatever is padding removed."""
    tokens_BK = _tensor(proposal.tokens, device, torch.int64)
    lengths_B = _tensor(proposal.lengths, device, torch.int64)
    ids_BKM = _tensor(proposal.support_ids, device, torch.int64)
    probs_BKM = _tensor(proposal.support_probs, device, torch.float64)
    drafted_BK = _drafted(tokens_BK, lengths_B)
    real_BKM = (ids_BKM >= 0) & drafted_BK.unsqueeze(-1)
    ids_BKM = torch.where(real_BKM, ids_BKM, -1)
    probs_BKM = torch.where(real_BKM, probs_BKM, 0.0)
    sums_BK1 = probs_BKM.sum(-1, keepdim=True)
    probs_BKM = torch.where(sums_BK1 > 0, probs_BKM / sums_BK1, 0.0)
    return Drafted(
        tokens_BK=torch.where(drafted_BK, tokens_BK, -1),
        lengths_B=lengths_B,
        ids_BKM=torch.nn.functional.pad(ids_BKM, (0, 0, 0, 1), value=-1),
        probs_BKM=torch.nn.functional.pad(probs_BKM, (0, 0, 0, 1)),
    )


def judge_ratio(target_BK: Tensor, draft_BK: Tensor, lengths_B: Tensor, uniforms_BK: Tensor) -> Tensor:
    """[B] tokens kept under `ratio`, given p(x) and q(x) of the drafted tokens alone, as float64."""
    return accepted_tokens(ratio_acceptance(target_BK, draft_BK, lengths_B), uniforms_BK, "ratio")


def ratio_acceptance(target_BK: Tensor, draft_BK: Tensor, lengths_B: Tensor) -> Tensor:
    """[B, K]: min(1, p(x) / q(x)), and 0 beyond a row's length and where q(x) = 0."""
    return _ratios(target_BK, draft_BK, lengths_B).clamp(max=1.0)


def block_acceptance(
    target_BK: Tensor, draft_BK: Tensor, target_BKM: Tensor, draft_BKM: Tensor, lengths_B: Tensor
) -> tuple[Tensor, Tensor]:
    """h_1 … h_γ [B, K] and P_0 … P_γ [B, K+1] of `block`.

    Takes p(x) and q(x) of the drafted tokens [B, K], and both laws on the support of q [B, K+1, M] (as in
    `Drafted`), of distinct ids (`distinct`): outside it max(P · p - q, 0) is P · p, so p's mass is enough.
    """
    weights_BK = _block_weights(_ratios(target_BK, draft_BK, lengths_B))
    after_BK = weights_BK[:, 1:]
    target_BKM, draft_BKM = target_BKM[:, 1:], draft_BKM[:, 1:]  # token i is followed by position i + 1
    outside_BK = 1.0 - target_BKM.sum(-1)
    outside_BK = torch.where(outside_BK > _ROUNDING, outside_BK, 0.0)
    inside_BK = (after_BK.unsqueeze(-1) * target_BKM - draft_BKM).clamp(min=0.0).sum(-1)
    surplus_BK = after_BK * outside_BK + inside_BK
    total_BK = surplus_BK + (1.0 - after_BK)
    inner_BK = torch.where(total_BK > 0, surplus_BK / total_BK, 1.0)
    count_BK = torch.arange(1, after_BK.shape[1] + 1, device=after_BK.device)
    is_inner_BK = count_BK < lengths_B.unsqueeze(-1)
    is_last_BK = count_BK == lengths_B.unsqueeze(-1)
    acceptance_BK = torch.where(is_inner_BK, inner_BK, torch.where(is_last_BK, after_BK, 0.0))
    return acceptance_BK, weights_BK


def distinct(ids_BKM: Tensor, probs_BKM: Tensor) -> tuple[Tensor, Tensor]:
    """The same laws with every id once: repeated ones are summed into the first, the rest become -1."""
    ids_BKM, order_BKM = ids_BKM.sort(dim=-1)
    probs_BKM = probs_BKM.gather(-1, order_BKM)
    is_new_BKM = torch.ones_like(ids_BKM, dtype=torch.bool)
    is_new_BKM[..., 1:] = ids_BKM[..., 1:] != ids_BKM[..., :-1]
    group_BKM = is_new_BKM.long().cumsum(-1) - 1
    summed_BKM = torch.zeros_like(probs_BKM).scatter_add(-1, group_BKM, probs_BKM)
    distinct_BKM = torch.full_like(ids_BKM, -1).scatter(-1, group_BKM, ids_BKM)
    return distinct_BKM, summed_BKM


def accepted_tokens(acceptance_BK: Tensor, uniforms_BK: Tensor, rule: str) -> Tensor:
    """[B]: up to the first token that is not good under `ratio`, up to the last that is under `block`."""
    good_BK = (uniforms_BK < acceptance_BK).long()
    if rule == "ratio":
        return good_BK.cumprod(-1).sum(-1)
    return good_BK.flip(-1).cummax(-1).values.sum(-1) if good_BK.shape[1] else good_BK.sum(-1)


def subtract(law_BV: Tensor, ids_BM: Tensor, probs_BM: Tensor, scale_B: Tensor | None = None) -> Tensor:
    """[B, V]: max(scale · p - q, 0), not normalised, for float64 laws that sum to 1; p where that is empty.

    q has `probs_BM` at `ids_BM`, where -1 and ids beyond V are passed over.
    """
    scaled_BV = law_BV.clone() if scale_B is None else law_BV * scale_B.unsqueeze(-1)
    inside_BM = (ids_BM >= 0) & (ids_BM < law_BV.shape[-1])
    scaled_BV.scatter_add_(-1, torch.where(inside_BM, ids_BM, 0), torch.where(inside_BM, -probs_BM, 0.0))
    scaled_BV.clamp_(min=0.0)
    return torch.where(scaled_BV.sum(-1, keepdim=True) > _ROUNDING, scaled_BV, law_BV)


def draw(law_BV: Tensor, uniforms_B: Tensor) -> Tensor:
    """[B] tokens by inverse CDF in token order, never one of probability 0; -1 where there is no finite mass.

    The token is the first whose running sum of `law_BV` / its sum is above the uniform. Runs of tokens are summed in
    the law's own type, everything else in float64.
    Looks for the run of tokens that holds the point first, then inside it, which spares passes over the law.
    """
    width = min(_RUN, law_BV.shape[-1])
    if law_BV.shape[-1] % width:
        law_BV = torch.nn.functional.pad(law_BV, (0, -law_BV.shape[-1] % width))
    runs_BRW = law_BV.unflatten(-1, (-1, width))
    masses_BR = runs_BRW.sum(-1).double()
    total_B = masses_BR.sum(-1)
    point_B = uniforms_B.to(torch.float64)
    run_B, point_B = _first_above(masses_BR / total_B.unsqueeze(-1), point_B)
    token_B, _ = _first_above(at(runs_BRW, run_B).double() / total_B.unsqueeze(-1), point_B)
    return torch.where(torch.isfinite(total_B) & (total_B > 0), run_B * width + token_B, -1)


def race(ids_BS: Tensor, log_probs_BS: Tensor, uniforms_BS: Tensor) -> Tensor:
    """[B] tokens chosen by noise of their own, one uniform in [0, 1) per candidate id: the rule `coupled`.

    Each candidate gets a waiting time, exponential with its probability as rate, and the first one wins: this is
    the Gumbel maximum of log p + g with the sign turned round, and wins with probability p. Two laws that race with the
    same uniforms agree often (Daliri et al. 2024, "Coupling without communication and drafter-invariant speculative
    decoding"). The smallest uniforms decide; half a step of 2^-53 keeps every time positive and finite.
    """
    inside_BS = (uniforms_BS.double() + 2.0**-54).clamp(max=1.0 - 2.0**-53)
    times_BS = (-torch.log1p(-inside_BS)).log() - log_probs_BS.double()
    times_BS = torch.where(log_probs_BS > -torch.inf, times_BS, torch.inf)
    return at(ids_BS, times_BS.argmin(-1))


def at(values_BK: Tensor, index_B: Tensor) -> Tensor:
    """values_BK[b, index_B[b]] for every row b."""
    return values_BK[torch.arange(values_BK.shape[0], device=values_BK.device), index_B]


# ------------------------------------------------------------------------------------------------- in private


def _acceptance(target_probs: Tensor, drafted: Drafted, rule: str) -> tuple[Tensor, Tensor]:
    """[B, K] acceptance, and [B, K+1] what p is scaled with before q is subtracted (1 under `ratio`)."""
    sums_BK = target_probs.sum(-1, dtype=torch.float64)
    target_BK = _target_at(target_probs[:, :-1], drafted.tokens_BK.unsqueeze(-1), sums_BK[:, :-1]).squeeze(-1)
    if rule == "ratio":
        acceptance_BK = ratio_acceptance(target_BK, drafted.chosen_BK, drafted.lengths_B)
        return acceptance_BK, torch.ones_like(sums_BK)
    ids_BKM, draft_BKM = distinct(drafted.ids_BKM, drafted.probs_BKM)
    target_BKM = _target_at(target_probs, ids_BKM, sums_BK)
    return block_acceptance(target_BK, drafted.chosen_BK, target_BKM, draft_BKM, drafted.lengths_B)


def _residual(target_probs: Tensor, drafted: Drafted, accepted_B: Tensor, weights_BK: Tensor) -> Tensor:
    law_BV = at(target_probs, accepted_B).to(torch.float64)
    law_BV = law_BV / law_BV.sum(-1, keepdim=True)
    scale_B = torch.where(accepted_B < drafted.lengths_B, at(weights_BK, accepted_B), 1.0)
    return subtract(law_BV, at(drafted.ids_BKM, accepted_B), at(drafted.probs_BKM, accepted_B), scale_B)


def _target_at(target_probs: Tensor, ids_BKM: Tensor, sums_BK: Tensor) -> Tensor:
    """p at each id, float64; 0 at an id that is -1 or beyond the target's vocabulary."""
    inside_BKM = (ids_BKM >= 0) & (ids_BKM < target_probs.shape[-1])
    found_BKM = target_probs.gather(-1, torch.where(inside_BKM, ids_BKM, 0)).to(torch.float64)
    return torch.where(inside_BKM, found_BKM / sums_BK.unsqueeze(-1), 0.0)


def _ratios(target_BK: Tensor, draft_BK: Tensor, lengths_B: Tensor) -> Tensor:
    """p(x) / q(x), finite, and 0 where nothing is drafted or the draft could not have drawn x."""
    possible_BK = _drafted(draft_BK, lengths_B) & (draft_BK > 0)
    ratios_BK = target_BK / torch.where(possible_BK, draft_BK, 1.0)
    return torch.where(possible_BK, ratios_BK, 0.0).clamp(max=torch.finfo(torch.float64).max)


def _block_weights(ratios_BK: Tensor) -> Tensor:
    """P_0 … P_K [B, K+1]. One that is 1 up to rounding is 1: 1 - P would be noise in h's denominator."""
    weights = [ratios_BK.new_ones(ratios_BK.shape[0])]
    for i in range(ratios_BK.shape[1]):
        weight_B = (weights[-1] * ratios_BK[:, i]).clamp(max=1.0)
        weights.append(torch.where(weight_B > 1.0 - _ROUNDING, 1.0, weight_B))
    return torch.stack(weights, dim=-1)


def _first_above(masses_BR: Tensor, point_B: Tensor) -> tuple[Tensor, Tensor]:
    """[B] first index of positive mass whose running sum is above the point, and the point's rest there.

    Right for any order of summation (a parallel scan need not be monotone): only the sums at positive masses
    are looked at, and the point is kept below the largest of them.
    """
    sums_BR = masses_BR.cumsum(-1)
    sums_BR = torch.where(masses_BR > 0, sums_BR, 0.0)
    largest_B = sums_BR.amax(-1)
    point_B = torch.minimum(point_B, torch.nextafter(largest_B, torch.zeros_like(largest_B)))
    index_B = (sums_BR > point_B.unsqueeze(-1)).to(torch.uint8).argmax(-1)
    before_B = at(torch.nn.functional.pad(masses_BR, (1, 0)).cumsum(-1), index_B)
    return index_B, point_B - before_B


def _drafted(like_BK: Tensor, lengths_B: Tensor) -> Tensor:
    """[B, K] bool: whether position i is within the row's length."""
    return torch.arange(like_BK.shape[1], device=like_BK.device) < lengths_B.unsqueeze(-1)


def _tensor(array: Array, device: torch.device, dtype: torch.dtype) -> Tensor:
    if isinstance(array, np.ndarray) and not (array.flags.writeable and array.flags.c_contiguous):
        array = array.copy()  # torch warns about read-only memory, which is what Ray hands out
    return torch.as_tensor(array).to(device=device, dtype=dtype)


def _check_rule(rule: str) -> None:
    if rule not in RULES:
        raise ValueError(f"rule {rule!r} does not judge laws: use 'ratio' or 'block'")
