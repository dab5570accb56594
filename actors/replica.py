"""One replica: a scheduler and its decode loop in a thread, fed with shards and asked how it fares by small calls.

Colocated, target and drafter live in this process. Separate, they are workers that this process owns: they end
with it. Nothing is decided here but how the parts are joined.
"""

from __future__ import annotations

import pickle
import threading
import traceback
from collections.abc import Iterable, Iterator, Sequence

from actors.draft import Draft, RemoteDrafter
from actors.draft_pool import DraftPool
from actors.publications import Publications
from actors.report import ReplicaReport
from actors.seats import Seats
from actors.shard_feed import ShardFeed
from actors.target import RemoteVerifier
from actors.target_group import TargetGroup
from actors.watch import Watch, WatchedDrafter, WatchedVerifier
from actors.worker import LOADING_SECONDS, Worker
from pipeline.answering import Answerer
from pipeline.decode import Decoder, Drafter, Verifier
from pipeline.engine.assembly import Setup, agree, load_drafter, load_verifier, make_decoder, set_threads
from pipeline.engine.memory import is_out_of_memory
from pipeline.errors import NightdeskError, WorkerLost
from pipeline.output.plan import Shard
from pipeline.output.store import open_store
from pipeline.records import Completion, Request
from pipeline.stats import Progress
from pipeline.work import JobWork


class Replica:
    """The actor. Its work begins with `ready`, and ends when it has been told that no more shards come."""

    def __init__(self, work: JobWork, seats: Seats) -> None:
        self.work = work
        self.seats = seats
        self.feed = ShardFeed()
        self.publications = Publications(open_store(work.config.output.path))
        self.watch = Watch("reading and publishing")
        self.total = Progress()
        self.notices: list[str] = []
        self.failure: Exception | None = None
        self.ended = False
        self.thread = threading.Thread(target=self._work, name="decode", daemon=True)

    def ready(self) -> bool:
        """Begin, if that has not been done."""
        if self.thread.ident is None:
            self.thread.start()
        return True

    def poll(self, give: Sequence[Shard], seen: int, close: bool) -> ReplicaReport:
        """Take shards and say how things are. `close`: all shards of the run are published.

        May be repeated: shards come once, and the report is about all that was done, but for the first `seen`
        published shards.
        """
        self.feed.give(give)
        if close:
            self.feed.close()
        ended = self.ended  # before all the rest: then nothing can change any more
        published, kept = self.publications.since(seen)
        return ReplicaReport(
            published=published,
            total=self.total,
            kept=kept,
            wants=self.feed.wants,
            activity=self.watch.activity(),
            notices=tuple(self.notices),
            failure=self.failure,
            ended=ended,
        )

    def _work(self) -> None:
        try:
            self._answerer().run(self.feed, self._count)
        except Exception as error:  # noqa: BLE001 - the thread's last frame: the driver owns whatever it was
            self.failure = portable(error)
        self.ended = True

    def _answerer(self) -> Answerer:
        with self.watch.during("loading the models", LOADING_SECONDS):
            set_threads(self.seats.replica.threads)
            setup = agree(self.work.config)
            verifier, drafter = self._in_workers(setup) if self.seats.ranks else self._in_this_process(setup)
            decoder = make_decoder(self.work.config, setup, verifier, drafter, self.work.plan.salt)
        work, prompters = self.work, self.work.prompters(setup.target.tokenizer())
        stream = FedStream(decoder, self.feed)
        return Answerer(work.config, work.plan, work.corpus(), prompters, stream, self.publications)

    def _in_this_process(self, setup: Setup) -> tuple[Verifier, Drafter | None]:
        """Target and drafter in this process."""
        config, limit = self.work.config, self.work.config.decoding.step_timeout
        verifier = WatchedVerifier(load_verifier(config, setup), self.watch, limit)
        drafter = load_drafter(config, setup)
        return verifier, None if drafter is None else WatchedDrafter(drafter, self.watch, limit)

    def _in_workers(self, setup: Setup) -> tuple[Verifier, Drafter | None]:
        """Target and draft model in workers, which load side by side; what computes nothing stays in this process."""
        config, limit = self.work.config, self.work.config.decoding.step_timeout
        ranks, seats, pool = self.seats.ranks, self.seats.drafts, None
        verifier = RemoteVerifier(lambda: TargetGroup(ranks, config, setup), limit, self._notice)
        if seats:
            pool = DraftPool(
                lambda i: Worker(seats[i].create(Draft, config, setup, seats[i].threads), f"draft worker {i}"),
                len(seats),
                self._notice,
            )
        verifier.wait_ready()
        if pool is not None:
            return verifier, RemoteDrafter(pool, pool.wait_ready(), limit)
        return verifier, load_drafter(config, setup)

    def _notice(self, line: str) -> None:
        self.notices.append(line)

    def _count(self, increment: Progress) -> None:
        self.total += increment


class FedStream:
    """A decoder that closes the feed when it stops, for whatever reason: no reader is left waiting for shards."""

    def __init__(self, decoder: Decoder, feed: ShardFeed) -> None:
        self.decoder = decoder
        self.feed = feed

    def stream(self, requests: Iterable[Request | None]) -> Iterator[Completion]:
        """See `decode.RequestStream`."""
        try:
            yield from self.decoder.stream(requests)
        finally:
            self.feed.close()  # also when the consumer failed and dropped this generator


def portable(error: Exception) -> Exception:
    """The error as another process can have it, with its traceback as a note where it is not a named one."""
    if isinstance(error, NightdeskError):
        return error
    if is_out_of_memory(error):
        return WorkerLost("out of memory: a smaller decoding.batch or decoding.context needs less")
    trace = "".join(traceback.format_exception(error))
    try:
        copy: Exception = pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - a foreign class, pickled; ours to replace
        copy = RuntimeError(f"{type(error).__name__}: {error}")
    copy.add_note(trace)
    return copy
