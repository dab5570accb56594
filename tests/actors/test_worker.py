"""An actor seen by its owner: answers, errors, deadlines and deaths."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import psutil
import pytest
import ray

from actors.worker import Worker, answer
from pipeline.errors import CacheMiss, WorkerLost
from tests.actors.processes import wait_gone

pytestmark = pytest.mark.usefixtures("ray_address")


class Clerk:
    """The actor."""

    def ready(self) -> int:
        return os.getpid()

    def ping(self) -> bool:
        return True

    def work(self, task: Any) -> Any:
        if isinstance(task, Exception):
            raise task
        if task == "slow":
            time.sleep(60)
        return task


@pytest.fixture(scope="module")
def clerk() -> Worker:
    return Worker(ray.remote(num_cpus=0)(Clerk).remote(), "the clerk")


def test_an_answer_and_an_error_arrive_as_themselves(clerk: Worker) -> None:
    clerk.wait_ready()
    assert clerk.is_ready()
    assert clerk.ask("work", "fine", 10) == "fine"
    with pytest.raises(CacheMiss) as miss:
        clerk.ask("work", CacheMiss([5]), 10)
    assert type(miss.value) is CacheMiss
    assert miss.value.sequences == (5,)
    assert "ray" not in str(miss.value)


def test_a_dead_worker_is_told_in_one_line(clerk: Worker) -> None:
    call = clerk.handle.work.remote("slow")
    os.kill(clerk.wait_ready(), signal.SIGKILL)
    with pytest.raises(WorkerLost) as loss:
        answer(call, 10, clerk.name)
    assert str(loss.value) == "the clerk is gone: its process was killed (for lack of memory, perhaps)"
    with pytest.raises(WorkerLost, match=r"^the clerk is gone: [^\n]*$"):
        clerk.ask("work", "fine", 10)


def test_a_hanging_worker_is_noticed_and_ended() -> None:
    hanging = Worker(ray.remote(num_cpus=0)(Clerk).remote(), "the clerk")
    process = psutil.Process(hanging.wait_ready())
    process.suspend()
    with pytest.raises(WorkerLost, match=r"^the clerk has not answered for 0.5 s$"):
        hanging.ask("work", "fine", 0.5)
    hanging.end()
    assert wait_gone(process, 20)


def beats(worker: Worker, wanted: int, seconds: float = 20.0) -> bool:
    """So many signs of life, before long."""
    deadline = time.monotonic() + 10
    while wanted and time.monotonic() < deadline:
        wanted -= worker.shows_life(seconds)
        time.sleep(0.01)
    return not wanted


def test_a_worker_that_works_shows_life_and_one_that_hangs_or_is_dead_does_not(monkeypatch: Any) -> None:
    monkeypatch.setattr("actors.worker.PING_SECONDS", 0.1)
    options = {"num_cpus": 0, "max_concurrency": 4}
    busy, hanging, dying = (Worker(ray.remote(**options)(Clerk).remote(), f"clerk {i}") for i in range(3))
    call = busy.handle.work.remote("slow")
    processes = {each: psutil.Process(each.wait_ready()) for each in (busy, hanging, dying)}
    assert beats(busy, 3)
    assert not ray.wait([call], timeout=0)[0]
    assert beats(hanging, 1)
    processes[hanging].suspend()
    with pytest.raises(WorkerLost, match=r"^clerk 1 has not answered for 0.5 s$"):
        beats(hanging, 100, 0.5)
    assert beats(dying, 1)
    processes[dying].kill()
    with pytest.raises(WorkerLost, match=r"^clerk 2 is gone: its process was killed"):
        beats(dying, 100)
    for each in processes:
        each.end()
