"""What a run has to do: the corpus compared with the output, as a plan.

Files unchanged in path, size and etag are not read. Where others hold documents that the output has, or should have,
they are compared by (id, doc_hash): new ones get parts of their own, changed ones take the place of what they were, in
its part, and those that are gone are cut out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pipeline.config import JobConfig, TaskConfig
from pipeline.corpus.listing import InputFile
from pipeline.corpus.readers import Corpus, RowIndex, RowRange
from pipeline.errors import ConfigError, OutputError
from pipeline.fingerprint import differences, digest
from pipeline.output.changes import Comparison, Found, Pairs, Records, joined
from pipeline.output.failures import failures_of
from pipeline.output.folder import Output
from pipeline.output.ledger import HeldPart, Ledger, same_content
from pipeline.output.names import parsed
from pipeline.output.pieces import folders_of, refuse_unpartitionable
from pipeline.output.plan import Amendment, Cut, Plan, PlannedFile, Rehoming, Shard, Span, cut, merged, spans_of
from pipeline.output.schema import output_schema
from pipeline.prompts.templates import template_fields

NAMED_KEYS = 6  # that a message names
_NO_ROWS = np.empty(0, np.int64)
MOST_DELETED = 0.1  # share of the published rows that a run removes without being told that it may


@dataclass(frozen=True)
class Ask:
    """What a command wants answered, apart from the job file: what that resolved to, and what narrows or widens it."""

    answers: Mapping[str, Any]  # `fingerprint.answer_values`
    context: int
    limit: int | None
    fresh: bool
    reanswer: bool = False  # out-of-date answers are to be replaced
    retry_failed: bool = False  # rows without an answer are to be asked again
    allow_deletions: bool = False


def prompt_fields(config: JobConfig) -> tuple[str, ...]:
    """The input columns that prompts name, each once."""
    templates = [text for task in config.tasks for text in (task.prompt, task.system) if text is not None]
    return tuple(dict.fromkeys(name for text in templates for name in template_fields(text)))


def column_values(config: JobConfig) -> dict[str, Any]:
    """What decides the columns beside the answers, and how the output is laid out, by key."""
    return {
        "input.id": config.input.id,
        "input.keep": list(config.input.keep),
        "output.partition_by": list(config.output.partition_by),
        "output.format": config.output.format,
    }


def refuse_foreign(
    plan: Plan, config: JobConfig, answers: Mapping[str, Any], where: str, reanswer: bool = False
) -> None:
    """OutputError, naming keys, if the output at `where` was planned by a job that answers otherwise.

    With `reanswer` only if it has other columns.
    """
    columns = {"output.format": "parquet"} | dict(plan.columns)
    found = differences(columns, column_values(config))
    if reanswer and not found:
        schema = output_schema(config, plan.kept_schema)
        if not schema.equals(plan.schema):
            other = sorted(set(schema.names) ^ set(plan.schema.names)) or ["types"]
            raise OutputError(
                f"output.path: {where} has other columns than this job's answers ({', '.join(other[:NAMED_KEYS])}), so "
                "--reanswer cannot replace them in their parts; give another output.path, or --fresh to start over"
            )
    elif not reanswer:
        found += differences(plan.answers, answers)
    if found:
        more = f"; and {len(found) - NAMED_KEYS} more keys" if len(found) > NAMED_KEYS else ""
        remedy = "give another output.path, or --fresh to start over"
        if len(found) == len(differences(plan.answers, answers)) and not reanswer:
            remedy = "give another output.path, --reanswer to replace the old answers, or --fresh to start over"
        raise OutputError(
            f"output.path: {where} was made by a job that differs: {'; '.join(found[:NAMED_KEYS])}{more}; {remedy}"
        )


def make_plan(
    config: JobConfig, output: Output, run: int, live: Sequence[Plan], files: Sequence[InputFile], ask: Ask
) -> Plan | None:
    """Plan `run` for everything in `files` that `live` plans have not published; None if there is nothing.

    `run` must have been chosen before `live` was read: then whoever plans at the same time chooses it too, and
    only one of both plans comes to be.
    """
    ledger = Ledger(output, live)
    survey = Survey(config, output, ledger, files, ask)
    work = survey.work()
    if not work.wanted and not work.amended and not work.cuts:
        return None
    survey.refuse_many_deletions(work)
    shards = cut(work.wanted, config.output.rows_per_shard, survey.range)
    return Plan(
        run=run,
        fresh=ask.fresh,
        salt=_salt(output, live, again=bool(work.amended)),
        answers=ask.answers,
        columns=column_values(config),
        filters={
            "where": config.input.where,
            "since": config.input.since,
            "date_column": config.input.date_column,
            "limit": ask.limit,
        },
        context=ask.context,
        schema=live[-1].schema if live else output_schema(config, survey.kept_schema),
        files=tuple(survey.planned),
        shards=(*shards, *survey.amending_shards(work, len(shards))),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        cuts=work.cuts,
        rehomed=work.rehomed,
    )


@dataclass
class Work:
    """What there is to do. Files are places in the plan."""

    wanted: Sequence[tuple[int, Span]] = ()  # rows for new parts
    amended: Sequence[tuple[HeldPart, Records, Records]] = ()  # a part, rows of it, and the rows that replace them
    cuts: tuple[Cut, ...] = ()
    rehomed: tuple[Rehoming, ...] = ()
    deleted: int = 0  # documents that are not in the input any more; rows that could not be read are none
    names: Sequence[str] = ()  # ids of some of them


class Survey:
    """A walk over the input files, in their order, that notes which of their rows are wanted.

    Where rows are compared, every file that was looked at is in the plan, under its place among these.
    """

    def __init__(
        self, config: JobConfig, output: Output, ledger: Ledger, files: Sequence[InputFile], ask: Ask
    ) -> None:
        self.config = config
        self.output = output
        self.ledger = ledger
        self.files = files
        self.ask = ask
        self.redo = self._parts_to_redo()
        self.suspects = self._paths_to_compare()
        self.looked_at = [file for file in files if self._is_read(file)]
        kept = ledger.plans[-1].kept_schema if ledger.plans else None
        self.corpus = Corpus(config.source, prompt_fields(config), self.looked_at, kept)
        self.kept_schema = self.corpus.kept_schema  # now, because it says which columns are missing
        refuse_unpartitionable(self.kept_schema, config.output.partition_by)
        if config.output.format == "delta":
            from pipeline.output.delta_types import refuse_undeltable

            refuse_undeltable(output_schema(config, self.kept_schema))
        self.planned: list[PlannedFile] = []
        self._indexes: list[RowIndex] = []  # of `planned`
        self._place = {file.path: place for place, file in enumerate(self.looked_at)}
        self._suspect = np.array([path in self.suspects for path in ledger.paths], dtype=bool)
        # Files are numbered as the comparison's other side numbers them; those that are gone follow.
        self._numbers = np.array(
            [self._place.get(path, len(self._place) + n) for path, n in ledger.paths.items()], np.int32
        )

    def work(self) -> Work:
        """Look at everything once."""
        held = self.ledger.from_paths(self.suspects)
        return self._compared(held) if held else self._uncompared()

    def range(self, file: int, start: int, stop: int) -> RowRange:
        """The rows of a planned file as a range that a reader can enter in the middle."""
        return self._indexes[file].range(file, start, stop)

    # --- what must be read

    def _parts_to_redo(self) -> dict[str, npt.NDArray[np.bool_]]:
        """By part, which of its rows are wanted anew whatever their documents are now; parts with any."""
        found: dict[str, npt.NDArray[np.bool_]] = {}
        fingerprint = digest(self.ask.answers)
        stale = np.array([plan.fingerprint != fingerprint for plan in self.ledger.plans], dtype=bool)
        failing = _failing_plans(self.output, self.ledger) if self.ask.retry_failed else set()
        for name, part in self.ledger.parts.items():
            redo = None
            if stale.any() and any(stale[place] for place in part.plans):
                redo = stale[part.sources().plans]
            if part.plans & failing:
                failed = self._failed_rows(name)
                redo = failed if redo is None else redo | failed
            if redo is not None and redo.any():
                found[name] = redo
        return found

    def _failed_rows(self, part: str) -> npt.NDArray[np.bool_]:
        """Rows with a task that has no answer. A row that could not be read would read the same again."""
        columns = [f"{task.name}_error" for task in self.config.tasks]
        table = self.output.part_columns(part, [*columns, "error"])
        failed = np.zeros(table.num_rows, dtype=bool)
        for task, column in zip(self.config.tasks, columns, strict=True):
            values = table.column(column)
            if task.n > 1:
                failed |= np.array([any(e is not None for e in cell or ()) for cell in values.to_pylist()], dtype=bool)
            else:
                failed |= values.is_valid().to_numpy()
        return failed & table.column("error").is_null().to_numpy()

    def _paths_to_compare(self) -> set[str]:
        """Files of which the output may hold rows that the input does not have like that."""
        listed = {file.path: file for file in self.files}
        paths = {
            path
            for path, entry in self.ledger.files.items()
            if entry.unsettled or path not in listed or not same_content(entry.file, listed[path])
        }
        numbers = {
            int(number)
            for name, redo in self.redo.items()
            for number in np.unique(self.ledger.parts[name].sources().paths[redo])
        }
        return paths | {path for path, number in self.ledger.paths.items() if number in numbers}

    def _is_read(self, file: InputFile) -> bool:
        entry = self.ledger.files.get(file.path)
        return entry is None or file.path in self.suspects or bool(entry.missing)

    # --- without anything to compare with

    def _uncompared(self) -> Work:
        """No published row is in question: every row that no part has is new, and nothing is read but for counting."""
        wanted: list[tuple[int, Span]] = []
        before = 0
        for file in self.files:
            room = self._room(before)
            entry = self.ledger.files.get(file.path)
            if entry is not None and same_content(entry.file, file):
                before += entry.rows
                if _within(entry.missing, room):
                    wanted += self._note(file, self.corpus.count_rows(self._place[file.path]), entry.covered, room)
            elif entry is not None or room != 0:
                index = self.corpus.count_rows(self._place[file.path])
                before += index.rows
                wanted += self._note(file, index, [], room)
        return Work(wanted)

    def _room(self, before: int) -> int | None:
        return None if self.ask.limit is None else max(self.ask.limit - before, 0)

    def _note(
        self, file: InputFile, index: RowIndex, known: Iterable[Span], room: int | None
    ) -> list[tuple[int, Span]]:
        planned = PlannedFile(file, index.rows, tuple(merged(known)))
        self.planned.append(planned)
        self._indexes.append(index)
        return [(len(self.planned) - 1, span) for span in _within(planned.missing, room)]

    # --- a comparison

    def _compared(self, held: Sequence[HeldPart]) -> Work:
        folders: dict[str, int] = {}
        with Comparison() as comparison:
            indexes = [self._add_file(comparison, place, file, folders) for place, file in enumerate(self.looked_at)]
            settled = {place for place, file in enumerate(self.looked_at) if self._is_settled(file)}
            for number, part in enumerate(held):
                self._add_part(comparison, number, part, folders)
            known = {place: np.zeros(index.rows, dtype=bool) for place, index in enumerate(indexes)}
            found = self._narrowed(_gathered(comparison.found(), known), indexes, known)
        in_place, elsewhere = found.changed.split(found.changed.held["folder"] != found.changed.current["folder"])
        for records in (found.redone.current, in_place.current):
            _mark(known, records)
        moved = dict(_by(elsewhere.current, "path"))
        wanted: list[tuple[int, Span]] = []
        before = 0
        for file in self.files:
            room = self._room(before)
            if file.path not in self._place:
                before += self.ledger.files[file.path].rows
                continue
            place = self._place[file.path]
            before += indexes[place].rows
            if place in settled:
                wanted += self._note(file, indexes[place], self.ledger.files[file.path].covered, room)
                continue
            spans = spans_of(np.flatnonzero(known[place]).tolist())
            moved_here = moved[place]["row"] if place in moved else _NO_ROWS
            wanted += self._note_compared(file, indexes[place], spans, room, moved_here)
        gone = np.concatenate([found.gone, elsewhere.held])
        deleted = found.gone[~found.gone["unreadable"]]
        return Work(
            wanted=wanted,
            amended=self._amended(held, joined([in_place, found.redone])),
            cuts=self._cuts(held, gone),
            rehomed=self._rehomed(held, found.same),
            deleted=len(deleted),
            names=self._names(held, deleted),
        )

    def _add_file(self, comparison: Comparison, place: int, file: InputFile, folders: dict[str, int]) -> RowIndex:
        index = self.corpus.count_rows(place)
        if self._is_settled(file):
            return index
        row = 0
        for batch in self.corpus.read([RowRange(place, 0, index.rows)]):
            count = len(batch.documents)
            ids = pa.array([document.id for document in batch.documents], pa.string())
            hashes = pa.array([document.doc_hash for document in batch.documents], pa.string())
            columns = [batch.kept.column(name) for name in self.config.output.partition_by]
            named = folders_of(columns, self.config.output.partition_by) if columns else [""] * count
            numbers = np.array([folders.setdefault(name, len(folders)) for name in named], np.int32)
            comparison.add_current(ids, hashes, place, np.arange(row, row + count), numbers)
            row += count
        return index

    def _narrowed(
        self, found: Found, indexes: Sequence[RowIndex], known: Mapping[int, npt.NDArray[np.bool_]]
    ) -> Found:
        """Without the answers that are wanted anew beyond the limit: these documents are unchanged, and stay."""
        if self.ask.limit is None:
            return found
        rooms = np.zeros(len(self.looked_at), np.int64)
        before = 0
        for file in self.files:
            place = self._place.get(file.path)
            if place is not None:
                rooms[place] = max(self.ask.limit - before, 0)
            before += self.ledger.files[file.path].rows if place is None else indexes[place].rows
        current = found.redone.current
        left, redone = found.redone.split(current["row"] < rooms[current["path"]])
        _mark(known, left.current)
        return replace(found, same=joined([found.same, _rehomed(left)]), redone=redone)

    def _is_settled(self, file: InputFile) -> bool:
        """Is it known which of its rows are answered? Then it is looked at for the others alone."""
        return file.path in self.ledger.files and file.path not in self.suspects

    def _add_part(self, comparison: Comparison, number: int, part: HeldPart, folders: dict[str, int]) -> None:
        sources = part.sources()
        table = self.output.part_columns(part.name, [self.config.input.id_column, "doc_hash", "error"])
        if table.num_rows != len(sources.paths):
            raise OutputError(
                f"output.path: {part.name} has {table.num_rows} rows, and not the {len(sources.paths)} that its plans "
                "gave it; put back what was changed, or --fresh to start over"
            )
        rows = np.flatnonzero(self._suspect[sources.paths])
        redo = self.redo.get(part.name)
        name = parsed(part.name)
        assert name is not None, part.name
        kept = table.take(pa.array(rows))
        comparison.add_held(
            kept.column(0),
            kept.column(1),
            number,
            folders.setdefault(name.folder, len(folders)),
            rows,
            self._numbers[sources.paths[rows]],
            np.zeros(len(rows), dtype=bool) if redo is None else redo[rows],
            kept.column(2).is_valid().to_numpy(),
        )

    def _note_compared(
        self,
        file: InputFile,
        index: RowIndex,
        answered: Sequence[Span],
        room: int | None,
        moved_here: npt.NDArray[np.int64],
    ) -> list[tuple[int, Span]]:
        """New rows within the limit, and those whose old rows are cut from another folder, limit or not."""
        new = self._note(file, index, answered, room)
        if room is None or not len(moved_here):
            return new
        place = len(self.planned) - 1
        wanted = merged([*(span for _, span in new), *spans_of(sorted(moved_here.tolist()))])
        return [(place, span) for span in wanted]

    def _amended(self, held: Sequence[HeldPart], both: Pairs) -> list[tuple[HeldPart, Records, Records]]:
        order = np.lexsort([both.held["row"], both.held["part"]])
        return [
            (held[number], both.held[order[places]], both.current[order[places]])
            for number, places in _runs(both.held["part"][order])
        ]

    def _cuts(self, held: Sequence[HeldPart], gone: Records) -> tuple[Cut, ...]:
        found = []
        for number, rows in _by(gone, "part"):
            name = held[number].name
            found.append(Cut(name, self.ledger.version(name), spans_of(np.sort(rows["row"]).tolist())))
        return tuple(found)

    def _rehomed(self, held: Sequence[HeldPart], same: Pairs) -> tuple[Rehoming, ...]:
        """What is unchanged, but in another file than before."""
        moved, files = same.held, same.current["path"]
        found = []
        order = np.lexsort([moved["row"], files, moved["part"]])
        for number, places in _runs(moved["part"][order]):
            of_part = order[places]
            for place, rows in _runs(files[of_part]):
                spans = spans_of(moved["row"][of_part[rows]].tolist())
                found.append(Rehoming(held[number].name, spans, place))
        return tuple(found)

    def _names(self, held: Sequence[HeldPart], gone: Records) -> list[str]:
        named = []
        for record in gone[np.lexsort([gone["row"], gone["part"]])[:3]]:
            ids = self.output.part_columns(held[int(record["part"])].name, [self.config.input.id_column]).column(0)
            named.append(str(ids[int(record["row"])].as_py()))
        return named

    # --- what it comes to

    def amending_shards(self, work: Work, first: int) -> list[Shard]:
        """One for each part with rows that others replace, numbered from `first`."""
        shards = []
        for index, (part, old, new) in enumerate(work.amended, start=first):
            ranges: list[tuple[int, int, int]] = []
            for record in new:
                place, row = int(record["path"]), int(record["row"])
                if ranges and ranges[-1][0] == place and ranges[-1][2] == row:
                    ranges[-1] = (place, ranges[-1][1], row + 1)
                else:
                    ranges.append((place, row, row + 1))
            amends = Amendment(part.name, self.ledger.version(part.name), spans_of(old["row"].tolist()))
            shards.append(Shard(index, tuple(self.range(*numbers) for numbers in ranges), amends))
        return shards

    def refuse_many_deletions(self, work: Work) -> None:
        """OutputError if so many documents are gone that the input is more likely incomplete than pruned."""
        if self.ask.allow_deletions or work.deleted <= MOST_DELETED * (self.ledger.rows - self._most_unreadable()):
            return
        answered = self.ledger.rows - self._unreadable()
        if work.deleted > MOST_DELETED * answered:
            named = ", ".join(work.names)
            more = f" and {work.deleted - len(work.names)} more" if work.deleted > len(work.names) else ""
            raise OutputError(
                f"input.path: {work.deleted} of {answered} answered documents are not in the input any more "
                f"({named}{more}), more than a tenth; is it complete? --allow-deletions removes their rows"
            )

    def _most_unreadable(self) -> int:
        """At least as many rows as could not be read: nothing is opened for it."""
        summaries = self.output.summaries(self.ledger.plans)
        if len(summaries) < len(self.ledger.plans):
            return self.ledger.rows
        return sum(summary["error_rows"] for summary in summaries.values())

    def _unreadable(self) -> int:
        """How many rows could not be read: their parts are looked into, but only where the run may be refused."""
        return _with_errors(self.output, self.ledger, self.config.input.id_column, [])


def _failing_plans(output: Output, ledger: Ledger) -> set[int]:
    """Places of those that may have left rows with an error."""
    summaries = output.summaries(ledger.plans)
    return {
        place
        for place, plan in enumerate(ledger.plans)
        if plan.run not in summaries or summaries[plan.run]["error_rows"]
    }


def failed_rows(config: JobConfig, output: Output, live: Sequence[Plan]) -> int:
    """Rows of the output that have an error instead of an answer. No part is opened where summaries alone can tell."""
    if not any(plan.cuts or any(shard.amends for shard in plan.shards) for plan in live):
        summaries = output.summaries(live)
        if len(summaries) == len(live):
            return sum(summary["error_rows"] for summary in summaries.values())
    return _with_errors(output, Ledger(output, live), config.input.id_column, [task.name for task in config.tasks])


def _with_errors(output: Output, ledger: Ledger, id_column: str, tasks: Sequence[str]) -> int:
    """Rows that could not be read, or have an error of one of the `tasks`."""
    failing = _failing_plans(output, ledger)
    parts = [part.name for part in ledger.parts.values() if part.plans & failing]
    return failures_of(output.store, parts, id_column, tasks)[0].error_rows


def _by(records: Records, name: str) -> Iterable[tuple[int, Records]]:
    order = np.argsort(records[name], kind="stable")
    for value, places in _runs(records[name][order]):
        yield value, records[order[places]]


def _runs(ordered: npt.NDArray[Any]) -> Iterator[tuple[int, slice]]:
    """The values of a sorted array, each with where it is."""
    starts = np.flatnonzero(np.diff(ordered, prepend=ordered[:1] - 1)).tolist()
    for start, stop in zip(starts, [*starts[1:], len(ordered)], strict=False):
        yield int(ordered[start]), slice(start, stop)


def _gathered(buckets: Iterable[Found], known: Mapping[int, npt.NDArray[np.bool_]]) -> Found:
    """All that is left to be done. What is unchanged is noted in `known`; kept of it is what is in another file now."""
    parts = []
    for found in buckets:
        _mark(known, found.same.current)
        parts.append(Found(_rehomed(found.same), found.redone, found.changed, found.gone))
    return Found(
        joined([p.same for p in parts]),
        joined([p.redone for p in parts]),
        joined([p.changed for p in parts]),
        np.concatenate([p.gone for p in parts]),
    )


def _rehomed(same: Pairs) -> Pairs:
    """Those that are in another file now."""
    return same.split(same.held["path"] != same.current["path"])[1]


def _mark(known: Mapping[int, npt.NDArray[np.bool_]], records: Records) -> None:
    for place, rows in _by(records, "path"):
        known[place][rows["row"]] = True


def _within(spans: Sequence[Span], room: int | None) -> list[Span]:
    """The rows of `spans` below row `room`."""
    return [(start, stop if room is None else min(stop, room)) for start, stop in spans if room is None or start < room]


def _salt(output: Output, live: Sequence[Plan], again: bool) -> int:
    """What may have been answered before takes a new salt: answers replaced, and all that comes after rows were cut,
    because a document may come back."""
    highest = output.highest_salt()
    if highest is None:
        return 0
    return highest + 1 if not live or again or any(plan.cuts for plan in live) else live[-1].salt


def refuse_foreign_tokens(tasks: Sequence[TaskConfig], tokens: int) -> None:
    """ConfigError for a bias on a token id that the target's tokenizer, of so many tokens, does not have."""
    for number, task in enumerate(tasks):
        foreign = [token for token in task.logit_bias if token >= tokens]
        if foreign:
            raise ConfigError(
                f"tasks.{number}.logit_bias: {foreign[0]} is no token of the target, whose last one is {tokens - 1}"
            )
