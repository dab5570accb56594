"""What an output already holds of each input file: worked out from plans and parts, never from a log.

Knows nothing of documents; `holdings` are rows of parts, and whoever compares them reads them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from pipeline.corpus.listing import InputFile, list_files
from pipeline.errors import CorpusError
from pipeline.output.folder import Output, part_name, published
from pipeline.output.plan import Plan, Shard, Span, complement, merged


@dataclass(frozen=True)
class OneFile:
    """An input of one file, for listing it again."""

    paths: tuple[str, ...]
    format: str


@dataclass(frozen=True)
class Holding:
    """Rows start <= row < stop of a part, which came from one file."""

    part: str
    start: int
    stop: int


@dataclass
class FileCoverage:
    """A file as the newest plan knew it, and what the output holds of it.

    `covered` are rows of this version of the file; `holdings` all published rows that ever came from the path.
    """

    file: InputFile
    rows: int
    covered: list[Span] = field(default_factory=list)
    holdings: list[Holding] = field(default_factory=list)

    @property
    def missing(self) -> list[Span]:
        """The rows of this version of the file that have not been answered."""
        return complement(self.covered, self.rows)

    @property
    def held_rows(self) -> int:
        return sum(holding.stop - holding.start for holding in self.holdings)


def same_content(old: InputFile, new: InputFile) -> bool:
    """As far as can be told without reading: the same path, size and etag."""
    return (old.path, old.size, old.etag) == (new.path, new.size, new.etag)


def is_current(file: InputFile) -> bool:
    """Is the file now what it was when it was listed, as far as can be told without reading?"""
    try:
        return any(same_content(file, found) for found in list_files(OneFile((file.path,), file.format)))
    except CorpusError:  # it does not exist any more
        return False


def coverage(output: Output, plans: Iterable[Plan]) -> dict[str, FileCoverage]:
    """By path, for every file that `plans` (in order) know."""
    known: dict[str, FileCoverage] = {}
    plans = list(plans)
    parts = output.parts()
    for plan in plans:
        _open_files(plan, known)
        for shard in published(plan, parts):
            _add_part(plan, shard, known)
    for entry in known.values():
        entry.covered = merged(entry.covered)
    return known


def _open_files(plan: Plan, known: dict[str, FileCoverage]) -> None:
    for planned in plan.files:
        entry = known.get(planned.file.path)
        if entry is None:
            entry = known[planned.file.path] = FileCoverage(planned.file, planned.rows)
        elif not same_content(entry.file, planned.file):
            entry.file, entry.rows, entry.covered = planned.file, planned.rows, []
        entry.covered += planned.known


def _add_part(plan: Plan, shard: Shard, known: dict[str, FileCoverage]) -> None:
    reached = 0
    name = part_name(plan.run, shard.index)
    for piece in shard.ranges:
        entry = known[plan.files[piece.file].file.path]
        rows = piece.stop - piece.start
        entry.covered.append((piece.start, piece.stop))
        entry.holdings.append(Holding(name, reached, reached + rows))
        reached += rows
