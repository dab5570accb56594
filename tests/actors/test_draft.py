"""The drafter that stands for a job's draft workers in a replica: fake workers, in a time that costs a test nothing."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np
import pytest

from actors.draft import RemoteDrafter
from actors.draft_homes import MOVES, PROVEN, SHORTEST_PATIENCE
from actors.roster import Member
from actors.shared_drafter import Drafted
from pipeline.errors import CacheMiss, OutOfMemory, WorkerLost
from pipeline.messages import DraftRequest
from tests.actors.exchange import HANG, REFUSAL, TRAITS, Exchange, Replica, request_of

TIMEOUT = 60.0


def remote(*homes: int) -> tuple[RemoteDrafter, Exchange]:
    exchange = Exchange(*homes)
    drafter = RemoteDrafter(TRAITS, TIMEOUT, exchange, exchange.clock)
    drafter.enroll(exchange.roster(*homes))
    return drafter, exchange


def used_to_it(replica: Replica, steps: int = PROVEN + 2) -> Replica:
    """Every worker's pace is known."""
    for _ in range(steps):
        replica.step()
    return replica


class Office(Exchange):
    """The same with threads and in real time: each desk answers after a moment, one request after the other."""

    def __init__(self, *homes: int) -> None:
        super().__init__(*homes)
        self.threads = ThreadPoolExecutor(20)
        self.locks = {home: threading.Lock() for home in homes}
        self.counting = threading.Lock()
        self.waiting = self.at_once = 0

    def send(self, member: Member, request: DraftRequest) -> Future[Drafted]:
        return self.threads.submit(self._draft, member.home, request)

    def _draft(self, home: int, request: DraftRequest) -> Drafted:
        with self.counting:
            self.waiting += 1
            self.at_once = max(self.waiting, self.at_once)
        with self.locks[home]:
            time.sleep(0.001)
            drafted = Drafted(self.desks[home].slots.draft(request), 0, 0.001)
        with self.counting:
            self.waiting -= 1
        return drafted

    def wait(self, calls: Sequence[Any], seconds: float) -> Sequence[Any]:
        return list(wait(calls, seconds, FIRST_COMPLETED).done)

    def answer(self, call: Future[Drafted], member: Member) -> Drafted:
        return call.result(0)


class TestHomes:
    def test_new_sequences_are_spread_and_stay_where_they_are(self) -> None:
        drafter, _ = remote(1, 2, 3)
        replica = Replica(drafter, 1, [3] * 6)
        first = replica.homes()
        assert sorted(first, key=str) == [1, 1, 2, 2, 3, 3]
        used_to_it(replica)
        assert replica.homes() == first

    def test_what_a_worker_does_for_other_replicas_counts(self) -> None:
        drafter, exchange = remote(1, 2)
        replica = Replica(drafter, 1, [3] * 4)
        exchange.desks[1].others = 10
        used_to_it(replica)
        for slot in range(4):
            replica.renew(slot)
        assert replica.homes() == [2] * 4

    def test_without_a_roster_nobody_drafts_and_with_one_they_begin(self) -> None:
        drafter, exchange = remote()
        replica = Replica(drafter, 1, [3, 3])
        assert not drafter.ready()
        assert replica.homes() == [None, None]
        assert replica.step() == [0, 0]
        drafter.enroll(exchange.roster(4, version=7))
        assert drafter.roster_version == 7
        assert drafter.ready()
        assert replica.step() == [2, 2]

    def test_a_worker_that_is_no_longer_on_the_roster_is_not_asked(self) -> None:
        drafter, exchange = remote(1, 2)
        replica = used_to_it(Replica(drafter, 1, [3] * 4))
        drafter.enroll(exchange.roster(2, 3, version=2))
        assert set(replica.homes()) == {2, 3}
        assert replica.step() == [2] * 4
        assert drafter.losses() == ()

    def test_memory_is_per_slot_however_many_sequences_there_were(self) -> None:
        drafter, _ = remote(1, 2)
        replica = Replica(drafter, 1, [3] * 4)
        for i in range(100):
            replica.renew(i % 4)
            replica.step()
        assert len(drafter._homes.places) == 4
        assert sum(standing.own for standing in drafter._homes.standings.values()) == 4


