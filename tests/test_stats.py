"""Counts add up, also where only some of them are given."""

from __future__ import annotations

from pipeline.records import Completion, CompletionStats, FinishReason
from pipeline.stats import Progress


def test_two_pieces_of_work_add_field_by_field() -> None:
    first = Progress(rows_done=2, accepted_at=(3, 1))
    second = Progress(rows_done=1, error_rows=1, accepted_at=(1, 1, 1))
    assert first + second == Progress(rows_done=3, error_rows=1, accepted_at=(4, 2, 1))


def test_lost_work_can_be_taken_back() -> None:
    lost = Progress(rows_done=2, new_tokens=7, accepted_at=(3, 1))
    assert Progress(rows_done=5, new_tokens=9, accepted_at=(4, 1)) - lost == Progress(
        rows_done=3, new_tokens=2, accepted_at=(1, 0)
    )


def test_a_completion_counts_its_tokens_and_what_its_stats_say() -> None:
    stats = CompletionStats(drafted=8, accepted=4, steps=2, prompt_tokens=5)
    completion = Completion("k", [1, 2, 3], "abc", FinishReason.STOP, None, stats)
    counted = Progress.of(completion)
    assert (counted.requests, counted.new_tokens, counted.prompt_tokens) == (1, 3, 5)
    assert counted.accepted_per_step == 2.0


def test_shares_of_nothing_are_zero() -> None:
    assert Progress().accepted_per_step == 0.0
    assert Progress().error_share == 0.0
