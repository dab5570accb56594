"""One step as data: which tokens of which sequences to feed and draft, and the messages that ask for it.

Made by the scheduler, carried out by whoever holds the models. Knows nothing of slots to come or of verdicts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from pipeline.messages import DraftRequest, Feed, PrefixCopy, Proposal, VerifyRequest
from pipeline.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence's part of a step. A feed covers `tokens[start:end]` of each model; empty: not fed."""

    sequence: Sequence
    target_start: int
    target_end: int
    draft_start: int
    draft_end: int
    wanted: int  # tokens to draft
    greedy: bool = False  # the drafter had better propose its likeliest tokens
    home: int | None = 0  # the draft worker it is fed to

    @property
    def draft_fed(self) -> int:
        """Tokens fed to the drafter."""
        return self.draft_end - self.draft_start

    @property
    def draft_opens(self) -> bool:
        """The drafter has not been told the opening yet."""
        return not self.sequence.draft_opened or self.sequence.draft_home != self.home

    @property
    def final(self) -> bool:
        """The target is fed up to the last token, so that a verdict can follow."""
        return self.target_end == len(self.sequence.tokens)


@dataclass(frozen=True, slots=True)
class Plan:
    """One step: its rows, and what workers must hear of before it."""

    rows: tuple[Row, ...]
    target_copies: tuple[PrefixCopy, ...]
    draft_copies: tuple[PrefixCopy, ...]

    def draft_request(self) -> DraftRequest | None:
        """What the drafter is asked; None where no row involves it."""
        rows = self._drafted_rows()
        if not rows:
            return None
        return DraftRequest(
            feed=_feed(rows, [r.draft_start for r in rows], [r.draft_end for r in rows]),
            openings=tuple(r.sequence.opening for r in rows if r.draft_opens),
            copies=self.draft_copies,
            wanted=np.array([r.wanted for r in rows], dtype=np.int64),
            starts=np.array([r.sequence.generated for r in rows], dtype=np.int64),
            greedy=np.array([r.greedy for r in rows]),
        )

    def verify_request(self, drafted: Proposal | None) -> VerifyRequest:
        """What the target is asked: every row, with its part of what the drafter answered."""
        rows = self.rows
        return VerifyRequest(
            feed=_feed(rows, [r.target_start for r in rows], [r.target_end for r in rows]),
            openings=tuple(r.sequence.opening for r in rows if not r.sequence.target_opened),
            copies=self.target_copies,
            final=np.array([r.final for r in rows]),
            starts=np.array([r.sequence.generated for r in rows], dtype=np.int64),
            proposal=self._spread(drafted),
        )

    def _drafted_rows(self) -> tuple[Row, ...]:
        return tuple(r for r in self.rows if r.draft_fed)

    def _spread(self, drafted: Proposal | None) -> Proposal:
        """A proposal over the drafted rows as one over all rows, length 0 elsewhere."""
        if drafted is None:
            return empty_proposal(len(self.rows))
        place = np.array([i for i, r in enumerate(self.rows) if r.draft_fed], dtype=np.int64)
        if len(place) == len(self.rows):
            return drafted
        full = empty_proposal(len(self.rows), *drafted.support_ids.shape[1:])
        for field in ("tokens", "lengths", "support_ids", "support_probs"):
            getattr(full, field)[place] = getattr(drafted, field)
        return full


def empty_proposal(rows: int, positions: int = 0, support: int = 1) -> Proposal:
    """A proposal in which no row has a drafted token."""
    return Proposal(
        tokens=np.full((rows, positions), -1, dtype=np.int64),
        lengths=np.zeros(rows, dtype=np.int64),
        support_ids=np.full((rows, positions, support), -1, dtype=np.int64),
        support_probs=np.zeros((rows, positions, support), dtype=np.float32),
    )


def _feed(rows: Iterable[Row], starts: list[int], ends: list[int]) -> Feed:
    rows = tuple(rows)
    fed = [token for r, a, b in zip(rows, starts, ends, strict=True) for token in r.sequence.tokens[a:b]]
    return Feed(
        sequences=np.array([r.sequence.handle for r in rows], dtype=np.int64),
        slots=np.array([r.sequence.slot for r in rows], dtype=np.int64),
        cached=np.array(starts, dtype=np.int64),
        lengths=np.array(ends, dtype=np.int64) - np.array(starts, dtype=np.int64),
        tokens=np.array(fed, dtype=np.int64),
    )
