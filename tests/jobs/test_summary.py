"""What a run gave up does not count as done, and positions that nobody drafted have no acceptance."""

from __future__ import annotations

import dataclasses

from jobs.summary import End, Session, summarised
from pipeline.output.plan import Amendment, Cut
from pipeline.stats import Progress
from tests.output.test_plan import plan

COUNTS = Progress(rows_done=10, error_rows=1, drafted_at=(4, 2, 0), accepted_at=(3, 1, 0))


def session() -> Session:
    """Of a run whose three shards amend a part each, and which cuts two others."""
    amending = tuple(
        dataclasses.replace(shard, amends=Amendment(f"part-{shard.index}", "v", ((0, shard.rows),)))
        for shard in plan().shards
    )
    cuts = (Cut("part-7", "v", ((0, 2), (5, 6))), Cut("part-8", "v", ((1, 2),)))
    return Session(dataclasses.replace(plan(), shards=amending, cuts=cuts), True, [], ["b", "a"], started=0.0)


def test_all_that_was_planned_counts_where_nothing_was_given_up() -> None:
    end = End([], [])
    summary = summarised(session(), end, COUNTS, 3, None)
    assert end.whole
    assert (summary["replaced_rows"], summary["removed_rows"], summary["parts"]) == (8, 4, 3)
    assert summary["dropped_files"] == []


def test_shards_and_cuts_that_were_given_up_do_not_count() -> None:
    end = End([1], ["part-7"])
    summary = summarised(session(), end, COUNTS, 3, None)
    assert not end.whole
    assert (summary["replaced_rows"], summary["removed_rows"]) == (4, 1)
    assert summary["dropped_files"] == ["b", "a"]


def test_a_position_that_was_never_drafted_has_no_acceptance() -> None:
    assert summarised(session(), End([], []), COUNTS, 3, None)["acceptance_by_position"] == [0.75, 0.5, None]
