"""What an engine at work knows of itself."""

from __future__ import annotations

import pytest

from pipeline.meter import STEP_SECONDS, Meter, Reason


class Clock:
    now = 10.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_two_at_work_at_the_same_time_are_busy_once(clock: Clock) -> None:
    meter = Meter(clock)
    with meter.target.at_work():
        clock.now += 1
        with meter.target.at_work():
            clock.now += 2
        assert meter.vitals().target_seconds == 3.0, "what goes on now counts too"
    clock.now += 5
    with meter.target.at_work():
        clock.now += 1
    assert meter.vitals().target_seconds == 4.0
    assert meter.vitals().draft_seconds == 0.0


def test_work_that_fails_was_work(clock: Clock) -> None:
    meter = Meter(clock)


    def fail() -> None:
        with meter.step(), meter.draft.at_work():
            clock.now += 3
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert meter.vitals().draft_seconds == 3.0
    assert sum(meter.vitals().steps) == 1


def test_steps_are_counted_by_how_long_they_take(clock: Clock) -> None:
    meter = Meter(clock)
    for seconds in (0.0, 0.0625, 1000.0):
        with meter.step():
            clock.now += seconds
    steps = meter.vitals().steps
    assert len(steps) == len(STEP_SECONDS) + 1
    assert (steps[0], steps[STEP_SECONDS.index(0.1)], steps[-1]) == (1, 1, 1)


def test_vitals_do_not_change_afterwards(clock: Clock) -> None:
    meter = Meter(clock)
    before = meter.vitals()
    meter.queues(3, 7, 2)
    meter.halved()
    meter.target_lost()
    meter.error(Reason.PROMPT)
    after = meter.vitals()
    assert before.errors == {}
    assert (after.running, after.waiting, after.cohorts, after.halvings, after.targets_lost) == (3, 7, 2, 1, 1)
    assert after.errors == {Reason.PROMPT: 1}
