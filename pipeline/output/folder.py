"""An output folder: its plans, its parts, and what has been said about them (DESIGN section 8).

Parts are the truth: a row counts when its part is there. Marks and summaries only save work and inform.
Knows nothing of documents or models.
"""

from __future__ import annotations

import dataclasses
import json
import re
from functools import reduce
from operator import add
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.errors import OutputError, Stopped
from pipeline.output.plan import Plan, Shard, run_name
from pipeline.output.store import Store
from pipeline.output.writer import counts_from, part_bytes, part_counts, schema_bytes
from pipeline.stats import Progress

RUNS = "_nightdesk/runs"
SUCCESS = "_SUCCESS"
SCHEMA_PART = "part-000000-schema.parquet"
PART = re.compile(r"part-(\d{6,})-(\d{6,})\.parquet")
RUN = re.compile(r"\d{6,}")


def part_name(run: int, shard: int) -> str:
    return f"part-{run:06d}-{shard:06d}.parquet"


class Output:
    """What is in the folder of `store`. Keeps nothing: every answer is read from the store."""

    def __init__(self, store: Store) -> None:
        self.store = store

    # --- plans

    def runs(self) -> list[int]:
        """Numbers of all plans, in order."""
        return [run for run in self._run_folders() if self.store.exists(f"{_folder(run)}/plan.json")]

    def plan(self, run: int) -> Plan:
        return Plan.from_json(self.store.read(f"{_folder(run)}/plan.json"))

    def live_plans(self) -> list[Plan]:
        """The plans whose rows count: from the last one that started over."""
        plans = [self.plan(run) for run in self.runs()]
        starts = [i for i, plan in enumerate(plans) if plan.fresh]
        return plans[starts[-1] if starts else 0 :]

    def highest_run(self) -> int:
        """The highest number that a plan or a part has; 0 where there is none."""
        return max([0, *self.runs(), *(run for run, _ in self.parts())])

    def highest_salt(self) -> int | None:
        salts = [self.plan(run).salt for run in self.runs()]
        return max(salts, default=None)

    def create_plan(self, plan: Plan) -> Plan:
        """`plan`, durable, or the one that another run created under this number before."""
        if self.store.create(f"{_folder(plan.run)}/plan.json", plan.to_json()):
            return plan
        return self.plan(plan.run)

    def summary(self, run: int) -> dict[str, Any] | None:
        """What was written when the run ended; None while it is open."""
        try:
            document: dict[str, Any] = json.loads(self.store.read(f"{_folder(run)}/summary.json"))
        except FileNotFoundError:
            return None
        return document

    # --- parts

    def parts(self) -> set[tuple[int, int]]:
        """(run, shard) of every published part."""
        matches = (PART.fullmatch(name) for name in self.store.names())
        return {(int(match[1]), int(match[2])) for match in matches if match}

    def missing(self, plan: Plan) -> list[Shard]:
        """The shards of `plan` that are not published."""
        parts = self.parts()
        return [shard for shard in plan.shards if (plan.run, shard.index) not in parts]

    def is_published(self, plan: Plan, shard: Shard) -> bool:
        return self.store.exists(part_name(plan.run, shard.index))

    def publish(self, plan: Plan, shard: Shard, table: pa.Table, counts: Progress, seconds: float) -> bool:
        """Commit the rows of a shard, unless somebody has done so before: then nothing changes, and False.

        Stopped if the output was started over meanwhile; a shard that its run has given up is not published.
        """
        if self._is_void(plan, shard):
            return False
        name = part_name(plan.run, shard.index)
        created = self.store.create(name, part_bytes(plan, shard, table, counts))
        # A plan that overtook us between the look and the link has listed the parts by now, or will still.
        if created and self._is_void(plan, shard, remove=name):
            return False
        if created:
            mark = {"rows": shard.rows, "errors": counts.error_rows, "seconds": round(seconds, 3)}
            self._write_mark(plan.run, shard.index, mark | {"counts": dataclasses.asdict(counts)})
        return created

    def part_columns(self, name: str, columns: list[str]) -> pa.Table:
        with self.store.open(name) as file:
            return pq.ParquetFile(file).read(columns=columns)

    # --- the course of a run

    def begin(self, plan: Plan) -> None:
        """Everything that must be so before the first new part: no `_SUCCESS`, no void parts, a schema."""
        self.store.remove(SUCCESS)
        self._refuse_if_superseded(plan)
        self._remove_void_parts()
        self._publish_schema(plan.schema)

    def counts(self, plan: Plan) -> Progress:
        """The sum over the published shards of `plan`, from their marks, or their footers where killed."""
        published = [shard for run, shard in self.parts() if run == plan.run]
        return reduce(add, (self._shard_counts(plan.run, shard) for shard in published), Progress())

    def finish(self, plan: Plan, summary: dict[str, Any], success: bool) -> None:
        """Close the run: its summary and, if all is well, `_SUCCESS`."""
        self._refuse_if_superseded(plan)
        self._remove_void_parts()
        self.store.create(f"{_folder(plan.run)}/summary.json", _json(summary))
        if success:
            self.write_success(plan.run)

    def write_success(self, run: int) -> None:
        self.store.replace(SUCCESS, f"{run_name(run)}\n".encode())

    def has_success(self) -> bool:
        return self.store.exists(SUCCESS)

    # --- inside

    def _run_folders(self) -> list[int]:
        return sorted(int(name) for name in self.store.names(RUNS) if RUN.fullmatch(name))

    def _superseding(self, plan: Plan) -> int | None:
        """The later run that started over, if there is one."""
        later = (run for run in self._run_folders() if run > plan.run)
        for run in later:
            if self.store.exists(f"{_folder(run)}/plan.json") and self.plan(run).fresh:
                return run
        return None

    def _refuse_if_superseded(self, plan: Plan) -> None:
        run = self._superseding(plan)
        if run is not None:
            raise Stopped(
                f"{self.store.location}: run {run_name(plan.run)} ends here, because run {run_name(run)} "
                "started over with --fresh; the same command continues that one"
            )

    def _is_void(self, plan: Plan, shard: Shard, remove: str | None = None) -> bool:
        """Is this part not wanted any more? Then take `remove` away again."""
        summary = self.summary(plan.run)
        dropped = summary is not None and shard.index in summary["dropped_shards"]
        superseded = self._superseding(plan) is not None
        if (dropped or superseded) and remove is not None:
            self.store.remove(remove)
        if superseded:
            self._refuse_if_superseded(plan)
        return dropped

    def _remove_void_parts(self) -> None:
        live = self.live_plans()
        if live[0].fresh:
            for run, shard in sorted(self.parts()):
                if run < live[0].run:
                    self.store.remove(part_name(run, shard))

    def _publish_schema(self, schema: pa.Schema) -> None:
        """The part without rows; replaced after the old parts are gone where --fresh changed the columns."""
        data = schema_bytes(schema)
        if self.store.create(SCHEMA_PART, data):
            return
        with self.store.open(SCHEMA_PART) as file:
            same = pq.read_schema(file).equals(schema)
        if not same:
            self.store.replace(SCHEMA_PART, data)

    def _write_mark(self, run: int, shard: int, mark: dict[str, Any]) -> None:
        self.store.create(f"{_folder(run)}/shards/{shard:06d}.json", _json(mark))

    def _shard_counts(self, run: int, shard: int) -> Progress:
        try:
            return counts_from(json.loads(self.store.read(f"{_folder(run)}/shards/{shard:06d}.json"))["counts"])
        except FileNotFoundError:
            with self.store.open(part_name(run, shard)) as file:
                return part_counts(file)


