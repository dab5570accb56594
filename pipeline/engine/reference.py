"""The independent reference of an audit: plain decoding through transformers, one sequence at a time.

transformers' own module with its own attention and cache, and its own logits processors; nothing of this engine's
passes, laws or verdicts. Slow, and meant to be. Where transformers leaves something open, DESIGN section 5 is followed:
presence and frequency penalties, and tokens that tie with the last one that a filter keeps (they are kept as well).

V is the vocabulary.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList
from transformers.generation import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from pipeline.audit import END, LIKELY, Difference, NextToken, Outcome, behind
from pipeline.engine.checkpoint import Checkpoint, load_model
from pipeline.records import SamplingParams
from pipeline.wording import Wording

LOGITS_PER_NOISE = 4.0  # a filter's border is doubtful this many times the relative error of a probability around it

Spell = Callable[[str], Sequence[Sequence[int]]]


class Reference:
    """A target, asked by transformers alone."""

    def __init__(self, model: Any, vocabulary: int, eos: Iterable[int], spell: Spell, noise: float = 0.0) -> None:
        """`spell` gives the token sequences that write a bad word; `noise` is `audit.NOISE` of the model's type."""
        self.model = model
        self.vocabulary = vocabulary
        self.eos = sorted({token for token in eos if token < vocabulary})
        self.spell = spell
        self.noise = noise

    @classmethod
    def load(cls, checkpoint: Checkpoint, dtype: str, device: str, noise: float) -> Reference:
        """The model in `dtype` on `device`. ModelError as from `load_model`."""
        model: Any = load_model(checkpoint, dtype, device)
        tokenizer = checkpoint.tokenizer()
        size = min(len(tokenizer), int(model.config.vocab_size))
        return cls(model, size, checkpoint.eos_ids(), Wording(tokenizer).spellings, noise)

    @torch.inference_mode()
    def differences(
        self, prompt: list[int], text: list[int], ended: bool, params: SamplingParams
    ) -> tuple[Difference, ...]:
        """Where a greedy text has not the likeliest token behind those before it; nowhere: plain decoding gives it too.

        `ended`: it ended by itself rather than at its length. Goes on behind a difference with the text as it is.
        """
        found = []
        fed = self._begin(prompt)
        for position, got in enumerate([*text, END] if ended else text):
            scores_V = self._edited(fed, params)
            best = int(scores_V.argmax())
            expected = END if best in self.eos else best
            if got != expected:
                reached = scores_V[self.eos].max() if got == END else scores_V[got]
                found.append(Difference(position, expected, got, float(scores_V[best] - reached)))
            if position + 1 < len(text) + ended:
                self._feed(fed, got)
        return tuple(found)

    @torch.inference_mode()
    def law(self, prefix: list[int], params: SamplingParams, length: int) -> dict[Outcome, NextToken]:
        """The law of up to `length` tokens behind a prefix: `audit.Law`."""
        law: dict[Outcome, NextToken] = {}
        self._look(self._begin(prefix), params, length, 1.0, law)
        return law

    def _look(
        self, fed: _Fed, params: SamplingParams, length: int, mass: float, law: dict[Outcome, NextToken]
    ) -> None:
        after = self._next_token(self._edited(fed, params), params)
        law[fed.generated] = after
        if len(fed.generated) + 1 < length:
            for token in behind(after, mass):
                longer = copy.deepcopy(fed)  # not every kind of cache can be cut back
                self._feed(longer, token)
                self._look(longer, params, length, mass * after.likely[token], law)

    def _next_token(self, scores_V: Tensor, params: SamplingParams) -> NextToken:
        scaled_V = scores_V
        if params.temperature != 1:
            scaled_V = TemperatureLogitsWarper(float(params.temperature))(_NO_IDS, scores_V[None])[0]
        slack = LOGITS_PER_NOISE * self.noise / params.temperature
        inner, dropped = _border(scaled_V, params, -self.noise, slack)
        outer, _ = _border(scaled_V, params, self.noise, -slack)
        surely = min(max(inner, dropped + slack), float(scaled_V.max()))
        sure_V = (scaled_V >= surely) & scaled_V.isfinite()
        doubtful_V = (scaled_V >= outer - slack) & scaled_V.isfinite() & ~sure_V
        law_V = torch.where(sure_V, scaled_V, -torch.inf).softmax(-1)
        doubtful = frozenset(torch.nonzero(doubtful_V)[:, 0].tolist())
        ends = sure_V[self.eos].any()
        end = float(law_V[self.eos].sum())
        law_V[self.eos], sure_V[self.eos] = 0.0, False
        likely = {int(t): float(law_V[t]) for t in torch.nonzero(law_V > LIKELY)[:, 0]}
        rest = max(0.0, float(law_V.sum()) - sum(likely.values()))
        if ends:
            likely[END] = end
        ending = {END} if doubtful & set(self.eos) else set()
        return NextToken(likely, rest, sure_V.cpu().numpy(), (doubtful - set(self.eos)) | ending)

    def _edited(self, fed: _Fed, params: SamplingParams) -> Tensor:
        """[V] float64: what is sampled from at temperature 1 without filters, or maximised."""
        ids: Any = torch.tensor([fed.tokens], device=fed.logits_V.device)
        processors = self._processors(params, len(fed.tokens) - len(fed.generated), str(ids.device))
        edited: Tensor = processors(ids, fed.logits_V[None].clone())[0]
        return edited

    def _processors(self, params: SamplingParams, prompt: int, device: str) -> LogitsProcessorList:
        """In transformers' order; those that change nothing left out, as `generate` does."""
        found = LogitsProcessorList()
        if params.logit_bias:
            found.append(SequenceBiasLogitsProcessor([[[int(t)], float(b)] for t, b in params.logit_bias.items()]))
        if params.repetition_penalty != 1:
            found.append(RepetitionPenaltyLogitsProcessor(float(params.repetition_penalty)))
        if params.presence_penalty or params.frequency_penalty:
            found.append(CountPenalty(params.presence_penalty, params.frequency_penalty, prompt))
        spelled = [list(ids) for word in params.bad_words for ids in self.spell(word)]
        if words := [ids for ids in spelled if max(ids) < self.vocabulary and (len(ids) > 1 or ids[0] not in self.eos)]:
            found.append(NoBadWordsLogitsProcessor(words))
        if params.min_new_tokens and self.eos:
            found.append(MinNewTokensLengthLogitsProcessor(prompt, params.min_new_tokens, self.eos, device))
        return found

    def _begin(self, prompt: list[int]) -> _Fed:
        fed = _Fed(list(prompt), DynamicCache(config=self.model.config))
        self._run(fed, prompt)
        return fed

    def _feed(self, fed: _Fed, token: int) -> None:
        fed.tokens.append(token)
        fed.generated += (token,)
        self._run(fed, [token])

    def _run(self, fed: _Fed, tokens: list[int]) -> None:
        ids = torch.tensor([tokens], device=self.model.device)
        output = self.model(input_ids=ids, cache=fed.cache, use_cache=True, logits_to_keep=1)
        fed.logits_V = output.logits[0, -1, : self.vocabulary].double()


