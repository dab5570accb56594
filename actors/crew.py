"""The replicas of a run, and the draft workers that they share: hired, polled with deadlines, replaced and dismissed.

What a loss means is the coordinator's to say, where one can sit is `hiring`'s, how draft workers fare is their pool's,
and how a replica answers shards is its own affair. Nothing here waits for anything but the next answers.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Protocol

import ray

from actors.cluster import LOOK_SECONDS, Cluster
from actors.coordinator import Coordinator
from actors.draft_seats import DraftSeats
from actors.hiring import Hiring
from actors.placement import Bundle
from actors.replica import Replica
from actors.report import ReplicaReport, label
from actors.roster import Roster
from actors.seats import Seats
from actors.telemetry import Telemetry
from actors.telemetry import Worker as Kind
from actors.worker import Worker, answer
from pipeline import events
from pipeline.errors import NightdeskError, WorkerLost
from pipeline.work import JobWork

ALONE = "the replica"  # what messages call one that never had company
POLL_SECONDS = 0.1
POLL_SHARE = 0.002  # seconds between two polls of a replica, for each replica: polls must not be all that one does
STARTING_SECONDS = 300.0  # until a new process answers its first poll: it imports much, and loads in a thread


class Pool(Protocol):
    """What a crew needs of the draft workers (`actors.draft_pool.DraftPool`)."""

    @property
    def roster(self) -> Roster: ...

    @property
    def failure(self) -> NightdeskError | None: ...

    def tend(self) -> None: ...

    def lose(self, home: int, cause: str) -> None: ...

    def end(self) -> None: ...


@dataclass(frozen=True)
class Drafts:
    """The draft workers of a job, and where they sit."""

    pool: Pool
    seats: DraftSeats


@dataclass
class Member:
    """A replica at work, and the call it owes an answer to."""

    worker: Worker
    seats: Seats
    call: Any = None
    called_at: float = 0.0
    patience: float = STARTING_SECONDS  # seconds until its answer is overdue
    idle_until: float = field(default_factory=time.monotonic)
    roster_version: int = 0  # of the draft workers that it knows
    draft_losses: int = 0  # of those it has told
    retired: bool = False

    def is_overdue(self) -> bool:
        return self.call is not None and time.monotonic() - self.called_at > self.patience


class Crew:
    """Everyone who works on a run."""

    def __init__(
        self,
        work: JobWork,
        coordinator: Coordinator,
        hiring: Hiring,
        cluster: Cluster,
        drafts: Drafts | None,
        notice: Callable[[str], None],
        telemetry: Telemetry,
    ) -> None:
        self.telemetry = telemetry
        self.work = work
        self.coordinator = coordinator
        self.hiring = hiring
        self.cluster = cluster
        self.drafts = drafts
        self.notice = notice
        self.step_timeout = work.config.decoding.step_timeout
        self.wanted = work.config.target.replicas
        self.members: dict[str, Member] = {}
        self.vacant: list[Seats] = []  # nobody sits there any more
        self.hired = 0  # so far
        self._looked_at = -math.inf
        self._several = min(len(hiring.planned), self._missing()) > 1

    def run(self) -> None:
        """Return when every shard is published; raise what ended the run before."""
        try:
            while not self.coordinator.finished:
                self.coordinator.heed_the_deadline()
                self._look_around()
                self._tell_state()
                self._poll()
        finally:
            self._go_home()
            self.telemetry.ended()

    # --- who is there

    def _look_around(self) -> None:
        """Every few seconds, and whenever seats have become vacant: who must go, who is to come."""
        if self.drafts is not None:
            self.drafts.pool.tend()
            if self.drafts.pool.failure is not None:
                raise self.drafts.pool.failure
        due = time.monotonic() - self._looked_at >= LOOK_SECONDS
        if due:
            self._looked_at = time.monotonic()
            self.cluster.look()
            self._heed_the_cluster()
        if due or self.vacant:
            self._fill(self.vacant)
            staying = sum(not member.retired for member in self.members.values())
            self.hiring.seek(self._missing(), self._taken(), nobody=not staying)
            if self.drafts is not None:
                self.drafts.seats.seek(self._taken())
        self._fill(self.hiring.found())
        if self.drafts is not None:
            self._move_drafts(self.drafts)
        if not (self.members or self.hiring.searches) and self.hiring.failure is not None:
            raise self.hiring.failure

    def _tell_state(self) -> None:
        coordinator = self.coordinator
        waiting = len(coordinator.waiting) + len(coordinator.suspects)
        drafts = 0 if self.drafts is None else len(self.drafts.pool.roster.members)
        self.telemetry.state(waiting, len(coordinator.holders), len(self.members), drafts)

    def _missing(self) -> int:
        """Replicas to hire: no more than find work, and than the job says."""
        hands = self.coordinator.hands_wanted
        if self.wanted == "auto":
            return hands
        return max(0, min(hands, self.wanted - sum(not member.retired for member in self.members.values())))

    def _taken(self) -> list[Bundle]:
        seated = [bundle for member in self.members.values() for bundle in member.seats.bundles]
        return seated + self.hiring.bundles + ([] if self.drafts is None else self.drafts.seats.bundles)

    def _fill(self, seats: list[Seats]) -> None:
        """Put somebody there, or give them back."""
        while seats:
            if self._missing() and self.hiring.is_usable(seats[-1].node) and seats[-1].stands():
                self._employ(seats.pop())
                continue
            if not (self.members or self.hiring.is_usable(seats[-1].node)):
                self.hiring.failure = WorkerLost(
                    f"there is room on {seats[-1].node.name} alone, where replicas were lost before they began: "
                    "is there memory enough for the models?"
                )
            seats.pop().release()

    def _employ(self, seats: Seats) -> None:
        careful = self.coordinator.careful_wanted
        name, place = self._name(), seats.apart() if careful else seats
        worker = Worker(place.replica.create(Replica, self.work, place, self.hired, label(name)), name)
        self.hired += 1
        self.telemetry.hired()
        self.members[name] = Member(worker, seats)
        self.coordinator.enlist(name, careful)
        if careful:
            with events.about("replica_careful", replica=label(name)):
                self.notice(f"{name} is a careful one: its target is in a process of its own, and it does not draft")

    def _name(self) -> str:
        self._several = self._several or bool(self.members)
        if not self._several:
            return ALONE
        first = 1 if ALONE in self.members else 0
        return next(name for i in itertools.count(first) if (name := f"replica {i}") not in self.members)

    # --- what happens to machines

    def _heed_the_cluster(self) -> None:
        for name, member in list(self.members.items()):
            node, ends = member.seats.node, self.cluster.ends
            if node.id not in self.cluster.living:
                self._lost(name, f"{name} is gone: {node.name} is not in the cluster any more", accident=True)
            elif node.id in ends and not self.coordinator.has_begun(name):
                with events.about("node_draining", replica=label(name), node=node.name):
                    self.notice(f"{node.name} is being drained: {name} had not begun and goes at once")
                self._left(name)
            elif self.cluster.must_leave(node.id):
                self._lost(name, f"{name} has not ended in time: {node.name} is being drained", accident=True)
            elif node.id in ends and not member.retired:
                member.retired = True
                self.coordinator.retire(name)
                with events.about("node_draining", replica=label(name), node=node.name):
                    self.notice(f"{node.name} is being drained{_until(ends[node.id])}: {name} ends what it has begun")

    def _move_drafts(self, drafts: Drafts) -> None:
        for name in drafts.seats.arrived():
            for worker in drafts.pool.roster.members:
                if worker.name == name:
                    drafts.pool.lose(worker.home, f"{name} moves: its machine goes away")

    # --- what is said

    def _poll(self) -> None:
        """Poll whoever is due, and take in whatever answers come within a moment."""
        now = time.monotonic()
        for name, member in list(self.members.items()):
            if member.call is None and now >= member.idle_until:
                order = self.coordinator.order(name)
                if order.close and not self.coordinator.has_begun(name):
                    self._left(name)  # without waiting for its models
                    continue
                if self.drafts is not None and self.drafts.pool.roster.version != member.roster_version:
                    order = replace(order, roster=self.drafts.pool.roster)
                member.call, member.called_at = member.worker.handle.poll.remote(order), now
        calls = [member.call for member in self.members.values() if member.call is not None]
        if not calls:
            time.sleep(POLL_SECONDS / 4)
            return
        ray.wait(calls, num_returns=1 + len(calls) // 8, timeout=POLL_SECONDS)  # many answers are taken in at once
        done, _ = ray.wait(calls, num_returns=len(calls), timeout=0)
        answered = set(done)
        for name, member in list(self.members.items()):
            if member.call in answered:
                self._answered(name, member)
            elif member.is_overdue():
                self._lost(name, f"{name} has not answered for {member.patience:g} s")

    def _answered(self, name: str, member: Member) -> None:
        try:
            report: ReplicaReport = answer(member.call, member.patience, name)
        except WorkerLost as loss:
            self._lost(name, str(loss))
            return
        period = max(POLL_SECONDS, POLL_SHARE * len(self.members))
        member.call, member.idle_until = None, time.monotonic() + period
        self._hear_of_drafts(member, report)
        self.telemetry.heard(name, report)
        try:
            self.coordinator.heard(name, report)
        except NightdeskError as failure:
            if not self.coordinator.forgives(name, failure):
                raise
            self._lost(name, f"{name}: {failure}")
            return
        activity = report.activity
        member.patience = max(self.step_timeout, activity.limit or 0)
        if activity.is_late:
            self._lost(name, f"{name}: {activity.what} takes longer than {activity.limit:g} s")
        elif report.ended:
            self._left(name)

    def _hear_of_drafts(self, member: Member, report: ReplicaReport) -> None:
        member.roster_version = report.roster_version
        if self.drafts is not None:
            for home, cause in report.draft_losses[member.draft_losses :]:
                self.drafts.pool.lose(home, cause)
        member.draft_losses = len(report.draft_losses)

    # --- who goes

    def _left(self, name: str) -> None:
        self._dismiss(name)
        self.coordinator.left(name)

    def _lost(self, name: str, cause: str, accident: bool = False) -> None:
        member = self._dismiss(name)
        self.telemetry.lost(Kind.REPLICA)
        accident = accident or not member.seats.stands()
        if not accident:
            self.hiring.lost(member.seats.node, self.coordinator.has_begun(name))
        self.coordinator.lost(name, cause, accident)

    def _dismiss(self, name: str) -> Member:
        """End its process, and those that it owns."""
        member = self.members.pop(name)
        self.telemetry.gone(name)
        self.vacant.append(member.seats)
        member.worker.end()
        return member

    def _go_home(self) -> None:
        """Nobody and nothing stays behind."""
        for name in list(self.members):
            self._dismiss(name)
        for seats in self.vacant:
            seats.release()
        self.hiring.cancel()
        if self.drafts is not None:
            self.drafts.pool.end()
            self.drafts.seats.release()


def _until(end: float) -> str:
    """`end` is Unix time; infinite where nobody has said."""
    return f" by {datetime.fromtimestamp(end):%H:%M:%S}" if end < math.inf else ""
