"""What is done to logits before temperature and filters, as changes to single tokens, for many positions at once.

In transformers' order: bias, repetition penalty (tokens of prompt and answer), presence and frequency penalties
(tokens of the answer alone), bad words, minimum length. Each position of a block sees the drafted tokens before
it: they stand in the slot's row of the token store like any other.

A list of (position, token) pairs is made for each kind of change, over all positions that want it, and applied
with a few indexed operations; no loop runs over positions or over the vocabulary.

Presence and frequency (OpenAI's and vLLM's formula): logit - presence · [count > 0] - frequency · count, after the
repetition penalty (Keskar et al. 2019, section 4.1): logit · r where it is negative, else logit / r.

Shapes: R positions, V vocabulary, B sequences, N pairs, W spelled bad words, T tokens of the longest of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pipeline.engine.token_store import TokenStore
from pipeline.messages import Opening

SMALL_VOCABULARY = 4096  # up to here laws are worked out in float64 throughout

_ANY, _NONE = -2, -3  # in a bad word's row: no token is asked for here; in a position's window: there is no token


@dataclass(frozen=True, slots=True)
class Positions:
    """Where R logits stand: which sequence each belongs to, and what came before it."""

    owner_R: np.ndarray  # index into the openings
    slots_R: np.ndarray
    before_R: np.ndarray  # tokens before the position: prompt, answer and drafted ones
    generated_R: np.ndarray  # those of them that are not prompt

    @classmethod
    def of_blocks(
        cls, slots_B: np.ndarray, before_B: np.ndarray, generated_B: np.ndarray, counts_B: np.ndarray
    ) -> Positions:
        """`counts_B` positions of every sequence, the first behind `before_B` tokens."""
        owner_R, within_R = _spread(counts_B)
        return cls(owner_R, slots_B[owner_R], before_B[owner_R] + within_R, generated_B[owner_R] + within_R)


def edited(
    logits_RV: Tensor, openings: Sequence[Opening], positions: Positions, texts: TokenStore, eos: Iterable[int]
) -> Tensor:
    """The logits with every change made, as float32 or float64; the same tensor where there is none to make."""
    params = [o.params for o in openings]
    repetition_B = np.array([p.repetition_penalty for p in params])
    presence_B = np.array([p.presence_penalty for p in params])
    frequency_B = np.array([p.frequency_penalty for p in params])
    shortest_B = np.array([0 if p.ignore_eos else p.min_new_tokens for p in params], dtype=np.int64)
    biased = any(p.logit_bias for p in params)
    banned = any(o.bad_words for o in openings)
    penalised = bool((repetition_B != 1).any() or presence_B.any() or frequency_B.any())
    short = bool((positions.generated_R < shortest_B[positions.owner_R]).any())
    if not (biased or banned or penalised or short):
        return logits_RV
    edit = _Edit(logits_RV, positions, texts)
    if biased:
        edit.add_bias(openings)
    if (repetition_B != 1).any():
        edit.penalise_repetition(repetition_B)
    if presence_B.any() or frequency_B.any():
        edit.penalise_presence_and_frequency(presence_B, frequency_B)
    if banned:
        edit.ban(openings)
    if short:
        edit.forbid_end(shortest_B, np.fromiter(eos, dtype=np.int64))
    return edit.logits_RV


class _Edit:
    """A copy of the logits, and changes to it."""

    def __init__(self, logits_RV: Tensor, positions: Positions, texts: TokenStore) -> None:
        self.size = logits_RV.shape[1]
        dtype = torch.float64 if self.size <= SMALL_VOCABULARY else torch.float32
        self.logits_RV = logits_RV.to(dtype, copy=True)
        self.positions = positions
        self.texts = texts

    def add_bias(self, openings: Sequence[Opening]) -> None:
        biases = [o.params.logit_bias for o in openings]
        sizes_B = np.array([len(b) for b in biases], dtype=np.int64)
        ids = np.array([token for b in biases for token in b], dtype=np.int64)
        values = np.array([value for b in biases for value in b.values()], dtype=np.float64)
        rows_N, entry_N = self._entries(sizes_B)
        self._change(rows_N, ids[entry_N], lambda old: old + self._like(values[entry_N]))

    def penalise_repetition(self, penalty_B: np.ndarray) -> None:
        p = self.positions
        wanted_R = penalty_B[p.owner_R] != 1
        rows_N, place_N = _spread(np.where(wanted_R, p.before_R, 0))
        penalty_N = self._like(penalty_B[p.owner_R[rows_N]])
        tokens_N = self.texts.tokens[p.slots_R[rows_N], place_N]
        self._change(rows_N, tokens_N, lambda old: torch.where(old < 0, old * penalty_N, old / penalty_N))

    def penalise_presence_and_frequency(self, presence_B: np.ndarray, frequency_B: np.ndarray) -> None:
        p = self.positions
        wanted_R = ((presence_B != 0) | (frequency_B != 0))[p.owner_R]
        rows_N, place_N = _spread(np.where(wanted_R, p.generated_R, 0))
        prompt_R = p.before_R - p.generated_R
        tokens_N = self.texts.tokens[p.slots_R[rows_N], prompt_R[rows_N] + place_N]
        owner_N = p.owner_R[rows_N]
        self._change(rows_N, tokens_N, lambda old: old - self._like(presence_B[owner_N]))  # once per distinct token
        rows, tokens = self._index(rows_N), self._index(tokens_N)
        self.logits_RV.index_put_((rows, tokens), -self._like(frequency_B[owner_N]), accumulate=True)

    def ban(self, openings: Sequence[Opening]) -> None:
        """The last token of every spelled word whose other tokens stand right before the position."""
        p = self.positions
        words = [word for o in openings for word in o.bad_words]
        counts_B = np.array([len(o.bad_words) for o in openings], dtype=np.int64)
        longest = max(len(word) for word in words) - 1
        heads_WT = np.array([[_ANY] * (longest + 1 - len(word)) + list(word[:-1]) for word in words], dtype=np.int64)
        heads_WT = heads_WT.reshape(len(words), longest)
        lasts_W = np.array([word[-1] for word in words], dtype=np.int64)
        places_RT = p.before_R[:, None] + np.arange(-longest, 0)
        windows_RT = self.texts.tokens[p.slots_R[:, None], np.maximum(places_RT, 0)]
        windows_RT = np.where(places_RT >= 0, windows_RT, _NONE)
        rows_N, word_N = self._entries(counts_B)
        fits_N = ((heads_WT[word_N] == _ANY) | (heads_WT[word_N] == windows_RT[rows_N])).all(axis=1)
        self._forbid(rows_N[fits_N], lasts_W[word_N[fits_N]])

    def forbid_end(self, shortest_B: np.ndarray, eos_E: np.ndarray) -> None:
        p = self.positions
        rows = np.flatnonzero(p.generated_R < shortest_B[p.owner_R])
        self._forbid(np.repeat(rows, len(eos_E)), np.tile(eos_E, len(rows)))

    def _entries(self, sizes_B: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Every entry of every position's sequence: the position, and the place in the joined lists of entries."""
        owner_R = self.positions.owner_R
        rows_N, within_N = _spread(sizes_B[owner_R])
        first_B = np.cumsum(sizes_B) - sizes_B
        return rows_N, first_B[owner_R[rows_N]] + within_N

    def _forbid(self, rows_N: np.ndarray, tokens_N: np.ndarray) -> None:
        known_N = tokens_N < self.size  # a spelled word may hold a token that this model does not have
        self._change(rows_N[known_N], tokens_N[known_N], lambda old: torch.where(old.isnan(), old, -torch.inf))

    def _change(self, rows_N: np.ndarray, tokens_N: np.ndarray, change: Callable[[Tensor], Tensor]) -> None:
        """Replace logits by a function of what they were; a pair that occurs twice gets the same value twice."""
        rows, tokens = self._index(rows_N), self._index(tokens_N)
        self.logits_RV[rows, tokens] = change(self.logits_RV[rows, tokens])

    def _index(self, array_N: np.ndarray) -> Tensor:
        return torch.as_tensor(array_N, device=self.logits_RV.device)

    def _like(self, array_N: np.ndarray) -> Tensor:
        return torch.as_tensor(array_N, dtype=self.logits_RV.dtype, device=self.logits_RV.device)


def _spread(counts_B: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`[N]` each: every index as often as it counts, and the place within its run (0, 1, …)."""
    rows_N = np.repeat(np.arange(len(counts_B)), counts_B)
    return rows_N, np.arange(len(rows_N)) - np.repeat(np.cumsum(counts_B) - counts_B, counts_B)
