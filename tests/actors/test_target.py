"""The verifier that stands for a worker: what happens when the worker is lost."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from actors.target import RemoteVerifier
from pipeline.errors import CacheMiss, ModelError, OutOfMemory, StepFailed, WorkerLost
from tests.actors.fakes import FakeWorker, dead


def remote(*workers: FakeWorker) -> tuple[RemoteVerifier, list[str]]:
    notices: list[str] = []
    supply: Any = iter(workers)
    return RemoteVerifier(lambda: next(supply), 1.0, notices.append), notices


def test_a_lost_worker_is_ended_and_replaced_and_its_step_has_failed() -> None:
    first, second = FakeWorker(answers=["one", dead()]), FakeWorker(answers=["two"])
    verifier, notices = remote(first, second)
    assert verifier.verify("a") == "one"  # type: ignore[arg-type, comparison-overlap]
    with pytest.raises(StepFailed, match="the worker is gone"):
        verifier.verify("b")  # type: ignore[arg-type]
    assert first.ended
    assert not second.ended
    assert verifier.verify("b") == "two"  # type: ignore[arg-type, comparison-overlap]
    assert notices == ["the worker is gone; replacing it"]


def test_steps_that_were_under_way_together_fail_together_and_cost_one_worker() -> None:
    """Two threads have asked the same worker when it dies; both are told, and one replaces it."""
    both = threading.Barrier(2)

    class Shared(FakeWorker):
        def ask(self, method: str, argument: Any, seconds: float) -> Any:
            both.wait()
            raise dead()

    verifier, notices = remote(Shared(), FakeWorker(answers=["one"]))

    def ask() -> str:
        try:
            verifier.verify("a")  # type: ignore[arg-type]
        except StepFailed as failure:
            return str(failure)
        return "answered"

    with ThreadPoolExecutor(2) as threads:
        assert [call.result() for call in [threads.submit(ask), threads.submit(ask)]] == ["the worker is gone"] * 2
    assert len(notices) == 1
    assert verifier.verify("b") == "one"  # type: ignore[arg-type, comparison-overlap]


def test_a_cache_miss_reaches_the_decoder_and_costs_no_worker() -> None:
    worker = FakeWorker(answers=[CacheMiss([3, 4]), "one"])
    verifier, _ = remote(worker)
    with pytest.raises(CacheMiss) as miss:
        verifier.verify("a")  # type: ignore[arg-type]
    assert miss.value.sequences == (3, 4)
    assert verifier.verify("a") == "one"  # type: ignore[arg-type, comparison-overlap]


def test_workers_lost_in_a_row_while_loading_end_the_run_with_the_cause() -> None:
    workers = [FakeWorker(answers=[dead()]), *[FakeWorker(loads=dead()) for _ in range(3)]]
    verifier, _ = remote(*workers)
    with pytest.raises(WorkerLost, match=r"^the worker is gone; lost 3 times in a row while loading$"):
        verifier.verify("a")  # type: ignore[arg-type]
    assert [worker.ended for worker in workers] == [True, True, True, False]


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


def test_what_the_model_raises_costs_the_worker_too() -> None:
    """A GPU's process may be of no use any more."""

    class Spoilt(FakeWorker):
        def ask(self, method: str, argument: Any, seconds: float) -> Any:
            raise RuntimeError("CUDA error: device-side assert\nmore")

    spoilt = Spoilt()
    verifier, notices = remote(spoilt, FakeWorker(answers=["one"]))
    with pytest.raises(StepFailed, match=r"^the target failed: RuntimeError: CUDA error: device-side assert$"):
        verifier.verify("a")  # type: ignore[arg-type]
    assert spoilt.ended
    assert verifier.verify("a") == "one"  # type: ignore[arg-type, comparison-overlap]
    assert len(notices) == 1
