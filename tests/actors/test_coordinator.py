"""Who gets which shard, what counts, and what a loss means."""

from __future__ import annotations

import random

import pytest

from actors.coordinator import ACCIDENTS, ATTEMPTS, LEAD_SECONDS, SUSPICIOUS, Coordinator
from actors.report import Activity, Publication, ReplicaReport
from pipeline.corpus.readers import RowRange
from pipeline.deadline import Deadline
from pipeline.errors import ModelError, OutOfMemory, OutOfTime, WorkerLost
from pipeline.output.plan import Shard
from pipeline.stats import Progress

ROWS = 10  # of every shard


class Run:
    """A coordinator with what it has reported, and a clock that stands still."""

    def __init__(self, shards: int = 4, careful: bool = False) -> None:
        self.progress = Progress()
        self.notices: list[str] = []
        self.now = 0.0
        everything = [Shard(i, (RowRange(0, ROWS * i, ROWS * i + ROWS),)) for i in range(shards)]
        self.coordinator = Coordinator(everything, self._report, self.notices.append, careful, lambda: self.now)

    def _report(self, increment: Progress) -> None:
        self.progress += increment

    def given(self, replica: str) -> list[int]:
        return [shard.index for shard in self.coordinator.order(replica).give]

    def hear(self, replica: str, *published: int, rows: int = 0, created: bool = True, **rest: object) -> None:
        """A report; each published shard counts its rows."""
        counts = Progress(rows_done=ROWS, shards_done=1)
        publications = tuple(Publication(index, counts, created) for index in published)
        values = {"wants": 0, "activity": Activity("reading", 0.0, None), **rest}
        self.coordinator.heard(replica, ReplicaReport(publications, Progress(rows_done=rows), **values))  # type: ignore[arg-type]

    def enlist(self, *replicas: str, wants: int = 1) -> list[list[int]]:
        """What each is given when it begins."""
        for replica in replicas:
            self.coordinator.enlist(replica)
        given = []
        for replica in replicas:
            self.hear(replica, wants=wants)
            given.append(self.given(replica))
        return given


class TestHandingOut:
    def test_shards_are_handed_out_on_demand(self) -> None:
        run = Run()
        run.coordinator.enlist("a")
        run.coordinator.enlist("b")
        assert run.given("a") == []
        run.hear("a", wants=1)
        run.hear("b", wants=1)
        assert run.given("a") == [0]
        assert run.given("b") == [1]
        assert run.given("b") == [], "a wish is granted once"
        run.hear("a", 0, wants=1)
        assert run.given("a") == [2]

    def test_one_alone_gets_what_it_wants(self) -> None:
        assert Run().enlist("a", wants=3) == [[0, 1, 2]]

    def test_the_last_ones_are_shared(self) -> None:
        run = Run(5)
        assert run.enlist("a", "b", wants=3) == [[0, 1], [2]]
        run.hear("a", wants=2)
        assert run.given("a") == [3]
        run.hear("a", wants=2)
        assert run.given("a") == [], "the very last one is for whoever has nothing"
        run.hear("b", 2, wants=2)
        assert run.given("b") == [4]

    def test_nobody_hoards(self) -> None:
        run = Run(9)
        run.coordinator.handful = 3 * ROWS
        assert run.enlist("a", wants=9) == [[0, 1, 2]]
        run.hear("a", wants=2)
        assert run.given("a") == []
        run.hear("a", 1, wants=2)
        assert run.given("a") == [3]
        run.coordinator.handful = 1
        run.hear("a", 0, 2, wants=2)
        assert run.given("a") == [4], "but one is always at hand for when the one before it drains"

    def test_a_run_is_finished_when_all_is_published(self) -> None:
        run = Run(1)
        run.enlist("a")
        assert not run.coordinator.order("a").close
        run.hear("a", 0, rows=ROWS)
        assert run.coordinator.finished
        assert run.coordinator.order("a").close

    def test_reports_are_sums_and_counted_once(self) -> None:
        run = Run()
        run.coordinator.enlist("a")
        run.hear("a", rows=3)
        run.hear("a", rows=3)
        run.hear("a", rows=7)
        assert run.progress.rows_done == 7
        run.hear("a", 2, 1, rows=7)
        assert run.coordinator.order("a").seen == 2

    def test_notices_are_passed_on_once_with_a_name_where_there_are_several(self) -> None:
        run = Run()
        run.coordinator.enlist("a")
        run.hear("a", notices=("x",))
        run.hear("a", notices=("x", "y"))
        assert run.notices == ["x", "y"]
        run.coordinator.enlist("b")
        run.hear("b", notices=("x",))
        assert run.notices == ["x", "y", "b: x"]