class TestSteps:
    def test_each_worker_is_asked_once_about_its_own_before_any_is_waited_for(self) -> None:
        drafter, exchange = remote(1, 2)
        replica = Replica(drafter, 1, [3] * 4)
        exchange.desks[1].seconds = exchange.desks[2].seconds = 0.1
        homes = replica.homes()
        assert replica.step() == [2] * 4
        assert exchange.now == pytest.approx(0.1)  # not 0.2
        for home, desk in exchange.desks.items():
            (request,) = desk.requests
            assert request.feed.slots.tolist() == [slot for slot in range(4) if homes[slot] == home]

    def test_openings_and_copies_go_where_their_rows_go(self) -> None:
        drafter, exchange = remote(1, 2)
        request = request_of(1, [(slot, 0, [7, 7, 7]) for slot in range(4)])
        for sequence, slot in zip(request.feed.sequences.tolist(), range(4), strict=True):
            drafter.homes(sequence, slot)
        drafter.propose(request)
        for desk in exchange.desks.values():
            (asked,) = desk.requests
            assert [o.sequence for o in asked.openings] == asked.feed.sequences.tolist()
        assert exchange.desks[1].requests[0].feed.slots.tolist() == [0, 2]

    def test_a_miss_is_told_with_the_sequences_of_all_workers(self) -> None:
        drafter, exchange = remote(1, 2)
        replica = used_to_it(Replica(drafter, 1, [3] * 4))
        for desk in exchange.desks.values():
            desk.slots.held.clear()
        request = request_of(1, [(slot, 2, [1]) for slot in range(4)], opened=False)
        with pytest.raises(CacheMiss) as miss:
            drafter.propose(request)
        assert sorted(miss.value.sequences) == request.feed.sequences.tolist()
        assert drafter.losses() == ()
        assert replica.step() == [0] * 4
        assert replica.step() == [2] * 4  # fed again from the first token

    def test_rows_without_a_worker_have_length_0(self) -> None:
        drafter, exchange = remote(1)
        drafter.homes((1 << 40) + 1, 0)
        proposal = drafter.propose(request_of(1, [(0, 0, [1, 2]), (1, 0, [3])]))
        assert proposal.lengths.tolist() == [2, 0]
        assert len(exchange.desks[1].requests[0].wanted) == 1
        stranger = request_of(2, [(0, 0, [1, 2])])  # in the slot of somebody who has a home
        assert drafter.propose(stranger).lengths.tolist() == [0]
        assert len(exchange.desks[1].requests) == 1
        proposal = drafter.propose(request_of(1, [(1, 0, [3])]))
        assert (proposal.tokens.shape, proposal.lengths.tolist()) == ((1, 0), [0])

    def test_cohorts_that_wait_at_the_same_time_get_each_its_own(self) -> None:
        office = Office(1, 2)
        drafter = RemoteDrafter(TRAITS, TIMEOUT, office)
        drafter.enroll(office.roster(1, 2))
        cohorts = [Replica(drafter, number, [3] * 4) for number in (1, 2, 3)]
        for number, cohort in enumerate(cohorts):
            for text in cohort.texts:
                text.slot += 4 * number

        def work(cohort: Replica) -> list[list[int]]:
            return [cohort.step() for _ in range(30)]

        with ThreadPoolExecutor(3) as threads:
            steps = [each.result(60) for each in [threads.submit(work, cohort) for cohort in cohorts]]
        drafted = sum(length for cohort in steps for step in cohort for length in step)
        assert drafted > 0.8 * 3 * 30 * 4 * 2  # all, but for what a busy machine makes late
        assert office.at_once > 2


