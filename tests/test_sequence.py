"""A sequence takes in blocks and ends at the right token."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.messages import Opening
from pipeline.records import FinishReason, Request, SamplingParams
from pipeline.sequence import DRAWN, ENOUGH_COMPARED, Sequence
from pipeline.stopping import StopWatch

EOS = frozenset({9})


def sequence(prompt: list[int], limit: int, **more: Any) -> Sequence:
    params = SamplingParams(limit - len(prompt), **more)
    watch = StopWatch(params.stop, lambda ids: "".join(map(str, ids))) if params.stop else None
    return Sequence(1, Request("key", prompt, params), Opening(1, (1, 2, 3), params), limit, watch)


def test_accepted_tokens_and_the_next_one_are_appended() -> None:
    s = sequence([1, 2], 20)
    assert s.extend([3, 4, 5], 2, 6, EOS) == 2
    assert s.tokens == [1, 2, 3, 4, 6]
    assert (s.generated, s.room, s.finish) == (3, 15, None)
    s.extend([7], 1, 8, EOS)
    assert (s.drafted_at, s.accepted_at, s.steps) == ([2, 1, 1], [2, 1], 2)


@pytest.mark.parametrize(
    ("drafted", "accepted", "following", "text", "kept"),
    [
        ([9, 4, 5], 3, 6, [], 0),
        ([3, 9, 5], 3, 6, [3], 1),
        ([3, 4, 9], 3, 6, [3, 4], 2),
        ([3, 4, 5], 3, 9, [3, 4, 5], 3),
        ([], 0, 9, [], 0),
        ([9], 0, 9, [], 0),
        ([9, 9], 2, 9, [], 0),
    ],
)
def test_first_eos_ends_it_wherever_it_is_in_the_block(drafted, accepted, following, text, kept) -> None:
    s = sequence([1, 2], 20)
    assert s.extend(drafted, accepted, following, EOS) == kept
    assert s.finish is FinishReason.STOP
    answer = s.completion("text")
    assert (answer.token_ids, answer.finish_reason, answer.text) == (text, FinishReason.STOP, "text")
    assert (answer.stats.accepted, answer.stats.drafted) == (kept, len(drafted))


def test_rejected_eos_does_not_end_it() -> None:
    s = sequence([1, 2], 20)
    s.extend([3, 9], 1, 4, EOS)
    assert (s.tokens, s.finish) == ([1, 2, 3, 4], None)


def test_limit_ends_it() -> None:
    s = sequence([1, 2], 5)
    s.extend([3, 4], 2, 5, EOS)
    assert (s.finish, s.room) == (FinishReason.LENGTH, 0)


def test_eos_at_the_limit_is_a_stop() -> None:
    s = sequence([1, 2], 5)
    s.extend([3, 4], 2, 9, EOS)
    assert s.finish is FinishReason.STOP
    assert s.completion("").token_ids == [3, 4]


def test_block_past_the_limit_is_a_bug() -> None:
    with pytest.raises(AssertionError):
        sequence([1, 2], 5).extend([3, 4, 5], 3, 6, EOS)


@pytest.mark.parametrize(("prompt", "limit"), [([], 5), ([1, 2], 2), ([1, 2, 3], 2)])
def test_prompt_must_leave_room(prompt: list[int], limit: int) -> None:
    with pytest.raises(AssertionError):
        sequence(prompt, limit)


@pytest.mark.parametrize("model", ["target_cached", "draft_cached"])
@pytest.mark.parametrize(("cached", "sound"), [(-1, False), (0, True), (1, True), (2, False)])
def test_there_is_always_a_token_to_feed(model: str, cached: int, sound: bool) -> None:
    s = sequence([1, 2], 5)
    setattr(s, model, cached)
    if sound:
        s.check()
    else:
        with pytest.raises(AssertionError):
            s.check()


def test_the_prompt_of_the_request_stays_as_it_was() -> None:
    prompt = [1, 2]
    sequence(prompt, 9).extend([3], 1, 4, EOS)
    assert prompt == [1, 2]


def test_an_unfinished_sequence_is_no_answer() -> None:
    with pytest.raises(AssertionError):
        sequence([1, 2], 5).completion("")


# stop strings, whose text is the tokens' numbers here


def test_a_stop_string_ends_it_before_the_token_that_it_begins_in() -> None:
    s = sequence([1, 2], 20, stop=("45",))
    assert s.extend([3, 4, 5, 6], 4, 7, EOS) == 1
    answer = s.completion("is not asked")
    assert (answer.token_ids, answer.text, answer.finish_reason) == ([3], "3", FinishReason.STOP)
    assert (answer.stats.accepted, answer.stats.drafted) == (1, 4)


def test_a_stop_string_that_an_earlier_block_began_takes_its_tokens_back() -> None:
    s = sequence([1, 2], 20, stop=("345",))
    assert s.extend([3], 1, 4, EOS) == 1
    assert s.finish is None
    assert s.extend([5, 6], 2, 7, EOS) == 0
    answer = s.completion("")
    assert (answer.token_ids, answer.text) == ([], "")
    assert (answer.stats.accepted, answer.stats.accepted_at, answer.stats.drafted) == (0, (), 3)


def test_a_stop_string_in_the_prompt_or_across_its_border_does_not_count() -> None:
    s = sequence([4, 5, 4], 6, stop=("45",))
    s.extend([5, 4], 2, 6, EOS)
    assert (s.finish, s.tokens) == (FinishReason.LENGTH, [4, 5, 4, 5, 4, 6])


def test_a_stop_string_at_the_limit_is_a_stop_and_one_behind_an_eos_was_never_seen() -> None:
    s = sequence([1, 2], 5, stop=("5",))
    s.extend([3, 4], 2, 5, EOS)
    assert (s.completion("").token_ids, s.finish) == ([3, 4], FinishReason.STOP)
    s = sequence([1, 2], 9, stop=("5",))
    s.extend([3, 9, 5], 3, 6, EOS)
    assert s.completion("3").text == "3"


def test_a_rejected_stop_string_does_not_end_it() -> None:
    s = sequence([1, 2], 20, stop=("5",))
    s.extend([3, 5], 1, 4, EOS)
    assert (s.tokens, s.finish) == ([1, 2, 3, 4], None)


def test_each_token_knows_where_it_came_from() -> None:
    s = sequence([1, 2], 20, stop=("77",))
    s.extend([3, 4], 2, 5, EOS)
    s.extend([6, 6], 0, 7, EOS)
    assert s.origins == [0, 1, DRAWN, DRAWN]
    s.extend([7], 1, 8, EOS)
    assert (s.origins, s.accepted_at, s.drafted_at) == ([0, 1, DRAWN], [1, 1], [3, 2])


# log probabilities


@pytest.mark.parametrize(("stop", "kept"), [((), 4), (("45",), 1), (("34",), 0)])
def test_log_probabilities_end_where_the_tokens_do(stop: tuple[str, ...], kept: int) -> None:
    s = sequence([1, 2], 20, stop=stop, logprobs="raw", top_logprobs=1)
    for drafted, following in (([3], 4), ([5, 6], 9)):
        if s.finish is not None:
            break
        new = [*drafted, following]
        s.score([-0.1 * t for t in new], [[(t, -0.1 * t)] for t in new])
        s.extend(drafted, len(drafted), following, EOS)
    answer = s.completion("")
    assert answer.token_ids == [3, 4, 5, 6][:kept]
    assert answer.logprobs == [-0.1 * t for t in answer.token_ids]
    assert answer.top_logprobs == [[(t, -0.1 * t)] for t in answer.token_ids]


def test_nothing_is_said_of_log_probabilities_that_nobody_asked_for() -> None:
    s = sequence([1, 2], 20)
    s.extend([], 0, 9, EOS)
    assert (s.completion("").logprobs, s.completion("").top_logprobs) == (None, None)


def test_tokens_without_their_log_probability_are_a_bug() -> None:
    s = sequence([1, 2], 4, logprobs="law")
    s.score([-1.0], [[]])
    s.extend([3], 1, 4, EOS)
    with pytest.raises(AssertionError):
        s.completion("")


# how its drafts are picked


@pytest.mark.parametrize(
    ("compared", "greedily"),
    [
        ([ENOUGH_COMPARED, 8.0, 9.0], True),
        ([ENOUGH_COMPARED, 9.0, 8.0], False),
        ([ENOUGH_COMPARED, 8.0, 8.0], False),
        ([ENOUGH_COMPARED - 1, 1.0, 9.0], False),
        ([0.0, 0.0, 0.0], False),
    ],
)
def test_drafts_are_the_likeliest_tokens_once_that_is_seen_to_pay(compared: list[float], greedily: bool) -> None:
    s = sequence([1, 2], 20)
    s.compared = compared
    assert s.drafts_greedily is greedily
