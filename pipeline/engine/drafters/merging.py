"""Several draft requests as one, rows end to end, and its proposal as one for each of them.

Whose requests they are, and whether their slots differ, is not known here.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipeline.messages import DraftRequest, Feed, Proposal
from pipeline.step import empty_proposal

_FEED = ("sequences", "slots", "cached", "lengths", "tokens")


def merged(requests: Sequence[DraftRequest]) -> DraftRequest:
    """One request with the rows, openings and copies of all, in their order."""
    if len(requests) == 1:
        return requests[0]
    feeds = [request.feed for request in requests]
    return DraftRequest(
        feed=Feed(*(np.concatenate([getattr(feed, name) for feed in feeds]) for name in _FEED)),
        openings=tuple(opening for request in requests for opening in request.openings),
        copies=tuple(copy for request in requests for copy in request.copies),
        wanted=np.concatenate([request.wanted for request in requests]),
        starts=np.concatenate([request.starts for request in requests]),
        greedy=np.concatenate([request.greedy for request in requests]),
    )


def split(proposal: Proposal, requests: Sequence[DraftRequest]) -> list[Proposal]:
    """Each request's rows of a proposal for all of them, no wider than what it wanted."""
    if len(requests) == 1:
        return [proposal]
    ends = np.cumsum([len(request.wanted) for request in requests]).tolist()
    parts = []
    for request, start, end in zip(requests, [0, *ends], ends, strict=False):
        positions = int(request.wanted.max())
        parts.append(
            Proposal(
                proposal.tokens[start:end, :positions],
                proposal.lengths[start:end],
                proposal.support_ids[start:end, :positions],
                proposal.support_probs[start:end, :positions],
            )
        )
    return parts


def rows_of(request: DraftRequest, rows: np.ndarray) -> DraftRequest:
    """Some of a request's rows, with the openings and copies that concern them. `rows` are increasing indices."""
    feed = request.feed
    tokens = np.split(feed.tokens, np.cumsum(feed.lengths)[:-1])
    sequences, slots = set(feed.sequences[rows].tolist()), set(feed.slots[rows].tolist())
    return DraftRequest(
        feed=Feed(
            sequences=feed.sequences[rows],
            slots=feed.slots[rows],
            cached=feed.cached[rows],
            lengths=feed.lengths[rows],
            tokens=np.concatenate([tokens[row] for row in rows]),
        ),
        openings=tuple(opening for opening in request.openings if opening.sequence in sequences),
        copies=tuple(copy for copy in request.copies if copy.target in slots),
        wanted=request.wanted[rows],
        starts=request.starts[rows],
        greedy=request.greedy[rows],
    )


def gathered(parts: Sequence[tuple[np.ndarray, Proposal]], rows: int) -> Proposal:
    """The opposite of `rows_of`: proposals for some rows each as one for `rows` of them, length 0 for all others."""
    positions = max((part.support_ids.shape[1] for _, part in parts), default=0)
    support = max((part.support_ids.shape[2] for _, part in parts), default=1)
    whole = empty_proposal(rows, positions, support)
    for places, part in parts:
        k, m = part.support_ids.shape[1:]
        whole.tokens[places, :k] = part.tokens
        whole.lengths[places] = part.lengths
        whole.support_ids[places, :k, :m] = part.support_ids
        whole.support_probs[places, :k, :m] = part.support_probs
    return whole
