"""A replica whose target and draft are workers in processes of their own, and what their loss changes: nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from pathlib import Path

import pytest

from actors.draft_group import DraftGroup
from actors.draft_pool import DraftPool
from actors.node import Node
from actors.placement import place
from actors.replica import Replica
from actors.report import Order, ReplicaReport
from actors.seats import reserve_replica
from pipeline.config import JobConfig
from pipeline.engine.assembly import agree
from pipeline.output.plan import Shard
from pipeline.stats import Progress
from tests.actors.growing import draft_seat, wait_until
from tests.actors.processes import only_process
from tests.actors.tiny_job import alone, answers, nearly, planned, tiny_job
from tests.models import tiny_folder

ROWS, TOKENS, ROWS_PER_SHARD = 100, 24, 4
PATIENCE = 60.0


@dataclass
class Running:
    """A replica in this process, its workers and a draft worker in others, and the shards that it was not given yet."""

    config: JobConfig
    replica: Replica
    pool: DraftPool
    notices: list[str]  # of the pool
    shards: list[Shard]
    expected: dict[str, str]
    given: list[Shard] = field(default_factory=list)

    def give(self, shards: int = 1) -> None:
        self.given += self.shards[:shards]
        del self.shards[:shards]

    def poll(self) -> ReplicaReport:
        self.pool.tend()
        report = self.replica.poll(Order(tuple(self.given), roster=self.pool.roster))
        assert report.failure is None, report.failure
        for loss in report.draft_losses:
            self.pool.lose(*loss)
        return report

    def wait(self, rows: int) -> ReplicaReport:
        """Until so many rows are answered in all."""
        deadline = time.monotonic() + PATIENCE
        while max((report := self.poll()).total.rows_done, kept(report).rows_done) < rows:
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


def kept(report: ReplicaReport) -> Progress:
    """What the published shards count."""
    return reduce(add, (publication.counts for publication in report.published), Progress())


@pytest.fixture(scope="module")
def running(ray_address: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder: Path = tmp_path_factory.mktemp("separate")
    target = tiny_folder(folder / "target", seed=0, num_hidden_layers=2)
    draft = nearly(target, folder / "draft")
    config = tiny_job(folder, (target, draft), ROWS, TOKENS, ROWS_PER_SHARD, placement="separate", step_timeout=20.0)
    work, shards = planned(config)
    placement, setup, notices = place(config, [Node("here", 2)]), agree(config), list[str]()
    seats, draft = reserve_replica(placement.replicas[0], 20), draft_seat(placement.drafts[0])
    pool = DraftPool(lambda place: DraftGroup.at(draft, config, setup, f"draft worker {place}"), 1, notices.append)
    replica = Replica(work, seats, number=3)
    replica.ready()
    running = Running(config, replica, pool, notices, shards, alone(config, ROWS))
    wait_until(lambda: running.poll().roster_version > 0, PATIENCE)
    yield running
    replica.poll(Order(close=True))
    replica.thread.join(20)
    pool.end()
    seats.release()
    draft.release()
    assert not replica.thread.is_alive()
    assert replica.failure is None


def test_workers_in_processes_of_their_own_answer_as_one_process_does(running: Running) -> None:
    running.give()
    report = running.finish()
    running.check()
    assert kept(report).drafted > kept(report).accepted > 0
    assert report.activity.what == "reading and publishing"


def test_a_killed_draft_worker_changes_no_answer_and_drafting_returns(running: Running) -> None:
    before = running.finish()
    running.give(3)
    running.wait(kept(before).rows_done + 1)
    only_process("Draft").kill()
    report = running.finish()
    running.check()
    wait_until(lambda: running.poll() is not None and bool(running.notices), PATIENCE)
    assert "draft worker 0 is gone" in running.notices[-1]
    drafted, deadline = kept(report).drafted, time.monotonic() + PATIENCE
    while kept(running.finish()).drafted == drafted:  # a shard at a time, until its sequences are drafted again
        assert time.monotonic() < deadline
        time.sleep(1)
        running.give()
    running.check()


def test_a_killed_target_worker_changes_no_answer(running: Running) -> None:
    before = running.finish()
    running.give(3)
    running.wait(kept(before).rows_done + 1)
    only_process("Target").kill()
    report = running.finish()
    running.check()
    assert "the target worker is gone" in report.notices[-1]
    assert len(report.notices) == len(before.notices) + 1
