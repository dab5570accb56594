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