class TestHowManyWork:
    def test_no_more_than_there_are_shards_to_hand_out(self) -> None:
        run = Run(3)
        assert run.coordinator.hands_wanted == 3
        run.coordinator.enlist("a")
        run.coordinator.enlist("b")
        assert run.coordinator.hands_wanted == 1, "those who load will take two"
        run.hear("a", wants=1)
        run.given("a")
        assert run.coordinator.hands_wanted == 1
        run.coordinator.enlist("c")
        assert run.coordinator.hands_wanted == 0

    def test_who_has_nothing_left_is_told_to_end(self) -> None:
        run = Run(3)
        assert run.enlist("a", "b", "c") == [[0], [1], [2]]
        run.hear("c", 2, wants=2)
        assert not run.coordinator.order("c").close, "what others have may have to be repeated"
        run.now += LEAD_SECONDS
        for index in (0, 1):
            run.hear("c", wants=2)
            assert run.given("c") == [index]
            run.hear("c", index, wants=2)
            run.hear("ab"[index], index)
        assert run.coordinator.finished

    def test_who_could_only_be_a_third_on_a_shard_ends(self) -> None:
        run = Run(1)
        run.enlist("a", "b", "c")
        run.now += LEAD_SECONDS
        run.hear("b", wants=1)
        assert run.given("b") == [0]
        run.hear("c", wants=1)
        order = run.coordinator.order("c")
        assert (order.give, order.close) == ((), True)
        assert run.coordinator.hands_wanted == 0

    def test_a_closing_one_is_not_counted_on(self) -> None:
        run = Run(1)
        run.enlist("a", "b", "c")
        run.now += LEAD_SECONDS
        run.hear("b", wants=1)
        run.given("b")
        assert run.coordinator.order("c").close
        run.coordinator.lost("a", "a was killed")
        run.coordinator.lost("b", "b was killed")
        assert run.coordinator.hands_wanted == 1
        run.hear("c", wants=1)
        assert run.given("c") == []


class TestRepeating:
    def test_a_shard_that_another_has_had_for_long_is_given_a_second_time_and_not_a_third(self) -> None:
        run = Run(2)
        assert run.enlist("a", "b", "c") == [[0], [1], []]
        run.hear("c", wants=1)
        assert run.given("c") == [], "not yet"
        run.now += LEAD_SECONDS
        run.hear("c", wants=1)
        assert run.given("c") == [0], "the oldest"
        run.hear("b", 1, wants=1)
        assert run.given("b") == []

    def test_it_is_in_hand_for_a_good_part_of_what_a_shard_takes(self) -> None:
        run = Run(3)
        run.enlist("a", "b")
        run.now = 40.0
        run.hear("a", 0, wants=1)
        run.hear("b", wants=1)
        assert run.given("a") == [2]
        run.hear("b", 1, wants=1)
        run.now = 49.0
        run.hear("b", wants=1)
        assert run.given("b") == [], "a shard takes 40 s"
        run.now = 50.0
        run.hear("b", wants=1)
        assert run.given("b") == [2]

    def test_what_waits_behind_another_is_repeated_first(self) -> None:
        run = Run(4)
        assert run.enlist("a", wants=3) == [[0, 1, 2]]
        run.now = 1.0
        assert run.enlist("b") == [[3]]
        run.hear("b", 3, wants=1)
        run.now += LEAD_SECONDS
        for index in (2, 1, 0):
            run.hear("b", wants=1)
            assert run.given("b") == [index]
            run.hear("b", index)
        assert run.coordinator.finished

    def test_nobody_repeats_while_it_has_work_of_its_own(self) -> None:
        run = Run(2)
        run.enlist("a", "b")
        run.now += 100
        run.hear("b", wants=2)
        assert run.given("b") == []

    def test_what_others_were_lost_with_is_not_repeated(self) -> None:
        run = Run(1)
        run.enlist("a")
        run.coordinator.lost("a", "a was killed")
        run.enlist("b", "c")
        run.now += 100
        run.hear("c", wants=1)
        assert run.given("c") == []

    def test_the_first_publication_counts_and_the_second_is_taken_back(self) -> None:
        run = Run(2)
        run.enlist("a", "b", "c")
        run.now += LEAD_SECONDS
        run.hear("c", wants=1)
        assert run.given("c") == [0]
        run.hear("c", 0, rows=ROWS)
        run.hear("a", 0, rows=ROWS)
        assert run.progress.rows_done == ROWS
        run.hear("b", rows=4)
        assert run.progress.rows_done == ROWS + 4
        run.hear("b", 1, rows=ROWS)
        assert run.progress.rows_done == 2 * ROWS

    def test_counts_of_whoever_did_the_work_replace_those_of_whoever_found_it_done(self) -> None:
        run = Run(2)
        run.enlist("a", "b")
        work = Progress(rows_done=ROWS, shards_done=1, new_tokens=50)
        found = Progress(rows_done=ROWS, shards_done=1)
        told = {"wants": 0, "activity": Activity("reading", 0.0, None)}
        run.coordinator.heard("b", ReplicaReport((Publication(0, found, created=False),), found, **told))  # type: ignore[arg-type]
        run.coordinator.heard("a", ReplicaReport((Publication(0, work),), work, **told))  # type: ignore[arg-type]
        assert run.progress == work

    def test_work_on_a_duplicate_is_taken_back_when_all_is_published(self) -> None:
        run = Run(1)
        run.enlist("a", "b")
        run.now += LEAD_SECONDS
        run.hear("b", wants=1)
        assert run.given("b") == [0]
        run.hear("b", rows=7)
        run.hear("a", 0, rows=ROWS - 1)  # the report came before the last count
        assert run.coordinator.finished
        assert run.progress.rows_done == ROWS