class TestLateWorkers:
    def test_a_late_worker_costs_its_rows_their_drafts_and_nobody_waits_for_it_again(self) -> None:
        drafter, exchange = remote(1, 2)
        replica = used_to_it(Replica(drafter, 1, [3] * 4))
        late = [home == 1 for home in replica.homes()]
        exchange.desks[1].seconds = HANG
        before = exchange.now
        assert replica.step() == [0 if each else 2 for each in late]
        assert exchange.now - before == pytest.approx(SHORTEST_PATIENCE)
        asked = len(exchange.desks[1].requests)
        before = exchange.now
        for _ in range(20):
            replica.step()
        assert exchange.now - before == pytest.approx(20 * exchange.desks[2].seconds)
        assert len(exchange.desks[1].requests) == asked
        assert exchange.desks[1].most_owed == 1

    def test_once_it_has_answered_it_goes_on_from_what_it_was_fed(self) -> None:
        drafter, exchange = remote(1)
        replica = used_to_it(Replica(drafter, 1, [3] * 2))
        exchange.desks[1].seconds = 1.0
        assert replica.step() == [0, 0]
        assert not drafter.ready()
        assert replica.step() == [0, 0]
        exchange.now += 1.0
        exchange.desks[1].seconds = 0.01
        assert drafter.ready()
        assert replica.step() == [2, 2]
        assert exchange.desks[1].requests[-1].feed.cached.min() > 0  # no miss, and nothing fed twice

    def test_with_usual_seconds_of_a_second_patience_is_longer(self) -> None:
        drafter, exchange = remote(1, 2)
        for desk in exchange.desks.values():
            desk.seconds = 1.0
        replica = used_to_it(Replica(drafter, 1, [3] * 4))
        exchange.desks[1].seconds = 3.0
        assert replica.step() == [2] * 4
        exchange.desks[1].seconds = HANG
        before = exchange.now
        replica.step()
        assert 4.0 <= exchange.now - before < 8.0

    def test_one_that_does_not_answer_for_long_is_lost(self) -> None:
        drafter, exchange = remote(1, 2)
        replica = used_to_it(Replica(drafter, 1, [3] * 4))
        exchange.desks[1].seconds = HANG
        replica.step()
        exchange.now += TIMEOUT
        assert replica.step() == [2] * 4
        assert drafter.losses() == ((1, "draft worker 1 has not answered for 60 s"),)

    def test_the_very_first_answer_may_take_long_but_not_for_ever(self) -> None:
        drafter, exchange = remote(1)
        replica = Replica(drafter, 1, [3])
        exchange.desks[1].seconds = TIMEOUT / 2
        assert replica.step() == [2]
        drafter, exchange = remote(1)
        replica = Replica(drafter, 1, [3])
        exchange.desks[1].seconds = HANG
        assert replica.step() == [0]
        assert exchange.now == TIMEOUT
        assert drafter.losses() == ((1, "draft worker 1 has not answered for 60 s"),)

    def test_sequences_of_one_that_stays_late_move_to_others_gradually(self) -> None:
        drafter, exchange = remote(1, 2)
        replica = used_to_it(Replica(drafter, 1, [3] * 12))
        exchange.desks[1].seconds = HANG
        left = []
        for _ in range(12):
            replica.step()
            left.append(sum(length == 0 for length in replica.drafted))
        assert left[0] == 6
        assert all(a - b <= MOVES for a, b in itertools.pairwise(left))
        assert left[-1] == 1


    def test_who_relies_on_what_a_late_worker_did_not_do_is_told_so(self) -> None:
        """The worker holds an earlier sequence's tokens in that slot, enough of them, and would not notice."""
        drafter, exchange = remote(1)
        replica = used_to_it(Replica(drafter, 1, [3]))
        replica.renew(0, length=30)
        exchange.desks[1].seconds, exchange.desks[1].failures = 1.0, [REFUSAL]
        assert replica.step() == [0]
        exchange.desks[1].seconds = 0.01
        exchange.now += 1.0
        replica.renew(0, shared=10)
        asked = len(exchange.desks[1].requests)
        assert replica.step() == [0]
        assert len(exchange.desks[1].requests) == asked  # the miss came from here
        assert replica.step() == [2]

    def test_so_is_who_relies_on_rows_that_were_never_sent(self) -> None:
        drafter, exchange = remote(1)
        replica = used_to_it(Replica(drafter, 1, [3]))
        exchange.desks[1].seconds = 1.0

        def late_for_another_cohort() -> None:
            other = request_of(2, [(7, 0, [1])])
            drafter.homes(int(other.feed.sequences[0]), 7)
            drafter.propose(other)

        replica.renew(0, length=30)
        assert replica.step(late_for_another_cohort) == [0]
        exchange.desks[1].seconds = 0.01
        exchange.now += 1.0
        replica.renew(0, shared=10)
        assert replica.step() == [0]
        assert replica.step() == [2]


