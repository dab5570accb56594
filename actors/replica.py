"""One replica: a scheduler and its decode loop in a thread, fed with shards and asked how it fares by small calls.

Colocated, target and drafter live in this process. Separate, the target's workers belong to this process and end with
it, while draft workers are the job's: one goes on without them until one is told of some, and whenever none is up. A
careful replica is a colocated job's with its target apart and without a draft model. Nothing is decided here but how
the parts are joined.
"""

from __future__ import annotations

import pickle
import threading
import traceback
from collections.abc import Iterable, Iterator

from actors.draft import RemoteDrafter
from actors.publications import Publications
from actors.report import Order, ReplicaReport
from actors.roster import Traits
from actors.seats import Seats
from actors.session import log_here
from actors.shard_feed import ShardFeed
from actors.target import RemoteVerifier
from actors.target_group import TargetGroup
from actors.watch import Watch, WatchedDrafter, WatchedVerifier
from actors.worker import LOADING_SECONDS
from pipeline import events
from pipeline.answering import Answerer
from pipeline.decode import Decoder, Drafter, Verifier
from pipeline.engine.assembly import (
    Setup,
    agree,
    drafting,
    load_drafter,
    load_verifier,
    make_decoder,
    set_threads,
)
from pipeline.engine.memory import is_out_of_memory
from pipeline.errors import NightdeskError, WorkerLost
from pipeline.messages import REPLICA_BITS_FROM
from pipeline.meter import Meter
from pipeline.output.names import run_name
from pipeline.records import Completion, Request
from pipeline.stats import Progress
from pipeline.work import JobWork


class Replica:
    """The actor. Its work begins with `ready`, and ends when it has been told so and has done what it had begun."""

    def __init__(self, work: JobWork, seats: Seats, number: int = 0, name: str = "0") -> None:
        """`number`: no other replica of the run has had it. `name`: what logs call it, as they may call a later one."""
        self.name = name
        self.meter = Meter()
        self.work = work
        self.seats = seats
        self.number = number
        self.feed = ShardFeed()
        self.publications = Publications.of(work.config.output)
        self.watch = Watch("reading and publishing")
        self.drafter: RemoteDrafter | None = None
        self.total = Progress()
        self.notices: list[str] = []
        self.failure: Exception | None = None
        self.ended = False
        self.thread = threading.Thread(target=self._work, name="decode", daemon=True)

    def ready(self) -> bool:
        """Begin, if that has not been done."""
        log_here(run=run_name(self.work.plan.run), job=self.work.config.name, replica=self.name)
        if self.thread.ident is None:
            self.thread.start()
        return True

    def poll(self, order: Order) -> ReplicaReport:
        """Take shards and say how things are.

        May be repeated: shards come once, and the report is about all that was done, but for the first `order.seen`
        published shards.
        """
        self.feed.give(order.give)
        if order.close:
            self.feed.close()
        if order.roster is not None and self.drafter is not None:
            self.drafter.enroll(order.roster)
        ended = self.ended  # before all the rest: then nothing can change any more
        return ReplicaReport(
            published=self.publications.since(order.seen),
            total=self.total,
            wants=self.feed.wants,
            activity=self.watch.activity(),
            returned=self.feed.returned,
            notices=tuple(self.notices),
            vitals=self.meter.vitals(),
            failure=self.failure,
            ended=ended,
            roster_version=0 if self.drafter is None else self.drafter.roster_version,
            draft_losses=() if self.drafter is None else self.drafter.losses(),
        )

    def _work(self) -> None:
        try:
            answerer = self._answerer()
            answerer.meter = self.meter
            events.tell("replica_began", "the models are loaded")
            answerer.run(self.feed, self._count)
        except Exception as error:  # noqa: BLE001 - the thread's last frame: the driver owns whatever it was
            self.failure = portable(error)
            trace = "".join(traceback.format_exception(error))
            events.tell("replica_failed", str(self.failure), traceback=trace)
        self.ended = True

    def _answerer(self) -> Answerer:
        with self.watch.during("loading the models", LOADING_SECONDS):
            set_threads(self.seats.replica.threads)
            setup = agree(self.work.config)
            verifier, drafter = self._in_workers(setup) if self.seats.ranks else self._in_this_process(setup)
            decoder = make_decoder(
                self.work.config, setup, verifier, drafter, self.work.plan.salt,
                first_handle=self.number << REPLICA_BITS_FROM,
                homes=None if self.drafter is None else self.drafter.homes,
                notice=self._notice,
                apart=bool(self.seats.ranks),
            )  # fmt: skip
            decoder.meter = self.meter
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
        """The target in workers; what computes nothing stays in this process."""
        config, limit, ranks = self.work.config, self.work.config.decoding.step_timeout, self.seats.ranks
        verifier = RemoteVerifier(lambda: TargetGroup(ranks, config, setup), limit, self._target_lost)
        chosen, drafter = drafting(config), None
        if chosen is None or chosen.kind != "model":
            drafter = load_drafter(config, setup)
        elif not self.seats.careful:
            drafter = self.drafter = RemoteDrafter(Traits.of_workers(setup), limit)
        verifier.wait_ready()
        return verifier, drafter

    def _target_lost(self, line: str) -> None:
        self.meter.target_lost()
        self._notice(line)

    def _notice(self, line: str) -> None:
        self.notices.append(line)
        events.tell("replica_notice", line)

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
