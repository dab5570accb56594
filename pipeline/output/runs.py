"""What has been planned in an output, and what was said when it was done: plans, marks and summaries.

Plans and summaries never change once they are there, so each is read once. Knows nothing of parts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from pipeline.errors import OutputError, Stopped
from pipeline.output.names import RUNS, SUCCESS, run_folder, run_name
from pipeline.output.plan import Plan, Shard
from pipeline.output.store import Store

RUN = re.compile(r"\d{6,}")


class Runs:
    """The runs of the output in `store`."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._plans: dict[int, Plan] = {}
        self._summaries: dict[int, dict[str, Any]] = {}
        self._given_up: dict[int, set[int]] = {}  # of runs at their end

    def runs(self) -> list[int]:
        """Numbers of all plans, in order."""
        there = [int(name) for name in self.store.names(RUNS) if RUN.fullmatch(name)]
        names = {f"{run_folder(run)}/plan.json": run for run in there if run not in self._plans}
        for name, data in self.store.read_many(names).items():
            self._plans[names[name]] = self._plan_from(name, data)
        return sorted(run for run in there if run in self._plans)

    def plan(self, run: int) -> Plan:
        """FileNotFoundError if there is none."""
        if run not in self._plans:
            name = f"{run_folder(run)}/plan.json"
            self._plans[run] = self._plan_from(name, self.store.read(name))
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

    def _plan_from(self, name: str, data: bytes) -> Plan:
        try:
            return Plan.from_json(data)
        except (ValueError, TypeError, LookupError, pa.ArrowException) as error:
            raise self._damaged(name, error) from error

    def _damaged(self, name: str, error: Exception) -> OutputError:
        return OutputError(
            f"output.path: {self.store.location}: {name} is damaged ({type(error).__name__}: {error}), and without it "
            "nobody knows what the parts hold; put it back from a copy, give another output.path, or remove the whole "
            "folder to start over"
        )

    # --- the end of a run

    def agree_on_end(self, run: int, dropped: Sequence[int]) -> list[int]:
        """The shards that the run gives up: what its first driver to come so far says, and all others then keep to.

        More hangs on it than a note: rows are cut only if there are none, and a Delta table shows all others.
        """
        if self.store.create(_end(run), json.dumps({"dropped_shards": list(dropped)}).encode()):
            return list(dropped)
        return sorted(self.given_up(run))

    def given_up(self, run: int) -> set[int]:
        """The shards that the run has given up; none while it is not at its end."""
        name = _end(run)
        if run not in self._given_up:
            try:
                ended: Mapping[str, Any] | None = self._told(name, self.store.read(name))
            except FileNotFoundError:
                ended = self.summary(run)
            if ended is None:
                return set()
            self._given_up[run] = set(ended["dropped_shards"])
        return self._given_up[run]

    def summary(self, run: int) -> dict[str, Any] | None:
        """What was written when the run ended; None while it is open."""
        if run not in self._summaries:
            name = f"{run_folder(run)}/summary.json"
            try:
                self._summaries[run] = self._told(name, self.store.read(name))
            except FileNotFoundError:
                return None
        return self._summaries[run]

    def summaries(self, plans: Iterable[Plan]) -> dict[int, dict[str, Any]]:
        """By run; those that are there."""
        names = {f"{run_folder(plan.run)}/summary.json": plan.run for plan in plans if plan.run not in self._summaries}
        for name, data in self.store.read_many(names).items():
            self._summaries[names[name]] = self._told(name, data)
        return {plan.run: self._summaries[plan.run] for plan in plans if plan.run in self._summaries}

    def _told(self, name: str, data: bytes) -> dict[str, Any]:
        """What the end of a run says; those of older versions had fewer keys."""
        try:
            told = json.loads(data)
            return {"dropped_shards": [], "error_rows": 0, **told}
        except (ValueError, TypeError) as error:
            raise self._damaged(name, error) from error

    def write_summary(self, run: int, summary: dict[str, Any]) -> None:
        self.store.create(f"{run_folder(run)}/summary.json", json.dumps(summary, indent=1).encode())

    def write_success(self, run: int) -> None:
        self.store.replace(SUCCESS, f"{run_name(run)}\n".encode())

    def has_success(self) -> bool:
        return self.store.exists(SUCCESS)

    # --- marks

    def marks(self, run: int, shards: Iterable[int]) -> dict[int, dict[str, Any]]:
        """What was noted when a shard was published, by shard; those that are there and can be read."""
        names = {_mark(run, shard): shard for shard in shards}
        found = {}
        for name, data in self.store.read_many(names).items():
            try:
                mark = json.loads(data)
            except ValueError:  # the parts say the same
                continue
            if isinstance(mark, dict) and "counts" in mark:
                found[names[name]] = mark
        return found

    def unmarked(self, run: int, shards: Iterable[Shard]) -> list[Shard]:
        """Those of which nothing was noted."""
        there = set(self.store.names(f"{run_folder(run)}/shards"))
        return [shard for shard in shards if _mark(run, shard.index).rpartition("/")[2] not in there]

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


def _end(run: int) -> str:
    return f"{run_folder(run)}/end.json"


def _mark(run: int, shard: int) -> str:
    return f"{run_folder(run)}/shards/{shard:06d}.json"
