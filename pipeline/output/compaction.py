"""Many small parts become few (`compact`), as a run of its own kind: planned, recorded, and continued after a kill.

A reader of a folder lists it first and then opens what it has seen. So a merged part gets a new name, and its sources
are gone before it appears: whoever reads meanwhile may find fewer rows, or a part missing, but never a row twice. The
merged part is durable, out of readers' sight, before the first source goes. (In a Delta table readers see one commit.)
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.output.folder import Output
from pipeline.output.names import parsed, run_folder, run_name
from pipeline.output.places import place_of_merge, superseded_by
from pipeline.output.plan import Merge, Plan
from pipeline.output.store import Entry
from pipeline.output.writer import Footer, part_bytes


def plan_merges(output: Output, target_bytes: int) -> Plan | None:
    """A plan that joins neighbouring parts of each folder up to about `target_bytes`; None if it would change nothing.

    The output's last run must be closed.
    """
    run = output.highest_run() + 1
    live = output.live_plans()
    if not live:
        return None
    gone = {name for plan in live for name in superseded_by(plan, output.summary(plan.run))}
    parts = {name: entry for name, entry in output.parts().items() if name not in gone}
    merges = [
        Merge(tuple(group), tuple(parts[name].version for name in group))
        for group in _groups(parts, target_bytes)
        if len(group) > 1
    ]
    if not merges:
        return None
    last = live[-1]
    return Plan(
        run=run,
        fresh=False,
        salt=last.salt,
        answers=last.answers,
        columns=last.columns,
        filters={},
        context=last.context,
        schema=last.schema,
        files=(),
        shards=(),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        merges=tuple(merges),
    )


_NOTHING = Merge((), ())


def _groups(parts: dict[str, Entry], target_bytes: int) -> list[list[str]]:
    """Parts to be joined: of one folder, in the order of their names, none that is large already."""
    groups: list[list[str]] = []
    folder, size = None, 0
    for name in sorted(parts, key=lambda name: (parsed(name), name)):
        part = parsed(name)
        assert part is not None, name
        if parts[name].size >= target_bytes:
            folder = None
            continue
        if folder != part.folder or size + parts[name].size > target_bytes:
            groups.append([])
            folder, size = part.folder, 0
        groups[-1].append(name)
        size += parts[name].size
    return groups


def merge(output: Output, plan: Plan) -> list[int]:
    """Carry out a plan of merges, or what is left of it after a kill. Several may do so at once.

    Returns the numbers of merges that were given up, because a source is not what it was when they were planned.
    """
    output.refuse_if_superseded(plan)
    dropped = [number for number in range(len(plan.merges)) if not _merge(output, plan, number)]
    output.finish(plan, _summary(plan, dropped), success=False)  # which leaves the mark of success as it is
    for number in range(len(plan.merges)):
        output.store.remove(_hidden(plan, number))
    return dropped


def _merge(output: Output, plan: Plan, number: int) -> bool:
    store, sources, result = output.store, plan.merges[number].sources, place_of_merge(plan, number)
    if output.summary(plan.run) is not None:  # somebody else has done it all
        return True
    if store.exists(result):
        _remove(output, plan, sources)
        return True
    data = _durable(output, plan, number)
    if not data:
        return data is None
    _remove(output, plan, sources)
    if store.create(result, data):
        # Whoever slept before this line may have brought back what a later run has merged or removed.
        later = output.later_plans(plan)
        if any(other.fresh or result in merge.sources for other in later for merge in (*other.merges, _NOTHING)):
            store.remove(result)
            output.refuse_if_superseded(plan)
    return True


def _durable(output: Output, plan: Plan, number: int) -> bytes | None:
    """The merged part, durable out of readers' sight before a source goes: whoever writes it first decides.

    Empty if it is given up. None if somebody else has ended the run meanwhile.
    """
    store, hidden = output.store, _hidden(plan, number)
    if not store.exists(hidden):
        store.create(hidden, _joined(output, plan, number))
    try:
        data = store.read(hidden)
    except FileNotFoundError:
        return None
    return None if output.summary(plan.run) is not None else data


def _remove(output: Output, plan: Plan, sources: Sequence[str]) -> None:
    if plan.format == "parquet":
        for name in sources:
            output.store.remove(name)


def _joined(output: Output, plan: Plan, number: int) -> bytes:
    """Nothing where a source is not what it was."""
    tables: list[pa.Table] = []
    merge = plan.merges[number]
    for name, version in zip(merge.sources, merge.versions, strict=True):
        if output.store.version(name) != version:
            return b""
        try:
            with output.open_part(name) as file:
                tables.append(pq.ParquetFile(file).read())
        except FileNotFoundError:
            return b""
    return part_bytes(pa.concat_tables(tables), Footer(plan.run, number, plan.fingerprint), output.compression)


def _hidden(plan: Plan, number: int) -> str:
    return f"{run_folder(plan.run)}/merged/{number:06d}.parquet"


def _summary(plan: Plan, dropped: Sequence[int]) -> dict[str, Any]:
    merges = [merge for number, merge in enumerate(plan.merges) if number not in dropped]
    return {
        "run": run_name(plan.run),
        "rows": 0,
        "error_rows": 0,
        "merged_parts": sum(len(merge.sources) for merge in merges),
        "parts": len(merges),
        "dropped_shards": [],
        "dropped_cuts": [],
        "dropped_merges": list(dropped),
        "ended": datetime.now(UTC).isoformat(timespec="seconds"),
    }