class TestLostWorkers:
    def test_its_sequences_go_to_others_at_once_and_are_fed_from_the_first_token(self) -> None:
        drafter, exchange = remote(1, 2)
        replica = used_to_it(Replica(drafter, 1, [3] * 4))
        lost = [home == 1 for home in replica.homes()]
        exchange.desks[1].failures = [WorkerLost("draft worker 1 is gone: its process was killed")]
        assert replica.step() == [0 if each else 2 for each in lost]
        assert drafter.losses() == ((1, "draft worker 1 is gone: its process was killed"),)
        assert replica.homes() == [2] * 4
        assert replica.step() == [2] * 4
        cached = exchange.desks[2].requests[-1].feed.cached
        assert [each == 0 for each in cached.tolist()] == lost

    def test_with_nobody_left_nobody_drafts_until_there_is_a_new_one(self) -> None:
        drafter, exchange = remote(1)
        replica = used_to_it(Replica(drafter, 1, [3, 3]))
        exchange.desks[1].failures = [WorkerLost("draft worker 1 is gone")]
        replica.step()
        assert not drafter.ready()
        assert replica.homes() == [None, None]
        drafter.enroll(exchange.roster(1, version=2))  # the driver has not heard of it yet
        assert not drafter.ready()
        drafter.enroll(exchange.roster(5, version=3))
        assert replica.homes() == [5, 5]
        assert replica.step() == [2, 2]
        assert len(drafter.losses()) == 1

    def test_one_that_fails_in_a_way_that_nobody_foresaw_is_lost_too(self) -> None:
        drafter, exchange = remote(1, 2)
        replica = used_to_it(Replica(drafter, 1, [3] * 2))
        exchange.desks[2].failures = [RuntimeError("CUDA error: an illegal memory access\nmore words")]
        replica.step()
        assert drafter.losses() == ((2, "draft worker 2 failed: RuntimeError: CUDA error: an illegal memory access"),)

    def test_lost_between_plan_and_proposal(self) -> None:
        drafter, exchange = remote(1, 2)
        replica = used_to_it(Replica(drafter, 1, [3] * 4))
        lost = [home == 1 for home in replica.homes()]
        lengths = replica.step(lambda: drafter.enroll(exchange.roster(2, version=2)))
        assert lengths == [0 if each else 2 for each in lost]
        assert replica.step() == [2] * 4

    def test_a_late_answer_of_one_that_died_tells_the_loss(self) -> None:
        drafter, exchange = remote(1, 2)
        replica = used_to_it(Replica(drafter, 1, [3] * 4))
        exchange.desks[1].seconds = 1.0
        exchange.desks[1].failures = [WorkerLost("draft worker 1 is gone")]
        replica.step()
        assert drafter.losses() == ()
        exchange.now += 1.0
        assert replica.step() == [2] * 4
        assert drafter.losses() == ((1, "draft worker 1 is gone"),)


class TestSlowWorkers:
    @staticmethod
    def served(replica: Replica) -> dict[int, int]:
        """Sequences by home, those of a late worker included."""
        replica.homes()
        homes = [home for _, home in replica.drafter._homes.places.values()]
        return {home: homes.count(home) for home in set(homes)}

    def test_a_slow_worker_keeps_its_share_alone_and_new_sequences_go_elsewhere(self) -> None:
        drafter, exchange = remote(1, 2, 3)
        replica = used_to_it(Replica(drafter, 1, [3] * 12))
        assert self.served(replica) == {1: 4, 2: 4, 3: 4}
        exchange.desks[2].seconds = 0.1  # ten times the others'
        used_to_it(replica, 60)
        assert self.served(replica) == {1: 5, 2: 1, 3: 6} or self.served(replica) == {1: 6, 2: 1, 3: 5}
        for slot in range(12):
            replica.renew(slot)
        assert self.served(replica).get(2, 0) <= 1

    def test_sequences_leave_it_a_few_per_step(self) -> None:
        drafter, exchange = remote(1, 2)
        replica = used_to_it(Replica(drafter, 1, [3] * 12))
        exchange.desks[2].seconds = 0.1
        counts = []
        for _ in range(60):
            replica.step()
            counts.append(sum(text.home == 2 for text in replica.texts))
        assert counts[-1] <= 2
        assert all(0 <= a - b <= MOVES for a, b in itertools.pairwise(counts))

    def test_none_is_slow_that_is_only_a_bit_slower_or_has_hardly_been_seen(self) -> None:
        drafter, exchange = remote(1, 2)
        replica = Replica(drafter, 1, [3] * 8)
        exchange.desks[2].seconds = 0.02
        used_to_it(replica, 60)
        assert self.served(replica) == {1: 4, 2: 4}
        drafter, exchange = remote(1, 2)
        replica = Replica(drafter, 1, [3] * 8)
        exchange.desks[1].seconds, exchange.desks[2].seconds = 0.001, 0.015  # the one's luck, or the other's
        used_to_it(replica, 60)
        assert self.served(replica) == {1: 4, 2: 4}
        drafter, exchange = remote(1, 2)
        replica = Replica(drafter, 1, [3] * 8)
        exchange.desks[2].seconds = 0.1
        used_to_it(replica, PROVEN - 1)
        assert self.served(replica) == {1: 4, 2: 4}

    def test_it_is_not_waited_for_much_longer_than_the_others(self) -> None:
        drafter, exchange = remote(1, 2)
        replica = used_to_it(Replica(drafter, 1, [3] * 8))
        exchange.desks[2].seconds = 0.2
        used_to_it(replica, 40)
        before = exchange.now
        used_to_it(replica, 40)
        assert exchange.now - before < 40 * 2 * exchange.desks[1].seconds

    def test_new_sequences_go_where_they_are_drafted_soonest(self) -> None:
        drafter, exchange = remote(1, 2)
        replica = Replica(drafter, 1, [3] * 12)
        exchange.desks[2].seconds = 0.02
        used_to_it(replica)
        assert self.served(replica) == {1: 6, 2: 6}
        for slot in range(12):
            replica.renew(slot)
        assert self.served(replica) == {1: 8, 2: 4}

    def test_an_answer_that_lay_there_for_long_does_not_make_a_worker_slow(self) -> None:
        drafter, exchange = remote(1)
        replica = used_to_it(Replica(drafter, 1, [3] * 4))
        exchange.desks[1].seconds = 0.3
        assert replica.step() == [0] * 4
        exchange.now += 30.0  # the target's step
        assert drafter.ready()
        assert 0.01 < (drafter._homes.standings[1].seconds or 0) < 0.1

    def test_one_that_recovers_gets_new_sequences_again(self) -> None:
        drafter, exchange = remote(1, 2)
        replica = used_to_it(Replica(drafter, 1, [3] * 8))
        exchange.desks[2].seconds = 0.1
        used_to_it(replica, 60)
        exchange.desks[2].seconds = 0.01
        used_to_it(replica, 60)
        for slot in range(8):
            replica.renew(slot)
            replica.step()
        assert self.served(replica)[2] >= 3


