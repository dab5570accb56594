"""Draft workers that are lost and come back, without anybody waiting."""

from __future__ import annotations

import pytest

from actors.draft_pool import LONGEST_PAUSE, DraftPool
from pipeline.errors import ModelError, WorkerLost
from tests.actors.fakes import FakeWorker, dead


class Hall:
    """A pool whose workers are made in advance, and a clock that stands still."""

    def __init__(self, *workers: FakeWorker, size: int = 1) -> None:
        self.supply = list(workers)
        self.made: list[FakeWorker] = []
        self.notices: list[str] = []
        self.now = 0.0
        self.pool = DraftPool(self._make, size, self.notices.append, lambda: self.now)  # type: ignore[arg-type]

    def _make(self, number: int) -> FakeWorker:
        self.made.append(self.supply.pop(0))
        return self.made[-1]


def test_a_worker_counts_once_it_has_loaded() -> None:
    slow = FakeWorker(loads=None)
    hall = Hall(slow)
    assert hall.pool.worker() is None
    slow.loads = "traits"
    assert hall.pool.worker() is slow  # type: ignore[comparison-overlap]


def test_a_lost_worker_is_ended_and_its_replacement_loads_in_the_background() -> None:
    first, second = FakeWorker(), FakeWorker(loads=None)
    hall = Hall(first, second)
    assert hall.pool.worker() is first  # type: ignore[comparison-overlap]
    hall.pool.lose(first, dead())  # type: ignore[arg-type]
    assert first.ended
    assert hall.pool.worker() is None
    second.loads = True
    assert hall.pool.worker() is second  # type: ignore[comparison-overlap]
    assert hall.notices == ["the worker is gone; going on without drafts until it is replaced"]


def test_another_worker_takes_over_while_one_is_replaced() -> None:
    first, other, third = FakeWorker(), FakeWorker(), FakeWorker(loads=None)
    hall = Hall(first, other, third, size=2)
    assert hall.pool.worker() is first  # type: ignore[comparison-overlap]
    hall.pool.lose(first, dead())  # type: ignore[arg-type]
    assert hall.pool.worker() is other  # type: ignore[comparison-overlap]
    assert hall.made == [first, other, third]


def test_replacements_that_die_too_are_tried_more_and_more_seldom_and_for_ever() -> None:
    hall = Hall(*(FakeWorker(loads=dead()) for _ in range(20)))
    for _ in range(2000):
        assert hall.pool.worker() is None
        hall.now += 0.1
    assert 6 < len(hall.made) < 12
    hall.now += LONGEST_PAUSE
    hall.supply = [FakeWorker()]
    hall.pool.worker()
    assert hall.pool.worker() is hall.made[-1]  # type: ignore[comparison-overlap]


def test_at_the_start_a_draft_that_cannot_be_loaded_ends_the_run() -> None:
    with pytest.raises(ModelError, match="no such model"):
        Hall(FakeWorker(loads=ModelError("no such model"))).pool.wait_ready()
    with pytest.raises(WorkerLost):
        Hall(*(FakeWorker(loads=dead()) for _ in range(3))).pool.wait_ready()
    assert Hall(FakeWorker(loads=dead()), FakeWorker(loads="traits")).pool.wait_ready() == "traits"