def refuse_unplanned_parts(output: Output) -> None:
    """OutputError if there are parts whose plan is gone: nobody knows what they hold."""
    planned = set(output.runs())
    unknown = sorted(run for run, _ in output.parts() if run not in planned)
    if unknown:
        raise OutputError(
            f"output.path: {output.store.location} holds parts of run {run_name(unknown[0])} but not its plan "
            f"({RUNS}); give another output.path, or --fresh to remove them"
        )


def refuse_foreign_files(output: Output) -> None:
    """OutputError if readers would meet anything that is not a part: pandas reads every visible name.

    Folders of partition values (`key=value`) are ours.
    """
    visible = (name for name in output.store.names() if not name.startswith(("_", ".")))
    foreign = [name for name in visible if name != SCHEMA_PART and not PART.fullmatch(name) and "=" not in name]
    if foreign:
        more = f" and {len(foreign) - 1} more" if len(foreign) > 1 else ""
        raise OutputError(
            f"output.path: {output.store.location} holds {foreign[0]}{more}, which would be read with the answers; "
            "give a folder of its own, or move that elsewhere"
        )


def published(plan: Plan, parts: set[tuple[int, int]]) -> list[Shard]:
    """The shards of `plan` that are among `parts`."""
    return [shard for shard in plan.shards if (plan.run, shard.index) in parts]


def _folder(run: int) -> str:
    return f"{RUNS}/{run_name(run)}"


def _json(document: dict[str, Any]) -> bytes:
    return json.dumps(document, indent=1).encode()