class TestLosses:
    def test_shards_of_a_lost_replica_go_to_the_next_one_first_and_unpublished_work_is_taken_back(self) -> None:
        run = Run()
        assert run.enlist("a", wants=2) == [[0, 1]]
        run.hear("a", 0, rows=14, wants=1)
        assert run.given("a") == [2]
        run.coordinator.lost("a", "a was killed")
        assert run.progress.rows_done == ROWS
        assert run.notices == ["a was killed; replacing it"]
        assert run.enlist("b", wants=9) == [[1, 2, 3]]

    def test_what_another_has_too_is_left_to_that_one(self) -> None:
        run = Run(1)
        run.enlist("a", "b")
        run.now += LEAD_SECONDS
        run.hear("b", wants=1)
        assert run.given("b") == [0]
        run.coordinator.lost("a", "a was killed")
        assert run.coordinator.hands_wanted == 0
        assert run.notices == ["a was killed; others have its shards"]
        run.coordinator.lost("b", "b was killed")
        assert run.coordinator.hands_wanted == 1

    def test_a_shard_that_loses_every_replica_ends_the_run(self) -> None:
        run = Run(2)
        for attempt in range(ATTEMPTS):
            assert run.enlist("a") == [[0]]
            if attempt < ATTEMPTS - 1:
                run.coordinator.lost("a", "a was killed")
        with pytest.raises(WorkerLost, match=r"a was killed; 3 replicas were lost with shard 0 \(10 rows\) in hand"):
            run.coordinator.lost("a", "a was killed")

    def test_machines_may_be_lost_more_often(self) -> None:
        run = Run(1)
        for _ in range(ACCIDENTS - 1):
            assert run.enlist("a") == [[0]]
            run.coordinator.lost("a", "the machine is gone", accident=True)
        run.enlist("a")
        with pytest.raises(WorkerLost, match=f"{ACCIDENTS} machines were lost with shard 0"):
            run.coordinator.lost("a", "the machine is gone", accident=True)

    def test_replicas_that_are_lost_while_loading_end_the_run(self) -> None:
        run = Run()
        for _ in range(ATTEMPTS - 1):
            run.coordinator.enlist("a")
            run.coordinator.lost("a", "a was killed")
            run.coordinator.enlist("a")
            run.coordinator.lost("a", "the machine is gone", accident=True)
        run.coordinator.enlist("a")
        with pytest.raises(WorkerLost, match="3 replicas in a row were lost before they began"):
            run.coordinator.lost("a", "a was killed")

    def test_losses_before_work_are_forgotten_once_a_replica_works(self) -> None:
        run = Run(ATTEMPTS)
        for shard in range(ATTEMPTS):
            run.coordinator.enlist("a")
            run.coordinator.lost("a", "a was killed")
            assert run.enlist("a") == [[shard]]
            run.hear("a", shard)
            run.coordinator.left("a")

    def test_a_failure_is_raised_as_itself_after_what_was_published_is_noted(self) -> None:
        run = Run(1)
        run.coordinator.enlist("a")
        with pytest.raises(ModelError, match="no such model"):
            run.hear("a", 0, rows=10, failure=ModelError("no such model"))
        assert run.coordinator.finished
        assert run.progress.rows_done == 10

    def test_lost_workers_are_the_end_of_one_replica_where_others_work(self) -> None:
        run = Run(2)
        run.enlist("a")
        assert not run.coordinator.forgives("a", WorkerLost("the target worker is gone"))
        run.enlist("b")
        assert run.coordinator.forgives("a", WorkerLost("the target worker is gone"))
        assert run.coordinator.forgives("a", OutOfMemory("no memory"))
        assert not run.coordinator.forgives("a", ModelError("no such model"))


