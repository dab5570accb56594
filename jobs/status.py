"""`status OUT`: what an output holds, what is missing, what failed and why, and who is at work.

Reads only, and may be called while a run writes. Knows nothing of models and jobs.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pipeline.config import absolute_path
from pipeline.counting import counted
from pipeline.errors import OutputError
from pipeline.output.claim import Holder, holder_of
from pipeline.output.failures import Failures, failures_of
from pipeline.output.folder import Output
from pipeline.output.names import SUCCESS, parsed, run_name
from pipeline.output.places import superseded_by
from pipeline.output.plan import Plan
from pipeline.output.store import Entry, Store, open_store

SMALL_BYTES = 8 << 20  # below this, opening a part takes longer than reading it
MANY_SMALL = 20
SHOWN_REASONS = 10


@dataclass(frozen=True)
class RunStatus:
    """One run. Of a run that ended, the missing rows are those that were given up; they are planned anew."""

    run: str
    kind: str  # answers, or compaction
    state: str  # open or closed
    planned: str
    ended: str | None
    rows: int
    published: int
    missing: int
    error_rows: int


@dataclass(frozen=True)
class Parts:
    """The parts that readers meet, or of a Delta table those that its log names."""

    count: int
    bytes: int
    small: int
    unreadable: int  # gone or replaced while this command read them


@dataclass(frozen=True)
class Status:
    """What `status` found. `success` is the run that `_SUCCESS` names."""

    location: str
    format: str | None
    partition_by: tuple[str, ...]
    runs: tuple[RunStatus, ...]
    superseded_runs: int
    parts: Parts
    failures: Failures
    holder: Holder | None
    success: str | None
    last_summary: Mapping[str, Any] | None

    @property
    def missing(self) -> int:
        """Rows of the last run that answers; what earlier ones left out, it has planned again."""
        answering = [run for run in self.runs if run.kind == "answers"]
        return answering[-1].missing if answering else 0

    def as_json(self) -> dict[str, Any]:
        failures = self.failures
        return {
            "output": self.location,
            "format": self.format,
            "partition_by": list(self.partition_by),
            "rows": failures.rows,
            "answered": failures.rows - failures.error_rows,
            "missing": self.missing,
            "failed": failures.error_rows,
            "reasons": [
                {"task": task, "reason": reason, "rows": kind.rows, "example_id": kind.example_id}
                for (task, reason), kind in _most_first(failures)
            ],
            "runs": [asdict(run) for run in self.runs],
            "superseded_runs": self.superseded_runs,
            "at_work": None
            if self.holder is None
            else {"host": self.holder.host, "pid": self.holder.pid, "seconds_ago": _silent_for(self.holder)},
            "success": self.success,
            "parts": {**asdict(self.parts), "small_is_below": SMALL_BYTES},
            "last_summary": None if self.last_summary is None else dict(self.last_summary),
        }


def print_status(path: str, as_json: bool = False) -> int:
    """Say how the output at `path` is; the exit code. OutputError if there is none."""
    status = status_of(open_store(absolute_path(path)), path)
    _print(status)
    if as_json:
        print(json.dumps(status.as_json(), ensure_ascii=False))
    return 0


def status_of(store: Store, path: str) -> Status:
    """How the output in `store` is at this moment; `path` is how the user calls it."""
    output = Output(store)
    live = output.live_plans()
    holder = holder_of(store)
    holder = holder if holder is not None and holder.is_alive() else None
    if not live and holder is None:
        raise OutputError(f"{path}: there is no output of nightdesk; give the output.path of a job that has run")
    summaries = output.summaries(live)
    parts = _parts_read(output, live, summaries)
    failures, unreadable = _failures(store, live, parts)
    small = sum(entry.size < SMALL_BYTES for entry in parts.values())
    return Status(
        location=store.location,
        format=live[-1].format if live else None,
        partition_by=live[-1].partition_by if live else (),
        runs=tuple(_run(output, plan, summaries.get(plan.run)) for plan in live),
        superseded_runs=len(output.runs()) - len(live),
        parts=Parts(len(parts), sum(entry.size for entry in parts.values()), small, unreadable),
        failures=failures,
        holder=holder,
        success=_success(store),
        last_summary=_last_summary(live, summaries),
    )


# --- what is there


def _parts_read(
    output: Output, live: Iterable[Plan], summaries: Mapping[int, Mapping[str, Any]]
) -> dict[str, Entry]:
    """The parts whose rows count. In a Delta table, what an open run published shows only with its commit, and what a
    run gave up never does."""
    plans = list(live)
    counted = {plan.run for plan in plans if plan.format != "delta" or plan.run in summaries}
    gone = {name for plan in plans if plan.run in counted for name in superseded_by(plan, summaries.get(plan.run))}
    late = {
        (plan.run, index)
        for plan in plans
        if plan.format == "delta" and plan.run in summaries
        for index in summaries[plan.run]["dropped_shards"]
    }
    return {
        name: entry
        for name, entry in output.parts().items()
        if (part := parsed(name)) is not None and part.run in counted and name not in gone and part[1:] not in late
    }


def _failures(store: Store, live: list[Plan], parts: Iterable[str]) -> tuple[Failures, int]:
    """Over all parts, and how many of them could not be read because a run replaced or removed them just now."""
    if not live:
        return Failures(), 0
    return failures_of(store, parts, str(live[-1].columns["input.id"] or "id"), _tasks(live[-1]))


def _tasks(plan: Plan) -> list[str]:
    """The tasks that the output's columns are of."""
    kept = set(plan.kept_schema.names)
    names = [name for name in plan.schema.names if name not in kept]
    stems = [name.removesuffix("_finish") for name in names if name.endswith("_finish")]
    return [stem for stem in stems if f"{stem}_error" in names]


