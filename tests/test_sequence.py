"""A sequence takes in blocks and ends at the right token."""

from __future__ import annotations

import pytest

from pipeline.messages import Opening
from pipeline.records import FinishReason, Request, SamplingParams
from pipeline.sequence import Sequence

EOS = frozenset({9})


def sequence(prompt: list[int], limit: int) -> Sequence:
    params = SamplingParams(limit - len(prompt))
    return Sequence(1, Request("key", prompt, params), Opening(1, (1, 2, 3), params), limit)


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
