"""The drafter that stands for a pool."""

from __future__ import annotations

import pytest

from actors.draft import RemoteDrafter, Traits
from actors.draft_pool import DraftPool
from pipeline.errors import CacheMiss, WorkerLost
from tests.actors.fakes import FakeWorker, dead


def remote(*workers: FakeWorker) -> RemoteDrafter:
    supply = list(workers)
    pool = DraftPool(lambda i: supply.pop(0), 1, lambda line: None)  # type: ignore[arg-type, return-value]
    return RemoteDrafter(pool, Traits(True, 7), 1.0)


def test_a_lost_worker_is_told_and_drafting_waits_for_its_replacement() -> None:
    second = FakeWorker(answers=["two"], loads=None)
    drafter = remote(FakeWorker(answers=["one", dead()]), second)
    assert drafter.ready()
    assert drafter.propose("a") == "one"  # type: ignore[arg-type, comparison-overlap]
    with pytest.raises(WorkerLost):
        drafter.propose("b")  # type: ignore[arg-type]
    assert not drafter.ready()
    with pytest.raises(WorkerLost, match="no draft worker is up"):
        drafter.propose("b")  # type: ignore[arg-type]
    second.loads = True
    assert drafter.ready()
    assert drafter.propose("b") == "two"  # type: ignore[arg-type, comparison-overlap]


def test_a_cache_miss_costs_no_worker() -> None:
    drafter = remote(FakeWorker(answers=[CacheMiss([1]), "one"]))
    with pytest.raises(CacheMiss):
        drafter.propose("a")  # type: ignore[arg-type]
    assert drafter.ready()


def test_what_the_scheduler_must_know_comes_from_the_worker() -> None:
    drafter = remote(FakeWorker())
    assert (drafter.keeps_proposals, drafter.chunk) == (True, 7)
