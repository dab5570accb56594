"""Draft workers that are lost and come back, without anybody waiting."""

from __future__ import annotations

import pytest

from actors.draft_pool import LONGEST_PAUSE, SEAT_PAUSE, DraftPool
from actors.worker import LOADING_SECONDS
from pipeline.errors import ModelError
from tests.actors.exchange import TRAITS
from tests.actors.fakes import FakeWorker, dead


class Hall:
    """A pool whose workers are made in advance (None: no seat), and a clock that stands still."""

    def __init__(self, *workers: FakeWorker | None, size: int = 1) -> None:
        self.supply = list(workers)
        self.made: list[FakeWorker | None] = []
        self.notices: list[str] = []
        self.now = 0.0
        self.pool = DraftPool(self._make, size, self.notices.append, lambda: self.now)

    def _make(self, number: int) -> FakeWorker | None:
        self.made.append(self.supply.pop(0))
        return self.made[-1]

    def tended(self) -> list[str]:
        """The names on the roster after some rounds."""
        for _ in range(4):  # made, lost, made anew, loaded
            self.pool.tend()
        return [member.name for member in self.pool.roster.members]


def worker(name: str = "draft worker 0", **how: object) -> FakeWorker:
    return FakeWorker(name, **{"loads": TRAITS, **how})  # type: ignore[arg-type]


def test_a_worker_is_on_the_roster_once_it_has_loaded() -> None:
    slow = worker(loads=None)
    hall = Hall(slow)
    assert hall.tended() == []
    assert hall.pool.roster.version == 0
    slow.loads = TRAITS
    assert hall.tended() == ["draft worker 0"]
    (member,) = hall.pool.roster.members
    assert (hall.pool.roster.version, member.handle, member.traits) == (1, slow.handle, TRAITS)
    assert hall.tended() == ["draft worker 0"]
    assert hall.pool.roster.version == 1


def test_a_lost_worker_is_ended_and_its_replacement_is_somebody_else() -> None:
    first, second = worker("a"), worker("b", loads=None)
    hall = Hall(first, second)
    hall.tended()
    home = hall.pool.roster.members[0].home
    hall.pool.lose(home, "draft worker 0 is gone: its process was killed")
    assert first.ended
    assert hall.notices == ["draft worker 0 is gone: its process was killed; replacing it"]
    assert hall.tended() == []
    assert hall.pool.roster.version == 2
    second.loads = TRAITS
    assert hall.tended() == ["b"]
    assert hall.pool.roster.members[0].home != home
    hall.pool.lose(home, "told once more, by another replica")
    assert not second.ended
    assert len(hall.notices) == 1


def test_the_others_stay_while_one_is_replaced() -> None:
    hall = Hall(worker("a"), worker("b"), worker("c", loads=None), size=2)
    assert hall.tended() == ["a", "b"]
    hall.pool.lose(hall.pool.roster.members[0].home, "gone")
    assert hall.tended() == ["b"]


def test_one_that_dies_though_nobody_asks_it_is_noticed() -> None:
    first, second = worker("a"), worker("b")
    hall = Hall(first, second)
    assert hall.tended() == ["a"]
    first.life = dead("a")
    assert hall.tended() == ["b"]
    assert hall.notices == ["a is gone; replacing it"]


def test_replacements_that_die_too_are_tried_more_and_more_seldom_and_for_ever() -> None:
    hall = Hall(*(worker(loads=dead()) for _ in range(20)))
    for _ in range(2000):
        hall.pool.tend()
        hall.now += 0.1
    assert 6 < len(hall.made) < 12
    hall.now += LONGEST_PAUSE
    hall.supply = [worker("late")]
    assert hall.tended() == ["late"]
    assert hall.pool.failure is None


def test_steady_work_makes_earlier_losses_forgotten() -> None:
    hall = Hall(*(worker(loads=dead()) for _ in range(4)), worker("a"), worker("b"))
    while hall.tended() == []:
        hall.now += LONGEST_PAUSE
    for _ in range(200):
        hall.pool.tend()
    hall.pool.lose(hall.pool.roster.members[0].home, "gone")
    assert hall.tended() == ["b"]  # at once


def test_without_a_seat_it_is_asked_for_again_later_and_that_is_no_loss() -> None:
    hall = Hall(None, None, worker("a"))
    for _ in range(2):
        assert hall.tended() == []
        assert len(hall.made) == round(hall.now / SEAT_PAUSE) + 1
        hall.now += SEAT_PAUSE
    assert hall.tended() == ["a"]
    assert hall.notices == []


def test_a_model_that_cannot_be_loaded_is_a_failure_of_the_job() -> None:
    hall = Hall(worker(loads=ModelError("no such model")))
    hall.tended()
    assert isinstance(hall.pool.failure, ModelError)
    assert hall.notices == []


def test_anything_else_that_befalls_a_loading_worker_is_its_own_affair() -> None:
    hall = Hall(worker(loads=RuntimeError("CUDA error: the device is busy")), worker("b"))
    assert hall.tended() == ["b"]
    assert hall.pool.failure is None
    assert hall.notices == ["draft worker 0 failed: RuntimeError: CUDA error: the device is busy; replacing it"]


def test_loading_has_a_deadline() -> None:
    hall = Hall(worker(loads=None), worker("b"))
    assert hall.tended() == []
    hall.now += LOADING_SECONDS + 1
    assert hall.tended() == ["b"]
    assert hall.notices == [f"draft worker 0 has not loaded for {LOADING_SECONDS:g} s; replacing it"]


def test_at_the_end_all_are_ended() -> None:
    first, second = worker("a"), worker("b", loads=None)
    hall = Hall(first, second, size=2)
    hall.tended()
    hall.pool.end()
    assert first.ended
    assert second.ended


@pytest.mark.parametrize("size", [0, 3])
def test_a_pool_of_any_size(size: int) -> None:
    hall = Hall(*(worker(str(i)) for i in range(size)), size=size)
    assert hall.tended() == [str(i) for i in range(size)]
    assert len({member.home for member in hall.pool.roster.members}) == size
