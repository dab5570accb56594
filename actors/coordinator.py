"""Hands out shards on demand, follows progress, and decides what a lost replica means for the run.

Knows nothing of Ray, time or processes: it is told what was heard and who was lost, and says what to send next.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from actors.report import ReplicaReport
from pipeline.errors import WorkerLost
from pipeline.output.plan import Shard
from pipeline.stats import Progress

ATTEMPTS = 3  # replicas that may be lost on one shard, or one after another while loading


@dataclass(frozen=True, slots=True)
class Order:
    """The arguments of `Replica.poll`."""

    give: tuple[Shard, ...]
    seen: int
    close: bool


@dataclass
class Charge:
    """What is known of one replica."""

    in_hand: dict[int, Shard] = field(default_factory=dict)  # given, and not heard to be published
    wants: int = 0
    seen: int = 0  # publications heard of
    notices: int = 0  # notices heard of
    total: Progress = field(default_factory=Progress)
    kept: Progress = field(default_factory=Progress)
    ended: bool = False


class Coordinator:
    """The shards of one run and the replicas that answer them, by name."""

    def __init__(
        self, shards: Iterable[Shard], report: Callable[[Progress], None], notice: Callable[[str], None]
    ) -> None:
        """`report` is told increments (negative ones where work was lost), `notice` lines for people."""
        self.waiting = deque(shards)
        self.report = report
        self.notice = notice
        self.unpublished = {shard.index for shard in self.waiting}
        self.charges: dict[str, Charge] = {}
        self.losses: Counter[int] = Counter()  # by shard
        self.losses_before_work = 0  # in a row

    @property
    def finished(self) -> bool:
        """Every shard is published, and every replica has said its last word."""
        return not self.unpublished and all(charge.ended for charge in self.charges.values())

    def enlist(self, replica: str) -> None:
        """A replica was started."""
        self.charges[replica] = Charge()

    def order(self, replica: str) -> Order:
        """What to send it now."""
        charge = self.charges[replica]
        give = tuple(self.waiting.popleft() for _ in range(min(charge.wants, len(self.waiting))))
        charge.in_hand |= {shard.index: shard for shard in give}
        charge.wants = 0
        return Order(give, charge.seen, close=not self.unpublished)

    def heard(self, replica: str, report: ReplicaReport) -> None:
        """Take in a report; raise the failure that it tells of."""
        charge = self.charges[replica]
        for index in report.published:
            charge.in_hand.pop(index, None)
            self.unpublished.discard(index)
        charge.seen += len(report.published)
        if report.published or charge.in_hand:
            self.losses_before_work = 0
        self._report(report.total - charge.total)
        charge.total, charge.kept = report.total, report.kept
        for line in report.notices[charge.notices :]:
            self.notice(line)
        charge.notices = len(report.notices)
        charge.wants = report.wants
        if report.failure is not None:
            raise report.failure
        charge.ended = report.ended

    def lost(self, replica: str, cause: str) -> None:
        """A replica is gone: its shards go to others, its unpublished work is taken back.

        WorkerLost when that has happened too often to be an accident.
        """
        charge = self.charges.pop(replica)
        self._report(charge.kept - charge.total)
        for index, shard in reversed(charge.in_hand.items()):
            if index in self.unpublished:
                self.losses[index] += 1
                self.waiting.appendleft(shard)
        self._refuse_repetition(charge, cause)
        if self.unpublished:
            self.notice(f"{cause}; replacing it")

    def _refuse_repetition(self, charge: Charge, cause: str) -> None:
        for index, shard in charge.in_hand.items():
            if self.losses[index] >= ATTEMPTS:
                raise WorkerLost(
                    f"{cause}; {ATTEMPTS} replicas were lost with shard {index} ({shard.rows} rows) in hand: "
                    "look at its documents and at the memory of the machine, then run the same command again"
                )
        if not charge.in_hand and not charge.seen:
            self.losses_before_work += 1
            if self.losses_before_work >= ATTEMPTS:
                raise WorkerLost(
                    f"{cause}; {ATTEMPTS} replicas in a row were lost before they began: is there memory enough "
                    "for the models?"
                )

    def _report(self, increment: Progress) -> None:
        if increment != Progress():
            self.report(increment)