class TestRetiring:
    def test_what_was_not_begun_goes_to_others_and_what_was_is_ended(self) -> None:
        run = Run(3)
        assert run.enlist("a", wants=2) == [[0, 1]]
        run.coordinator.retire("a")
        assert run.coordinator.order("a").close
        assert run.coordinator.hands_wanted == 1
        run.hear("a", wants=0, returned=(1,))
        assert run.coordinator.hands_wanted == 2
        assert run.enlist("b", wants=2) == [[1, 2]]
        run.hear("a", 0, rows=ROWS, returned=(1,), ended=True)
        run.coordinator.left("a")
        run.hear("b", 1, 2, rows=2 * ROWS)
        assert run.coordinator.finished
        assert run.progress.rows_done == 3 * ROWS

    def test_who_leaves_with_work_in_hand_is_blamed_for_nothing(self) -> None:
        run = Run(1, careful=True)
        for _ in range(ATTEMPTS):
            assert run.enlist("a") == [[0]]
            run.hear("a", rows=3)
            run.coordinator.left("a")
        assert run.progress.rows_done == 0
        assert run.notices == []


class TestCarefulReplicas:
    def lose_twice(self, shards: int = 3) -> Run:
        run = Run(shards, careful=True)
        for _ in range(SUSPICIOUS):
            assert run.enlist("a") == [[0]]
            assert not run.coordinator.careful_wanted
            run.coordinator.lost("a", "a was killed")
        return run

    def test_who_was_lost_twice_with_a_shard_leaves_it_to_a_careful_one(self) -> None:
        run = self.lose_twice()
        assert run.coordinator.careful_wanted
        assert run.coordinator.hands_wanted == 3
        run.coordinator.enlist("c", careful=True)
        assert not run.coordinator.careful_wanted
        assert run.coordinator.hands_wanted == 2
        assert run.enlist("b", wants=9) == [[1, 2]], "nobody else gets it"
        run.hear("c", wants=2)
        assert run.given("c") == [0]
        run.hear("c", 0, wants=2)
        assert run.coordinator.order("c").close, "it gets nothing else"

    def test_it_gets_one_suspect_at_a_time(self) -> None:
        run = Run(2, careful=True)
        for _ in range(SUSPICIOUS):
            assert run.enlist("a", wants=2) == [[0, 1]]
            run.coordinator.lost("a", "a was killed")
        run.coordinator.enlist("c", careful=True)
        for index in (0, 1):
            run.hear("c", wants=2)
            assert run.given("c") == [index]
            run.hear("c", wants=2)
            assert run.given("c") == []
            run.hear("c", index)
        assert run.coordinator.finished

    def test_the_run_ends_if_a_careful_one_is_lost_with_it(self) -> None:
        run = self.lose_twice()
        run.coordinator.enlist("c", careful=True)
        run.hear("c", wants=1)
        assert run.given("c") == [0]
        with pytest.raises(WorkerLost, match="3 replicas were lost with shard 0"):
            run.coordinator.lost("c", "c was killed")

    def test_who_was_lost_with_a_shard_that_another_repeated_does_not_end_the_run(self) -> None:
        run = Run(1, careful=True)
        run.enlist("a", "b")
        run.now += LEAD_SECONDS
        run.hear("b", wants=1)
        assert run.given("b") == [0]
        run.coordinator.lost("a", "a was killed")
        run.coordinator.lost("b", "b was killed")
        assert run.coordinator.careful_wanted

    def test_a_careful_one_whose_machine_is_lost_is_followed_by_another(self) -> None:
        run = self.lose_twice()
        run.coordinator.enlist("c", careful=True)
        run.hear("c", wants=1)
        assert run.given("c") == [0]
        run.coordinator.lost("c", "the machine is gone", accident=True)
        assert run.coordinator.careful_wanted


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_every_shard_is_published_and_counted_once(seed: int) -> None:
    """Replicas come, work at different speeds, repeat and are lost, some of them just after a publication."""
    chance = random.Random(seed)
    run, output = Run(30), set()
    work: dict[str, list[int]] = {}
    rows: dict[str, int] = {}
    names = iter(range(10**6))
    while not run.coordinator.finished:
        run.now += 1.0
        if len(work) < 4 and run.coordinator.hands_wanted:
            name = f"replica {next(names)}"
            work[name], rows[name] = [], 0
            run.coordinator.enlist(name)
        for name in list(work):
            work[name] += run.given(name)
            published, created = [], True
            if work[name] and chance.random() < 0.3:
                shard = work[name].pop(0)
                created = shard not in output
                output.add(shard)
                published.append(shard)
                rows[name] += ROWS
            if chance.random() < 0.03:
                run.coordinator.lost(name, "killed", accident=True)
                del work[name]
                continue
            partly = 3 * bool(work[name])
            run.hear(name, *published, rows=rows[name] + partly, created=created, wants=max(0, 2 - len(work[name])))
    assert output == set(range(30))
    assert run.progress.rows_done == 30 * ROWS


