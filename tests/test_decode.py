"""The loop over simulated workers: where requests come from, and what becomes of workers that fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest

from pipeline import decode
from pipeline.cohorts import Cohorts
from pipeline.decode import Answer
from pipeline.errors import CacheMiss, NightdeskError, OutOfMemory, StepFailed, WorkerLost
from pipeline.messages import DraftRequest, Proposal, VerifyReply, VerifyRequest
from pipeline.records import FinishReason, Request, SamplingParams
from pipeline.scheduler import Limits
from tests.simulation import ShuffledFlight, Simulation, plain_text, related_requests

LIMITS = Limits(slots=3, context=40, draft_tokens=4, prefill_chunk=16)


def requests(count: int, wanted: int = 6) -> list[Request]:
    return [Request(str(i), [i % 5, (i * 3) % 5, 1], SamplingParams(wanted)) for i in range(count)]


def texts(answers: list[Answer]) -> bool:
    """Every answer is the request's own, and what decoding it alone gives."""
    return all(
        c.key == r.key
        and c.token_ids == plain_text(r, LIMITS.context, ())
        and c.text == " ".join(map(str, c.token_ids))
        for r, _, c in answers
    )


@pytest.fixture(autouse=True)
def naps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Pauses, which are counted instead of slept."""
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        assert len(slept) < 1000, "waits for ever"

    monkeypatch.setattr(decode.time, "sleep", sleep)
    return slept


# requests


def test_no_requests_no_answers() -> None:
    assert list(Simulation(LIMITS).answers([])) == []


def test_every_request_is_answered_once(naps: list[float]) -> None:
    asked = requests(20)
    answers = list(Simulation(LIMITS).answers(asked))
    assert sorted(int(r.key) for r, _, _ in answers) == list(range(20))
    assert texts(answers)
    assert naps == []


def test_requests_are_pulled_a_bounded_number_ahead() -> None:
    pulled = 0

    def source() -> Iterator[Request]:
        nonlocal pulled
        for request in requests(40):
            pulled += 1
            yield request

    answered = 0
    for _ in Simulation(LIMITS).answers(source()):
        answered += 1
        assert pulled <= answered + 3 * LIMITS.slots
    assert answered == 40


def test_requests_that_are_refused_are_pulled_a_bounded_number_ahead_too() -> None:
    """A source of nothing but empty prompts, without an end."""
    pulled = 0

    def source() -> Iterator[Request]:
        nonlocal pulled
        while True:
            pulled += 1
            assert pulled < 100
            yield Request(str(pulled), [], SamplingParams(3))

    answers = Simulation(LIMITS).answers(source())
    for _ in range(20):
        _, _, completion = next(answers)
        assert completion.finish_reason is FinishReason.ERROR
    assert pulled <= 20 + LIMITS.slots


def test_none_means_wait_and_ask_again(naps: list[float]) -> None:
    first, second = requests(2)
    answers = list(Simulation(LIMITS).answers([None, None, first, None, second, None, None]))
    assert len(answers) == 2
    assert texts(answers)
    assert len(naps) == 2  # before the first request; later a sequence is running


def test_none_does_not_hold_running_sequences_up(naps: list[float]) -> None:
    def source() -> Iterator[Request | None]:
        yield requests(1)[0]
        for _ in range(3):
            yield None
        yield from requests(4)[1:]

    simulation = Simulation(LIMITS, skill=0.0)
    assert texts(list(simulation.answers(source())))
    assert naps == []


def test_source_is_not_asked_again_after_its_end() -> None:
    class Once:
        def __init__(self) -> None:
            self.left, self.ended = requests(2), 0

        def __iter__(self) -> Once:
            return self

        def __next__(self) -> Request:
            if self.left:
                return self.left.pop()
            self.ended += 1
            raise StopIteration

    source = Once()
    assert len(list(Simulation(LIMITS).answers(source))) == 2
    assert source.ended == 1


def test_refused_requests_are_answered_among_the_others() -> None:
    good = requests(5)
    bad = [Request("empty", [], SamplingParams(3)), Request("late", [1], SamplingParams(3, min_p=-0.1))]
    answers = list(Simulation(LIMITS).answers([good[0], bad[0], *good[1:3], bad[1], *good[3:]]))
    assert sorted(c.key for _, _, c in answers if c.error) == ["empty", "late"]
    assert texts([a for a in answers if not a.completion.error])
    assert len(answers) == 7


def test_samples_of_a_request_are_answered_each() -> None:
    asked = [Request(str(i), [i], SamplingParams(4, n=i + 1)) for i in range(3)]
    answers = list(Simulation(LIMITS).answers(asked))
    assert sorted((r.key, sample) for r, sample, _ in answers) == [
        ("0", 0), ("1", 0), ("1", 1), ("2", 0), ("2", 1), ("2", 2)
    ]  # fmt: skip
    assert texts(answers)


def test_samples_of_a_request_that_is_refused_are_refused_each() -> None:
    answers = list(Simulation(LIMITS).answers([Request("a", [], SamplingParams(4, n=3))]))
    assert [sample for _, sample, _ in answers] == [0, 1, 2]
    assert all(answer.completion.error for answer in answers)


def test_equal_keys_are_answered_each() -> None:
    asked = [Request("same", [i], SamplingParams(4)) for i in range(4)]
    answers = list(Simulation(LIMITS).answers(asked))
    assert sorted(r.prompt_token_ids[0] for r, _, _ in answers) == [0, 1, 2, 3]
    assert texts(answers)


def test_stream_gives_the_completions_alone() -> None:
    completions = list(Simulation(LIMITS).decoder.stream(requests(4)))
    assert sorted(c.key for c in completions) == ["0", "1", "2", "3"]


def test_stream_that_is_dropped_leaves_nothing_behind() -> None:
    simulation = Simulation(LIMITS)
    first = simulation.answers(requests(10, wanted=20))
    next(first)
    first.close()
    assert simulation.scheduler.idle
    simulation.begin_anew()
    later = [replace(r, key=f"later{r.key}") for r in requests(6)]
    answers = list(simulation.answers(later))
    assert sorted(r.key for r, _, _ in answers) == sorted(r.key for r in later)
    assert texts(answers)


def test_second_stream_while_one_is_open_is_refused_and_the_first_goes_on() -> None:
    simulation = Simulation(LIMITS)
    first = simulation.answers(requests(8, wanted=20))
    begun = [next(first)]
    with pytest.raises(NightdeskError, match="end that stream"):
        next(simulation.answers(requests(2)))
    assert len([*begun, *first]) == 8


def test_what_slots_hold_after_a_failure_is_not_relied_on() -> None:
    """The pass was done, its answer never came, and the same worker is asked again about part of the sequences."""
    for broken in range(1, 12):
        simulation = Simulation(LIMITS, seed=broken)
        verify, failures = simulation.verifier.verify, 0
        simulation.verifier.orderly = False
        rng = np.random.default_rng(broken)

        def failing(request: VerifyRequest, verify=verify, simulation=simulation, broken=broken) -> VerifyReply:
            nonlocal failures
            reply = verify(request)
            if len(simulation.verifier.requests) in (broken, broken + 6):
                failures += 1
                raise RuntimeError("planted")
            return reply

        simulation.verifier.verify = failing  # type: ignore[method-assign]
        simulation.run(related_requests(rng, 12, LIMITS.context))
        assert failures >= 1


# workers


def test_drafter_that_is_never_ready_is_never_asked() -> None:
    simulation = Simulation(LIMITS, rests=1.0)
    answers = list(simulation.answers(requests(5)))
    assert texts(answers)
    assert simulation.drafter.requests == []
    assert all(c.stats.drafted == 0 and c.stats.steps == 6 for _, _, c in answers)


def test_no_drafter_is_plain_decoding() -> None:
    simulation = Simulation(replace(LIMITS, draft_tokens=0))
    simulation.decoder.drafter = None
    answers = list(simulation.answers(requests(5)))
    assert texts(answers)
    assert all(c.stats.steps == 6 for _, _, c in answers)


def test_lost_drafter_costs_no_step_of_the_target() -> None:
    simulation = Simulation(LIMITS)
    propose = simulation.drafter.propose

    def lost(request: DraftRequest) -> Proposal:
        raise WorkerLost("gone")

    simulation.drafter.propose = lost  # type: ignore[method-assign]
    [(request, _, completion)] = simulation.answers(requests(1))
    assert completion.stats.steps == len(simulation.verifier.requests) == 6
    simulation.drafter.propose = propose  # type: ignore[method-assign]
    simulation.drafter.cache.empty()
    [(request, _, completion)] = simulation.answers(requests(1))
    assert completion.stats.accepted > 0
    assert texts([(request, _, completion)])


def test_drafter_that_misses_a_prefix_is_fed_it_and_drafts_again() -> None:
    simulation = Simulation(LIMITS, skill=1.0)
    propose, calls = simulation.drafter.propose, 0

    def forgetful(request: DraftRequest) -> Proposal:
        nonlocal calls
        calls += 1
        if calls == 2:
            simulation.drafter.cache.empty()
            raise CacheMiss(request.feed.sequences)
        return propose(request)

    simulation.drafter.propose = forgetful  # type: ignore[method-assign]
    [(request, _, completion)] = simulation.answers(requests(1, wanted=20))
    assert texts([(request, _, completion)])
    assert completion.stats.accepted == completion.stats.drafted > 12
    assert completion.stats.steps == len(simulation.verifier.requests)


def test_target_that_misses_a_prefix_is_fed_it_from_the_first_token() -> None:
    simulation = Simulation(LIMITS)
    verify = simulation.verifier.verify
    fed: list[tuple[int, int]] = []

    def forgetful(request: VerifyRequest) -> VerifyReply:
        fed.append((int(request.feed.cached[0]), len(request.openings)))
        if len(fed) == 2:
            simulation.verifier.cache.empty()
            raise CacheMiss(request.feed.sequences)
        return verify(request)

    simulation.verifier.verify = forgetful  # type: ignore[method-assign]
    assert texts(list(simulation.answers(requests(1))))
    assert fed[0] == fed[2] == (0, 1)
    assert fed[1][1] == 0


def test_failure_of_the_target_is_not_swallowed() -> None:
    simulation = Simulation(LIMITS)

    def gone(request: VerifyRequest) -> VerifyReply:
        raise WorkerLost("the target is gone")

    simulation.verifier.verify = gone  # type: ignore[method-assign]
    with pytest.raises(WorkerLost, match="target"):
        list(simulation.answers(requests(2)))


def test_row_that_is_not_finite_is_an_error_and_the_others_are_answered() -> None:
    simulation = Simulation(LIMITS)
    verify = simulation.verifier.verify

    def poisoned(request: VerifyRequest) -> VerifyReply:
        reply = verify(request)
        reply.verdict.next_token[request.feed.sequences == 2] = -1
        return reply

    simulation.verifier.verify = poisoned  # type: ignore[method-assign]
    answers = list(simulation.answers(requests(6)))
    assert [c.key for _, _, c in answers if c.error] == ["1"]
    assert texts([a for a in answers if not a.completion.error])


# steps that fail


def failing_where(simulation: Simulation, fails: Callable[[VerifyRequest], Exception | None]) -> list[VerifyRequest]:
    """Makes the target fail; the list holds the requests that failed."""
    verify, failed = simulation.verifier.verify, []
    simulation.verifier.orderly = False

    def failing(request: VerifyRequest) -> VerifyReply:
        problem = fails(request)
        if problem is None:
            return verify(request)
        failed.append(request)
        raise problem

    simulation.verifier.verify = failing  # type: ignore[method-assign]
    return failed


def test_one_request_of_a_hundred_that_makes_the_target_fail_is_an_error_row() -> None:
    simulation = Simulation(Limits(slots=16, context=40, draft_tokens=4, prefill_chunk=64))
    problem = RuntimeError("index out of range\nmore")
    failed = failing_where(simulation, lambda r: problem if 37 in r.feed.sequences else None)
    answers = list(simulation.answers(requests(100)))
    [bad] = [a.completion for a in answers if a.completion.error]
    assert bad.key == "36"
    assert bad.finish_reason is FinishReason.ERROR
    assert bad.error == (
        "the target fails at this request, alone and repeatedly: RuntimeError: index out of range"
    )
    assert len(answers) == 100
    assert texts([a for a in answers if not a.completion.error])
    assert [len(r.feed.sequences) for r in failed] == [16, 8, 4, 2, 1, 1]


def test_two_bad_requests_in_one_batch_are_both_found() -> None:
    simulation = Simulation(Limits(slots=16, context=40, draft_tokens=4, prefill_chunk=64))
    bad = {3, 14}
    failing_where(simulation, lambda r: StepFailed("the worker died") if bad & set(r.feed.sequences.tolist()) else None)
    answers = list(simulation.answers(requests(40)))
    assert sorted(a.completion.key for a in answers if a.completion.error) == ["13", "2"]
    assert texts([a for a in answers if not a.completion.error])
    assert len(answers) == 40


def test_a_bad_request_is_found_with_cohorts_under_way_together() -> None:
    simulation = Simulation(Limits(slots=12, context=40, draft_tokens=4, prefill_chunk=64), cohorts=3, seed=2)
    failing_where(simulation, lambda r: StepFailed("the worker died") if 20 in r.feed.sequences else None)
    with patch("pipeline.decode.Flight", ShuffledFlight):
        answers = list(simulation.answers(requests(60)))
    assert [a.completion.key for a in answers if a.completion.error] == ["19"]
    assert texts([a for a in answers if not a.completion.error])
    assert len(answers) == 60


def test_accidents_cost_no_request() -> None:
    simulation = Simulation(Limits(slots=8, context=40, draft_tokens=4, prefill_chunk=64))
    rng = np.random.default_rng(3)
    failed = failing_where(simulation, lambda r: StepFailed("killed") if rng.random() < 0.03 else None)
    simulation.run(requests(400, wanted=12))
    assert len(failed) >= 5


def test_a_target_that_always_fails_ends_the_run_with_the_cause() -> None:
    simulation = Simulation(LIMITS)
    failed = failing_where(simulation, lambda r: RuntimeError("no kernel for this device"))
    with pytest.raises(RuntimeError, match="no kernel"):
        list(simulation.answers(requests(30)))
    assert len(failed) < 12


@pytest.mark.parametrize("cohorts", [1, 2])
def test_too_many_at_once_for_the_memory_are_halved(cohorts: int) -> None:
    simulation = Simulation(Limits(slots=16, context=40, draft_tokens=4, prefill_chunk=64), cohorts=cohorts)
    notices: list[str] = []
    simulation.decoder.notice = notices.append
    if cohorts > 1:
        simulation.decoder.cohorts = Cohorts(16)
    failing_where(simulation, lambda r: OutOfMemory("out of memory") if len(simulation.scheduler.running) > 5 else None)
    with patch("pipeline.decode.Flight", ShuffledFlight):
        simulation.run(requests(40))
    assert notices == [
        "out of memory; going on with 8 sequences at once",
        "out of memory; going on with 4 sequences at once",
    ]
    assert simulation.scheduler.limits.slots == 4


def test_a_request_too_large_for_the_memory_alone_is_an_error_row() -> None:
    simulation = Simulation(Limits(slots=4, context=40, draft_tokens=4, prefill_chunk=64))
    failing_where(simulation, lambda r: OutOfMemory("out of memory") if 6 in r.feed.sequences else None)
    answers = list(simulation.answers(requests(12)))
    assert [a.completion.key for a in answers if a.completion.error] == ["5"]
    assert texts([a for a in answers if not a.completion.error])
    assert simulation.scheduler.limits.slots == 4, "the others are not to blame"


def test_what_memory_once_had_no_room_for_is_tried_again_later() -> None:
    simulation = Simulation(Limits(slots=8, context=40, draft_tokens=0, prefill_chunk=64))
    scarce = True
    failing_where(simulation, lambda r: OutOfMemory("no") if scarce and len(r.feed.sequences) > 4 else None)
    seen = []
    for _ in simulation.answers(requests(400)):
        seen.append(simulation.scheduler.limits.slots)
        scarce = len(seen) < 40
    assert seen[20] == 4
    assert seen[-1] == 8


def test_a_worker_that_dies_of_too_many_at_once_gets_fewer() -> None:
    """It says nothing of memory: the machine has killed it."""
    simulation = Simulation(Limits(slots=16, context=40, draft_tokens=4, prefill_chunk=64))
    notices: list[str] = []
    simulation.decoder.notice = notices.append
    failing_where(simulation, lambda r: StepFailed("its process was killed") if len(r.feed.sequences) > 8 else None)
    simulation.run(requests(60, wanted=12))
    assert notices == ["its process was killed; going on with 8 sequences at once"]


def test_cohorts_are_told_how_many_rows_were_judged() -> None:
    """All tokens but the drafted ones are judged rows, each once."""
    told: list[int] = []

    class Told(Cohorts):
        def observe(self, now: float, rows: int, full: bool) -> None:
            told.append(rows)

    simulation = Simulation(Limits(slots=8, context=40, draft_tokens=4, prefill_chunk=64))
    simulation.verifier.orderly = False
    simulation.decoder.cohorts = Told(8)
    simulation.decoder.cohorts.count = 2
    with patch("pipeline.decode.Flight", ShuffledFlight):
        answers = list(simulation.answers(requests(40)))
    assert sum(told) == sum(c.stats.steps for _, _, c in answers) > 40


def test_a_drafter_that_raises_is_left_after_a_while() -> None:
    simulation = Simulation(LIMITS)
    notices: list[str] = []
    simulation.decoder.notice = notices.append

    def broken(request: DraftRequest) -> Proposal:
        raise RuntimeError("planted")

    simulation.drafter.propose = broken  # type: ignore[method-assign]
    assert texts(list(simulation.answers(requests(8))))
    assert len(notices) == 3
    assert notices[-1] == "drafting failed, and the next step goes without, as all others: RuntimeError: planted"


@pytest.mark.parametrize("bad", [{3, 4, 5}, {1, 2, 3, 4}, {9, 10, 11, 12, 13}])
def test_neighbours_that_all_make_the_target_fail_end_no_run(bad: set[int]) -> None:
    """Samples or tasks of one document stand in a row."""
    simulation = Simulation(Limits(slots=16, context=40, draft_tokens=4, prefill_chunk=64))
    failing_where(simulation, lambda r: StepFailed("died") if bad & set(r.feed.sequences.tolist()) else None)
    answers = list(simulation.answers(requests(40)))
    assert {int(a.completion.key) + 1 for a in answers if a.completion.error} == bad
    assert len(answers) == 40


def test_a_drafter_without_memory_costs_no_row() -> None:
    simulation = Simulation(Limits(slots=4, context=40, draft_tokens=4, prefill_chunk=64))
    simulation.verifier.orderly = False

    def exhausted(request: DraftRequest) -> Proposal:
        raise OutOfMemory("the draft model ran out of memory")

    simulation.drafter.propose = exhausted  # type: ignore[method-assign]
    answers = list(simulation.answers(requests(20)))
    assert texts(answers)
    assert len(answers) == 20
    assert not [a for a in answers if a.completion.error]


def test_a_lone_sequence_in_a_high_slot_is_moved_before_it_is_blamed() -> None:
    """The cache reaches up to the highest slot that is used: alone in the step is not alone in memory."""
    simulation = Simulation(Limits(slots=8, context=40, draft_tokens=0, prefill_chunk=64))

    def fails(request: VerifyRequest) -> Exception | None:
        slots = request.feed.slots
        return OutOfMemory("no") if len(slots) == 1 and slots.max() > 3 else None

    failing_where(simulation, fails)
    asked = [Request(str(i), [i % 5, 1], SamplingParams(3 if i < 7 else 20)) for i in range(8)]
    answers = list(simulation.answers(asked))
    assert texts(answers)
    assert not [a for a in answers if a.completion.error]


def test_a_failing_step_of_one_row_among_many_is_no_strike() -> None:
    """Steps of several cohorts share a worker, and one of them may have a single row."""
    simulation = Simulation(Limits(slots=6, context=40, draft_tokens=0, prefill_chunk=64), cohorts=3, seed=1)
    simulation.decoder.cohorts = Cohorts(6)
    simulation.decoder.cohorts.count = 3
    held: set[int] = set()
    killed = 0

    def too_many(request: VerifyRequest) -> Exception | None:
        nonlocal killed
        held.intersection_update(sequence.handle for sequence in simulation.scheduler.running)
        held.update(request.feed.sequences.tolist())
        if len(held) <= 2:
            return None
        killed += 1
        held.clear()  # the next worker begins with nothing
        return StepFailed("killed for its memory")

    failing_where(simulation, too_many)
    with patch("pipeline.decode.Flight", ShuffledFlight):
        answers = list(simulation.answers(requests(30)))
    assert not [a for a in answers if a.completion.error]
    assert killed < 20


def test_refused_requests_of_a_stream_that_failed_are_not_answered_in_the_next() -> None:
    def source() -> Iterator[Request]:
        yield Request("bad", [], SamplingParams(3))
        raise RuntimeError("planted")

    simulation = Simulation(LIMITS)
    with pytest.raises(RuntimeError, match="planted"):
        list(simulation.answers(source()))
    assert [a.completion.key for a in simulation.answers(requests(1))] == ["0"]
