"""What an output holds of which input file: worked out from plans and parts, never from a log.

Which row of a part came from which file is told by plans, row by row and only for the parts that somebody asks about;
what these rows are (ids and hashes) only the parts themselves say. Knows nothing of documents.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt

from pipeline.corpus.listing import InputFile, list_files
from pipeline.errors import CorpusError
from pipeline.output.folder import Output
from pipeline.output.names import part_name
from pipeline.output.places import folders_by_shard, place_of, place_of_cut, place_of_merge, superseded_by
from pipeline.output.plan import Plan, Shard, Span, complement, merged, rows_of
from pipeline.output.store import Entry


@dataclass(frozen=True)
class OneFile:
    """An input of one file, for listing it again."""

    paths: tuple[str, ...]
    format: str


@dataclass
class FileCoverage:
    """A file as the newest plan knew it. `covered` are the rows of this version that the output has an answer for.

    Of an `unsettled` one the output may hold rows that are out of date although it has not changed since: a plan that
    meant to replace or remove them could not.
    """

    file: InputFile
    rows: int
    covered: list[Span] = field(default_factory=list)
    unsettled: bool = False

    @property
    def missing(self) -> list[Span]:
        """The rows of this version of the file that have not been answered."""
        return complement(self.covered, self.rows)


@dataclass(frozen=True)
class Sources:
    """Where the rows of a part came from, row by row: a path's number in the ledger, a plan's place in it."""

    paths: npt.NDArray[np.int32]
    plans: npt.NDArray[np.int32]


Change = Callable[[Sources], Sources]


@dataclass
class HeldPart:
    """A published part. `paths` and `plans` are all that any of its rows may have come from."""

    name: str
    origin: Callable[[], Sources]
    paths: set[int]
    plans: set[int]
    changes: list[Change] = field(default_factory=list)

    def sources(self) -> Sources:
        """Of every row, in the part's order."""
        found = self.origin()
        for change in self.changes:
            found = change(found)
        return found


def same_content(old: InputFile, new: InputFile) -> bool:
    """As far as can be told without reading: the same path, size and etag."""
    return (old.path, old.size, old.etag) == (new.path, new.size, new.etag)


def is_current(file: InputFile) -> bool:
    """Is the file now what it was when it was listed, as far as can be told without reading?"""
    try:
        return any(same_content(file, found) for found in list_files(OneFile((file.path,), file.format)))
    except CorpusError:  # it does not exist any more
        return False


