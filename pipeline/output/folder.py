"""An output folder: its plans, its parts, and what has been said about them (DESIGN section 8).

Parts are the truth: a row counts when its part is there. Marks and summaries only save work and inform.
Knows nothing of documents or models.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from itertools import accumulate
from operator import add
from typing import Any, BinaryIO, Protocol, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.errors import OutputError, Stopped
from pipeline.output.edits import amended, without
from pipeline.output.names import RUNS, SCHEMA_PART, SUCCESS, parsed, part_name, partition_values, run_name
from pipeline.output.pieces import pieces_of
from pipeline.output.places import folders_by_shard, place_of, place_of_cut, superseded_by, taken_apart
from pipeline.output.plan import Cut, Plan, Shard
from pipeline.output.runs import Runs
from pipeline.output.store import Entry, Store, open_store
from pipeline.output.writer import Edit, Footer, counts_from, footer_of, part_bytes, read_footer, schema_bytes
from pipeline.stats import Progress


class OutputSettings(Protocol):
    """What of `config.OutputConfig` decides how parts are written."""

    @property
    def path(self) -> str: ...
    @property
    def single_writer(self) -> bool: ...
    @property
    def compression(self) -> str: ...


class Output(Runs):
    """What is in the folder of `store`. What may change is read from the store each time."""

    def __init__(self, store: Store, compression: str = "zstd") -> None:
        super().__init__(store)
        self.compression = compression
        self._pieces: dict[tuple[int, int], Mapping[str, Sequence[int]]] = {}  # by (run, shard): see `Footer.pieces`
        self._amended: set[tuple[int, int]] = set()  # shards whose rows were seen in the parts that they amend

    @classmethod
    def of(cls, settings: OutputSettings) -> Self:
        return cls(open_store(settings.path, settings.single_writer), settings.compression)

    def highest_run(self) -> int:
        """The highest number that a plan or a part has; 0 where there is none."""
        return max([0, *self.runs(), *(name.run for name in map(parsed, self.store.visible()) if name)])

    # --- what is published

    def parts(self) -> dict[str, Entry]:
        """Every part but the one without rows, by name."""
        return {name: entry for name, entry in self.store.visible().items() if parsed(name)}

    def missing(self, plan: Plan) -> list[Shard]:
        """The shards of `plan` that are not published, or not all of whose pieces are."""
        there = self.published(plan, plan.shards, self.parts())
        return [shard for shard in plan.shards if shard.index not in there]

    def published(self, plan: Plan, shards: Iterable[Shard], parts: Mapping[str, Entry]) -> set[int]:
        """Those of `shards` that are whole, where `parts` are there."""
        return self.published_among(plan, shards, folders_by_shard(parts).get(plan.run, {}), parts)

    def published_among(
        self, plan: Plan, shards: Iterable[Shard], folders: Mapping[int, set[str]], parts: Mapping[str, Entry]
    ) -> set[int]:
        """The same, where it is known in which folders each shard of the run has parts."""
        shards = list(shards)
        plain = [shard.index for shard in shards if shard.amends is None and shard.index in folders]
        if plan.partition_by:
            self._learn_pieces(plan, {index: folders[index] for index in plain})
            plain = [index for index in plain if set(self._pieces[plan.run, index]) <= folders[index]]
        return {*plain, *self._find_amended(plan, [s for s in shards if s.amends is not None], parts)}

    def is_published(self, plan: Plan, shard: Shard) -> bool:
        """Does a look at one part, or at the mark, say that somebody has published this shard meanwhile?

        It spares work, and lists nothing: what is published twice is published once.
        """
        if shard.amends is None and not plan.partition_by:
            return self.store.exists(part_name(plan.run, shard.index))
        mark = self.marks(plan.run, [shard.index]).get(shard.index)
        if mark is None or shard.amends is not None:
            return mark is not None
        return all(self.store.exists(part_name(plan.run, shard.index, folder)) for folder in mark.get("pieces", [""]))

    def pieces(self, plan: Plan, shard: Shard, folders: set[str]) -> Mapping[str, Sequence[int]]:
        """Folder → rows there, by range of the shard; of a shard of a partitioned output with parts in `folders`.

        Empty where neither a part nor a mark is left of it.
        """
        self._learn_pieces(plan, {shard.index: folders})
        return self._pieces.get((plan.run, shard.index), {})

    def part_columns(self, name: str, columns: list[str]) -> pa.Table:
        with self.open_part(name) as file:
            return pq.ParquetFile(file).read(columns=columns)

    @contextmanager
    def open_part(self, name: str) -> Iterator[BinaryIO]:
        """The part for reading; OutputError where it turns out to be none."""
        with self.store.open(name) as file:
            try:
                yield file
            except (ValueError, LookupError, OSError) as error:
                if isinstance(error, OSError) and error.errno is not None:  # the storage's failure, and not Arrow's
                    raise
                reason = str(error).partition("\n")[0].rstrip(".")
                raise OutputError(
                    f"output.path: {self.store.location}: {name} is damaged ({reason}); put it back from a copy, or "
                    "remove it and the next run answers its documents again (under Delta: --fresh to start over)"
                ) from error

    # --- publishing

    def publish(self, plan: Plan, shard: Shard, table: pa.Table, counts: Progress, seconds: float) -> bool:
        """Commit the rows of a shard, unless somebody has done so before: then nothing changes, and False.

        `table` has the columns of `plan.schema`. Stopped if the output was started over meanwhile, or a part that the
        shard amends is not what it was; a shard that its run has given up is not published.
        """
        assert table.num_rows == shard.rows, f"shard {shard.index}: {table.num_rows} rows of {shard.rows}"
        if self._is_void(plan, shard):
            return False
        began = time.monotonic()
        if shard.amends is not None:
            created = self._amend(plan, shard, table.drop_columns(list(plan.partition_by)), counts)
            pieces: Mapping[str, Sequence[int]] = {}
        else:
            created, pieces = self._create(plan, shard, table, counts)
        if created:
            mark: dict[str, Any] = {"rows": shard.rows, "errors": counts.error_rows, "seconds": round(seconds, 3)}
            mark |= {"publishing_seconds": round(time.monotonic() - began, 3), "pieces": pieces}
            self.write_mark(plan.run, shard.index, mark | {"counts": dataclasses.asdict(counts)})
        return created

    def cut(self, plan: Plan) -> list[Cut]:
        """Take out the rows that `plan` cuts, once its shards are there; returns what could not be done.

        That is where a part is not what it was when the plan was made. Can be repeated.
        """
        self.refuse_if_superseded(plan)
        amending = {shard.amends.part: shard for shard in plan.shards if shard.amends is not None}
        return [cut for n, cut in enumerate(plan.cuts) if not self._cut(plan, n, cut, amending.get(cut.part))]

    # --- the course of a run

    def begin(self, plan: Plan) -> None:
        """Everything that must be so before the first new part: no `_SUCCESS`, no void parts, a schema."""
        self.store.remove(SUCCESS)
        self.refuse_if_superseded(plan)
        if plan.format == "delta" and plan.fresh:
            self._delta(plan).clear(plan.run)
        self._remove_void_parts()
        if plan.format == "delta":
            self._delta(plan).create(plan.run)
        else:
            self._publish_schema(plan.part_schema)

    def counts(self, plan: Plan) -> Progress:
        """The sum over the published shards of `plan`, from their marks, or their footers where killed."""
        missing = {shard.index for shard in self.missing(plan)}
        published = [shard for shard in plan.shards if shard.index not in missing]
        marks = self.marks(plan.run, (shard.index for shard in published))
        folders = folders_by_shard(self.parts()).get(plan.run, {})
        counts = (
            counts_from(marks[shard.index]["counts"])
            if shard.index in marks
            else self._footer_counts(plan, shard, folders.get(shard.index, set()))
            for shard in published
        )
        return reduce(add, counts, Progress())

    def finish(self, plan: Plan, summary: dict[str, Any], success: bool) -> None:
        """Close the run: its summary and, if all is well, `_SUCCESS`."""
        self.refuse_if_superseded(plan)
        self._remove_void_parts()
        if plan.format == "delta":
            self._commit(plan, summary)
        if plan.partition_by:
            self._write_missing_marks(plan)
        self.write_summary(plan.run, summary)
        if success and all(later.merges for later in self.later_plans(plan)):  # else another run is under way
            self.write_success(plan.run)

    # --- inside: shards

    def _create(
        self, plan: Plan, shard: Shard, table: pa.Table, counts: Progress
    ) -> tuple[bool, Mapping[str, Sequence[int]]]:
        found = pieces_of(table, plan.partition_by)
        ends = list(accumulate(span.stop - span.start for span in shard.ranges))
        pieces = {
            piece.folder: np.diff(np.searchsorted(piece.rows, ends), prepend=0).tolist()
            for piece in found
            if plan.partition_by
        }
        footer = Footer(plan.run, shard.index, plan.fingerprint, counts, pieces)
        created = False
        for piece in found:
            name = part_name(plan.run, shard.index, piece.folder)
            if self.store.create(name, part_bytes(piece.table, footer, self.compression)):
                # A plan that overtook us between the look and the link has listed the parts by now, or will still.
                if self._is_void(plan, shard, remove=name):
                    return False, pieces
                created = True
        return created, pieces

    def _amend(self, plan: Plan, shard: Shard, answers: pa.Table, counts: Progress) -> bool:
        assert shard.amends is not None
        name = shard.amends.part
        try:
            version = self.store.version(name)
            table, footer = self._read(name)
        except FileNotFoundError:
            raise _changed(self.store, name) from None
        if _has_taken(footer, plan, shard):
            return False
        if version != shard.amends.version:
            if self.summary(plan.run) is not None:  # the run has ended, and a later one was here
                return False
            raise _changed(self.store, name)
        edit = Edit(plan.run, shard.index, counts=counts)
        changed = dataclasses.replace(footer, fingerprint=plan.fingerprint, edit=edit)
        data = part_bytes(amended(table, shard.amends.rows, answers), changed, self.compression)
        if plan.format == "delta":
            return self.store.create(place_of(plan, shard), data)
        if self.store.replace_if(name, data, version):
            return True
        if _has_taken(self._footer(name), plan, shard):
            return False
        raise _changed(self.store, name)

    def _cut(self, plan: Plan, number: int, cut: Cut, amending: Shard | None) -> bool:
        name = cut.part if amending is None else place_of(plan, amending)
        result = place_of_cut(plan, number)
        if plan.format == "delta" and self.store.exists(result):
            return True
        version = self.store.version(name)
        try:
            table, footer = self._read(name)
        except FileNotFoundError:
            return False
        if version is None:  # it came at this moment
            return self._cut(plan, number, cut, amending)
        edit = footer.edit if footer.edit is not None and footer.edit.run == plan.run else None
        if edit is not None and edit.cut:
            return True
        if version != cut.version and edit is None:
            return False
        left = dataclasses.replace(footer, edit=dataclasses.replace(edit or Edit(plan.run), cut=True))
        data = part_bytes(without(table, cut.rows), left, self.compression)
        if plan.format == "delta":
            self.store.create(result, data)
            return True
        return self.store.replace_if(name, data, version) or self._cut(plan, number, cut, amending)

    def _read(self, name: str) -> tuple[pa.Table, Footer]:
        with self.open_part(name) as file:
            parquet = pq.ParquetFile(file)
            return parquet.read(), footer_of(parquet.metadata.metadata)

    def _footer(self, name: str) -> Footer:
        with self.open_part(name) as file:
            return read_footer(file)

    def _write_missing_marks(self, plan: Plan) -> None:
        """Of shards whose driver was killed before the mark: when their parts are merged, nothing else says what was in
        which folder."""
        folders = folders_by_shard(self.parts()).get(plan.run, {})
        plain = [shard for shard in plan.shards if shard.amends is None and shard.index in folders]
        for shard in self.unmarked(plan.run, plain):
            try:
                footer = self._footer(part_name(plan.run, shard.index, min(folders[shard.index])))
            except FileNotFoundError:  # another driver closed this run, and a later one has merged the part
                continue
            mark = {"rows": shard.rows, "errors": footer.counts.error_rows, "pieces": footer.pieces}
            self.write_mark(plan.run, shard.index, mark | {"counts": dataclasses.asdict(footer.counts)})

    def _footer_counts(self, plan: Plan, shard: Shard, folders: set[str]) -> Progress:
        if shard.amends is None:
            return self._footer(part_name(plan.run, shard.index, min(folders))).counts
        edit = self._footer(place_of(plan, shard)).edit
        assert edit is not None, f"{shard.amends.part} was amended, and does not say so"
        return edit.counts

    def _learn_pieces(self, plan: Plan, folders: Mapping[int, set[str]]) -> None:
        """What was published of which shard, from marks or, where a run was killed before one, a part's footer."""
        unknown = [shard for shard in folders if (plan.run, shard) not in self._pieces]
        marks = self.marks(plan.run, unknown)
        for shard in unknown:
            if shard in marks and "pieces" in marks[shard]:
                self._pieces[plan.run, shard] = marks[shard]["pieces"]
            elif folders[shard]:
                self._pieces[plan.run, shard] = self._footer(part_name(plan.run, shard, min(folders[shard]))).pieces

    def _find_amended(self, plan: Plan, shards: Sequence[Shard], parts: Mapping[str, Entry]) -> set[int]:
        """Those whose rows are in the parts that they amend, as marks say or the parts themselves."""
        if plan.format == "delta":
            return {shard.index for shard in shards if place_of(plan, shard) in parts}
        unknown = [s for s in shards if (plan.run, s.index) not in self._amended and not _is_untouched(s, parts)]
        marks = self.marks(plan.run, (shard.index for shard in unknown))
        for shard in unknown:
            if shard.index in marks or self._has_amended(plan, shard):
                self._amended.add((plan.run, shard.index))
        return {shard.index for shard in shards if (plan.run, shard.index) in self._amended}

    def _has_amended(self, plan: Plan, shard: Shard) -> bool:
        assert shard.amends is not None
        try:
            return _has_taken(self._footer(shard.amends.part), plan, shard)
        except FileNotFoundError:
            return False

    # --- inside: the folder

    def _is_void(self, plan: Plan, shard: Shard, remove: str | None = None) -> bool:
        """Is this shard not wanted any more? Then take the part `remove` away again."""
        later = self.later_plans(plan)
        superseded = any(other.fresh for other in later)
        merged = {source for other in later for merge in other.merges for source in merge.sources}
        dropped = shard.index in self.given_up(plan.run)
        consumed = any(taken_apart(source)[1:] == (plan.run, shard.index) for source in merged)
        if (dropped or superseded or consumed) and remove is not None:
            self.store.remove(remove)
        if superseded:
            self.refuse_if_superseded(plan)
        return dropped or consumed

    def _remove_void_parts(self) -> None:
        live = self.live_plans()
        if live[0].fresh:
            for name in self.parts():
                part = parsed(name)
                if part is not None and part.run < live[0].run:
                    self.store.remove(name)

    def _publish_schema(self, schema: pa.Schema) -> None:
        """The part without rows; replaced after the old parts are gone where --fresh changed the columns."""
        data = schema_bytes(schema)
        if self.store.create(SCHEMA_PART, data):
            return
        with self.store.open(SCHEMA_PART) as file:
            same = pq.read_schema(file).equals(schema)
        if not same:
            self.store.replace(SCHEMA_PART, data)

    # --- inside: Delta

    def _delta(self, plan: Plan) -> Any:
        from pipeline.output.delta import DeltaLog

        return DeltaLog(self.store.location, plan.schema, plan.partition_by)

    def _commit(self, plan: Plan, summary: Mapping[str, Any]) -> None:
        """Everything that `plan` published and did not give up, and nothing that it replaced, as one transaction."""
        from pipeline.output.delta import AddedPart, RemovedPart

        log = self._delta(plan)
        if log.committed(plan.run):
            return
        parts = self.parts()
        gone = superseded_by(plan, summary)
        dropped = set(summary["dropped_shards"])
        own = [
            name
            for name in parts
            if _run_of(name) == plan.run and taken_apart(name).shard not in dropped and name not in gone
        ]
        added = [
            AddedPart(name, parts[name].size, self._rows(name), _partition(name), int(time.time() * 1000))
            for name in own
        ]
        # Parts that somebody removed are in nobody's way any more either: their documents were planned anew.
        lost = {name: size for name, size in log.shown().items() if parsed(name) and name not in parts}
        replaced = {name: parts[name].size for name in gone if name in parts and _run_of(name) != plan.run}
        removed = [RemovedPart(name, size, _partition(name)) for name, size in sorted((lost | replaced).items())]
        log.commit(plan.run, added, removed, fresh=plan.fresh)

    def _rows(self, name: str) -> int:
        with self.open_part(name) as file:
            return int(pq.read_metadata(file).num_rows)


