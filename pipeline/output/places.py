"""Which part holds what a plan made, and which parts it put out of use: by their names alone.

Knows nothing of storage.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pipeline.output.names import PartName, parsed, part_name
from pipeline.output.plan import Plan, Shard


def place_of(plan: Plan, shard: Shard) -> str:
    """The part that holds a shard's rows where it amends one: that one, or in a Delta table a new one beside it."""
    assert shard.amends is not None
    if plan.format != "delta":
        return shard.amends.part
    return part_name(plan.run, shard.index, taken_apart(shard.amends.part).folder)


def place_of_cut(plan: Plan, number: int) -> str:
    """The part that is left by a plan's cut: the same one, or in a Delta table a new one beside it."""
    part = plan.cuts[number].part
    if plan.format != "delta":
        return part
    return part_name(plan.run, len(plan.shards) + number, taken_apart(part).folder)


def place_of_merge(plan: Plan, number: int) -> str:
    """The part that a plan's merge makes."""
    return part_name(plan.run, number, taken_apart(plan.merges[number].sources[0]).folder)


def superseded_by(plan: Plan, summary: Mapping[str, Any] | None = None) -> set[str]:
    """The parts that are no more, or no more read, when `plan` is done; as `summary` says, where it is.

    What a run has given up supersedes nothing.
    """
    merges = set() if summary is None else set(summary.get("dropped_merges", ()))
    names = {source for number, merge in enumerate(plan.merges) if number not in merges for source in merge.sources}
    if plan.format == "delta":
        shards = set() if summary is None else set(summary["dropped_shards"])
        cuts = set() if summary is None else set(summary.get("dropped_cuts", ()))
        amended = {s.amends.part: s for s in plan.shards if s.amends is not None and s.index not in shards}
        names |= set(amended)
        for cut in plan.cuts:
            if cut.part not in cuts:
                names.add(place_of(plan, amended[cut.part]) if cut.part in amended else cut.part)
    return names


def folders_by_shard(parts: Iterable[str]) -> dict[int, dict[int, set[str]]]:
    """By run and shard, the folders in which it has parts."""
    found: dict[int, dict[int, set[str]]] = {}
    for part in map(parsed, parts):
        if part is not None:
            found.setdefault(part.run, {}).setdefault(part.shard, set()).add(part.folder)
    return found


def taken_apart(name: str) -> PartName:
    """The name of what must be a part."""
    part = parsed(name)
    assert part is not None, f"{name} is no part"
    return part
