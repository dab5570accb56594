"""Which draft worker drafts for which sequence of a replica, and how each of them fares.

A sequence stays where it is (its prefix is cached there), unless its worker is lost, or is slow and has more than its
share. New ones go where they will be drafted soonest. Knows nothing of Ray, and keeps no time of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median

from actors.roster import Member

SMOOTHING = 0.2  # weight of the newest reply's seconds
PROVEN = 8  # replies after which a worker's seconds say something about it
SLOW = 2.5  # times the others' median
NOISE = 0.02  # seconds: no worker is slow that answers within them
FORGETTING = 64  # steps after which a slot that was not asked about holds nobody's sequence
MOVES = 2  # sequences that a slow worker loses per step
SHORTEST_PATIENCE = 0.25  # seconds
PATIENCE = 4.0  # times the usual seconds, until a worker is late for a step
PATIENCE_WITH_SLOW = 1.5  # … where it is known to be slow: what it drafts is not worth more


@dataclass(slots=True)
class Standing:
    """What a replica knows of one draft worker."""

    member: Member
    seconds: float | None = None  # per reply, smoothed
    replies: int = 0
    others: int = 0  # sequences of other replicas that it drafts for
    most: float = math.inf  # own sequences: with more it ran out of memory
    late_since: float | None = None  # it was asked then, and still owes an answer that nobody waits for
    own: int = 0  # sequences of this replica
    unsure: set[int] = field(default_factory=set)  # slots that may not hold what the scheduler believes


@dataclass
class Homes:
    """Not to be used by several threads at once."""

    standings: dict[int, Standing] = field(default_factory=dict)
    places: dict[int, tuple[int, int]] = field(default_factory=dict)  # by slot: the sequence in it, and its home
    moves: int = 0
    steps: int = 0
    asked: dict[int, int] = field(default_factory=dict)  # by slot: the step in which it was last asked about

    def enroll(self, members: Iterable[Member]) -> None:
        """Those who are up, and nobody else."""
        known = self.standings
        self.standings = {member.home: known.get(member.home) or Standing(member) for member in members}

    def drop(self, home: int) -> None:
        """It is lost."""
        self.standings.pop(home, None)

    def find(self, handle: int, slot: int, now: float) -> int | None:
        """The worker that drafts for a sequence in this step; None: nobody.

        While its worker is late, a sequence goes on without drafts, and may yet come back to what is cached there.
        """
        self.asked[slot] = self.steps
        sequence, home = self.places.get(slot, (None, None))
        standing = None if home is None else self.standings.get(home)
        if sequence != handle or standing is None or self._leaves(standing, now):
            if standing is not None:
                standing.own -= 1
            standing = self._choose(now)
            if standing is None:
                self.places.pop(slot, None)
                return None
            standing.own += 1
            self.places[slot] = (handle, standing.member.home)
        return standing.member.home if standing.late_since is None else None

    def at(self, handle: int, slot: int) -> int | None:
        """Where `find` has put a sequence, unless it was lost since."""
        sequence, home = self.places.get(slot, (None, None))
        return home if sequence == handle and home in self.standings else None

    def begin_step(self) -> None:
        """As many sequences as may be moved in a step may be moved again; places nobody asks about are forgotten."""
        self.moves = MOVES
        self.steps += 1
        if self.steps % FORGETTING == 0:
            for slot in [slot for slot, step in self.asked.items() if self.steps - step >= FORGETTING]:
                del self.asked[slot]
                _, home = self.places.pop(slot, (0, None))
                if home is not None and home in self.standings:
                    self.standings[home].own -= 1

    def replied(self, home: int, seconds: float, others: int) -> None:
        """It has drafted."""
        standing = self.standings[home]
        old = standing.seconds
        standing.seconds = seconds if old is None else old + SMOOTHING * (seconds - old)
        standing.replies += 1
        standing.others = others

    def exhausted(self, home: int) -> None:
        """It ran out of memory: it will not get as many sequences again."""
        standing = self.standings[home]
        standing.most = standing.own // 2

    def patience(self, home: int, longest: float, now: float) -> float:
        """Seconds within which it must answer, or is late for this step; at most `longest`."""
        standing = self.standings[home]
        if self._is_slow(standing, now):
            return min(longest, max(NOISE, PATIENCE_WITH_SLOW * self._usual(standing)))
        seconds = [s.seconds for s in self.standings.values() if s.seconds is not None]
        return min(longest, max(SHORTEST_PATIENCE, PATIENCE * median(seconds))) if seconds else longest

    def _choose(self, now: float) -> Standing | None:
        fit = [s for s in self.standings.values() if s.late_since is None and s.own < s.most]
        return min(fit, key=lambda s: (s.others + s.own + 1) * self._pace(s, now), default=None)

    def _leaves(self, standing: Standing, now: float) -> bool:
        """One of its sequences had better go elsewhere."""
        if standing.own > standing.most:
            return True
        if not self.moves or standing.own <= 1 or not self._is_slow(standing, now) or self._choose(now) is None:
            return False
        leaves = standing.own > math.ceil(self._share(standing, now))
        self.moves -= leaves
        return leaves

    def _share(self, standing: Standing, now: float) -> float:
        """Of this replica's sequences, as many as its speed deserves."""
        total = sum(s.own for s in self.standings.values())
        return total / self._pace(standing, now) / sum(1 / self._pace(s, now) for s in self.standings.values())

    def _is_slow(self, standing: Standing, now: float) -> bool:
        proven = standing.replies >= PROVEN or standing.late_since is not None
        usual = self._usual(standing)
        return proven and usual > 0 and self._seconds(standing, now) > max(NOISE, SLOW * usual)

    def _pace(self, standing: Standing, now: float) -> float:
        """Its seconds per reply; the others' where it has not replied yet."""
        return self._seconds(standing, now) or self._usual(standing) or 1.0

    def _seconds(self, standing: Standing, now: float) -> float:
        waited = 0.0 if standing.late_since is None else now - standing.late_since
        return max(standing.seconds or 0.0, waited)

    def _usual(self, standing: Standing) -> float:
        """The others' median seconds per reply; 0 where there are none."""
        others = [s.seconds for s in self.standings.values() if s is not standing and s.seconds is not None]
        return median(others) if others else 0.0
