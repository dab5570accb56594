"""The nouns that travel: a document, a request for a model, and what came back.

Plain data; knows nothing of files, models or Ray.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal


class FinishReason(StrEnum):
    """Why a completion ended: an EOS token or stop string, the length limit, or a failure."""

    STOP = "stop"
    LENGTH = "length"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Document:
    """One input row, cleaned.

    `fields` holds, as text, the columns that prompts name (the text column under its own name among them).
    With `error` set the row could not be read: `text` is empty and the error becomes the row's `error`.
    """

    id: str
    doc_hash: str
    text: str
    fields: Mapping[str, str]
    error: str | None = None


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the target's logits become the law that is sampled (DESIGN sections 5 and 10).

    `temperature` 0 is greedy; `top_k` 0, `top_p` 1 and `min_p` 0 switch a filter off. `logit_bias` maps a
    token id to what is added to its logit. Lengths are in tokens. `bad_words` are kept from being written the way that
    the tokenizer writes them. `n` samples are independent answers. `logprobs` are the plain model's (raw) or those of
    the law that all these parameters make (law), with `top_logprobs` alternatives per token.
    """

    max_new_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    n: int = 1
    logprobs: Literal["none", "raw", "law"] = "none"
    top_logprobs: int = 0
    bad_words: tuple[str, ...] = ()
    min_new_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to continue.

    `key` is the identity that randomness hangs on, together with seed, salt and sample number: equal keys
    draw equally, different keys independently, whatever their prompts and neighbours.
    """

    key: str
    prompt_token_ids: list[int]
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class CompletionStats:
    """What one completion cost. `drafted` and `accepted` count tokens; accepted ones are kept in the output.

    `steps` counts the target's passes that gave this sequence a verdict. `drafted_at[i]` and `accepted_at[i]`
    count tokens at position i of their blocks.
    """

    drafted: int = 0
    accepted: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    drafted_at: tuple[int, ...] = ()
    accepted_at: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """The answer to a request; `error` says why there is none (then `finish_reason` is `error`).

    `logprobs` and `top_logprobs` have an entry per token, None unless asked for; the latter are (token id, log
    probability) pairs, likeliest first.
    """

    key: str
    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    logprobs: list[float] | None
    stats: CompletionStats
    error: str | None = None
    top_logprobs: list[list[tuple[int, float]]] | None = None
