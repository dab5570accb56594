"""A replica whose target and draft are workers in processes of their own, and what their loss changes: nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from actors.placement import Node, place
from actors.replica import Replica
from actors.report import ReplicaReport
from actors.seats import Seats, reserve
from pipeline.config import JobConfig
from pipeline.output.plan import Shard
from tests.actors.processes import only_process
from tests.actors.tiny_job import alone, answers, nearly, planned, tiny_job
from tests.models import tiny_folder

ROWS, TOKENS, ROWS_PER_SHARD = 100, 24, 4
PATIENCE = 60.0


@dataclass
class Running:
    """A replica in this process, its workers in others, and the shards that it has not been given yet."""

    config: JobConfig
    replica: Replica
    shards: list[Shard]
    expected: dict[str, str]
    given: list[Shard] = field(default_factory=list)

    def give(self, shards: int = 1) -> None:
        self.given += self.shards[:shards]
        del self.shards[:shards]

    def poll(self) -> ReplicaReport:
        report = self.replica.poll(self.given, 0, False)
        assert report.failure is None, report.failure
        return report

    def wait(self, rows: int) -> ReplicaReport:
        """Until so many rows are answered in all."""
        deadline = time.monotonic() + PATIENCE
        while max((report := self.poll()).total.rows_done, report.kept.rows_done) < rows:
            assert time.monotonic() < deadline, report
            time.sleep(0.02)
        return report

    def finish(self) -> ReplicaReport:
        """Until all that was given is published."""
        report = self.wait(sum(shard.rows for shard in self.given))
        assert len(report.published) == len(self.given)
        return report

    def check(self) -> None:
        """What is published is what one process answers."""
        published = answers(self.config)
        assert len(published) == sum(shard.rows for shard in self.given)
        assert published == {key: self.expected[key] for key in published}


@pytest.fixture(scope="module")
def running(ray_address: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder: Path = tmp_path_factory.mktemp("separate")
    target = tiny_folder(folder / "target", seed=0, num_hidden_layers=2)
    draft = nearly(target, folder / "draft")
    config = tiny_job(folder, (target, draft), ROWS, TOKENS, ROWS_PER_SHARD, placement="separate", step_timeout=20.0)
    work, shards = planned(config)
    seats: Seats = reserve(place(config, [Node("here", 2)]), 20)
    replica = Replica(work, seats)
    replica.ready()
    yield Running(config, replica, shards, alone(config, ROWS))
    replica.poll([], 0, True)
    replica.thread.join(20)
    seats.release()
    assert not replica.thread.is_alive()
    assert replica.failure is None


def test_workers_in_processes_of_their_own_answer_as_one_process_does(running: Running) -> None:
    running.give()
    report = running.finish()
    running.check()
    assert report.kept.drafted > report.kept.accepted > 0
    assert report.activity.what == "reading and publishing"


def test_a_killed_draft_worker_changes_no_answer_and_drafting_returns(running: Running) -> None:
    before = running.finish()
    running.give(3)
    running.wait(before.kept.rows_done + 1)
    only_process("Draft").kill()
    report = running.finish()
    running.check()
    assert "draft worker 0 is gone" in report.notices[-1]
    drafted, deadline = report.kept.drafted, time.monotonic() + PATIENCE
    while running.finish().kept.drafted == drafted:  # a shard at a time, until its sequences are drafted again
        assert time.monotonic() < deadline
        time.sleep(1)
        running.give()
    running.check()


def test_a_killed_target_worker_changes_no_answer(running: Running) -> None:
    before = running.finish()
    running.give(3)
    running.wait(before.kept.rows_done + 1)
    only_process("Target").kill()
    report = running.finish()
    running.check()
    assert "the target worker is gone" in report.notices[-1]
    assert len(report.notices) == len(before.notices) + 1
