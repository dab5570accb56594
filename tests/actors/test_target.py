"""The verifier that stands for a worker: what happens when the worker is lost."""

from __future__ import annotations

from typing import Any

import pytest

from actors.losses import STEADY
from actors.target import RemoteVerifier
from pipeline.errors import CacheMiss, ModelError, OutOfMemory, WorkerLost
from tests.actors.fakes import FakeWorker, dead


def remote(*workers: FakeWorker) -> tuple[RemoteVerifier, list[str]]:
    notices: list[str] = []
    supply: Any = iter(workers)
    return RemoteVerifier(lambda: next(supply), 1.0, notices.append), notices


def test_a_lost_worker_is_ended_and_its_replacement_asked_the_same() -> None:
    first, second = FakeWorker(answers=["one", dead()]), FakeWorker(answers=["two"])
    verifier, notices = remote(first, second)
    assert verifier.verify("a") == "one"  # type: ignore[arg-type, comparison-overlap]
    assert verifier.verify("b") == "two"  # type: ignore[arg-type, comparison-overlap]
    assert first.ended
    assert not second.ended
    assert second.asked == [("verify", "b")]
    assert notices == ["the worker is gone; replacing it"]


def test_a_cache_miss_reaches_the_decoder_and_costs_no_worker() -> None:
    worker = FakeWorker(answers=[CacheMiss([3, 4]), "one"])
    verifier, _ = remote(worker)
    with pytest.raises(CacheMiss) as miss:
        verifier.verify("a")  # type: ignore[arg-type]
    assert miss.value.sequences == (3, 4)
    assert verifier.verify("a") == "one"  # type: ignore[arg-type, comparison-overlap]


def test_workers_lost_in_a_row_end_the_run_with_the_cause() -> None:
    workers = [FakeWorker(answers=[dead()]) for _ in range(3)]
    verifier, _ = remote(*workers)
    with pytest.raises(WorkerLost, match=r"^the worker is gone; lost 3 times in a row$"):
        verifier.verify("a")  # type: ignore[arg-type]
    assert all(worker.ended for worker in workers)


def test_a_few_answers_between_losses_do_not_make_them_accidents() -> None:
    workers = [FakeWorker(answers=["one", "two", dead()]) for _ in range(3)]
    verifier, _ = remote(*workers)
    answers = [verifier.verify("a") for _ in range(6)]  # type: ignore[arg-type]
    assert len(answers) == 6
    with pytest.raises(WorkerLost, match="lost 3 times"):
        verifier.verify("a")  # type: ignore[arg-type]


def test_losses_far_apart_are_accidents() -> None:
    workers = [FakeWorker(answers=["one"] * STEADY + [dead()]) for _ in range(6)]
    verifier, _ = remote(*workers, FakeWorker(answers=["two"]))
    answers = [verifier.verify("a") for _ in range(6 * STEADY + 1)]  # type: ignore[arg-type]
    assert answers[-1] == "two"  # type: ignore[comparison-overlap]


def test_a_worker_lost_while_loading_is_replaced_but_not_one_that_says_why_it_cannot() -> None:
    verifier, notices = remote(FakeWorker(loads=dead()), FakeWorker())
    verifier.wait_ready()
    assert len(notices) == 1
    verifier, _ = remote(FakeWorker(loads=ModelError("no such model")), FakeWorker())
    with pytest.raises(ModelError, match="no such model"):
        verifier.wait_ready()


def test_a_target_out_of_memory_is_kept_but_ranks_that_are_out_of_step_are_not() -> None:
    exhausted = OutOfMemory("the target ran out of memory")
    worker = FakeWorker(answers=[exhausted, "one"])
    verifier, notices = remote(worker)
    with pytest.raises(OutOfMemory):
        verifier.verify("a")  # type: ignore[arg-type]
    assert verifier.verify("a") == "one"  # type: ignore[arg-type, comparison-overlap]
    assert notices == []
    ranks = [FakeWorker(answers=[exhausted]) for _ in range(4)]
    for each in ranks:
        each.several = True
    verifier, notices = remote(*ranks, FakeWorker(answers=["two"]))
    for each in ranks:  # no number of them is a reason to give up: each time less is asked
        with pytest.raises(OutOfMemory):
            verifier.verify("a")  # type: ignore[arg-type]
        assert each.ended
    assert verifier.verify("a") == "two"  # type: ignore[arg-type, comparison-overlap]
    assert notices == ["the target ran out of memory; its ranks are replaced"] * 4
