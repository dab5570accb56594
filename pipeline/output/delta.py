"""The Delta table over an output: a log of its parts, which stay where they are. Knows nothing of plans.

One transaction per run names the parts that the run adds and removes, and the run itself as an application
transaction ("nightdesk", run). Delta refuses the second of two commits that name the same application and began at
the same version, so a run is committed once, however many drivers try, and whoever is killed between. A path is the
identity of a part: adding one that the table holds already replaces its size and row count, as a part replaced in place
needs it.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Schema, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.transaction import AddAction, RemoveAction

from pipeline.errors import OutputError, StoreError
from pipeline.output.delta_storage import Storage, said
from pipeline.output.delta_types import declared, refuse_undeltable

__all__ = ["AddedPart", "DeltaLog", "RemovedPart", "refuse_undeltable"]

COMMITS = "nightdesk"  # application whose version is the last run that was committed
CLEARINGS = "nightdesk.cleared"  # … and the last run that emptied the table before it began
ATTEMPTS = 8  # against writers of other runs, or of other programs
FIRST_PAUSE_SECONDS = 0.05
ONCE = CommitProperties(max_commit_retries=0)  # what was overtaken is looked at anew, never put on top


@dataclass(frozen=True, slots=True)
class AddedPart:
    """A published part. `partition` has every partition column, dates as 2024-05-17, times as 2024-05-17 12:00:00."""

    name: str  # relative to the output, as the store knows it
    size: int  # bytes
    rows: int
    partition: Mapping[str, str | None]
    modified_ms: int


@dataclass(frozen=True, slots=True)
class RemovedPart:
    """A part whose rows the table no longer shows; the file itself is the caller's affair."""

    name: str
    size: int
    partition: Mapping[str, str | None]


class DeltaLog:
    """The log of one output. `schema` includes the partition columns, which the parts themselves do not hold."""

    def __init__(self, location: str, schema: pa.Schema, partition_by: Sequence[str]) -> None:
        """OutputError for a column that Delta can't hold, and for storage that it can't reach."""
        refuse_undeltable(schema)
        self.location = location
        self.partition_by = list(partition_by)
        self._columns = Schema.from_arrow(pa.schema([pa.field(f.name, declared(f.type)) for f in schema]))
        self._storage = Storage(location)
        self._conflict: CommitFailedError | None = None  # the last one

    def create(self, run: int) -> None:
        """The table, without rows, unless it is there; to be called when `run` begins.

        OutputError if the one that is there has other columns, or was left by a later run.
        """
        with self._failures("creating the table") as options:
            table = self._table(options) or self._created(options)
            self._refuse_other_columns(table)
            self._refuse_later_run(table, run)

    def committed(self, run: int) -> bool:
        """Whether the table shows what this run, or a later one, left.

        Runs are committed in the order of their numbers: one that a later run has overtaken has nothing to say.
        """
        with self._failures("reading the log") as options:
            table = self._table(options)
            return table is not None and _last(table, COMMITS) >= run

    def shown(self) -> dict[str, int]:
        """The files that the table shows, with their bytes."""
        with self._failures("reading the log") as options:
            table = self._table(options)
            return {} if table is None else {name: size for name, (size, *_) in _held(table).items()}

    def clear(self, run: int) -> None:
        """Show no rows from here on, because `run` starts over: to be called before the old parts are removed.

        The table takes the columns of this log. Done once per run, and not after its commit.
        """
        with self._failures("emptying the table") as options:
            for _ in _attempts():
                table = self._table(options)
                if table is None or max(_last(table, CLEARINGS), _last(table, COMMITS)) >= run:
                    return
                if self._has_our_columns(table):
                    actions = [_removal(name, size) for name, (size, *_) in _held(table).items()]
                    if self._transaction(table, actions, CLEARINGS, run):
                        return
                    continue
                try:
                    self._created(options, "overwrite", _named(CLEARINGS, run))
                except CommitFailedError as error:
                    self._conflict = error
                    continue
                return
            raise self._contended()

    def commit(self, run: int, adds: Sequence[AddedPart], removes: Sequence[RemovedPart], fresh: bool) -> None:
        """Add and remove these parts in one transaction, unless `run` is committed: then nothing changes.

        A part in both is one that was replaced. With `fresh` the table holds exactly `adds` afterwards, under the
        columns of this log; parts that it held before as they are now stay without a word in the log.
        """
        added = {part.name for part in adds}
        assert len(added) == len(adds), f"run {run}: a part is added twice"
        assert all(set(part.partition) == set(self.partition_by) for part in adds), f"run {run}: {self.partition_by}"
        with self._failures(f"committing run {run}") as options:
            for _ in _attempts():
                table = self._table(options) or self._created(options)
                self._refuse_later_run(table, run)
                if _last(table, COMMITS) == run:
                    return
                if fresh and not self._has_our_columns(table):
                    self.clear(run)
                    continue
                self._refuse_other_columns(table)
                held = _held(table) if fresh else {}
                new = [_addition(part) for part in adds if held.get(part.name) != _trace(part)]
                gone = [_removal(name, size) for name, (size, *_) in held.items() if name not in added]
                gone += [_removal(p.name, p.size, p.partition) for p in removes if p.name not in added | held.keys()]
                if self._transaction(table, [*new, *gone], COMMITS, run):
                    return
            raise self._contended()

    def _transaction(
        self, table: DeltaTable, actions: Sequence[AddAction | RemoveAction], application: str, run: int
    ) -> bool:
        """Whether it was committed. It was not if somebody else committed what it can't stand beside."""
        try:
            table.create_write_transaction(
                list(actions), "append", self._columns, self.partition_by, commit_properties=_named(application, run)
            )
        except CommitFailedError as error:
            self._conflict = error
            return False
        if self._storage.is_local:
            _sync(self._folder, table.version())
        return True

    # --- the table

    @property
    def _folder(self) -> Path:
        return Path(self.location) / "_delta_log"

    def _table(self, options: dict[str, str] | None) -> DeltaTable | None:
        """The newest version; None where there is no table."""
        if self._storage.is_local and not self._folder.is_dir():
            return None
        try:
            return DeltaTable(self.location, storage_options=options)
        except TableNotFoundError:
            return None

    def _created(
        self, options: dict[str, str] | None, mode: Any = "error", properties: CommitProperties = ONCE
    ) -> DeltaTable:
        """A new table, or the one that another driver created at the same moment."""
        try:
            return DeltaTable.create(
                self.location,
                self._columns,
                mode=mode,
                partition_by=self.partition_by,
                storage_options=options,
                commit_properties=properties,
            )
        except DeltaError:
            table = self._table(options) if mode == "error" else None
            if table is None:
                raise
            return table

    def _has_our_columns(self, table: DeltaTable) -> bool:
        return table.schema() == self._columns and table.metadata().partition_columns == self.partition_by

    def _refuse_other_columns(self, table: DeltaTable) -> None:
        if not self._has_our_columns(table):
            raise OutputError(
                f"output.path: the Delta table in {self.location} has other columns, types or partitions than this "
                "job writes; give another output.path, or --fresh to start over"
            )

    def _refuse_later_run(self, table: DeltaTable, run: int) -> None:
        """A log that is ahead belongs to plans that are gone: to take `run` for committed would lose its rows."""
        last = _last(table, COMMITS)
        if last > run:
            raise OutputError(
                f"output.path: the Delta log in {self.location} ends with run {last}, which is later than run {run}; "
                "remove its _delta_log, or give another output.path"
            )

    # --- failures

    @contextmanager
    def _failures(self, doing: str) -> Iterator[dict[str, str] | None]:
        """Hands out fresh storage options, and turns what Delta raises into our errors."""
        options = self._storage.options()
        try:
            yield options
        except DeltaError as error:
            raise OutputError(
                f"output.path: {doing} in {self.location} failed, because its Delta log is damaged, or of a kind that "
                f"this version can't write ({said(error, options)}); give another output.path"
            ) from None
        except OSError as error:
            raise StoreError(
                f"{self.location}: {doing} failed ({said(error, options)}); "
                "what is published stays, mend the storage and run the same command again"
            ) from None

    def _contended(self) -> StoreError:
        return StoreError(
            f"{self.location}: {ATTEMPTS} commits to the Delta log failed beside those of other writers "
            f"({said(self._conflict, None)}); run the same command again"
        )