def refuse_unplanned_parts(output: Output) -> None:
    """OutputError if there are parts whose plan is gone: nobody knows what they hold."""
    planned = set(output.runs())
    unknown = sorted(part.run for part in map(parsed, output.parts()) if part is not None and part.run not in planned)
    if unknown:
        raise OutputError(
            f"output.path: {output.store.location} holds parts of run {run_name(unknown[0])} but not its plan "
            f"({RUNS}); give another output.path, or --fresh to remove them"
        )


def refuse_foreign_files(output: Output) -> None:
    """OutputError if readers would meet anything that is not a part: pandas reads every visible name."""
    foreign = [name for name in output.store.visible() if name != SCHEMA_PART and parsed(name) is None]
    if foreign:
        more = f" and {len(foreign) - 1} more" if len(foreign) > 1 else ""
        raise OutputError(
            f"output.path: {output.store.location} holds {foreign[0]}{more}, which would be read with the answers; "
            "give a folder of its own, or move that elsewhere"
        )


def _run_of(name: str) -> int:
    return taken_apart(name).run


def _partition(name: str) -> Mapping[str, str | None]:
    return partition_values(taken_apart(name).folder)


def _is_untouched(shard: Shard, parts: Mapping[str, Entry]) -> bool:
    """Is the part that it amends as it was when the plan was made?"""
    assert shard.amends is not None
    entry = parts.get(shard.amends.part)
    return entry is not None and entry.version == shard.amends.version


def _has_taken(footer: Footer, plan: Plan, shard: Shard) -> bool:
    edit = footer.edit
    return edit is not None and (edit.run, edit.shard) == (plan.run, shard.index)


def _changed(store: Store, name: str) -> Stopped:
    return Stopped(
        f"{store.location}: {name} is not what it was when the run was planned; run the same command again to plan "
        "its rows anew"
    )