class Ledger:
    """The state after `plans`, in order. A shard of an open plan counts where it is published."""

    def __init__(self, output: Output, plans: Sequence[Plan]) -> None:
        self.output = output
        self.plans = list(plans)
        self.files: dict[str, FileCoverage] = {}
        self.parts: dict[str, HeldPart] = {}
        self.paths: dict[str, int] = {}  # numbers of all paths that ever held a row
        self.rows = 0  # of the whole output
        self._there = output.parts()
        self._summaries = output.summaries(self.plans)
        self._known = self._there | {name: Entry(0, "") for name in self._gone() if name not in self._there}
        self._folders = folders_by_shard(self._known)
        self._by_number: list[str] = []  # `paths` the other way
        for place, plan in enumerate(self.plans):
            self._enter(place, plan)
        self._lose_what_is_gone()
        for entry in self.files.values():
            entry.covered = merged(entry.covered)

    def version(self, part: str) -> str:
        """As it was listed when the ledger was made."""
        return self._there[part].version

    def from_paths(self, paths: Iterable[str]) -> list[HeldPart]:
        """The parts that may have rows from any of these files."""
        wanted = {self.paths[path] for path in paths if path in self.paths}
        return [part for part in self.parts.values() if part.paths & wanted]

    # --- building

    def _gone(self) -> set[str]:
        """The parts that plans have replaced by others. A part's run is named in it, and only later ones replace it."""
        return set().union(*(superseded_by(plan, self._summaries.get(plan.run)) for plan in self.plans))

    def _enter(self, place: int, plan: Plan) -> None:
        for planned in plan.files:
            path = planned.file.path
            if path not in self.paths:
                self.paths[path] = len(self.paths)
                self._by_number.append(path)
            entry = self.files.get(path)
            # Older versions took an empty text file for no document.
            rows = max(planned.rows, 1) if planned.file.format == "text" else planned.rows
            if entry is None:
                entry = self.files[path] = FileCoverage(planned.file, rows)
            elif not same_content(entry.file, planned.file):
                entry.file, entry.rows, entry.covered = planned.file, rows, []
            entry.covered += planned.known
            entry.unsettled = False
        for rehoming in plan.rehomed:
            number = self.paths[plan.files[rehoming.file].file.path]
            if rehoming.part in self.parts:
                part = self.parts[rehoming.part]
                part.paths.add(number)
                part.changes.append(partial(_rehomed, rows_of(rehoming.rows), number))
        published = self._published(plan)
        for shard in plan.shards:
            self._enter_shard(place, plan, shard, shard.index in published)
        self._enter_cuts(plan)
        dropped = self._summaries.get(plan.run, {}).get("dropped_merges", ())
        for number, merge in enumerate(plan.merges):
            if number in dropped:
                continue
            sources = [self.parts.pop(name) for name in merge.sources if name in self.parts]
            self._enter_merge(place_of_merge(plan, number), sources)

    def _published(self, plan: Plan) -> set[int]:
        """Shards whose rows the output holds, or held until a later plan put other parts in the place of theirs."""
        summary = self._summaries.get(plan.run)
        folders = self._folders.get(plan.run, {})
        plain = [shard for shard in plan.shards if shard.amends is None]
        amending = [shard for shard in plan.shards if shard.amends is not None]
        if summary is None:
            return self.output.published_among(plan, [*plain, *amending], folders, self._there)
        dropped = set(summary["dropped_shards"])
        sure = {shard.index for shard in amending if shard.index not in dropped}
        if plan.format == "delta":  # what was given up is not in the table, even if its part came too late
            plain = [shard for shard in plain if shard.index not in dropped]
        if plan.partition_by and summary.get("parts") == sum(map(len, folders.values())):
            return sure | {shard.index for shard in plain if shard.index not in dropped}
        return sure | self.output.published_among(plan, plain, folders, self._there)

    def _enter_shard(self, place: int, plan: Plan, shard: Shard, is_published: bool) -> None:
        paths = [plan.files[piece.file].file.path for piece in shard.ranges]
        numbers = np.array([self.paths[path] for path in paths], np.int32)
        expected = is_published or self._is_expected(plan, shard)
        if shard.amends is not None and not is_published:
            self._unsettle(shard.amends.part, paths)
        elif shard.amends is not None:
            self._enter_amendment(place, plan, shard, numbers)
        elif not expected and plan.format == "delta" and plan.run in self._summaries:
            pass  # given up, and so not in the table, whatever parts of it there are
        elif plan.partition_by:
            self._enter_pieces(place, plan, shard, numbers, expected and not is_published)
        elif expected:
            self._enter_whole(place, plan, shard, numbers)
        if is_published:
            for piece, path in zip(shard.ranges, paths, strict=True):
                self.files[path].covered.append((piece.start, piece.stop))
        elif plan.partition_by and shard.amends is None:  # some of its pieces may be there
            for path in paths:
                self.files[path].unsettled = True
        if expected and shard.amends is None:
            self.rows += shard.rows

    def _enter_amendment(self, place: int, plan: Plan, shard: Shard, numbers: npt.NDArray[np.int32]) -> None:
        assert shard.amends is not None
        if shard.amends.part in self.parts:
            part = self._renamed(shard.amends.part, place_of(plan, shard))
            part.paths |= set(numbers.tolist())
            part.plans.add(place)
            values = np.repeat(numbers, [piece.stop - piece.start for piece in shard.ranges])
            part.changes.append(partial(_amended, rows_of(shard.amends.rows), values, place))

    def _is_expected(self, plan: Plan, shard: Shard) -> bool:
        """Did the run end with this shard published? Then, if its part is not there, somebody has removed it."""
        return plan.run in self._summaries and shard.index not in self._summaries[plan.run]["dropped_shards"]

    def _enter_whole(self, place: int, plan: Plan, shard: Shard, numbers: npt.NDArray[np.int32]) -> None:
        name = part_name(plan.run, shard.index)
        lengths = [piece.stop - piece.start for piece in shard.ranges]
        self.parts[name] = HeldPart(name, partial(_plain, numbers, lengths, place), set(numbers.tolist()), {place})

    def _enter_pieces(
        self, place: int, plan: Plan, shard: Shard, numbers: npt.NDArray[np.int32], were_removed: bool
    ) -> None:
        there = self._folders.get(plan.run, {}).get(shard.index, set())

        def origin(folder: str) -> Sources:
            return _plain(numbers, self.output.pieces(plan, shard, there)[folder], place)

        folders = there | set(self.output.pieces(plan, shard, there)) if were_removed else there
        for folder in folders:
            name = part_name(plan.run, shard.index, folder)
            self.parts[name] = HeldPart(name, partial(origin, folder), set(numbers.tolist()), {place})
        if were_removed and not folders:  # nobody knows any more in which folders it had parts
            self._enter_whole(place, plan, shard, numbers)

    def _enter_cuts(self, plan: Plan) -> None:
        dropped = set(self._summaries.get(plan.run, {}).get("dropped_cuts", ()))
        amending = {s.amends.part: place_of(plan, s) for s in plan.shards if s.amends is not None}
        for number, cut in enumerate(plan.cuts):
            name = amending.get(cut.part, cut.part)
            if name not in self.parts:
                continue
            if cut.part in dropped or plan.run not in self._summaries:
                self._unsettle(name, [])
                continue
            part = self._renamed(name, place_of_cut(plan, number))
            rows = rows_of(cut.rows)
            self.rows -= len(rows)
            part.changes.append(partial(_cut, rows))

    def _enter_merge(self, name: str, sources: Sequence[HeldPart]) -> None:
        self.parts[name] = HeldPart(
            name,
            partial(_joined, sources),
            set().union(*(part.paths for part in sources)),
            set().union(*(part.plans for part in sources)),
        )

    def _lose_what_is_gone(self) -> None:
        """Parts that should be there and were removed by somebody: whatever files their rows came from in the end hold
        documents without an answer, however much later plans took for known."""
        unfinished = [plan for plan in self.plans if plan.run not in self._summaries]
        coming = {place_of_merge(plan, number) for plan in unfinished for number in range(len(plan.merges))}
        for name in [name for name in self.parts if name not in self._there and name not in coming]:
            self._unsettle(name, [])
            part = self.parts.pop(name)
            self.rows -= len(part.sources().paths)
            for number in part.paths:
                if self._by_number[number] in self.files:
                    self.files[self._by_number[number]].covered = []

    def _renamed(self, old: str, new: str) -> HeldPart:
        part = self.parts.pop(old)
        part.name = new
        self.parts[new] = part
        return part

    def _unsettle(self, name: str, paths: Iterable[str]) -> None:
        """A part has rows that should have been replaced: whichever files they came from must be compared again."""
        numbers = self.parts[name].paths if name in self.parts else set()
        for path in {*paths, *(self._by_number[number] for number in numbers)}:
            if path in self.files:
                self.files[path].unsettled = True


def _plain(numbers: npt.NDArray[np.int32], lengths: Sequence[int], place: int) -> Sources:
    paths = np.repeat(numbers, lengths)
    return Sources(paths, np.full(len(paths), place, np.int32))


def _rehomed(rows: npt.NDArray[np.int64], number: int, sources: Sources) -> Sources:
    paths = sources.paths.copy()
    paths[rows] = number
    return Sources(paths, sources.plans)


def _amended(rows: npt.NDArray[np.int64], numbers: npt.NDArray[np.int32], place: int, sources: Sources) -> Sources:
    paths, plans = sources.paths.copy(), sources.plans.copy()
    paths[rows], plans[rows] = numbers, place
    return Sources(paths, plans)


def _cut(rows: npt.NDArray[np.int64], sources: Sources) -> Sources:
    return Sources(np.delete(sources.paths, rows), np.delete(sources.plans, rows))


def _joined(parts: Sequence[HeldPart]) -> Sources:
    found = [part.sources() for part in parts]
    return Sources(np.concatenate([f.paths for f in found]), np.concatenate([f.plans for f in found]))