def _run(output: Output, plan: Plan, summary: Mapping[str, Any] | None) -> RunStatus:
    if summary is None:
        missing = sum(shard.rows for shard in output.missing(plan))
        errors = output.counts(plan).error_rows
    else:
        dropped = set(summary["dropped_shards"])
        missing = sum(shard.rows for shard in plan.shards if shard.index in dropped)
        errors = int(summary["error_rows"])
    return RunStatus(
        run=run_name(plan.run),
        kind="compaction" if plan.merges else "answers",
        state="open" if summary is None else "closed",
        planned=plan.created,
        ended=None if summary is None else summary.get("ended"),
        rows=plan.rows,
        published=plan.rows - missing,
        missing=missing,
        error_rows=errors,
    )


def _success(store: Store) -> str | None:
    try:
        return store.read(SUCCESS).decode().strip()
    except FileNotFoundError:
        return None


def _last_summary(live: Iterable[Plan], summaries: Mapping[int, Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """What the last run said that answered and ended."""
    ended = [summaries[plan.run] for plan in live if plan.run in summaries and not plan.merges]
    return ended[-1] if ended else None


# --- what is said


def _print(status: Status) -> None:
    parts, failures = status.parts, status.failures
    layout = f", partitioned by {', '.join(status.partition_by)}" if status.partition_by else ""
    print(f"{status.location} ({status.format or 'nothing planned yet'}{layout})")
    done = counted(failures.rows - failures.error_rows, "row")
    print(f"done      {done}, in {counted(parts.count, 'part')} of {_size(parts.bytes)}")
    print(f"missing   {counted(status.missing, 'row')}")
    print(f"failed    {counted(failures.error_rows, 'row')}{_share(failures)}")
    kinds = _most_first(failures)
    for (task, reason), kind in kinds[:SHOWN_REASONS]:
        print(f"          {kind.rows} × {'' if task is None else f'{task}: '}{reason} (for one, {kind.example_id})")
    if len(kinds) > SHOWN_REASONS:
        print(f"          and {counted(len(kinds) - SHOWN_REASONS, 'more reason')}; --json has them")
    for run in status.runs:
        print(f"run {run.run} {_said_of(run)}")
    if status.superseded_runs:
        print(f"          and {status.superseded_runs} earlier ones, started over with --fresh")
    print(f"last      {_line(status.last_summary)}")
    print(f"at work   {_who(status.holder)}")
    print(f"_SUCCESS  {'no' if status.success is None else f'of run {status.success}'}")
    if parts.unreadable:
        print(f"          {counted(parts.unreadable, 'part')} replaced or removed meanwhile, and not counted")
    if parts.small >= MANY_SMALL:
        print(f"hint      {parts.small} parts are below {_size(SMALL_BYTES)}: nightdesk compact joins them")


def _most_first(failures: Failures) -> list[tuple[tuple[str | None, str], Any]]:
    return sorted(failures.kinds.items(), key=lambda item: (-item[1].rows, item[0][0] or "", item[0][1]))


def _said_of(run: RunStatus) -> str:
    if run.kind == "compaction":
        return f"{run.state}, compaction, planned {run.planned}"
    missing = "" if not run.missing else f", {run.missing} {'missing' if run.state == 'open' else 'given up'}"
    when = f"planned {run.planned}" if run.ended is None else f"ended {run.ended}"
    published = f"{run.published} of {counted(run.rows, 'row')} published"
    return f"{run.state}, {published}{missing}, {run.error_rows} failed, {when}"


def _line(summary: Mapping[str, Any] | None) -> str:
    if summary is None:
        return "no run has ended yet"
    audit = summary.get("audit")
    audited = "" if not audit else f", audit {'failed' if audit.get('failure') else 'passed'}"
    truncated = summary.get("counts", {}).get("truncated", 0)  # summaries of older versions lack it
    cut = f", {truncated} cut to fit the context" if truncated else ""
    return (
        f"run {summary['run']} of {summary.get('job')}: {counted(summary['rows'], 'row')}, "
        f"{summary['error_rows']} failed{cut}{audited}, ended {summary.get('ended')}"
    )


def _who(holder: Holder | None) -> str:
    if holder is None:
        return "nobody"
    return f"process {holder.pid} on {holder.host}, heard of {_silent_for(holder):.0f} s ago"


def _silent_for(holder: Holder) -> float:
    return round(max(time.time() - holder.heartbeat, 0.0), 1)


def _share(failures: Failures) -> str:
    return f" ({failures.error_rows / failures.rows:.2%})" if failures.error_rows else ""


def _size(size: int) -> str:
    for unit, step in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= step:
            return f"{size / step:.1f} {unit}"
    return f"{size} bytes"
