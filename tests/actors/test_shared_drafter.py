"""Many callers and one drafter: who waits together is drafted together, and gets his own answer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from actors.shared_drafter import Answers, Drafted, SharedDrafter
from pipeline.engine.drafters.model import ModelDrafter
from pipeline.errors import CacheMiss, OutOfMemory
from pipeline.messages import DraftRequest
from tests.actors.exchange import request_of
from tests.decoding import packed, runner


class Turnstile:
    """A drafter whose passes wait until they are let through."""

    def __init__(self, propose_all: Callable[[Sequence[DraftRequest]], Answers]) -> None:
        self.behind = propose_all
        self.entered, self.open = threading.Semaphore(0), threading.Semaphore(0)
        self.passes: list[int] = []

    def propose_all(self, requests: Sequence[DraftRequest]) -> Answers:
        self.passes.append(len(requests))
        self.entered.release()
        assert self.open.acquire(timeout=30)
        return self.behind(requests)


def model() -> ModelDrafter:
    build = lambda: packed("llama", 3, num_hidden_layers=2)  # noqa: E731
    return ModelDrafter(runner(build, slots=2, context=64), 8, "sample", 100)


def asked_together(shared: SharedDrafter, turnstile: Turnstile, requests: Sequence[DraftRequest]) -> list[Any]:
    """Answers, or errors, to requests that wait while a pass of another is under way."""
    with ThreadPoolExecutor(len(requests) + 1) as callers:
        first = callers.submit(shared.propose, request_of(99, [(0, 0, [1])]))
        assert turnstile.entered.acquire(timeout=30)
        waiting: list[Future[Drafted]] = []
        for request in requests:
            waiting.append(callers.submit(shared.propose, request))
            while len(shared._waiting) < len(waiting):
                pass
        for done in (first, waiting[0]):
            turnstile.open.release()
            wait([done], 30)
        assert turnstile.entered.acquire(timeout=30)
        return [each.exception(30) or each.result(30) for each in waiting]


REQUESTS = [
    request_of(1, [(0, 0, [1, 2, 3]), (1, 0, [4])], wanted=3),
    request_of(2, [(1, 0, [5, 6, 7, 8]), (0, 0, [9])], wanted=2),
    request_of(3, [(7, 0, [1, 2, 3])], wanted=4),
]


def same(drafted: Any, request: DraftRequest) -> None:
    alone = model().propose(replace(request, feed=replace(request.feed, slots=np.arange(len(request.wanted)))))
    assert drafted.proposal.tokens.tolist() == alone.tokens.tolist()
    assert drafted.proposal.lengths.tolist() == alone.lengths.tolist()
    np.testing.assert_allclose(drafted.proposal.support_probs, alone.support_probs, atol=1e-5)


def test_who_waits_together_shares_a_pass_and_each_gets_what_he_would_get_alone() -> None:
    turnstile = Turnstile(model().propose_all)
    answers = asked_together(SharedDrafter(turnstile.propose_all, 99), turnstile, REQUESTS)
    assert turnstile.passes == [1, 3]
    for drafted, request in zip(answers, REQUESTS, strict=True):
        same(drafted, request)
    assert [drafted.others for drafted in answers] == [4, 4, 5]
    assert len({tuple(map(tuple, drafted.proposal.tokens)) for drafted in answers}) == 3


def test_a_miss_is_told_to_him_alone_whose_it_is() -> None:
    forgotten = request_of(4, [(0, 3, [5])], opened=False)
    turnstile = Turnstile(model().propose_all)
    answers = asked_together(SharedDrafter(turnstile.propose_all, 99), turnstile, [REQUESTS[0], forgotten, REQUESTS[1]])
    assert isinstance(answers[1], CacheMiss)
    assert answers[1].sequences == ((4 << 40) + 1,)
    same(answers[0], REQUESTS[0])
    same(answers[2], REQUESTS[1])


def test_a_pass_of_nothing_but_misses_does_not_run() -> None:
    turnstile = Turnstile(model().propose_all)
    with pytest.raises(CacheMiss):
        SharedDrafter(turnstile.propose_all, 99).propose(request_of(4, [(0, 3, [5])], opened=False))
    assert turnstile.passes == []


def test_what_fails_is_told_to_all_who_took_part_and_the_next_pass_runs() -> None:
    failures: list[Exception] = [OutOfMemory("the draft model ran out of memory"), ValueError("it broke")]
    drafter = model()

    def failing(requests: Sequence[DraftRequest]) -> Answers:
        if len(requests) > 1 and failures:
            raise failures.pop(0)
        return drafter.propose_all(requests)

    turnstile = Turnstile(failing)
    shared = SharedDrafter(turnstile.propose_all, 99)
    for kind in (OutOfMemory, ValueError):
        assert [type(each) for each in asked_together(shared, turnstile, REQUESTS[:2])] == [kind, kind]
    turnstile.open.release()
    same(shared.propose(REQUESTS[2]), REQUESTS[2])
    assert shared.table.most == 2  # of the five that it held, when memory was short


def test_steps_of_two_replicas_in_the_same_slots_do_not_mix() -> None:
    """Each feeds on, what it cached before being the prefix, while the other's texts lie in between."""
    shared, alone = SharedDrafter(model().propose_all, 99), {1: model(), 2: model()}
    asked = {1: request_of(1, [(0, 0, [1, 2, 3]), (1, 0, [4, 5])]), 2: request_of(2, [(0, 0, [9, 8]), (1, 0, [7])])}
    for step in range(4):
        for replica, request in asked.items():
            drafted = shared.propose(request).proposal
            expected = alone[replica].propose(request)
            assert drafted.tokens.tolist() == expected.tokens.tolist()
            ends = request.feed.cached + request.feed.lengths
            feed = replace(request.feed, cached=ends, lengths=np.array([1, 1]), tokens=expected.tokens[:, 0])
            asked[replica] = replace(request, feed=feed, openings=(), starts=request.starts + step + 1)
