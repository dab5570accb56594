"""What a run has to do: the corpus compared with the output, as a plan.

New files, new rows of files that have grown, and rows that an earlier run left out are answered. Documents that
changed or disappeared are refused by name. Files unchanged in path, size and etag are not read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa

from pipeline.config import JobConfig, TaskConfig
from pipeline.corpus.listing import InputFile
from pipeline.corpus.readers import Corpus, RowIndex, RowRange
from pipeline.errors import ConfigError, OutputError
from pipeline.fingerprint import differences
from pipeline.output.changes import REMEDY, known_rows
from pipeline.output.coverage import FileCoverage, coverage, same_content
from pipeline.output.folder import Output
from pipeline.output.plan import Plan, PlannedFile, Span, cut, merged
from pipeline.output.schema import output_schema
from pipeline.prompts.templates import template_fields

NAMED_KEYS = 6  # that a message names


@dataclass(frozen=True)
class Ask:
    """What a command wants answered, apart from the job file: what that resolved to, and what narrows it."""

    answers: Mapping[str, Any]  # `fingerprint.answer_values`
    context: int
    limit: int | None
    fresh: bool


def prompt_fields(config: JobConfig) -> tuple[str, ...]:
    """The input columns that prompts name, each once."""
    templates = [text for task in config.tasks for text in (task.prompt, task.system) if text is not None]
    return tuple(dict.fromkeys(name for text in templates for name in template_fields(text)))


def column_values(config: JobConfig) -> dict[str, Any]:
    """What decides the columns beside the answers, by key."""
    return {
        "input.id": config.input.id,
        "input.keep": list(config.input.keep),
        "output.partition_by": list(config.output.partition_by),
    }


def refuse_foreign(plan: Plan, config: JobConfig, answers: Mapping[str, Any], where: str) -> None:
    """OutputError, naming keys, if the output at `where` was planned by a job that answers otherwise."""
    found = differences(plan.columns, column_values(config)) + differences(plan.answers, answers)
    if found:
        more = f"; and {len(found) - NAMED_KEYS} more keys" if len(found) > NAMED_KEYS else ""
        raise OutputError(
            f"output.path: {where} was made by a job that differs: {'; '.join(found[:NAMED_KEYS])}{more}; "
            "give another output.path, or --fresh to start over"
        )


def make_plan(
    config: JobConfig, output: Output, run: int, live: Sequence[Plan], files: Sequence[InputFile], ask: Ask
) -> Plan | None:
    """Plan `run` for everything in `files` that `live` plans have not published; None if there is nothing.

    `run` must have been chosen before `live` was read: then whoever plans at the same time chooses it too, and
    only one of both plans comes to be.
    """
    known = coverage(output, live)
    _refuse_missing_files(known, files)
    survey = Survey(config, output, known, files, live[-1].kept_schema if live else None)
    for file in files:
        survey.look_at(file, ask.limit)
    if not survey.wanted:
        return None
    return Plan(
        run=run,
        fresh=ask.fresh,
        salt=_salt(output, live),
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
        shards=cut(survey.wanted, config.output.rows_per_shard, survey.range),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )


class Survey:
    """A walk over the input files, in their order, that notes which of their rows are wanted."""

    def __init__(
        self,
        config: JobConfig,
        output: Output,
        known: Mapping[str, FileCoverage],
        files: Sequence[InputFile],
        kept: pa.Schema | None,
    ) -> None:
        self.id_column = config.input.id_column
        self.output = output
        self.known = known
        unread = [file for file in files if not self._is_done(file)]
        self.corpus = Corpus(config.input, prompt_fields(config), unread, kept)
        self.kept_schema = self.corpus.kept_schema  # now, because it says which columns are missing
        self.place = {file.path: place for place, file in enumerate(unread)}
        self.planned: list[PlannedFile] = []
        self.wanted: list[tuple[int, Span]] = []  # (place in `planned`, rows)
        self._indexes: list[RowIndex] = []  # of `planned`
        self._rows_before = 0

    def look_at(self, file: InputFile, limit: int | None) -> None:
        """Note what is wanted of the next file, of the first `limit` rows of the corpus."""
        room = None if limit is None else max(limit - self._rows_before, 0)
        entry = self.known.get(file.path)
        if entry is not None and same_content(entry.file, file):
            self._rows_before += entry.rows
            if _within(entry.missing, room):
                self._note(file, self.corpus.count_rows(self.place[file.path]), entry.covered, room)
        elif entry is not None or room != 0:
            index = self.corpus.count_rows(self.place[file.path])
            self._rows_before += index.rows
            held = entry.holdings if entry is not None else []
            place = self.place[file.path]
            everything = RowRange(place, 0, index.rows)
            known = known_rows(self.output, held, self.corpus, everything, self.id_column, file)
            self._note(file, index, known, room)

    def range(self, file: int, start: int, stop: int) -> RowRange:
        """The rows of a planned file as a range that a reader can enter in the middle."""
        return self._indexes[file].range(file, start, stop)

    def _note(self, file: InputFile, index: RowIndex, known: Sequence[Span], room: int | None) -> None:
        planned = PlannedFile(file, index.rows, tuple(merged(known)))
        self.wanted += [(len(self.planned), span) for span in _within(planned.missing, room)]
        self.planned.append(planned)
        self._indexes.append(index)

    def _is_done(self, file: InputFile) -> bool:
        entry = self.known.get(file.path)
        return entry is not None and same_content(entry.file, file) and not entry.missing


def _within(spans: Sequence[Span], room: int | None) -> list[Span]:
    """The rows of `spans` below row `room`."""
    return [(start, stop if room is None else min(stop, room)) for start, stop in spans if room is None or start < room]


def _salt(output: Output, live: Sequence[Plan]) -> int:
    """What is answered for the first time keeps the salt of the output; what is answered again takes a new one."""
    if live:
        return live[-1].salt
    earlier = output.highest_salt()
    return 0 if earlier is None else earlier + 1


def refuse_foreign_tokens(tasks: Sequence[TaskConfig], tokens: int) -> None:
    """ConfigError for a bias on a token id that the target's tokenizer, of so many tokens, does not have."""
    for number, task in enumerate(tasks):
        foreign = [token for token in task.logit_bias if token >= tokens]
        if foreign:
            raise ConfigError(
                f"tasks.{number}.logit_bias: {foreign[0]} is no token of the target, whose last one is {tokens - 1}"
            )


def _refuse_missing_files(known: Mapping[str, FileCoverage], files: Sequence[InputFile]) -> None:
    listed = {file.path for file in files}
    gone = [entry for path, entry in known.items() if path not in listed and entry.holdings]
    if gone:
        rows = sum(entry.held_rows for entry in gone)
        more = f" and {len(gone) - 1} more files" if len(gone) > 1 else ""
        raise OutputError(
            f"input: {gone[0].file.path}{more} with {rows} answered documents is deleted or moved; {REMEDY}"
        )
