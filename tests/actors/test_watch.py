"""What a thread is at, and whether it is late."""

from __future__ import annotations

from typing import Any

from actors.report import Activity
from actors.watch import Watch, WatchedDrafter, WatchedVerifier


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_step_is_late_after_its_limit_and_resting_never_is() -> None:
    clock = Clock()
    watch = Watch("reading", clock)
    clock.now = 1000.0
    assert not watch.activity().is_late
    with watch.during("the target's step", 5.0):
        clock.now = 1004.0
        assert watch.activity() == Activity("the target's step", 4.0, 5.0)
        assert not watch.activity().is_late
        clock.now = 1006.0
        assert watch.activity().is_late
    assert watch.activity() == Activity("reading", 0.0, None)


class Slow:
    """A model that notes what is said of it while it computes."""

    keeps_proposals = True
    chunk = 5

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self.said = ""

    def ready(self) -> bool:
        return True

    def verify(self, request: Any) -> Any:
        self.said = self.watch.activity().what
        return request

    propose = verify


def test_models_in_this_process_are_watched_while_they_compute() -> None:
    watch = Watch("reading")
    target, draft = Slow(watch), Slow(watch)
    verifier, drafter = WatchedVerifier(target, watch, 1.0), WatchedDrafter(draft, watch, 1.0)
    request: Any = "request"
    assert verifier.verify(request) == request
    assert drafter.propose(request) == request
    assert (target.said, draft.said) == ("the target's step", "the draft's step")
    assert (drafter.ready(), drafter.keeps_proposals, drafter.chunk) == (True, True, 5)
