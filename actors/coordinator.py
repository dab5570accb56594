"""Hands out shards on demand, follows progress, and decides what a lost replica means for the run.

Knows nothing of Ray or processes: it is told what was heard and who was lost, and says what to send next, and how many
more replicas would find work.

Every shard is counted once, by whoever is first heard to have published it. What else a replica has counted is taken
back at the latest when it leaves.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from actors.report import Order, Publication, ReplicaReport, label
from actors.shard_feed import AHEAD
from pipeline import events
from pipeline.deadline import Deadline
from pipeline.errors import OutOfMemory, OutOfTime, WorkerLost
from pipeline.output.plan import Shard
from pipeline.stats import Progress

ATTEMPTS = 3  # replicas that may be lost on one shard, or one after another while loading
SUSPICIOUS = 2  # ... after which its next holder is a careful one, where there are careful ones
ACCIDENTS = 10  # machines that may be lost on one shard: theirs is rarely a document's fault
LEAD_SECONDS, LEAD_SHARE = 2.0, 0.25  # a shard younger than both (the share is of a usual one's time) is not repeated


@dataclass(frozen=True, slots=True)
class Held:
    """A shard in a replica's hands."""

    shard: Shard
    since: float


@dataclass(eq=False)
class Charge:
    """What is known of one replica."""

    careful: bool = False
    in_hand: dict[int, Held] = field(default_factory=dict)  # given, and not heard to be published or returned
    wants: int = 0
    seen: int = 0  # publications heard of
    notices: int = 0  # notices heard of
    rested: float = 0.0  # when it was last heard to have published something
    total: Progress = field(default_factory=Progress)  # as it has told
    credited: Progress = field(default_factory=Progress)  # the part of `total` that counts for good
    debited: Progress = field(default_factory=Progress)  # the part that has been taken back
    closing: bool = False  # gets nothing any more
    ended: bool = False

    @property
    def free(self) -> bool:
        """It has nothing to do, and would take something."""
        return not (self.in_hand or self.closing or self.careful)


@dataclass(frozen=True, slots=True)
class Credit:
    """Who is said to have published a shard, and what it counts."""

    publication: Publication
    charge: Charge


