"""A draft worker, and the drafter that stands for all of a job's draft workers in a replica.

Workers belong to the job: its driver creates and replaces them (`actors.draft_pool`), and a replica uses those that it
is told of. A worker that is late or lost costs its rows their drafts, never the step, nor anything of the text.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import ray

from actors.draft_homes import Homes
from actors.meeting import Meeting
from actors.roster import Member, Roster, Traits
from actors.shared_drafter import Answers, Drafted, SharedDrafter
from actors.worker import answer
from pipeline.config import JobConfig
from pipeline.engine.assembly import Setup, drafting, load_drafter, set_threads
from pipeline.engine.drafters.merging import gathered, rows_of
from pipeline.engine.drafters.model import ModelDrafter
from pipeline.engine.parallel import device_of
from pipeline.errors import CacheMiss, NightdeskError, OutOfMemory, WorkerLost
from pipeline.messages import DraftRequest, Proposal

CALLERS = 32  # replicas and their cohorts that may wait for a worker at once, and the driver's pings
REPLICAS_HELD = 16  # so many replicas' sequences a worker holds, if they fit into its memory
FETCH_SECONDS = 10.0  # for an answer that is there, or as good as there: it is small


class Draft:
    """The actor: hosts a draft model for all replicas, or one rank of it. Rank 0 is the one to ask."""

    CONCURRENCY = CALLERS

    def __init__(
        self, config: JobConfig, setup: Setup, threads: int, rank: int = 0, followers: Sequence[Any] = ()
    ) -> None:
        """`followers` are the actors of the other ranks, which rank 0 makes run every pass that it runs itself."""
        set_threads(threads)
        self.config = config
        self.setup = setup
        self.followers = followers
        self.meeting = Meeting(rank, config.decoding.step_timeout)
        self.drafter: ModelDrafter | None = None
        self.shared: SharedDrafter | None = None

    def listen(self) -> tuple[str, int]:
        """See `Meeting.listen`."""
        return self.meeting.listen()

    def ready(self, place: tuple[str, int] | None = None) -> Traits:
        """Meet the other ranks, if there are any, and load. Asked once."""
        chosen = drafting(self.config)
        assert chosen is not None
        group = None if place is None else self.meeting.join(place, chosen.gpus, device_of(chosen.gpus))
        drafter = load_drafter(self.config, self.setup, group)
        assert isinstance(drafter, ModelDrafter), "a draft worker is for a draft model"
        self.drafter = drafter
        alone = not self.followers
        propose_all = drafter.propose_all if alone else LeadingRank(drafter, self.followers).propose_all
        self.shared = SharedDrafter(propose_all, REPLICAS_HELD * self.setup.limits.slots)
        return Traits.of_workers(self.setup)

    def follow(self, requests: Sequence[DraftRequest]) -> list[tuple[int, ...] | None]:
        """Take part in a pass of rank 0; see `misses`."""
        assert self.drafter is not None, "ready() comes first"
        return misses(self.drafter.propose_all(requests))

    def ping(self) -> bool:
        """A sign of life, also while a pass is under way."""
        return True

    def propose(self, request: DraftRequest) -> Drafted:
        """See `decode.Drafter`; what several replicas ask at the same time is one pass."""
        assert self.shared is not None, "ready() comes first"
        return self.shared.propose(request)


class LeadingRank:
    """Rank 0 of a draft model on several: what it runs, the others run too, or they would wait for each other for ever.

    Once one of them has failed, nobody knows where in a pass the others are, and the worker is of no use any more.
    """

    def __init__(self, drafter: ModelDrafter, followers: Sequence[Any]) -> None:
        self.drafter = drafter
        self.followers = followers
        self.failed = ""

    def propose_all(self, requests: Sequence[DraftRequest]) -> Answers:
        """See `ModelDrafter.propose_all`; WorkerLost when a rank fails, this one included."""
        if self.failed:
            raise WorkerLost(self.failed)
        calls = [follower.follow.remote(requests) for follower in self.followers]
        try:
            answers = self.drafter.propose_all(requests)
            for rank, call in enumerate(calls, 1):
                if answer(call, FETCH_SECONDS, f"rank {rank}") != misses(answers):
                    raise WorkerLost(f"rank {rank} is out of step: it misses other sequences than rank 0")
        except Exception as error:  # noqa: BLE001 - whatever it was, the ranks are out of step
            self.failed = f"a rank of the draft failed: {_first_line(error)}"
            raise WorkerLost(self.failed) from None
        return answers


def misses(answers: Answers) -> list[tuple[int, ...] | None]:
    """Which sequences each request misses; None: it was drafted."""
    return [reply.sequences if isinstance(reply, CacheMiss) else None for reply in answers]


class Lines(Protocol):
    """How a replica reaches draft workers."""

    def send(self, member: Member, request: DraftRequest) -> Any:
        """Ask one to draft; returns the call at once."""
        ...

    def wait(self, calls: Sequence[Any], seconds: float) -> Sequence[Any]:
        """Those calls that are answered, as soon as there is one, or none after `seconds`."""
        ...

    def answer(self, call: Any, member: Member) -> Drafted:
        """What an answered call says. Raises what the worker raised, or WorkerLost."""
        ...


class RayLines:
    """Draft workers as actors."""

    def send(self, member: Member, request: DraftRequest) -> Any:
        """See `Lines`."""
        return member.handle.propose.remote(request)

    def wait(self, calls: Sequence[Any], seconds: float) -> Sequence[Any]:
        """See `Lines`."""
        answered: list[Any] = ray.wait(list(calls), timeout=seconds)[0]
        return answered

    def answer(self, call: Any, member: Member) -> Drafted:
        """See `Lines`."""
        drafted: Drafted = answer(call, FETCH_SECONDS, member.name)
        return drafted


@dataclass(frozen=True, slots=True)
class Call:
    """What a worker was asked, and when."""

    member: Member
    rows: np.ndarray  # of the request of which it is a part
    request: DraftRequest
    ref: Any
    sent_at: float
    waited: float | None = None  # seconds, until it was late


class RemoteDrafter:
    """A `decode.Drafter` whose work the workers of a roster do; may be used by several threads at once.

    A step asks each worker once and waits for all of them, but not for one that is late. That one is not asked again
    before it has answered; if it does not within `step_timeout`, it is lost, as is one that is dead or that fails.

    Rows that come back without drafts count as fed with the scheduler. Where a worker was not asked, or says too late
    that it did not do it, its slots are `unsure`, and who relies on one of them is answered with a CacheMiss from here:
    the worker cannot know, since the slot may hold an earlier sequence's tokens.
    """

    def __init__(
        self,
        traits: Traits,
        step_timeout: float,
        lines: Lines | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Without a roster nobody drafts."""
        self.keeps_proposals = traits.keeps_proposals
        self.chunk = traits.chunk
        self.step_timeout = step_timeout
        self.roster_version = 0
        self._lines: Lines = RayLines() if lines is None else lines
        self._clock = clock
        self._homes = Homes()
        self._late: dict[int, list[Call]] = {}
        self._lost: dict[int, str] = {}
        self._lock = threading.RLock()

    def enroll(self, roster: Roster) -> None:
        """These workers are up, and no others."""
        with self._lock:
            self.roster_version = roster.version
            self._homes.enroll(member for member in roster.members if member.home not in self._lost)
            self._late = {home: calls for home, calls in self._late.items() if home in self._homes.standings}

    def losses(self) -> tuple[tuple[int, str], ...]:
        """All workers that were lost from here, and why."""
        with self._lock:
            return tuple(self._lost.items())

    def ready(self) -> bool:
        """Is there a worker to ask?"""
        self._hear_late_ones()
        with self._lock:
            return any(standing.late_since is None for standing in self._homes.standings.values())

    def homes(self, handle: int, slot: int) -> int | None:
        """The worker that drafts for a sequence in the step that is being planned; None: nobody."""
        with self._lock:
            return self._homes.find(handle, slot, self._clock())

    def propose(self, request: DraftRequest) -> Proposal:
        """Ask the workers; rows that none of them has drafted in time have length 0."""
        self._hear_late_ones()
        with self._lock:
            self._homes.begin_step()
            parts = self._by_home(request)
            self._check_unsure(parts)
        calls = []
        for member, rows, part in parts:
            sent_at = self._clock()
            calls.append(Call(member, rows, part, self._lines.send(member, part), sent_at))
        drafted: list[tuple[np.ndarray, Proposal]] = []
        missing: list[int] = []
        for call, reply in self._replies(calls):
            if isinstance(reply, CacheMiss):
                missing += reply.sequences
            elif reply is not None:
                drafted.append((call.rows, reply))
        if missing:
            raise CacheMiss(missing)
        return gathered(drafted, len(request.wanted))

    def _by_home(self, request: DraftRequest) -> list[tuple[Member, np.ndarray, DraftRequest]]:
        """The rows that each worker is to draft, and its part of the request."""
        feed = request.feed
        at = [self._homes.at(*pair) for pair in zip(feed.sequences.tolist(), feed.slots.tolist(), strict=True)]
        parts = []
        for home in sorted({home for home in at if home is not None}):
            standing, rows = self._homes.standings[home], np.array([i for i, found in enumerate(at) if found == home])
            if standing.late_since is None:
                parts.append((standing.member, rows, rows_of(request, rows)))
            else:
                standing.unsure.update(feed.slots[rows].tolist())
        return parts

    def _check_unsure(self, parts: Sequence[tuple[Member, np.ndarray, DraftRequest]]) -> None:
        """CacheMiss for rows that rely on what may be missing; the slots of the others will be known again."""
        missing: list[int] = []
        for member, _, part in parts:
            unsure, feed = self._homes.standings[member.home].unsure, part.feed
            copied = {copy.target: copy.source for copy in part.copies}
            for sequence, slot, cached in zip(
                feed.sequences.tolist(), feed.slots.tolist(), feed.cached.tolist(), strict=True
            ):
                if cached and copied.get(slot, slot) in unsure:
                    missing.append(sequence)
        if missing:
            raise CacheMiss(missing)
        for member, _, part in parts:
            self._homes.standings[member.home].unsure.difference_update(part.feed.slots.tolist())

    def _replies(self, calls: Sequence[Call]) -> list[tuple[Call, Proposal | CacheMiss | None]]:
        """The replies that came in time; None for one that cannot be used."""
        pending = {call.ref: call for call in calls}
        replies = []
        while pending:
            answered = self._lines.wait(list(pending), max(0.0, min(map(self._patience_left, pending.values()))))
            for ref in answered:
                call = pending.pop(ref)
                replies.append((call, self._hear(call)))
            if not answered:
                for ref in [ref for ref, call in pending.items() if self._patience_left(call) <= 0]:
                    self._is_late(pending.pop(ref))
        return replies

    def _patience_left(self, call: Call) -> float:
        with self._lock:
            if call.member.home not in self._homes.standings:
                return 0.0  # lost meanwhile, to another thread
            now = self._clock()
            return call.sent_at + self._homes.patience(call.member.home, self.step_timeout, now) - now

    def _is_late(self, call: Call) -> None:
        with self._lock:
            home, standing = call.member.home, self._homes.standings.get(call.member.home)
            if standing is None:
                return
            if self._clock() - call.sent_at >= self.step_timeout:
                self._lose(call.member, f"{call.member.name} has not answered for {self.step_timeout:g} s")
                return
            calls = self._late.setdefault(home, [])
            calls.append(call if call.waited is not None else replace(call, waited=self._clock() - call.sent_at))
            standing.late_since = min(call.sent_at for call in calls)

    def _hear_late_ones(self) -> None:
        """Take in late answers, without waiting; lose those who will not answer any more."""
        with self._lock:
            late = {call.ref: call for calls in self._late.values() for call in calls}
            if not late:
                return
            for ref in self._answered(list(late)):
                call = late.pop(ref)
                standing = self._homes.standings.get(call.member.home)
                if isinstance(self._hear(call), CacheMiss) and standing is not None:
                    standing.unsure.update(call.request.feed.slots.tolist())
            self._late = {}
            for standing in self._homes.standings.values():
                standing.late_since = None
            for call in late.values():
                self._is_late(call)

    def _answered(self, refs: list[Any]) -> list[Any]:
        answered: list[Any] = []
        while refs:
            more = self._lines.wait(refs, 0.0)
            if not more:
                break
            answered += more
            refs = [ref for ref in refs if ref not in more]
        return answered

    def _hear(self, call: Call) -> Proposal | CacheMiss | None:
        """Take an answer in."""
        home, seconds = call.member.home, self._clock() - call.sent_at
        try:
            drafted = self._lines.answer(call.ref, call.member)
        except CacheMiss as miss:
            return miss
        except OutOfMemory:
            with self._lock:
                if home in self._homes.standings:
                    self._homes.exhausted(home)
            return None
        except NightdeskError as loss:
            self._lose(call.member, str(loss))
            return None
        except Exception as error:  # noqa: BLE001 - whatever it was: a replacement may do better, and the text is safe
            self._lose(call.member, f"{call.member.name} failed: {_first_line(error)}")
            return None
        if call.waited is not None:  # nobody knows how long the answer has lain there
            seconds = max(call.waited, drafted.seconds)
        with self._lock:
            if home in self._homes.standings:
                self._homes.replied(home, seconds, drafted.others)
        return drafted.proposal

    def _lose(self, member: Member, cause: str) -> None:
        with self._lock:
            if member.home in self._homes.standings:
                self._lost[member.home] = cause
                self._homes.drop(member.home)
                self._late.pop(member.home, None)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
