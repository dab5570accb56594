"""What has been planned in an output, and what was said when it was done: plans, marks and summaries.

Plans and summaries never change once they are there, so each is read once. Knows nothing of parts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from pipeline.errors import Stopped
from pipeline.output.names import RUNS, SUCCESS, run_folder, run_name
from pipeline.output.plan import Plan
from pipeline.output.store import Store

RUN = re.compile(r"\d{6,}")


class Runs:
    """The runs of the output in `store`."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._plans: dict[int, Plan] = {}
        self._summaries: dict[int, dict[str, Any]] = {}

    def runs(self) -> list[int]:
        """Numbers of all plans, in order."""
        there = [int(name) for name in self.store.names(RUNS) if RUN.fullmatch(name)]
        names = {f"{run_folder(run)}/plan.json": run for run in there if run not in self._plans}
        for name, data in self.store.read_many(names).items():
            self._plans[names[name]] = Plan.from_json(data)
        return sorted(run for run in there if run in self._plans)

    def plan(self, run: int) -> Plan:
        """FileNotFoundError if there is none."""
        if run not in self._plans:
            self._plans[run] = Plan.from_json(self.store.read(f"{run_folder(run)}/plan.json"))
        return self._plans[run]

    def live_plans(self) -> list[Plan]:
        """The plans whose rows count: from the last one that started over."""
        plans = [self.plan(run) for run in self.runs()]
        starts = [i for i, plan in enumerate(plans) if plan.fresh]
        return plans[starts[-1] if starts else 0 :]

    def highest_salt(self) -> int | None:
        return max((self.plan(run).salt for run in self.runs()), default=None)

    def create_plan(self, plan: Plan) -> Plan:
        """`plan`, durable, or the one that another run created under this number before."""
        if self.store.create(f"{run_folder(plan.run)}/plan.json", plan.to_json()):
            return plan
        return self.plan(plan.run)

    # --- the end of a run

    def summary(self, run: int) -> dict[str, Any] | None:
        """What was written when the run ended; None while it is open."""
        if run not in self._summaries:
            try:
                self._summaries[run] = json.loads(self.store.read(f"{run_folder(run)}/summary.json"))
            except FileNotFoundError:
                return None
        return self._summaries[run]

    def summaries(self, plans: Iterable[Plan]) -> dict[int, dict[str, Any]]:
        """By run; those that are there."""
        names = {f"{run_folder(plan.run)}/summary.json": plan.run for plan in plans if plan.run not in self._summaries}
        for name, data in self.store.read_many(names).items():
            self._summaries[names[name]] = json.loads(data)
        return {plan.run: self._summaries[plan.run] for plan in plans if plan.run in self._summaries}

    def write_summary(self, run: int, summary: dict[str, Any]) -> None:
        self.store.create(f"{run_folder(run)}/summary.json", json.dumps(summary, indent=1).encode())

    def write_success(self, run: int) -> None:
        self.store.replace(SUCCESS, f"{run_name(run)}\n".encode())

    def has_success(self) -> bool:
        return self.store.exists(SUCCESS)

    # --- marks

    def marks(self, run: int, shards: Iterable[int]) -> dict[int, dict[str, Any]]:
        """What was noted when a shard was published, by shard; those that are there."""
        names = {_mark(run, shard): shard for shard in shards}
        return {names[name]: json.loads(data) for name, data in self.store.read_many(names).items()}

    def write_mark(self, run: int, shard: int, mark: dict[str, Any]) -> None:
        self.store.create(_mark(run, shard), json.dumps(mark).encode())

    # --- later runs

    def later_plans(self, plan: Plan) -> list[Plan]:
        """Those with higher numbers."""
        later = (int(name) for name in self.store.names(RUNS) if RUN.fullmatch(name))
        found = []
        for run in sorted(run for run in later if run > plan.run):
            try:
                found.append(self.plan(run))
            except FileNotFoundError:  # a planner that was killed, or is about to create it
                continue
        return found

    def refuse_if_superseded(self, plan: Plan) -> None:
        """Stopped if a later run started over."""
        for later in self.later_plans(plan):
            if later.fresh:
                raise Stopped(
                    f"{self.store.location}: run {run_name(plan.run)} ends here, because run {run_name(later.run)} "
                    "started over with --fresh; the same command continues that one"
                )


def _mark(run: int, shard: int) -> str:
    return f"{run_folder(run)}/shards/{shard:06d}.json"
