"""What workers send each other.

Arrays throughout, so that a message costs one small copy per field; whose arrays (numpy, torch) is no
concern of this module, and it imports neither. Shapes: B rows (sequences in a step), K draft positions,
M support size, N tokens fed in all.

A worker keeps no history beyond its cache: each request says how much of every sequence's slot is valid
(`Feed.cached`), and one that does not hold that much answers `errors.CacheMiss`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pipeline.records import SamplingParams

Array = Any  # a torch.Tensor or a numpy.ndarray

REPLICA_BITS_FROM = 40  # a sequence's handle: the number of its replica, and below that a count


def replica_of(handle: int) -> int:
    """The number of the replica that a sequence belongs to; no two replicas of a run ever have the same."""
    return handle >> REPLICA_BITS_FROM


@dataclass(frozen=True, slots=True)
class Proposal:
    """Drafted tokens with the law each was drawn from (DESIGN section 10, contract).

    The law of a drafted token is its `support_probs` divided by their sum, over `support_ids`.
    """

    tokens: Array  # [B, K] int64; -1 pads
    lengths: Array  # [B] int64; how many of K are drafted, per row
    support_ids: Array  # [B, K, M] int64; -1 pads
    support_probs: Array  # [B, K, M]


@dataclass(frozen=True, slots=True)
class Verdict:
    """How many proposed tokens of each row are kept, and the one token drawn after them (contract).

    In a `VerifyReply` a `next_token` of -1 says that the row has no verdict: it was only prefilled, or its logits
    were not finite (`VerifyRequest.final` tells which).
    """

    accepted: Array  # [B] int64
    next_token: Array  # [B] int64


@dataclass(frozen=True, slots=True)
class Opening:
    """What a worker must know of a sequence before its first row: its randomness and its parameters.

    `philox_key` is (key low, key high, counter word 3), 32 bits each (`randomness.philox_key`). `bad_words` are the
    token sequences that write the words of `params.bad_words`.
    """

    sequence: int
    philox_key: tuple[int, int, int]
    params: SamplingParams
    bad_words: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class PrefixCopy:
    """Copy the first `length` cache entries of slot `source` to slot `target`, before the pass."""

    source: int
    target: int
    length: int


@dataclass(frozen=True, slots=True)
class Feed:
    """Tokens to run through one model, rows laid end to end."""

    sequences: Array  # [B] int64; a handle per sequence, unique in a run (`replica_of`)
    slots: Array  # [B] int64
    cached: Array  # [B] int64; valid cache entries of the row's slot before this pass
    lengths: Array  # [B] int64; tokens fed, >= 1
    tokens: Array  # [N] int64; the rows' tokens, at positions cached, cached + 1, … of their sequences


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """Ask a drafter for up to `wanted` tokens after the fed ones; 0 only brings its cache up to date."""

    feed: Feed
    openings: tuple[Opening, ...]
    copies: tuple[PrefixCopy, ...]
    wanted: Array  # [B] int64
    starts: Array  # [B] int64; generated tokens before the block: the position that randomness hangs on
    greedy: Array  # [B] bool; a drafter that may choose proposes its likeliest tokens instead of drawing them


@dataclass(frozen=True, slots=True)
class VerifyRequest:
    """Ask the target to run the fed tokens and the proposal behind them, and to judge the latter."""

    feed: Feed
    openings: tuple[Opening, ...]
    copies: tuple[PrefixCopy, ...]
    final: Array  # [B] bool; the row's feed ends with its last token, so a verdict is wanted
    starts: Array  # [B] int64
    proposal: Proposal  # rows as in `feed`; length 0 where nothing is proposed


@dataclass(frozen=True, slots=True)
class Scores:
    """Log probabilities of the tokens of a verdict; natural logarithms, NaN where none are asked for.

    Position i < accepted is drafted token i, position `accepted` the next token; what lies behind is NaN. L is the most
    alternatives that any row asked for; -1 pads their ids.
    """

    logprobs: Array  # [B, K+1] float64
    top_ids: Array  # [B, K+1, L] int64
    top_logprobs: Array  # [B, K+1, L] float64


@dataclass(frozen=True, slots=True)
class VerifyReply:
    """The target's answer to a `VerifyRequest`.

    `overlap` [B, 3] float64 is, over the judged positions of each sampled row: how many there were, the sum of the
    chances to accept a token drawn from the draft's law (sum of min(p, q)), and of those to accept its likeliest one.
    """

    verdict: Verdict
    scores: Scores | None = None
    overlap: Array | None = None