class TestADeadline:
    """Of a run whose clock stands at 0 when it begins."""

    def run(self, shards: int, seconds: float, careful: bool = False) -> Run:
        run = Run(shards, careful)
        run.coordinator.deadline = Deadline(seconds, clock=lambda: run.now)
        return run

    def test_nothing_is_handed_out_that_could_not_be_finished(self) -> None:
        run = self.run(10, seconds=35)
        assert run.enlist("a", wants=1) == [[0]]
        run.now = 10
        run.hear("a", 0, wants=1)
        assert run.given("a") == [1]
        run.now = 20
        run.hear("a", 1, wants=2)
        assert run.given("a") == [2], "there is time for one, not for two"
        run.hear("a", wants=1)
        assert run.given("a") == []
        run.now = 30
        run.hear("a", 2, wants=1)
        assert run.coordinator.hands_wanted == 0
        assert run.coordinator.order("a").close
        with pytest.raises(OutOfTime, match="what is left"):
            run.coordinator.heed_the_deadline()
        assert not run.coordinator.finished

    def test_what_is_in_hand_is_waited_for_until_the_deadline_and_no_longer(self) -> None:
        run = self.run(3, seconds=30)
        run.enlist("a", wants=1)
        run.now = 20
        run.hear("a", 0, wants=1)
        assert run.given("a") == [], "the second would take as long as the first"
        run = self.run(3, seconds=30)
        assert run.enlist("a", wants=2) == [[0, 1]], "while nothing is known, all is hoped for"
        run.now = 29
        run.hear("a")
        run.coordinator.heed_the_deadline()
        run.now = 30
        with pytest.raises(OutOfTime, match="has come"):
            run.coordinator.heed_the_deadline()

    def test_others_are_waited_for_by_nobody_who_could_not_help(self) -> None:
        run = self.run(4, seconds=25)
        assert run.enlist("a", "b") == [[0], [1]]
        run.now = 15
        run.hear("a", 0, wants=1)
        assert run.given("a") == [1], "a second time: it could have been given to a slow one"
        run.hear("b", 1)
        run.coordinator.heed_the_deadline()
        run.hear("a", 1, created=False)
        with pytest.raises(OutOfTime):
            run.coordinator.heed_the_deadline()

    def test_a_run_without_a_deadline_heeds_none(self) -> None:
        run = Run(1)
        run.now = 1e9
        run.coordinator.heed_the_deadline()

    def test_no_careful_replica_is_hired_for_what_it_could_not_finish(self) -> None:
        run = self.run(4, seconds=30, careful=True)
        run.enlist("a", wants=1)
        run.now = 10
        run.hear("a", 0, wants=1)
        assert run.given("a") == [1]
        for name in "ab":
            run.coordinator.lost(name, "gone")
            if name == "a":
                run.enlist("b", wants=1)
        assert [shard.index for shard in run.coordinator.suspects] == [1]
        assert run.coordinator.careful_wanted
        run.now = 25
        assert not run.coordinator.careful_wanted
        with pytest.raises(OutOfTime):
            run.coordinator.heed_the_deadline()