class Coordinator:
    """The shards of one run and the replicas that answer them, by name."""

    def __init__(
        self,
        shards: Iterable[Shard],
        report: Callable[[Progress], None],
        notice: Callable[[str], None],
        careful: bool = False,
        clock: Callable[[], float] = time.monotonic,
        handful: int = 1000,
        deadline: Deadline | None = None,
    ) -> None:
        """`report` is told increments (negative ones where work was lost), `notice` lines for people.

        `handful`: a replica that has so many rows in hand, and more than one shard, gets no other. `careful`: there are
        replicas that survive whatever a document does to a model (see `enlist`). Shards that could not be published
        before the `deadline` are not handed out.
        """
        self.waiting = deque(shards)
        self.suspects: deque[Shard] = deque()  # waiting too, for a careful replica
        self.report = report
        self.notice = notice
        self.careful = careful
        self.clock = clock
        self.handful = handful
        self.deadline = deadline
        self.unpublished = {shard.index for shard in self.waiting}
        self.credits: dict[int, Credit] = {}
        self.charges: dict[str, Charge] = {}
        self.holders: dict[int, list[str]] = {}  # of unpublished shards
        self.losses: Counter[int] = Counter()  # by shard
        self.accidents: Counter[int] = Counter()  # by shard
        self.losses_before_work = 0  # in a row
        self._several = False
        self._seconds = 0.0  # that the published shards took
        self._rows = 0  # that they have

    @property
    def finished(self) -> bool:
        """Every shard is published; what replicas still do is in vain."""
        return not self.unpublished

    @property
    def hands_wanted(self) -> int:
        """Replicas that would find work beside those who are there."""
        free = sum(charge.free for charge in self.charges.values())
        waiting = len(self.waiting) if self._can_begin(self.waiting) else 0
        return max(0, waiting - free) + self.careful_wanted

    @property
    def careful_wanted(self) -> bool:
        """The next replica should be a careful one."""
        there = any(charge.careful and not charge.closing for charge in self.charges.values())
        return self._can_begin(self.suspects) and not there

    def heed_the_deadline(self) -> None:
        """OutOfTime when it has come, and as soon as nothing is in hand and nothing can be begun before it."""
        if self.deadline is None:
            return
        if self.deadline.passed:
            raise OutOfTime(f"the deadline, {self.deadline}, has come")
        at_work = any(charge.in_hand for charge in self.charges.values())
        if self.unpublished and not (at_work or self._can_begin(self.waiting) or self._can_begin(self.suspects)):
            raise OutOfTime(f"what is left cannot be done until {self.deadline}")

    def enlist(self, replica: str, careful: bool = False) -> None:
        """A replica was started. A careful one is given shards that others were lost with, and no other is."""
        assert replica not in self.charges, f"{replica} is there"
        self.charges[replica] = Charge(careful)
        self._several = self._several or len(self.charges) > 1

    def has_begun(self, replica: str) -> bool:
        """Has it ever had work?"""
        charge = self.charges[replica]
        return bool(charge.in_hand or charge.seen)

    def order(self, replica: str) -> Order:
        """What to send it now."""
        charge = self.charges[replica]
        give = () if charge.closing else tuple(self._choose(replica, charge))
        for shard in give:
            charge.in_hand[shard.index] = Held(shard, self.clock())
            self.holders.setdefault(shard.index, []).append(replica)
        charge.wants = 0
        charge.closing = charge.closing or self._nothing_left(charge)
        return Order(give, charge.seen, charge.closing)

    def retire(self, replica: str) -> None:
        """Give it nothing more: it hands back what it has not begun, and ends when it has done the rest."""
        self.charges[replica].closing = True

    def heard(self, replica: str, report: ReplicaReport) -> None:
        """Take in a report; raise the failure that it tells of."""
        charge = self.charges[replica]
        for publication in report.published:
            self._published(replica, charge, publication)
        charge.seen += len(report.published)
        if report.published or charge.in_hand:
            self.losses_before_work = 0
        self._report(report.total - charge.total)
        charge.total = report.total
        for index in report.returned:
            if index in charge.in_hand:
                self._put_back(self._release(replica, charge, index))
        for line in report.notices[charge.notices :]:
            with events.about("replica_notice", replica=label(replica)):
                self.notice(f"{replica}: {line}" if self._several else line)
        charge.notices = len(report.notices)
        charge.wants = report.wants
        if self.finished:
            for each in self.charges.values():
                self._settle(each)
        if report.failure is not None:
            raise report.failure
        charge.ended = report.ended

    def left(self, replica: str) -> None:
        """A replica has done what it was to do, and is gone."""
        self._part_from(replica)

    def lost(self, replica: str, cause: str, accident: bool = False) -> None:
        """A replica is gone: its shards go to others, its unpublished work is taken back.

        `accident`: its machine is gone too. WorkerLost when that has happened too often to be one.
        """
        began = self.has_begun(replica)
        charge = self.charges[replica]
        suspected = [held.shard for index, held in charge.in_hand.items() if index in self.unpublished]
        (self.accidents if accident else self.losses).update(shard.index for shard in suspected)
        self._part_from(replica)
        self._refuse_repetition(suspected, cause)
        if not (began or accident):
            self.losses_before_work += 1
            if self.losses_before_work >= ATTEMPTS:
                raise WorkerLost(
                    f"{cause}; {ATTEMPTS} replicas in a row were lost before they began: is there memory enough "
                    "for the models?"
                )
        if self.unpublished:
            with events.about("replica_lost", replica=label(replica), shards=[shard.index for shard in suspected]):
                self.notice(f"{cause}; replacing it" if self.hands_wanted else f"{cause}; others have its shards")

    def forgives(self, replica: str, failure: Exception) -> bool:
        """Is that the end of one replica, not of the run? So it is where it has lost its workers and others work."""
        others = (charge for name, charge in self.charges.items() if name != replica)
        return isinstance(failure, WorkerLost | OutOfMemory) and any(charge.in_hand for charge in others)

    # --- who gets what

    def _choose(self, replica: str, charge: Charge) -> list[Shard]:
        if charge.careful:  # one at a time, so that it is known whose fault it was
            ready = charge.wants and not charge.in_hand and self._can_begin(self.suspects)
            return [self.suspects.popleft()] if ready else []
        others = sum(not (each.closing or each.careful) for each in self.charges.values())
        fair = max(len(self.waiting) // others, 0 if charge.in_hand else 1)  # the last ones are for those who have none
        rows = sum(held.shard.rows for held in charge.in_hand.values())
        give: list[Shard] = []
        while self.waiting and len(give) < min(charge.wants, fair):
            if rows >= self.handful and len(charge.in_hand) + len(give) >= AHEAD:
                break  # it reads far ahead; what it has not begun to answer is better off with others
            if not self._can_begin(self.waiting, rows):
                break
            give.append(self.waiting.popleft())
            rows += give[-1].rows
        if charge.wants and not self._can_begin(self.waiting) and not give and not charge.in_hand:
            return self._repeated(replica)
        return give

    def _repeated(self, replica: str) -> list[Shard]:
        """A shard that one other replica has had for some time: one that is behind others there, else the oldest.

        What is behind others has probably not been begun.
        """
        usual = self._seconds / len(self.credits) if self.credits else 0.0
        before = self.clock() - max(LEAD_SECONDS, LEAD_SHARE * usual)
        best: tuple[int, float, Shard] | None = None
        for name, other in self.charges.items():
            if name == replica:
                continue
            for ahead, (index, held) in enumerate(other.in_hand.items()):
                due = held.since <= before and self._repeatable(index)
                if due and (best is None or (-ahead, held.since) < best[:2]):
                    best = (-ahead, held.since, held.shard)
        return [] if best is None else [best[2]]

    def _nothing_left(self, charge: Charge) -> bool:
        if charge.in_hand:
            return False
        if charge.careful:
            return not self._can_begin(self.suspects)
        if self._can_begin(self.waiting):
            return False
        return not any(map(self._repeatable, self.holders))

    def _can_begin(self, queue: deque[Shard], rows: int = 0) -> bool:
        """Is there a next one, and time for it, with a replica that has so many rows to answer before?"""
        if not queue or self.deadline is None:
            return bool(queue)
        per_row = self._seconds / self._rows if self._rows else 0.0
        return (rows + queue[0].rows) * per_row < self.deadline.left

    def _repeatable(self, index: int) -> bool:
        """One replica has it, and nobody has been lost with it."""
        return index in self.unpublished and len(self.holders[index]) == 1 and not self.losses[index]

    # --- what was done

    def _published(self, replica: str, charge: Charge, publication: Publication) -> None:
        index, now = publication.shard, self.clock()
        held = charge.in_hand.get(index)
        if held is not None:
            self._release(replica, charge, index)
            self._seconds += now - max(held.since, charge.rested)
            self._rows += held.shard.rows
        charge.rested = now
        first = self.credits.get(index)
        if first is None:
            self.unpublished.discard(index)
            _tell(replica, publication)
        elif publication.created and not first.publication.created:
            first.charge.credited -= first.publication.counts  # it only found what this one had published
            self._take_back(first.charge, first.publication.counts)
        else:
            self._take_back(charge, publication.counts)
            return
        self.credits[index] = Credit(publication, charge)
        charge.credited += publication.counts

    def _take_back(self, charge: Charge, counts: Progress) -> None:
        charge.debited += counts
        self._report(Progress() - counts)

    def _part_from(self, replica: str) -> None:
        charge = self.charges[replica]
        for index in reversed(list(charge.in_hand)):
            self._put_back(self._release(replica, charge, index))
        del self.charges[replica]
        self._settle(charge)

    def _settle(self, charge: Charge) -> None:
        """Only what it is credited with stays counted."""
        self._report(charge.credited - (charge.total - charge.debited))
        charge.total, charge.debited = charge.credited, Progress()

    def _release(self, replica: str, charge: Charge, index: int) -> Shard:
        names = self.holders[index]
        names.remove(replica)
        if not names:
            del self.holders[index]
        return charge.in_hand.pop(index).shard

    def _put_back(self, shard: Shard) -> None:
        """It is the next to be handed out, unless it is published or another has it too."""
        if shard.index in self.unpublished and shard.index not in self.holders:
            suspicious = self.careful and self.losses[shard.index] >= SUSPICIOUS
            (self.suspects if suspicious else self.waiting).appendleft(shard)

    def _refuse_repetition(self, suspected: list[Shard], cause: str) -> None:
        for shard in suspected:
            losses, accidents = self.losses[shard.index], self.accidents[shard.index]
            if losses >= ATTEMPTS or accidents >= ACCIDENTS:
                lost = f"{losses} replicas" if losses >= ATTEMPTS else f"{accidents} machines"
                raise WorkerLost(
                    f"{cause}; {lost} were lost with shard {shard.index} ({shard.rows} rows) in hand: "
                    "look at its documents and at the memory of the machine, then run the same command again"
                )

    def _report(self, increment: Progress) -> None:
        if increment != Progress():
            self.report(increment)


def _tell(replica: str, publication: Publication) -> None:
    counts = publication.counts
    events.tell(
        "shard_published", f"shard {publication.shard} is published", replica=label(replica), shard=publication.shard,
        rows=counts.rows_done, error_rows=counts.error_rows, seconds=round(publication.seconds, 3),
    )  # fmt: skip
