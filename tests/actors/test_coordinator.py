"""Who gets which shard, and what a loss means."""

from __future__ import annotations

import pytest

from actors.coordinator import ATTEMPTS, Coordinator
from actors.report import Activity, ReplicaReport
from pipeline.corpus.readers import RowRange
from pipeline.errors import ModelError, WorkerLost
from pipeline.output.plan import Shard
from pipeline.stats import Progress


class Run:
    """A coordinator with what it has reported."""

    def __init__(self, shards: int = 4) -> None:
        self.progress = Progress()
        self.notices: list[str] = []
        everything = [Shard(i, (RowRange(0, 10 * i, 10 * i + 10),)) for i in range(shards)]
        self.coordinator = Coordinator(everything, self._report, self.notices.append)

    def _report(self, increment: Progress) -> None:
        self.progress += increment

    def given(self, replica: str) -> list[int]:
        return [shard.index for shard in self.coordinator.order(replica).give]

    def hear(self, replica: str, published: tuple[int, ...] = (), rows: int = 0, kept: int = 0, **rest: object) -> None:
        values = {"wants": 0, "activity": Activity("reading", 0.0, None), **rest}
        report = ReplicaReport(published, Progress(rows_done=rows), Progress(rows_done=kept), **values)  # type: ignore[arg-type]
        self.coordinator.heard(replica, report)


def test_shards_are_handed_out_on_demand() -> None:
    run = Run()
    run.coordinator.enlist("a")
    run.coordinator.enlist("b")
    assert run.given("a") == []
    run.hear("a", wants=1)
    run.hear("b", wants=2)
    assert run.given("a") == [0]
    assert run.given("b") == [1, 2]
    assert run.given("b") == [], "a wish is granted once"
    run.hear("a", published=(0,), wants=2)
    assert run.given("a") == [3]


def test_a_run_is_finished_when_all_is_published_and_the_last_word_said() -> None:
    run = Run(1)
    run.coordinator.enlist("a")
    run.hear("a", wants=2)
    assert not run.coordinator.order("a").close
    run.hear("a", published=(0,), rows=9)
    assert not run.coordinator.finished
    assert run.coordinator.order("a").close
    run.hear("a", rows=10, kept=10, ended=True)
    assert run.coordinator.finished
    assert run.progress == Progress(rows_done=10)


def test_reports_are_sums_and_counted_once() -> None:
    run = Run()
    run.coordinator.enlist("a")
    run.hear("a", rows=3)
    run.hear("a", rows=3)
    run.hear("a", rows=7)
    assert run.progress.rows_done == 7
    run.hear("a", published=(2, 1), rows=7)
    assert run.coordinator.order("a").seen == 2


def test_shards_of_a_lost_replica_go_to_the_next_one_first_and_unpublished_work_is_taken_back() -> None:
    run = Run()
    run.coordinator.enlist("a")
    run.hear("a", wants=2)
    assert run.given("a") == [0, 1]
    run.hear("a", published=(0,), rows=14, kept=10, wants=1)
    assert run.given("a") == [2]
    run.coordinator.lost("a", "a was killed")
    assert run.progress.rows_done == 10
    assert run.notices == ["a was killed; replacing it"]
    run.coordinator.enlist("b")
    run.hear("b", wants=9)
    assert run.given("b") == [1, 2, 3]


def test_a_shard_that_loses_every_replica_ends_the_run() -> None:
    run = Run(2)
    for attempt in range(ATTEMPTS):
        run.coordinator.enlist("a")
        run.hear("a", wants=1)
        assert run.given("a") == [0]
        if attempt < ATTEMPTS - 1:
            run.coordinator.lost("a", "a was killed")
    with pytest.raises(WorkerLost, match=r"a was killed; 3 replicas were lost with shard 0 \(10 rows\) in hand"):
        run.coordinator.lost("a", "a was killed")


def test_replicas_that_are_lost_while_loading_end_the_run() -> None:
    run = Run()
    for _ in range(ATTEMPTS - 1):
        run.coordinator.enlist("a")
        run.coordinator.lost("a", "a was killed")
    run.coordinator.enlist("a")
    with pytest.raises(WorkerLost, match="3 replicas in a row were lost before they began"):
        run.coordinator.lost("a", "a was killed")


def test_losses_before_work_are_forgotten_once_a_replica_works() -> None:
    run = Run(ATTEMPTS)
    for shard in range(ATTEMPTS):
        run.coordinator.enlist("a")
        run.coordinator.lost("a", "a was killed")
        run.coordinator.enlist("a")
        run.hear("a", wants=1)
        assert run.given("a") == [shard]
        run.hear("a", published=(shard,))
        run.coordinator.charges.pop("a")


def test_a_failure_is_raised_as_itself_after_what_was_published_is_noted() -> None:
    run = Run(1)
    run.coordinator.enlist("a")
    with pytest.raises(ModelError, match="no such model"):
        run.hear("a", published=(0,), rows=10, failure=ModelError("no such model"))
    assert not run.coordinator.unpublished
    assert run.progress.rows_done == 10


def test_notices_are_passed_on_once() -> None:
    run = Run()
    run.coordinator.enlist("a")
    run.hear("a", notices=("x",))
    run.hear("a", notices=("x", "y"))
    assert run.notices == ["x", "y"]