class TestMemory:
    def test_a_worker_out_of_memory_gets_half_as_many_and_nobody_else_notices(self) -> None:
        drafter, exchange = remote(1, 2)
        replica = used_to_it(Replica(drafter, 1, [3] * 8))
        exchange.desks[1].failures = [OutOfMemory("the draft model ran out of memory")]
        replica.step()
        exchange.desks[1].slots.held.clear()
        assert [replica.homes().count(home) for home in (1, 2)] == [2, 6]
        replica.step()  # the miss
        assert replica.step() == [2] * 8
        assert drafter.losses() == ()

    def test_one_that_cannot_even_hold_one_is_not_asked_any_more(self) -> None:
        drafter, exchange = remote(1)
        replica = used_to_it(Replica(drafter, 1, [3] * 3))
        for _ in range(3):
            exchange.desks[1].failures = [OutOfMemory("the draft model ran out of memory")]
            replica.step()
            exchange.desks[1].slots.held.clear()
        asked = len(exchange.desks[1].requests)
        assert replica.homes() == [None] * 3
        assert replica.step() == [0] * 3
        assert len(exchange.desks[1].requests) == asked


def troubled(seed: int) -> None:
    """Random delays, deaths, misses, exhaustion and new rosters: every draft fits its text, and no worker is asked
    while it owes. (`Replica` and `Exchange` assert it.)
    """
    rng = np.random.default_rng(seed)
    drafter, exchange = remote(1, 2, 3)
    replica = Replica(drafter, 1, rng.integers(1, 6, 8))
    up, drafted, version = [1, 2, 3], 0, 1
    for _ in range(200):
        desk = exchange.desks[int(rng.choice(up))]
        event = rng.random()
        desk.seconds = float(rng.choice([0.01, 0.01, 0.01, 0.5, 3.0, HANG], p=[0.5, 0.2, 0.1, 0.1, 0.05, 0.05]))
        if event < 0.05:
            desk.slots.held.clear()
        elif event < 0.1:
            desk.failures.append(OutOfMemory("no memory") if event < 0.07 else WorkerLost("gone"))
        elif event < 0.12:
            desk.failures.append(REFUSAL)
        elif event < 0.15:
            replica.renew(int(rng.integers(8)), shared=int(rng.integers(20)))
        elif event < 0.2:
            up = [*up[1:], max(exchange.desks) + 1]
            exchange.desks[up[-1]] = type(desk)()
            version += 1
            drafter.enroll(exchange.roster(*up, version=version))
        replica.step()
        drafted += sum(replica.drafted)
        exchange.now += 0.05
    assert drafted > 200
    assert all(each.most_owed <= 1 for each in exchange.desks.values())


@pytest.mark.parametrize("seed", range(12))
def test_whatever_befalls_the_workers_drafts_fit_their_texts(seed: int) -> None:
    troubled(seed)

