"""From logits to laws: temperature, top-k, top-p and min-p, in transformers' order, for many positions at once.

A filtered law is never written out over the vocabulary unless it has to be. Each position keeps four numbers
beside its logits: a shift, a divisor (the temperature), a floor and a normaliser. A token belongs to the law if its
scaled logit, (logit - shift) / divisor, is at least the floor, and its probability is then
exp(scaled logit - normaliser). Tokens that tie with the last one that a filter keeps are kept as well, so that the
law does not depend on a sorting order.

Top-k keeps the k largest. Top-p keeps, of what top-k left, the tokens whose better ones sum up to less than p.
Min-p keeps, of those, the tokens with at least that share of the largest one's probability. Temperature 0 is the law
with all mass on the largest logit (the first of equals).

Where the temperature is not 1 the shift is the largest logit, so that the best tokens' scaled logits are 0 or little
less. However small the temperature, they neither overflow nor lose the normaliser to rounding: the law goes to its
limit, in which equal largest logits share the mass.

Filters look at the largest few logits of every position. Where these do not decide (a flat law with a large top-p),
the floor is found by sums over buckets of neighbouring values, never by sorting a vocabulary.

Large vocabularies are worked through a few rows at a time, which stay in the processor's cache, with float32
exponentials and float64 sums; small ones in float64 throughout.

Shapes: R positions, V vocabulary, C candidates, G positions that are worked on together, M drafted support.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from pipeline import speculation
from pipeline.engine.edits import SMALL_VOCABULARY
from pipeline.randomness import coupled_uniforms
from pipeline.records import SamplingParams

CANDIDATES, MORE_CANDIDATES = 256, 1024  # largest logits that filters look at, first and then
ROWS_AT_ONCE = 4
RUN, GROUP = 128, 64  # places that are summed at once; of which the best is looked at first
ROUNDING = 1e-6  # what float32 laws that are equal leave of each other at most
BUCKETS, PER_UNIT = 2**16, 1024.0  # of neighbouring values, and how many of them to a unit


@dataclass(frozen=True, slots=True)
class Decoding:
    """The decoding parameters of R positions, as arrays."""

    temperature_R: np.ndarray
    top_k_R: np.ndarray
    top_p_R: np.ndarray
    min_p_R: np.ndarray

    @classmethod
    def of(cls, params: Iterable[SamplingParams]) -> Decoding:
        """One entry per element of `params`."""
        params = tuple(params)
        return cls(
            np.array([p.temperature for p in params], dtype=np.float64),
            np.array([p.top_k for p in params], dtype=np.int64),
            np.array([p.top_p for p in params], dtype=np.float64),
            np.array([p.min_p for p in params], dtype=np.float64),
        )

    def repeat(self, counts: np.ndarray) -> Decoding:
        """Each entry as often as `counts` says."""
        return Decoding(*(np.repeat(getattr(self, f.name), counts) for f in fields(self)))

    def greedy_where(self, chosen_R: np.ndarray) -> Decoding:
        """The same with temperature 0 at the chosen positions."""
        return Decoding(np.where(chosen_R, 0.0, self.temperature_R), self.top_k_R, self.top_p_R, self.min_p_R)

    @property
    def greedy_R(self) -> np.ndarray:
        """Which positions put all mass on the largest logit."""
        return self.temperature_R == 0


class Laws:
    """The laws of R positions, given their logits `[R, V]` (changed by `edits` already) and decoding parameters."""

    def __init__(self, logits_RV: Tensor, decoding: Decoding) -> None:
        self.logits_RV = logits_RV
        self.device = logits_RV.device
        rows, self.size = logits_RV.shape
        self.dtype = torch.float64 if self.size <= SMALL_VOCABULARY else torch.float32
        self.rounding = 2.0**-48 if self.dtype == torch.float64 else ROUNDING
        self.candidates = self.size if self.size <= SMALL_VOCABULARY else CANDIDATES
        self.greedy_R = self._tensor(decoding.greedy_R)
        limits = torch.finfo(self.dtype)  # temperatures beyond them make the same laws, up to rounding
        temperature_R = np.clip(decoding.temperature_R, limits.tiny, limits.max)
        self.divisor_R = self._tensor(np.where(decoding.greedy_R, 1.0, temperature_R), self.dtype)
        self.shift_R = torch.zeros(rows, dtype=self.dtype, device=self.device)
        self.warm = bool((~decoding.greedy_R & (decoding.temperature_R != 1)).any())  # somebody's divisor is not 1
        self.best_R = torch.zeros(rows, dtype=torch.int64, device=self.device)
        self.finite_R = torch.empty(rows, dtype=torch.bool, device=self.device)
        self.floor_R = torch.full((rows,), -torch.inf, dtype=self.dtype, device=self.device)
        self.normaliser_R = torch.zeros(rows, dtype=torch.float64, device=self.device)
        self.few_R = torch.zeros(rows, dtype=torch.bool, device=self.device)  # the law lies on `ids_RC` alone
        self._read(decoding)

    def _read(self, decoding: Decoding) -> None:
        """Find maxima, floors and normalisers."""
        top_k_R = np.where(decoding.top_k_R < self.size, decoding.top_k_R, 0)
        filtered_R = ~decoding.greedy_R & ((top_k_R > 0) | (decoding.top_p_R < 1) | (decoding.min_p_R > 0))
        width = self.candidates if filtered_R.any() else 0
        # ids of the law in ascending order where they are few, `size` behind them
        self.ids_RC = torch.full((len(filtered_R), width), self.size, dtype=torch.int64, device=self.device)
        step = ROWS_AT_ONCE if self.device.type == "cpu" and self.size > SMALL_VOCABULARY else max(len(filtered_R), 1)
        self.desk = Desk(step, self.size, self.dtype, self.device)
        for part in self._parts(np.flatnonzero(decoding.greedy_R)):
            top_G, self.best_R[part] = self._scaled(part).max(-1)
            self.finite_R[part] = torch.isfinite(top_G)
        for part in self._parts(np.flatnonzero(~decoding.greedy_R & ~filtered_R)):
            logits_GW = self.desk.put(self.logits_RV[part])
            top_G1 = logits_GW.amax(-1, keepdim=True)
            self._meet(part, top_G1[:, 0])
            self._sum(part, self._scale(part, logits_GW), self._scale(part, top_G1)[:, 0])
        if filtered_R.any():
            self._filter(np.flatnonzero(filtered_R), top_k_R, decoding)

    def _parts(self, rows: np.ndarray) -> Iterator[Tensor | slice]:
        """Some positions in groups that fit the processor's cache; neighbours as a slice, which copies nothing."""
        for first in range(0, len(rows), self.desk.rows):
            part = rows[first : first + self.desk.rows]
            if part[-1] - part[0] == len(part) - 1:
                yield slice(int(part[0]), int(part[-1]) + 1)
            else:
                yield torch.as_tensor(part, device=self.device)

    def _meet(self, part: Tensor | slice, top_G: Tensor) -> None:
        """Take note of the largest logits of some positions."""
        self.finite_R[part] = finite_G = torch.isfinite(top_G)
        if self.warm:  # a shift that is not finite would spoil the places behind the vocabulary
            self.shift_R[part] = torch.where(finite_G & (self.divisor_R[part] != 1), top_G, 0.0)

    def _scaled(self, part: Tensor | slice) -> Tensor:
        """The scaled logits of some positions whose maxima are known, on the desk; -inf behind the vocabulary."""
        return self._scale(part, self.desk.put(self.logits_RV[part]))

    def _scale(self, part: Tensor | slice, logits_GN: Tensor) -> Tensor:
        """Make scaled logits of logits, in their place."""
        return logits_GN.sub_(self.shift_R[part, None]).div_(self.divisor_R[part, None]) if self.warm else logits_GN

    def _sum(self, part: Tensor | slice, scaled_GW: Tensor, top_G: Tensor) -> None:
        """Sum the exponentials of positions whose largest scaled logits are known."""
        mass_G = _runs(self.desk.exponentials(scaled_GW, top_G)).sum(-1).sum(-1, dtype=torch.float64)
        self.normaliser_R[part] = top_G.double() + mass_G.log()

    def _filter(self, filtered_F: np.ndarray, top_k_R: np.ndarray, decoding: Decoding) -> None:
        """Set floors, normalisers and the ids of the law of positions with filters."""
        rows_F = self._tensor(filtered_F)
        top_k_F, top_p_F, min_p_F = (
            self._tensor(a[filtered_F]) for a in (top_k_R, decoding.top_p_R, decoding.min_p_R)
        )
        found = []
        for part in self._parts(filtered_F):
            logits_GW = self.desk.put(self.logits_RV[part])
            values_GC, ids_GC = largest(logits_GW, self.candidates)
            self._meet(part, values_GC[:, 0])
            found.append((self._scale(part, values_GC), ids_GC))
            self._sum(part, self._scale(part, logits_GW), values_GC[:, 0])
        values_FC, ids_FC = (torch.cat(parts) for parts in zip(*found, strict=True))
        filters = Filters(self.normaliser_R[rows_F], top_k_F, top_p_F, min_p_F, self.size)
        floor_F, normaliser_F, decided_F = filters.cut(values_FC)
        open_f = torch.nonzero(~decided_F & self.finite_R[rows_F])[:, 0]
        for some in open_f.split(self.desk.rows) if len(open_f) else ():
            values_fC, _ = largest(self._scaled(rows_F[some]), MORE_CANDIDATES)
            floor_F[some], normaliser_F[some], decided_F[some] = filters.of(some).cut(values_fC)
        for f in open_f[~decided_F[open_f]]:
            row = rows_F[f]
            floor_F[f], normaliser_F[f] = filters.of(f[None]).reached(self._scaled(row[None])[0, : self.size])
        self.floor_R[rows_F], self.normaliser_R[rows_F] = floor_F, normaliser_F
        inside_FC = values_FC >= floor_F[:, None]
        self.ids_RC[rows_F] = torch.where(inside_FC, ids_FC, self.size).sort(-1).values
        held_F = (values_FC[:, -1] < floor_F) | (self.candidates >= self.size)  # however the floor was found
        self.few_R[rows_F] = held_F & self.finite_R[rows_F]

    # what is asked of laws

    def probability(self, rows_n: Tensor, tokens_n: Tensor) -> Tensor:
        """Probability `[n]`, float64, of one token at each of the named positions; 0 for a token of -1."""
        return self.log_probability(rows_n, tokens_n).exp()

    def log_probability(self, rows_n: Tensor, tokens_n: Tensor) -> Tensor:
        """Natural logarithm of `probability`; -inf outside the law."""
        known_n = (tokens_n >= 0) & (tokens_n < self.size)
        tokens_n = torch.where(known_n, tokens_n, 0)
        scaled_n = self._scaled_at(rows_n, self.logits_RV[rows_n, tokens_n])
        inside_n = torch.where(
            self.greedy_R[rows_n], tokens_n == self.best_R[rows_n], scaled_n >= self.floor_R[rows_n]
        )
        logs_n = torch.where(self.greedy_R[rows_n], 0.0, scaled_n.double() - self.normaliser_R[rows_n])
        return torch.where(known_n & inside_n, logs_n, -torch.inf)

    def log_probabilities(self, rows_n: Tensor, tokens_n: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
        """`log_probability`, and ids and logs `[n, top]` of the likeliest tokens; -inf where there are no more."""
        ids_nT = self.logits_RV[rows_n].topk(min(top, self.size), dim=-1).indices
        if top:
            ids_nT = torch.where(self.greedy_R[rows_n, None], _first(self.best_R[rows_n], ids_nT), ids_nT)
        places_nT = rows_n[:, None].expand_as(ids_nT)
        logs_nT = self.log_probability(places_nT.reshape(-1), ids_nT.reshape(-1)).view(ids_nT.shape)
        return self.log_probability(rows_n, tokens_n), ids_nT, logs_nT

    def _scaled_at(self, rows: Tensor, logits: Tensor) -> Tensor:
        return (logits.to(self.dtype) - self.shift_R[rows]) / self.divisor_R[rows]

    def _probs(self, scaled: Tensor, rows: Tensor) -> Tensor:
        inside = scaled >= self.floor_R[rows]
        return torch.where(inside, (scaled.double() - self.normaliser_R[rows]).exp(), 0.0)

    def whole(self, rows_n: Tensor) -> Tensor:
        """The laws at some positions over the vocabulary, `[n, V]` float64, summing to 1 up to rounding."""
        probs_nV = self._probs(self._scaled_at(rows_n[:, None], self.logits_RV[rows_n]), rows_n[:, None])
        one_hot_nV = torch.nn.functional.one_hot(self.best_R[rows_n], self.size).double()
        return torch.where(self.greedy_R[rows_n, None], one_hot_nV, probs_nV)

    def top(self, size: int) -> tuple[Tensor, Tensor]:
        """The `size` likeliest tokens of every law, likeliest first: ids and probabilities `[R, size]`, float32.

        Places without probability hold id -1. Not renormalised: whoever ships a truncated law ships these numbers.
        """
        size = min(size, self.size)
        values_RS, ids_RS = self.logits_RV.topk(size, dim=-1)
        rows_R1 = torch.arange(len(ids_RS), device=self.device)[:, None]
        probs_RS = self._probs(self._scaled_at(rows_R1, values_RS), rows_R1).float()
        greedy_R1 = self.greedy_R[:, None]
        first_S = torch.arange(size, device=self.device) == 0
        probs_RS = torch.where(greedy_R1, first_S.float(), probs_RS)
        ids_RS = torch.where(greedy_R1 & first_S, self.best_R[:, None], ids_RS)
        return torch.where(probs_RS > 0, ids_RS, -1), probs_RS

    def draw(
        self,
        rows_n: Tensor,
        minus_ids_nM: Tensor,
        minus_probs_nM: Tensor,
        uniforms_n: Tensor,
        scale_n: Tensor | None = None,
    ) -> Tensor:
        """Draw one token at each named position from the law, less another law on a support (-1 pads): `[n]`.

        What is drawn from is max(scale · p - q, 0), or p where nothing is left, by inverse CDF in token order.
        """
        tokens_n = self.best_R[rows_n].clone()
        few, many = self._split(rows_n)
        for i in many.split(self.desk.rows) if len(many) else ():
            scale_i = None if scale_n is None else scale_n[i]
            tokens_n[i] = self._draw_of_many(rows_n[i], minus_ids_nM[i], minus_probs_nM[i], uniforms_n[i], scale_i)
        if len(few):
            ids_nC, law_nC = self._few(rows_n[few])
            minus_ids_nM, minus_probs_nM = minus_ids_nM[few], minus_probs_nM[few]
            place_nM = torch.searchsorted(ids_nC, minus_ids_nM.contiguous()).clamp(max=ids_nC.shape[1] - 1)
            place_nM = torch.where(ids_nC.gather(1, place_nM) == minus_ids_nM, place_nM, -1)
            law_nC = speculation.subtract(law_nC, place_nM, minus_probs_nM, None if scale_n is None else scale_n[few])
            tokens_n[few] = _chosen(ids_nC, speculation.draw(law_nC, uniforms_n[few]))
        return tokens_n

    def _draw_of_many(
        self, rows_n: Tensor, minus_ids_nM: Tensor, minus_probs_nM: Tensor, uniforms_n: Tensor, scale_n: Tensor | None
    ) -> Tensor:
        """`draw` from laws over the vocabulary, worked out where they are used."""
        scaled_nW = self._scaled(rows_n)
        normaliser_n = self.normaliser_R[rows_n]
        law_nW = self.desk.exponentials(scaled_nW, normaliser_n)
        excess_n = (normaliser_n - normaliser_n.to(self.dtype).double()).exp()  # what float32 makes of 1
        floor_n1 = self.floor_R[rows_n, None]
        if bool((floor_n1 > -torch.inf).any()):
            law_nW.masked_fill_(scaled_nW < floor_n1, 0.0)
        if scale_n is not None:
            law_nW.mul_(scale_n[:, None])
        known_nM = (minus_ids_nM >= 0) & (minus_ids_nM < self.size)
        ids_nM = torch.where(known_nM, minus_ids_nM, self.size)  # there is a place behind the vocabulary
        law_nW.scatter_add_(-1, ids_nM, -(minus_probs_nM * excess_n[:, None]).to(self.dtype))
        law_nW.scatter_(-1, ids_nM, law_nW.gather(-1, ids_nM).clamp_(min=0.0))
        law_nW[:, self.size] = 0.0
        drawn_n = speculation.draw(law_nW, uniforms_n)
        empty = torch.nonzero((law_nW.sum(-1) <= self.rounding) & (minus_probs_nM > 0).any(-1))[:, 0]
        if len(empty):  # p = q up to rounding: drawn from p
            nothing_nM = torch.full_like(minus_ids_nM[empty], -1)
            drawn_n[empty] = self._draw_of_many(rows_n[empty], nothing_nM, 0.0 * nothing_nM, uniforms_n[empty], None)
        return drawn_n

    def race(self, rows_n: Tensor, keys_n3: np.ndarray, places_n: np.ndarray) -> Tensor:
        """Draw one token at each named position by the noise of the rule `coupled`, made on the law's support: `[n]`.

        `keys_n3` and `places_n` say whose noise it is and for which generated token (`randomness.coupled_uniforms`).
        """
        tokens_n = self.best_R[rows_n].clone()
        few, many = self._split(rows_n)
        for i in many.tolist():
            law_V = self.whole(rows_n[i : i + 1])[0]
            ids_S = torch.nonzero(law_V)[:, 0]
            tokens_n[i] = speculation.race(
                ids_S[None], law_V[None, ids_S].log(), self._noise(keys_n3[i : i + 1], places_n[i : i + 1], ids_S[None])
            )[0]
        if len(few):
            ids_nC, law_nC = self._few(rows_n[few])
            i = few.cpu().numpy()
            tokens_n[few] = speculation.race(ids_nC, law_nC.log(), self._noise(keys_n3[i], places_n[i], ids_nC))
        return tokens_n

    def _noise(self, keys_n3: np.ndarray, places_n: np.ndarray, ids_nS: Tensor) -> Tensor:
        return torch.as_tensor(coupled_uniforms(keys_n3, places_n, ids_nS.cpu().numpy()), device=self.device)

    def _split(self, rows_n: Tensor) -> tuple[Tensor, Tensor]:
        """Indices of the sampled ones among the named positions: those with few ids, and the others."""
        sampled_n, few_n = ~self.greedy_R[rows_n] & self.finite_R[rows_n], self.few_R[rows_n]
        return torch.nonzero(sampled_n & few_n)[:, 0], torch.nonzero(sampled_n & ~few_n)[:, 0]

    def _few(self, rows_n: Tensor) -> tuple[Tensor, Tensor]:
        """Ids in ascending order and probabilities `[n, C]` of laws that lie on few; places behind them have none."""
        ids_nC = self.ids_RC[rows_n]
        known_nC = ids_nC < self.size
        inside_nC = torch.where(known_nC, ids_nC, 0)
        scaled_nC = self._scaled_at(rows_n[:, None], self.logits_RV[rows_n[:, None], inside_nC])
        return ids_nC, torch.where(known_nC, self._probs(scaled_nC, rows_n[:, None]), 0.0)

    def _tensor(self, array: np.ndarray, dtype: torch.dtype | None = None) -> Tensor:
        return torch.as_tensor(array, dtype=dtype, device=self.device)


@dataclass(frozen=True)
class Filters:
    """Top-k (0: none), top-p and min-p of F laws, whose normalisers without filters are known."""

    whole_F: Tensor
    top_k_F: Tensor
    top_p_F: Tensor
    min_p_F: Tensor
    size: int  # of the vocabulary

    def of(self, some_n: Tensor) -> Filters:
        """Those of some of the laws."""
        whole, top_k, top_p, min_p = (
            field[some_n] for field in (self.whole_F, self.top_k_F, self.top_p_F, self.min_p_F)
        )
        return Filters(whole, top_k, top_p, min_p, self.size)

    def cut(self, values_FC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Floors, normalisers, and where these are right, given the largest scaled logits, largest first."""
        candidates, values64_FC = values_FC.shape[1], values_FC.double()
        floor_F = torch.full_like(values_FC[:, 0], -torch.inf)
        has_k_F = self.top_k_F > 0
        last_F = values_FC.gather(1, self.top_k_F.clamp(1, candidates)[:, None] - 1)[:, 0]
        floor_F = torch.where(has_k_F, last_F, floor_F)
        normaliser_F = torch.where(has_k_F, _mass(values64_FC, floor_F), self.whole_F)
        decided_F = ~has_k_F | ((self.top_k_F <= candidates) & (values_FC[:, -1] < last_F))  # and no ties beyond
        probs_FC = torch.where(values_FC >= floor_F[:, None], (values64_FC - normaliser_F[:, None]).exp(), 0.0)
        better_FC = probs_FC.cumsum(-1) - probs_FC
        nucleus_F = (better_FC < self.top_p_F[:, None]).sum(-1).clamp(min=1)  # leading ones: the sums only grow
        in_nucleus_F = values_FC.gather(1, nucleus_F[:, None] - 1)[:, 0]
        floor_F = torch.where(self.top_p_F < 1, torch.maximum(floor_F, in_nucleus_F), floor_F)
        floor_F = torch.maximum(floor_F, self._share(values_FC[:, 0]))
        decided_F &= values_FC[:, -1] < floor_F  # nothing beyond the candidates reaches the floor
        return floor_F, _mass(values64_FC, floor_F), decided_F | (candidates >= self.size)

    def reached(self, scaled_V: Tensor) -> tuple[Tensor, Tensor]:
        """Floor and normaliser of the first law, given all of its scaled logits.

        A token is kept while the tokens strictly better than it are fewer than k, and then sum up to less than p.
        """
        top_k, top_p, top = int(self.top_k_F[0]), float(self.top_p_F[0]), scaled_V.max()
        weights_V = (scaled_V - top).exp_()  # less a maximum nothing is lost to float32, as less a normaliser it would
        bucket_V = ((top - scaled_V) * PER_UNIT).clamp_(max=BUCKETS - 1).int()
        floor, mass = scaled_V.new_tensor(-torch.inf), float((self.whole_F[0] - top.double()).exp())
        if top_k > 0:
            floor = _last_kept(scaled_V, bucket_V, torch.ones_like(scaled_V), float(top_k))
            mass = float(weights_V.masked_fill_(scaled_V < floor, 0.0).sum())
        if top_p < 1:
            floor = torch.maximum(floor, _last_kept(scaled_V, bucket_V, weights_V, top_p * mass))
        floor = torch.maximum(floor, self._share(top[None])[0])
        return floor, top.double() + weights_V.masked_fill_(scaled_V < floor, 0.0).sum().double().log()

    def _share(self, top_F: Tensor) -> Tensor:
        """The floors that min-p sets; -inf where there is none."""
        return (top_F.double() + self.min_p_F.log()).to(top_F.dtype)


class Desk:
    """Memory for a few laws at a time, used over and over: fresh pages cost more than the arithmetic on them.

    A row is a vocabulary and at least one place more, in whole runs; what is behind the vocabulary is -inf.
    """

    def __init__(self, rows: int, vocabulary: int, dtype: torch.dtype, device: torch.device) -> None:
        self.rows = rows
        self.vocabulary = vocabulary
        width = (vocabulary // RUN + 1) * RUN
        self._rows = torch.full((rows, width), -torch.inf, dtype=dtype, device=device)
        self._exponentials = torch.empty_like(self._rows)

    def put(self, logits_GV: Tensor) -> Tensor:
        """A copy `[G, W]` in place of the last one."""
        self._rows[: len(logits_GV), : self.vocabulary].copy_(logits_GV)
        return self._rows[: len(logits_GV)]

    def exponentials(self, values_GW: Tensor, less_G: Tensor) -> Tensor:
        """exp(value - less) `[G, W]` in place of the last ones."""
        out_GW = self._exponentials[: len(values_GW)]
        return torch.sub(values_GW, less_G[:, None].to(values_GW.dtype), out=out_GW).exp_()


def largest(values_GW: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest of every row, largest first: values and places.

    Looks at the largest of every 64 places first: the best ones lie where these are best, so that only as many places
    as are wanted, times 64, are sorted out. Places that are `RUN` steps or so apart belong together, which reads memory
    in order.
    """
    groups = values_GW.shape[1] // GROUP
    if groups <= count:
        return values_GW.topk(count)
    values_GPU = values_GW.view(len(values_GW), GROUP, groups)
    chosen_GC = values_GPU.amax(1).topk(count, sorted=False).indices
    among_GPC = values_GPU.gather(2, chosen_GC[:, None, :].expand(-1, GROUP, -1))
    values_GC, found_GC = among_GPC.reshape(len(values_GW), -1).topk(count)
    return values_GC, chosen_GC.gather(1, found_GC % count) + groups * (found_GC // count)


def _runs(values_GW: Tensor) -> Tensor:
    return values_GW.view(len(values_GW), -1, RUN)


def raw_log_probabilities(logits_RV: Tensor, rows_n: Tensor, tokens_n: Tensor, top: int) -> tuple[Tensor, ...]:
    """Of unchanged logits: log probability `[n]` of one token per named position; ids and logs `[n, top]` of the best.

    float64, natural logarithms, worked out a few positions at a time.
    """
    parts = [
        _raw(logits_RV[rows_n[i : i + ROWS_AT_ONCE]], tokens_n[i : i + ROWS_AT_ONCE], top)
        for i in range(0, max(len(rows_n), 1), ROWS_AT_ONCE)
    ]
    return tuple(torch.cat(values) for values in zip(*parts, strict=True))


def _raw(logits_GV: Tensor, tokens_G: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
    logits_GV = logits_GV.to(torch.float64 if logits_GV.shape[1] <= SMALL_VOCABULARY else torch.float32)
    top_G = logits_GV.amax(-1)
    mass_G = torch.exp(logits_GV - top_G[:, None]).sum(-1)
    normaliser_G1 = (top_G.double() + mass_G.double().log())[:, None]
    values_GT, ids_GT = logits_GV.topk(min(top, logits_GV.shape[1]))
    chosen_G = logits_GV.gather(1, tokens_G[:, None]).double() - normaliser_G1
    return chosen_G[:, 0], ids_GT, values_GT.double() - normaliser_G1


def _mass(values_GC: Tensor, floor_G: Tensor) -> Tensor:
    """Logarithm of the summed exponentials of the values that reach the floor."""
    return torch.where(values_GC >= floor_G[:, None], values_GC.double(), -torch.inf).logsumexp(-1)


def _first(best_n: Tensor, ids_nT: Tensor) -> Tensor:
    """The best token before the other ids, of which none is it."""
    others_nT = torch.where(ids_nT == best_n[:, None], -1, ids_nT)
    others_nT[:, 0] = best_n
    return others_nT


def _chosen(ids_nC: Tensor, place_n: Tensor) -> Tensor:
    """The id at each place; a place of -1 stays -1."""
    return torch.where(place_n >= 0, ids_nC.gather(1, place_n.clamp(min=0)[:, None])[:, 0], place_n)


def _last_kept(scaled_V: Tensor, bucket_V: Tensor, weights_V: Tensor, enough: float) -> Tensor:
    """The smallest value whose strictly better ones weigh less than `enough`.

    Weights are summed per bucket, the best values in the first; only the bucket in which the sum gets there is sorted.
    """
    weight_U = torch.bincount(bucket_V, weights_V.double(), minlength=BUCKETS)
    better_U = weight_U.cumsum(0) - weight_U
    bucket = (better_U < enough).sum() - 1  # the last one that is kept: sums only grow
    within = torch.nonzero(bucket_V == bucket)[:, 0]
    if not len(within):  # everything weighs less than `enough`
        return scaled_V.new_tensor(-torch.inf)
    values, order = scaled_V[within].sort(descending=True)
    weights = weights_V[within][order].double()
    starts = torch.ones_like(values, dtype=torch.bool)
    starts[1:] = values[1:] != values[:-1]
    before = torch.where(starts, weights.cumsum(0) - weights, -torch.inf).cummax(0).values  # the same for equal values
    kept = better_U[bucket] + before < enough
    return values[kept][-1]
