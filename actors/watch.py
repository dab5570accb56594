"""Notes what a thread is doing and since when, for another thread to look at."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from actors.report import Activity
from pipeline.decode import Drafter, Verifier
from pipeline.messages import DraftRequest, Proposal, VerifyReply, VerifyRequest


class Watch:
    """One thread writes, any may read."""

    def __init__(self, resting: str, clock: Callable[[], float] = time.monotonic) -> None:
        """`resting` is what is said between the things that are watched."""
        self.clock = clock
        self._resting: tuple[str, float | None] = (resting, None)
        self._now: tuple[tuple[str, float | None], float] = (self._resting, clock())

    @contextmanager
    def during(self, what: str, limit: float) -> Iterator[None]:
        """What goes on inside takes at most `limit` seconds, or is late."""
        self._now = ((what, limit), self.clock())
        try:
            yield
        finally:
            self._now = (self._resting, self.clock())

    def activity(self) -> Activity:
        """What is going on now."""
        (what, limit), since = self._now
        return Activity(what, self.clock() - since, limit)


class WatchedVerifier:
    """A verifier in this process, under watch (protocol `decode.Verifier`)."""

    def __init__(self, verifier: Verifier, watch: Watch, limit: float) -> None:
        self.verifier = verifier
        self.watch = watch
        self.limit = limit

    def verify(self, request: VerifyRequest) -> VerifyReply:
        """See `decode.Verifier`."""
        with self.watch.during("the target's step", self.limit):
            return self.verifier.verify(request)


class WatchedDrafter:
    """A drafter in this process, under watch (protocol `decode.Drafter`)."""

    def __init__(self, drafter: Drafter, watch: Watch, limit: float) -> None:
        self.drafter = drafter
        self.watch = watch
        self.limit = limit
        self.keeps_proposals = drafter.keeps_proposals
        self.chunk = drafter.chunk

    def ready(self) -> bool:
        """See `decode.Drafter`."""
        return self.drafter.ready()

    def propose(self, request: DraftRequest) -> Proposal:
        """See `decode.Drafter`."""
        with self.watch.during("the draft's step", self.limit):
            return self.drafter.propose(request)