class _Fed:
    """Tokens that the model has seen, and the logits behind them."""

    def __init__(self, tokens: list[int], cache: DynamicCache) -> None:
        self.tokens = tokens
        self.generated: Outcome = ()
        self.cache = cache
        self.logits_V = torch.empty(0)


class CountPenalty(LogitsProcessor):
    """Presence and frequency penalties on the tokens behind a prompt: OpenAI's formula, which transformers lacks."""

    def __init__(self, presence: float, frequency: float, prompt: int) -> None:
        self.presence = presence
        self.frequency = frequency
        self.prompt = prompt

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        counts = torch.bincount(input_ids[0, self.prompt :], minlength=scores.shape[1])[: scores.shape[1]]
        return scores - self.presence * (counts > 0) - self.frequency * counts


def _border(scaled_V: Tensor, params: SamplingParams, mass: float, share: float) -> tuple[float, float]:
    """The lowest score that the filters keep and the highest that they drop, -inf where there is none.

    Top-p's mass is taken to be larger by `mass`, and min-p's share by a factor of e to the `share`.
    """
    filters = LogitsProcessorList()
    if 0 < params.top_k < len(scaled_V):
        filters.append(TopKLogitsWarper(int(params.top_k)))
    if params.top_p < 1:
        filters.append(TopPLogitsWarper(min(max(params.top_p + mass, 0.0), 1.0)))
    if params.min_p > 0:
        filters.append(MinPLogitsWarper(min(params.min_p * math.exp(share), 1.0)))
    if not filters:
        return -math.inf, -math.inf
    kept_V = filters(_NO_IDS, scaled_V[None])[0] > -torch.inf
    return float(scaled_V[kept_V].min()), float(torch.where(kept_V, -torch.inf, scaled_V).max())


_NO_IDS: Any = torch.empty((1, 0), dtype=torch.int64)  # filters do not look at them
