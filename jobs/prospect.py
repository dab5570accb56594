"""What a run would do with an output as it is now: the plan that it would continue, or the one that it would make.

Refuses what a run would refuse, in the same words. Writes nothing to the output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeline.config import JobConfig
from pipeline.corpus.listing import InputFile
from pipeline.counting import counted
from pipeline.output.folder import Output, refuse_foreign_files, refuse_unplanned_parts
from pipeline.output.ledger import Ledger, same_content
from pipeline.output.names import run_name
from pipeline.output.plan import Plan, Shard
from pipeline.planning import Ask, make_plan, refuse_foreign


@dataclass(frozen=True)
class Prospect:
    """`plan` is what a run would work on first; None if it would have nothing to do."""

    plan: Plan | None
    is_open: bool  # planned by a run before, and to be continued
    todo: tuple[Shard, ...]  # of the plan, those that are not published
    rows_of: Mapping[str, int]  # by path; rows of the files that plans have counted as they are now
    held: int  # rows of these files that the output has

    @property
    def rows(self) -> int:
        """To be answered, by the plan."""
        return sum(shard.rows for shard in self.todo)

    @property
    def parts(self) -> int:
        """That the plan would add; rows that take the place of others get no part of their own."""
        return sum(1 for shard in self.todo if shard.amends is None)

    def answered(self, files: Sequence[InputFile], asked: Sequence[int]) -> int:
        """Of the documents that the job asks about, so many of each file, those that need no answer any more."""
        if self.is_open:
            return min(self.held, sum(asked))
        limits = {file.path: rows for file, rows in zip(files, asked, strict=True)}
        todo = 0
        for r in (r for shard in self.todo for r in shard.ranges):
            assert self.plan is not None, "shards without a plan"
            todo += max(min(r.stop, limits[self.plan.files[r.file].file.path]) - r.start, 0)
        return sum(asked) - todo

    def said(self) -> str:
        """In a clause that begins with "a run"."""
        if self.plan is None:
            return "a run has nothing to do"
        if self.is_open and self.plan.merges:
            return f"a run continues the compaction {run_name(self.plan.run)} first, and then plans what there is to do"
        if self.is_open:
            return (
                f"a run continues run {run_name(self.plan.run)}: {continued(self.plan, self.plan.rows - self.rows)}, "
                f"{self.rows:,} left; then it plans what has changed since"
            )
        adds = f" (adds {counted(self.parts, 'part')})" if self.parts else ""
        return f"a run has {announced(self.plan)}{adds}"


def announced(plan: Plan) -> str:
    """What a new plan is about: how many rows are new, to replace, to remove."""
    replaced = sum(shard.rows for shard in plan.shards if shard.amends is not None)
    removed = sum(cut.count for cut in plan.cuts)
    told = [(plan.rows - replaced, "new"), (replaced, "to replace"), (removed, "to remove")]
    return ", ".join(f"{rows} {what}" for rows, what in told if rows)


def continued(plan: Plan, done: int) -> str:
    """How far an open plan is."""
    return f"{done} of {counted(plan.rows, 'row')} {'is' if done == 1 else 'are'} there"


def foresee(config: JobConfig, output: Output, files: Sequence[InputFile], ask: Ask) -> Prospect:
    """Look at the output, and read what a run would read to plan; OutputError for what it would refuse."""
    refuse_foreign_files(output)
    refuse_unplanned_parts(output)
    run = output.highest_run() + 1
    live = output.live_plans()
    if live:
        refuse_foreign(live[-1], config, ask.answers, output.store.location)
    rows_of: dict[str, int] = {}
    held = 0
    known = Ledger(output, live).files if live else {}
    for file in files:
        entry = known.get(file.path)
        if entry is not None and same_content(entry.file, file):
            rows_of[file.path] = entry.rows
            held += entry.rows - sum(stop - start for start, stop in entry.missing)
    if live and output.summary(live[-1].run) is None:
        return Prospect(live[-1], True, tuple(output.missing(live[-1])), rows_of, held)
    plan = make_plan(config, output, run, live, files, ask)
    if plan is None:
        return Prospect(None, False, (), rows_of, held)
    rows_of |= {planned.file.path: planned.rows for planned in plan.files}
    return Prospect(plan, False, plan.shards, rows_of, held)
