"""What a run counts, and how counts are summed.

Counts only: no clock, no rates, no files. An answerer reports *increments*; whoever shows or stores a total
adds them up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from itertools import zip_longest
from operator import add, sub
from typing import Any

from pipeline.records import Completion


@dataclass(frozen=True, slots=True)
class Progress:
    """Counts of a piece of work; the sum of two pieces is `a + b`.

    `rows_done` counts finished rows, `error_rows` those among them with an error of the row or of a task;
    `shards_done` counts published shards, `truncated` documents that were cut to fit the context, however many tasks
    cut them. `drafted`, `accepted` and `steps` are sums of `CompletionStats`
    (requests generated once for several rows count once). `drafted_at[i]` and `accepted_at[i]` count tokens
    at draft position i, and stay empty where an engine does not say.
    """

    rows_done: int = 0
    rows_total: int = 0
    shards_done: int = 0
    shards_total: int = 0
    error_rows: int = 0
    requests: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    steps: int = 0
    drafted_at: tuple[int, ...] = ()
    accepted_at: tuple[int, ...] = ()
    truncated: int = 0

    @staticmethod
    def of(completion: Completion) -> Progress:
        """What one completion cost."""
        stats = completion.stats
        return Progress(
            requests=1,
            prompt_tokens=stats.prompt_tokens,
            new_tokens=len(completion.token_ids),
            drafted=stats.drafted,
            accepted=stats.accepted,
            steps=stats.steps,
            drafted_at=stats.drafted_at,
            accepted_at=stats.accepted_at,
        )

    def __add__(self, other: Progress) -> Progress:
        return self._combined(other, add)

    def __sub__(self, other: Progress) -> Progress:
        """Take back work that was counted and then lost (a shard given to another worker)."""
        return self._combined(other, sub)

    def _combined(self, other: Progress, operation: Callable[[int, int], int]) -> Progress:
        numbers: dict[str, Any] = {n: operation(getattr(self, n), getattr(other, n)) for n in _NUMBERS}
        return Progress(
            **numbers,
            drafted_at=_by_position(self.drafted_at, other.drafted_at, operation),
            accepted_at=_by_position(self.accepted_at, other.accepted_at, operation),
        )

    @property
    def accepted_per_step(self) -> float:
        """Drafted tokens kept per pass of the target, per sequence; 0 before the first step."""
        return self.accepted / self.steps if self.steps else 0.0

    @property
    def error_share(self) -> float:
        """Share of finished rows that are error rows."""
        return self.error_rows / self.rows_done if self.rows_done else 0.0


_NUMBERS = tuple(field.name for field in fields(Progress) if field.default == 0)


def _by_position(
    left: tuple[int, ...], right: tuple[int, ...], operation: Callable[[int, int], int]
) -> tuple[int, ...]:
    return tuple(operation(a, b) for a, b in zip_longest(left, right, fillvalue=0))
