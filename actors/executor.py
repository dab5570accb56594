"""Runs shards on Ray: places replicas, polls them with a deadline, and replaces those that are lost.

What a loss means is the coordinator's to say; how a replica answers shards is its own affair.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import ray

from actors.autoscaler import arrange
from actors.coordinator import Coordinator
from actors.placement import Placement
from actors.replica import Replica
from actors.report import ReplicaReport
from actors.seats import Seats, reserve
from actors.session import ray_session
from actors.worker import LOADING_SECONDS, Worker, answer
from pipeline.config import JobConfig
from pipeline.errors import WorkerLost
from pipeline.output.plan import Shard
from pipeline.stats import Progress
from pipeline.work import JobWork

LOG = logging.getLogger(__name__)
POLL_SECONDS = 0.1


class RayExecutor:
    """An executor (`pipeline.work.Executor`) on the cluster at RAY_ADDRESS, or on a local Ray while it runs."""

    def __init__(self, config: JobConfig) -> None:
        self.config = config
        self._where = "Ray"

    def run(self, work: JobWork, shards: list[Shard], report: Callable[[Progress], None]) -> None:
        """See `pipeline.work.Executor`."""
        with ray_session():
            placement = arrange(self.config)
            self._where = placement.describe()
            Crew(work, placement, Coordinator(shards, report, LOG.warning)).run()

    def describe(self) -> str:
        """Where the last run took place."""
        return self._where


@dataclass
class Member:
    """A replica at work, and the call it owes an answer to."""

    worker: Worker
    seats: Seats
    call: Any = None
    called_at: float = 0.0
    patience: float = LOADING_SECONDS  # seconds until its answer is overdue: its process must load first
    idle_until: float = field(default_factory=time.monotonic)

    def dismiss(self) -> None:
        """End its process, and those that it owns."""
        self.worker.end()
        self.seats.release()


class Crew:
    """The replicas of a run."""

    def __init__(self, work: JobWork, placement: Placement, coordinator: Coordinator) -> None:
        self.work = work
        self.decoding = work.config.decoding
        self.placement = placement
        self.coordinator = coordinator
        self.members: dict[str, Member] = {}

    def run(self) -> None:
        """Return when every shard is published; raise what ended the run before."""
        try:
            self._hire("the replica")
            while not self.coordinator.finished:
                self._round()
        finally:
            for member in self.members.values():
                member.dismiss()

    def _hire(self, name: str) -> None:
        seats = reserve(self.placement, self.decoding.placement_timeout)
        self.members[name] = Member(Worker(seats.replica.create(Replica, self.work, seats), name), seats)
        self.coordinator.enlist(name)

    def _round(self) -> None:
        """Poll whoever is due, and take in whatever answers come within a moment."""
        now = time.monotonic()
        for name, member in self.members.items():
            if member.call is None and now >= member.idle_until:
                order = self.coordinator.order(name)
                member.call = member.worker.handle.poll.remote(order.give, order.seen, order.close)
                member.called_at = now
        calls = [member.call for member in self.members.values() if member.call is not None]
        answered, _ = ray.wait(calls, timeout=POLL_SECONDS) if calls else ([], [])
        if not calls:
            time.sleep(POLL_SECONDS / 4)
        for name, member in list(self.members.items()):
            if member.call in answered:
                self._answered(name, member)
            elif member.call is not None and time.monotonic() - member.called_at > member.patience:
                self._lost(name, f"{name} has not answered for {member.patience:g} s")

    def _answered(self, name: str, member: Member) -> None:
        try:
            report: ReplicaReport = answer(member.call, member.patience, name)
        except WorkerLost as loss:
            self._lost(name, str(loss))
            return
        member.call, member.idle_until = None, time.monotonic() + POLL_SECONDS
        self.coordinator.heard(name, report)
        activity = report.activity
        member.patience = max(self.decoding.step_timeout, activity.limit or 0)
        if activity.is_late:
            self._lost(name, f"{name}: {activity.what} takes longer than {activity.limit:g} s")

    def _lost(self, name: str, cause: str) -> None:
        self.members.pop(name).dismiss()
        self.coordinator.lost(name, cause)
        if self.coordinator.unpublished:
            self._hire(name)
