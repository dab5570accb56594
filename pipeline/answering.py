"""From shards to published parts: reads documents, asks an engine, and commits the answers.

Keeps the engine full across the borders of shards: the next shard is read while the last one drains. Memory is
bounded by the shards in hand. Knows nothing of Ray, and of the engine only that it answers requests.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import pyarrow as pa

from pipeline.config import JobConfig
from pipeline.corpus.readers import Corpus
from pipeline.deadline import Deadline
from pipeline.decode import RequestStream
from pipeline.errors import OutOfTime, PromptError, Stopped
from pipeline.fingerprint import request_key
from pipeline.meter import Meter, Reason
from pipeline.output.folder import Output
from pipeline.output.ledger import is_current
from pipeline.output.plan import Plan, Shard
from pipeline.output.rows import ShardRows
from pipeline.prefetch import Prefetched
from pipeline.prompts.templates import Prompter
from pipeline.records import Completion, Document, Request
from pipeline.stats import Progress

ROWS_AHEAD = 256  # prompts made before the engine wants them
REPORT_SECONDS = 0.25

Report = Callable[[Progress], None]


@dataclass(frozen=True)
class PreparedRow:
    """A document with a request per sample of each task, or why there is none; `kept` comes with a batch's first row.

    `truncated`: it was cut to fit the prompt of a task.
    The document has left its text and its fields behind: the row does not need them, and they may be long.
    """

    shard: Shard
    document: Document
    requests: Mapping[str, list[Request] | PromptError]
    kept: pa.RecordBatch | None
    truncated: bool


@dataclass(frozen=True)
class ReadShard:
    """All rows of a shard have been read, from files that are still what they were when it was planned."""

    shard: Shard


@dataclass(frozen=True)
class SkippedShard:
    """A shard that another run has published meanwhile."""

    shard: Shard


Prepared = PreparedRow | ReadShard | SkippedShard


class Admission:
    """Which shards are begun: those that can be finished before the deadline, if there is one.

    The thread that reads asks, and the one that publishes tells.
    """

    def __init__(self, deadline: Deadline | None) -> None:
        self.deadline = deadline
        self.closed = False  # a shard has been turned away, and so is every later one
        self.rows_begun = self.rows_done = 0
        self.started: float | None = None

    def admits(self, shard: Shard) -> bool:
        """At the pace so far, or while none is known, can it be answered in time?"""
        if self.deadline is None:
            return True
        now = self.deadline.clock()
        self.started = now if self.started is None else self.started
        self.rows_begun += shard.rows
        per_row = (now - self.started) / self.rows_done if self.rows_done else 0.0
        self.closed = (self.rows_begun - self.rows_done) * per_row >= self.deadline.left
        return not self.closed

    def refuse_lateness(self) -> None:
        """OutOfTime from the deadline on."""
        if self.deadline is not None and self.deadline.passed:
            raise OutOfTime(f"the deadline, {self.deadline}, has come")


@dataclass
class ShardInHand:
    """A shard between its first row and its publication."""

    rows: ShardRows
    started: float
    is_read: bool = False
    counts: Progress = field(default_factory=Progress)
    keys: list[str] = field(default_factory=list)  # requests made for it, whose answers are kept until it is done


@dataclass(frozen=True)
class Place:
    """Where an answer goes."""

    shard: ShardInHand
    row: int
    task: str
    sample: int


class Answerer:
    """Answers shards of one plan with one engine."""

    def __init__(
        self,
        config: JobConfig,
        plan: Plan,
        corpus: Corpus,
        prompters: Mapping[str, Prompter],
        engine: RequestStream,
        output: Output,
        deadline: Deadline | None = None,
    ) -> None:
        self.config = config
        self.plan = plan
        self.corpus = corpus
        self.prompters = prompters
        self.engine = engine
        self.output = output
        self.meter = Meter()
        self.sampling = {task.name: task.sampling() for task in config.tasks}
        self.admission = Admission(deadline)

    def run(self, shards: Iterable[Shard], report: Report) -> None:
        """Publish every shard. `report` is told increments, a few times a second.

        OutOfTime at the deadline, or once everything is published that can be before it.
        """
        with Prefetched(self._prepared(shards), ROWS_AHEAD) as prepared:
            desk = Desk(self, prepared, report)
            for completion in self.engine.stream(desk.requests()):
                desk.deliver(completion)
            desk.close()
        if self.admission.closed:
            raise OutOfTime(f"what is left cannot be done until {self.admission.deadline}")

    def _prepared(self, shards: Iterable[Shard]) -> Iterator[Prepared]:
        for shard in shards:
            if self.output.is_published(self.plan, shard):
                yield SkippedShard(shard)
                continue
            if not self.admission.admits(shard):
                return
            for batch in self.corpus.read(shard.ranges):
                kept: pa.RecordBatch | None = batch.kept
                for document in batch.documents:
                    requests, truncated = self._requests(document)
                    yield PreparedRow(shard, replace(document, text="", fields={}), requests, kept, truncated)
                    kept = None
            self._refuse_changed_files(shard)
            yield ReadShard(shard)

    def _refuse_changed_files(self, shard: Shard) -> None:
        """Stopped if a file is not what was planned any more: what was just read of it must not be published."""
        for place in {piece.file for piece in shard.ranges}:
            file = self.plan.files[place].file
            if not is_current(file):
                raise Stopped(f"{file.path} changed while it was read; run the same command again to plan it anew")

    def _requests(self, document: Document) -> tuple[Mapping[str, list[Request] | PromptError], bool]:
        """By task, and whether the document was cut for any of them."""
        requests: dict[str, list[Request] | PromptError] = {}
        truncated = False
        for task, prompter in self.prompters.items() if document.error is None else ():
            try:
                prompt = prompter.prompt(document)
            except PromptError as error:
                requests[task] = error
                continue
            requests[task] = self._samples(task, prompt.token_ids)
            truncated |= prompt.truncated
        return requests, truncated

    def _samples(self, task: str, prompt: list[int]) -> list[Request]:
        """One request per sample, each with a key of its own, so that each is answered as soon as it can be."""
        params = self.sampling[task]
        keys = [request_key(self.plan.fingerprint, task, prompt, sample) for sample in range(params.n)]
        return [Request(key, prompt, replace(params, n=1)) for key in keys]


class Desk:
    """The shards in hand of one `Answerer.run`: which answers are awaited, and where they go."""

    def __init__(
        self, answerer: Answerer, prepared: Prefetched[Prepared], report: Report
    ) -> None:
        self.answerer = answerer
        self.prepared = prepared
        self.report = report
        self.open: dict[int, ShardInHand] = {}
        self.awaited: dict[str, list[Place]] = {}  # request key → everyone who wants its answer
        self.answered: dict[str, Completion] = {}
        self.unreported = Progress()
        self.reported_at = time.monotonic()

    def requests(self) -> Iterator[Request | None]:
        """What the engine pulls from; None where the next document is still being read."""
        while True:
            self.answerer.admission.refuse_lateness()
            item = self.prepared.poll()
            if item is None:
                if self.prepared.ended:
                    return
                yield None
            elif isinstance(item, SkippedShard):
                self._count(Progress(rows_done=item.shard.rows, shards_done=1))
            elif isinstance(item, ReadShard):
                shard = self._shard_in_hand(item.shard)
                shard.is_read = True
                self._publish_if_complete(shard)
            else:
                yield from self._requests_of(item)

    def deliver(self, completion: Completion) -> None:
        """Fan an answer out to every row that waits for it."""
        self.answerer.admission.refuse_lateness()
        places = self.awaited.pop(completion.key)
        cost = Progress.of(completion)
        places[0].shard.counts += cost
        self._count(cost)
        self.answered[completion.key] = completion
        for place in places:
            self._fill(place, completion)

    def close(self) -> None:
        """All shards are published: say what has not been said."""
        assert not self.open, f"the engine ended, but shards {sorted(self.open)} have rows without answers"
        self.report(self.unreported)

    def _requests_of(self, item: PreparedRow) -> Iterator[Request]:
        shard = self._shard_in_hand(item.shard)
        if item.kept is not None:
            shard.rows.kept.append(item.kept)
        row = shard.rows.add(item.document)
        if item.truncated:
            shard.counts += Progress(truncated=1)
            self._count(Progress(truncated=1))
        if item.document.error is not None:
            self.answerer.meter.error(Reason.UNREADABLE)
            self._row_done(shard)
        for task, requests in item.requests.items():
            if isinstance(requests, PromptError):
                self.answerer.meter.error(Reason.PROMPT)
                for sample in range(shard.rows.tasks[task]):
                    self._settle(shard, shard.rows.fail(row, task, str(requests), sample))
                continue
            for sample, request in enumerate(requests):
                place = Place(shard, row, task, sample)
                if request.key in self.answered:
                    self._fill(place, self.answered[request.key])
                elif request.key in self.awaited:
                    self.awaited[request.key].append(place)
                else:
                    self.awaited[request.key] = [place]
                    shard.keys.append(request.key)
                    yield request

    def _shard_in_hand(self, shard: Shard) -> ShardInHand:
        if shard.index not in self.open:
            config, plan = self.answerer.config, self.answerer.plan
            tasks = {task.name: task.n for task in config.tasks}
            rows = ShardRows(shard, plan.schema, config.input.id_column, tasks)
            self.open[shard.index] = ShardInHand(rows, time.monotonic())
        return self.open[shard.index]

    def _fill(self, place: Place, completion: Completion) -> None:
        if completion.error is not None:
            self.answerer.meter.error(Reason.MODEL)
        self._settle(place.shard, place.shard.rows.answer(place.row, place.task, completion, place.sample))

    def _settle(self, shard: ShardInHand, row_is_complete: bool) -> None:
        if row_is_complete:
            self._row_done(shard)

    def _row_done(self, shard: ShardInHand) -> None:
        errors = shard.rows.error_rows - shard.counts.error_rows
        done = Progress(rows_done=1, error_rows=errors)
        shard.counts += done
        self._count(done)
        self.answerer.admission.rows_done += 1
        self._publish_if_complete(shard)

    def _publish_if_complete(self, shard: ShardInHand) -> None:
        rows = shard.rows
        if rows.incomplete or not shard.is_read:
            return
        del self.open[rows.shard.index]
        for key in shard.keys:
            self.answered.pop(key, None)
        seconds = time.monotonic() - shard.started
        counts = shard.counts + Progress(shards_done=1)
        self.answerer.output.publish(self.answerer.plan, rows.shard, rows.table(), counts, seconds)
        self._count(Progress(shards_done=1))

    def _count(self, increment: Progress) -> None:
        self.unreported += increment
        now = time.monotonic()
        if now - self.reported_at >= REPORT_SECONDS:
            self.report(self.unreported)
            self.unreported = Progress()
            self.reported_at = now
