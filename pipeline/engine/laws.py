"""From logits to laws: temperature, top-k and top-p, in transformers' order, for many positions at once.

A filtered law is never written out over the vocabulary unless it has to be. Each position keeps three numbers
beside its logits: a divisor (the temperature), a floor and a normaliser. A token belongs to the law if its scaled
logit is at least the floor, and its probability is then exp(scaled logit - normaliser). Tokens that tie with the
last one that a filter keeps are kept as well, so that the law does not depend on a sorting order.

Top-k keeps the k largest. Top-p keeps, of what top-k left, the tokens whose better ones sum up to less than p.
Temperature 0 is the law with all mass on the largest logit (the first of equals).

Large vocabularies are worked through a few rows at a time, which stay in the processor's cache, with float32
exponentials and float64 sums; small ones in float64 throughout.

Shapes: R positions, V vocabulary, S candidates, M drafted support.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pipeline import speculation
from pipeline.records import SamplingParams

CANDIDATES = 256  # largest logits looked at before a row is sorted whole
SMALL_VOCABULARY = 4096
ROWS_AT_ONCE = 4


@dataclass(frozen=True, slots=True)
class Decoding:
    """The decoding parameters of R positions, as arrays."""

    temperature_R: np.ndarray
    top_k_R: np.ndarray
    top_p_R: np.ndarray

    @classmethod
    def of(cls, params: Iterable[SamplingParams]) -> Decoding:
        """One entry per element of `params`."""
        params = tuple(params)
        return cls(
            np.array([p.temperature for p in params], dtype=np.float64),
            np.array([p.top_k for p in params], dtype=np.int64),
            np.array([p.top_p for p in params], dtype=np.float64),
        )

    def repeat(self, counts: np.ndarray) -> Decoding:
        """Each entry as often as `counts` says."""
        return Decoding(*(np.repeat(a, counts) for a in (self.temperature_R, self.top_k_R, self.top_p_R)))

    @property
    def greedy_R(self) -> np.ndarray:
        """Which positions put all mass on the largest logit."""
        return self.temperature_R == 0


class Laws:
    """The laws of R positions, given their logits `[R, V]` and decoding parameters."""

    def __init__(self, logits_RV: Tensor, decoding: Decoding) -> None:
        self.logits_RV = logits_RV
        self.device = logits_RV.device
        rows, self.size = logits_RV.shape
        self.dtype = torch.float64 if self.size <= SMALL_VOCABULARY else torch.float32
        self.greedy_R = torch.as_tensor(decoding.greedy_R, device=self.device)
        divisor = np.where(decoding.greedy_R, 1.0, decoding.temperature_R)
        self.divisor_R = torch.as_tensor(divisor, dtype=self.dtype, device=self.device)
        self.best_R = torch.empty(rows, dtype=torch.int64, device=self.device)
        self.floor_R = torch.full((rows,), -torch.inf, dtype=self.dtype, device=self.device)
        self.normaliser_R = torch.zeros(rows, dtype=torch.float64, device=self.device)
        self.finite_R = torch.empty(rows, dtype=torch.bool, device=self.device)
        self.ids_RS: list[Tensor | None] = [None] * rows  # ids that hold the whole law, where they are few
        step = rows if self.device.type != "cpu" or self.size <= SMALL_VOCABULARY else ROWS_AT_ONCE
        for first in range(0, rows, max(step, 1)):
            self._read(slice(first, min(first + step, rows)), decoding)

    def _read(self, part: slice, decoding: Decoding) -> None:
        """Find maxima, floors and normalisers of some neighbouring rows."""
        scaled = self.logits_RV[part].to(self.dtype)
        sampled = np.flatnonzero(~decoding.greedy_R[part])
        if len(sampled):
            scaled = scaled / self.divisor_R[part, None]
        top, best = scaled.max(-1)
        self.best_R[part] = best
        finite = torch.isfinite(top)
        self.finite_R[part] = finite
        if not len(sampled):
            return
        mass = torch.exp(scaled - top[:, None]).sum(-1, dtype=torch.float64)
        self.normaliser_R[part] = top.double() + mass.log()
        for i in sampled[finite.cpu().numpy()[sampled]]:  # there is nothing to keep of a law that is not finite
            row = part.start + int(i)
            top_k, top_p = int(decoding.top_k_R[row]), float(decoding.top_p_R[row])
            if (0 < top_k < self.size) or top_p < 1:
                self._filter(row, scaled[i], top_k, top_p)

    def _filter(self, row: int, scaled_V: Tensor, top_k: int, top_p: float) -> None:
        """Set floor, normaliser and candidates of one filtered row."""
        top_k = top_k if 0 < top_k < self.size else self.size
        for candidates in dict.fromkeys((min(CANDIDATES, self.size), self.size)):
            values, ids = scaled_V.topk(candidates)
            values64 = values.double()
            if top_k < candidates:
                floor = values[top_k - 1]
                if candidates < self.size and values[-1] >= floor:
                    continue  # ties with the k-th reach beyond the candidates
                normaliser = values64[values >= floor].logsumexp(0)
            else:
                if top_k < self.size:
                    continue
                floor, normaliser = values.new_tensor(-torch.inf), self.normaliser_R[row]
            if top_p < 1:
                probs = torch.where(values >= floor, (values64 - normaliser).exp(), 0.0)
                kept = (probs.cumsum(0) - probs) < top_p
                kept[0] = True
                floor = torch.maximum(floor, values[kept][-1])
                normaliser = values64[values >= floor].logsumexp(0)
            if candidates == self.size or values[-1] < floor:  # no tie reaches beyond the candidates
                self.floor_R[row], self.normaliser_R[row] = floor, normaliser
                self.ids_RS[row] = ids[values >= floor].sort().values
                return

    def probability(self, rows_n: Tensor, tokens_n: Tensor) -> Tensor:
        """Probability `[n]`, float64, of one token at each of the named positions; 0 for a token of -1."""
        known_n = (tokens_n >= 0) & (tokens_n < self.size)
        tokens_n = torch.where(known_n, tokens_n, 0)
        scaled_n = self.logits_RV[rows_n, tokens_n].to(self.dtype) / self.divisor_R[rows_n]
        probs_n = self._probs(scaled_n, rows_n)
        probs_n = torch.where(self.greedy_R[rows_n], (tokens_n == self.best_R[rows_n]).double(), probs_n)
        return torch.where(known_n, probs_n, 0.0)

    def _probs(self, scaled: Tensor, rows: Tensor) -> Tensor:
        inside = scaled >= self.floor_R[rows]
        return torch.where(inside, (scaled.double() - self.normaliser_R[rows]).exp(), 0.0)

    def whole(self, rows_n: Tensor) -> Tensor:
        """The laws at some positions over the vocabulary, `[n, V]` float64, summing to 1 up to rounding."""
        scaled_nV = self.logits_RV[rows_n].to(self.dtype) / self.divisor_R[rows_n, None]
        probs_nV = self._probs(scaled_nV, rows_n[:, None])
        one_hot_nV = torch.nn.functional.one_hot(self.best_R[rows_n], self.size).double()
        return torch.where(self.greedy_R[rows_n, None], one_hot_nV, probs_nV)

    def top(self, size: int) -> tuple[Tensor, Tensor]:
        """The `size` likeliest tokens of every law, likeliest first: ids and probabilities `[R, size]`, float32.

        Places without probability hold id -1. Not renormalised: whoever ships a truncated law ships these numbers.
        """
        size = min(size, self.size)
        values_RS, ids_RS = self.logits_RV.topk(size, dim=-1)
        rows_R1 = torch.arange(len(ids_RS), device=self.device)[:, None]
        probs_RS = self._probs(values_RS.to(self.dtype) / self.divisor_R[:, None], rows_R1).float()
        greedy_R1 = self.greedy_R[:, None]
        first_S = torch.arange(size, device=self.device) == 0
        probs_RS = torch.where(greedy_R1, first_S.float(), probs_RS)
        ids_RS = torch.where(greedy_R1 & first_S, self.best_R[:, None], ids_RS)
        return torch.where(probs_RS > 0, ids_RS, -1), probs_RS

    def draw(self, rows_n: Tensor, minus_ids_nM: Tensor, minus_probs_nM: Tensor, uniforms_n: Tensor) -> Tensor:
        """Draw one token at each named position from the law, less another law on a support (-1 pads): `[n]`.

        What is drawn from is max(p - q, 0), or p where nothing is to be subtracted, by inverse CDF in token order.
        """
        tokens_n = self.best_R[rows_n].clone()
        sampled = torch.nonzero(~self.greedy_R[rows_n])[:, 0]
        few = [i for i in sampled.tolist() if self.ids_RS[int(rows_n[i])] is not None]
        many = [i for i in sampled.tolist() if self.ids_RS[int(rows_n[i])] is None]
        if many:
            i = torch.tensor(many, device=self.device)
            law = speculation.subtract(self.whole(rows_n[i]), minus_ids_nM[i], minus_probs_nM[i])
            tokens_n[i] = speculation.draw(law, uniforms_n[i])
        if few:
            i = torch.tensor(few, device=self.device)
            tokens_n[i] = self._draw_few(rows_n[i], minus_ids_nM[i], minus_probs_nM[i], uniforms_n[i])
        return tokens_n

    def _draw_few(self, rows_n: Tensor, minus_ids_nM: Tensor, minus_probs_nM: Tensor, uniforms_n: Tensor) -> Tensor:
        """`draw` for laws whose supports are listed: the same sums, without the zeros between."""
        supports = [self.ids_RS[int(row)] for row in rows_n]
        ids_nS = torch.nn.utils.rnn.pad_sequence([s for s in supports if s is not None], True, padding_value=self.size)
        known_nS = ids_nS < self.size
        inside_nS = torch.where(known_nS, ids_nS, 0)
        scaled_nS = self.logits_RV[rows_n[:, None], inside_nS].to(self.dtype) / self.divisor_R[rows_n, None]
        law_nS = torch.where(known_nS, self._probs(scaled_nS, rows_n[:, None]), 0.0)
        place_nM = torch.searchsorted(ids_nS, minus_ids_nM.contiguous()).clamp(max=ids_nS.shape[1] - 1)
        place_nM = torch.where(ids_nS.gather(1, place_nM) == minus_ids_nM, place_nM, -1)
        law_nS = speculation.subtract(law_nS, place_nM, minus_probs_nM)
        drawn_n = speculation.draw(law_nS, uniforms_n)
        tokens_n = ids_nS.gather(1, drawn_n.clamp(min=0)[:, None])[:, 0]
        return torch.where(drawn_n >= 0, tokens_n, drawn_n)