# --- actions of the log


def _addition(part: AddedPart) -> AddAction:
    """delta-rs itself encodes the path for the log."""
    stats = json.dumps({"numRecords": part.rows})
    return AddAction(part.name, part.size, part.partition, part.modified_ms, True, stats)


def _removal(name: str, size: int, partition: Mapping[str, str | None] | None = None) -> RemoveAction:
    values = None if partition is None else dict(partition)
    return RemoveAction(name, True, int(time.time() * 1000), size, values)


def _held(table: DeltaTable) -> dict[str, tuple[int, ...]]:
    """The parts that the table shows, with their traces. Paths come as they are in the log, encoded."""
    columns = pa.table(table.get_add_actions())
    traces = (columns[name].to_pylist() for name in ("size_bytes", "num_records", "modification_time"))
    return dict(zip(map(unquote, columns["path"].to_pylist()), zip(*traces, strict=True), strict=True))


def _trace(part: AddedPart) -> tuple[int, ...]:
    """What tells a part from another one under its name."""
    return part.size, part.rows, part.modified_ms


def _named(application: str, run: int) -> CommitProperties:
    return CommitProperties(max_commit_retries=0, app_transactions=[Transaction(application, run)])


def _last(table: DeltaTable, application: str) -> int:
    """The run that `application` named last; 0 if it never did."""
    return table.transaction_version(application) or 0


def _attempts() -> Iterator[int]:
    """Numbers of attempts, with a growing pause of random length before all but the first."""
    for attempt in range(ATTEMPTS):
        if attempt:
            time.sleep(random.uniform(0.5, 1.0) * FIRST_PAUSE_SECONDS * 2 ** (attempt - 1))
        yield attempt


def _sync(log: Path, version: int) -> None:
    """Make the commits after `version` durable: delta-rs leaves that to the operating system."""
    commits = [path for path in log.glob("*.json") if path.stem.isdecimal() and int(path.stem) > version]
    for path in (*commits, log):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
