"""Who makes a step fail: groups that are tried, judged by what really is bad."""

from __future__ import annotations

import random

import pytest

from pipeline.suspects import CROWD, DOUBTFUL, HOPELESS, SOON, Suspects


def try_all(suspects: Suspects, running: set[int], bad: set[int], accidents: list[bool]) -> tuple[list[int], int]:
    """Steps until nobody is on trial; (condemned, failed steps). `accidents`: what befalls the next steps anyway."""
    condemned, failures = [], 0
    for _ in range(1000):
        group = sorted(set(suspects.on_trial if suspects.on_trial is not None else running) & running)
        if bad & set(group) or (accidents and accidents.pop()):
            failures += 1
            found = suspects.failed(group)
            if found is not None:
                condemned.append(found)
                running.discard(found)
        else:
            suspects.cleared(group)
        if suspects.on_trial is None and not bad & running:
            return condemned, failures
    raise AssertionError("it does not end")


@pytest.mark.parametrize("count", [1, 2, 3, 16, 64])
def test_exactly_the_bad_ones_are_condemned(count: int) -> None:
    rng = random.Random(count)
    for _ in range(50):
        bad = set(rng.sample(range(count), rng.randint(0, min(2, count))))
        condemned, failures = try_all(Suspects(), set(range(count)), set(bad), [])
        assert set(condemned) == bad
        assert failures <= len(bad) * (count.bit_length() + 2)


def test_accidents_condemn_nobody() -> None:
    rng = random.Random(1)
    for _ in range(100):
        accidents = [rng.random() < 0.2 for _ in range(40)] + [True]
        suspects = Suspects()
        condemned, _ = try_all(suspects, set(range(8)), set(), accidents)
        assert condemned == [] or suspects.strikes == {}, "twice alone by accident is possible, once is not"
        assert len(condemned) <= 1


def test_one_failure_alone_is_not_enough() -> None:
    suspects = Suspects()
    assert suspects.failed([7]) is None
    assert suspects.on_trial == [7]
    suspects.cleared([7])
    assert suspects.on_trial is None
    assert suspects.failed([7]) is None, "the strike is forgotten"


def test_whoever_was_not_in_the_step_stays_on_trial() -> None:
    suspects = Suspects()
    suspects.failed([1, 2, 3, 4])
    assert suspects.on_trial == [1, 2]
    suspects.cleared([1])
    assert suspects.on_trial == [2]
    suspects.cleared([2])
    assert suspects.on_trial == [3, 4]


def test_after_some_condemned_neighbours_a_distant_one_is_tried() -> None:
    suspects = Suspects()
    suspects.failed(range(16))
    for _ in range(DOUBTFUL):
        while (group := suspects.on_trial) is not None and suspects.failed(group) is None:
            pass
    assert suspects.on_trial == [15]
    assert not suspects.hopeless
    suspects.cleared([15])
    assert suspects.on_trial is not None
    assert len(suspects.on_trial) < 8, "the neighbours are tried again"


def test_when_a_distant_one_fails_too_it_is_hopeless_and_one_step_is_hope() -> None:
    suspects = Suspects()
    for handle in range(HOPELESS):
        assert not suspects.hopeless
        suspects.failed([handle])
        assert suspects.failed([handle]) == handle
    assert suspects.hopeless
    suspects.cleared([99])
    assert not suspects.hopeless


def test_failures_of_all_together_are_a_crowd_and_rare_ones_are_not() -> None:
    suspects = Suspects()
    for _ in range(CROWD - 1):
        assert not suspects.crowded
        suspects.failed([1, 2])
        suspects.cleared([1])
        suspects.cleared([2])
    assert suspects.crowded
    for _ in range(SOON):
        suspects.cleared([1, 2])
    assert not suspects.crowded
