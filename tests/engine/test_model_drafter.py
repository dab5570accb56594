"""A draft model ships the law that it drew from, for as many tokens as each row wants."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.engine.drafters.model import ModelDrafter
from pipeline.errors import CacheMiss, OutOfMemory
from pipeline.messages import DraftRequest, Feed, Opening, PrefixCopy, Proposal
from pipeline.randomness import philox_key
from pipeline.records import SamplingParams
from tests import oracle
from tests.decoding import packed, runner
from tests.models import tiny_model

SMALL: dict[str, Any] = {
    "num_hidden_layers": 1,
    "hidden_size": 16,
    "head_dim": 4,
    "vocab": 8,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "initializer_range": 0.3,
}


def drafter(support: int = 5, sampling: Any = "sample", slots: int = 4) -> ModelDrafter:
    return ModelDrafter(runner(lambda: packed("llama", 2, **SMALL), slots, 64), support, sampling, 100)


def request(
    prompts: list[list[int]],
    params: list[SamplingParams] | SamplingParams,
    wanted: list[int],
    keys: list[str] | None = None,
    start: int = 0,
) -> DraftRequest:
    """New sequences, fed whole, each in a slot of its own."""
    rows = len(prompts)
    params = params if isinstance(params, list) else [params] * rows
    names = keys or [str(i) for i in range(rows)]
    zeros = np.zeros(rows, dtype=np.int64)
    fed = np.concatenate([np.array(p) for p in prompts])
    return DraftRequest(
        feed=Feed(np.arange(1, rows + 1), np.arange(rows), zeros, np.array([len(p) for p in prompts]), fed),
        openings=tuple(
            Opening(i + 1, philox_key(0, 0, name, 0), p) for i, (name, p) in enumerate(zip(names, params, strict=True))
        ),
        copies=(),
        wanted=np.array(wanted),
        starts=zeros + start,
        greedy=np.zeros(rows, dtype=bool),
    )


PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 1, 2], [3, 3]]
MIXED = [
    SamplingParams(9, temperature=1.0),
    SamplingParams(9, temperature=0.5, top_p=0.9),
    SamplingParams(9),
    SamplingParams(9, temperature=1.5, top_k=3),
]


def shipped(proposal: Proposal, row: int, place: int) -> np.ndarray:
    """A shipped law over the vocabulary, normalised as the contract says."""
    law = np.zeros(SMALL["vocab"])
    ids, probs = proposal.support_ids[row, place], proposal.support_probs[row, place].astype(np.float64)
    law[ids[ids >= 0]] = probs[ids >= 0]
    return law / law.sum()


@pytest.mark.parametrize("support", [1, 3, 8, 64])
def test_shipped_laws_are_the_models_own_cut_to_their_support(support: int) -> None:
    """At every position, after the drafted tokens before it, under the row's own parameters."""
    proposal = drafter(support).propose(request(PROMPTS, MIXED, [4, 2, 3, 4]))
    assert proposal.lengths.tolist() == [4, 2, 3, 4]
    model = tiny_model("llama", 2, **SMALL)
    for row, (prompt, params) in enumerate(zip(PROMPTS, MIXED, strict=True)):
        for place in range(proposal.lengths[row]):
            text = [*prompt, *proposal.tokens[row, :place].tolist()]
            logits = model(torch.tensor([text])).logits[0, -1].double().numpy()
            law = oracle.filtered(logits, params.temperature, params.top_k, params.top_p)
            expected = oracle.top(law, support)
            assert np.abs(shipped(proposal, row, place) - expected / expected.sum()).max() < 1e-5
            assert shipped(proposal, row, place)[proposal.tokens[row, place]] > 0


def test_rows_want_different_numbers_and_none() -> None:
    proposal = drafter().propose(request(PROMPTS, MIXED[0], [0, 3, 1, 0]))
    assert proposal.lengths.tolist() == [0, 3, 1, 0]
    assert (proposal.tokens >= 0).sum(-1).tolist() == [0, 3, 1, 0]
    assert ((proposal.support_probs > 0).any(-1)).sum(-1).tolist() == [0, 3, 1, 0]


def test_nothing_wanted_only_brings_the_cache_up_to_date() -> None:
    made = drafter()
    proposal = made.propose(request(PROMPTS, MIXED[0], [0] * 4))
    assert proposal.tokens.shape == (4, 0)
    assert made.runner.held.tolist() == [3, 1, 5, 2]


def test_cache_holds_all_drafted_tokens_but_the_last() -> None:
    made = drafter()
    made.propose(request(PROMPTS, MIXED[0], [4, 1, 2, 0]))
    assert made.runner.held.tolist() == [3 + 3, 1, 5 + 1, 2]


def test_row_drafts_what_it_drafts_alone() -> None:
    together = drafter().propose(request(PROMPTS, MIXED, [4, 2, 3, 4]))
    for row in range(4):
        asked = request([PROMPTS[row]], MIXED[row], [4], keys=[str(row)])
        alone = drafter().propose(asked)
        n = int(together.lengths[row])
        assert alone.tokens[0, :n].tolist() == together.tokens[row, :n].tolist()


def test_greedy_sampling_ships_certainty_whatever_the_temperature() -> None:
    proposal = drafter(sampling="greedy").propose(request(PROMPTS, MIXED, [3] * 4))
    assert proposal.support_ids.shape == (4, 3, 1)
    assert (proposal.support_ids[..., 0] == proposal.tokens).all()
    assert (proposal.support_probs == 1).all()
    certain = drafter().propose(request(PROMPTS, SamplingParams(9), [3] * 4))
    assert (certain.tokens == proposal.tokens).all()


def first_tokens(rows: int, params: SamplingParams, start: int = 0) -> tuple[np.ndarray, Proposal]:
    """First drafted tokens of many sequences with the same prompt and keys of their own."""
    made = drafter(4, slots=rows)
    proposal = made.propose(request([[1, 2]] * rows, params, [1] * rows, start=start))
    return proposal.tokens[:, 0], proposal


@pytest.mark.parametrize("params", [MIXED[0], MIXED[1], MIXED[3]])
def test_tokens_are_drawn_from_the_law_that_is_shipped(params: SamplingParams) -> None:
    tokens, proposal = first_tokens(3000, params)
    law = {(t,): p for t, p in enumerate(shipped(proposal, 0, 0))}
    counts = {(t,): int(n) for t, n in enumerate(np.bincount(tokens)) if n}
    assert oracle.g_test(counts, law) > 1e-3
    if params is MIXED[0]:
        whole = tiny_model("llama", 2, **SMALL)(torch.tensor([[1, 2]])).logits[0, -1].double().numpy()
        assert oracle.g_test(counts, {(t,): p for t, p in enumerate(oracle.softmax(whole))}) < 1e-9  # not untruncated


def test_draws_are_independent_of_the_numbers_that_judge_and_redraw() -> None:
    """No correlation of the drafted token's uniform with those of its verdict, nor with the next block's."""
    from pipeline.randomness import Stream, uniforms, verdict_uniforms

    keys = np.array([philox_key(0, 0, str(i), 0) for i in range(3000)])
    starts = np.zeros(3000, dtype=np.int64)
    drafts = uniforms(keys, starts, 2, Stream.DRAFT)
    others = [*verdict_uniforms(keys, starts, 2).reshape(3000, -1).T, uniforms(keys, starts + 1, 1, Stream.DRAFT)[:, 0]]
    tokens, _ = first_tokens(3000, MIXED[0])
    assert abs(np.corrcoef(tokens, drafts[:, 0])[0, 1]) > 0.3  # it is this number that drew them
    for numbers in (drafts[:, 1], *others):
        assert abs(np.corrcoef(tokens, numbers)[0, 1]) < 0.08


def test_another_block_draws_anew_and_the_same_one_the_same() -> None:
    (one, _), (again, _), (other, _) = (first_tokens(300, MIXED[0], start) for start in (0, 0, 1))
    assert (one == again).all()
    assert 0.1 < (one == other).mean() < 0.9


def test_row_that_is_not_finite_stops_drafting_and_harms_nobody() -> None:
    made = drafter()
    made.runner.model.get_input_embeddings().weight.data[7] = torch.nan
    proposal = made.propose(request([[1, 2], [7, 1], [3]], MIXED[1], [3, 3, 3]))
    assert proposal.lengths[1] == 0
    alone = drafter().propose(request([[1, 2]], MIXED[1], [3]))
    if 7 not in alone.tokens:
        assert proposal.tokens[0].tolist() == alone.tokens[0].tolist()
    assert made.runner.held[1] == 0
    assert bool(made.runner.cache.keys[0][1].isfinite().all())


def test_prefix_copied_from_a_copy_of_the_same_step() -> None:
    """The source of the second copy is shorter than its copy before the first one is made."""
    made = drafter()
    text = [1, 2, 3, 4, 5, 6, 1, 2, 3, 4]
    made.propose(request([[1], [2], [3], text], MIXED[0], [0] * 4))
    feed = Feed(np.array([11, 12]), np.array([0, 1]), np.array([10, 9]), np.array([1, 1]), np.array([5, 5]))
    openings = tuple(Opening(h, philox_key(0, 0, str(h), 0), MIXED[0]) for h in (11, 12))
    copies = (PrefixCopy(3, 0, 10), PrefixCopy(0, 1, 9))
    asked = DraftRequest(feed, openings, copies, np.array([1, 1]), np.zeros(2, dtype=np.int64), np.zeros(2, dtype=bool))
    proposal = made.propose(asked)
    model = tiny_model("llama", 2, **SMALL)
    for row, tokens in enumerate(([*text, 5], [*text[:9], 5])):
        law = oracle.softmax(model(torch.tensor([tokens])).logits[0, -1].double().numpy())
        expected = oracle.top(law, 5)
        assert np.abs(shipped(proposal, row, 0) - expected / expected.sum()).max() < 1e-5


def test_prefix_that_is_not_held_is_a_cache_miss() -> None:
    feed = Feed(np.array([1]), np.array([0]), np.array([4]), np.array([1]), np.array([5]))
    with pytest.raises(CacheMiss):
        drafter().propose(DraftRequest(feed, (), (), np.array([1]), np.array([0]), np.array([False])))


def in_slots(asked: DraftRequest, slots: list[int], first: int = 1) -> DraftRequest:
    """The same sequences under other handles, in other slots."""
    rows = len(slots)
    feed = replace(asked.feed, sequences=np.arange(first, first + rows), slots=np.array(slots))
    openings = tuple(replace(o, sequence=first + i) for i, o in enumerate(asked.openings))
    return replace(asked, feed=feed, openings=openings)


class TestSeveralRequestsInOnePass:
    """Two replicas' requests, of different widths, in slots that lie between each other's."""

    ONE = in_slots(request(PROMPTS[:2], MIXED[:2], [1, 2]), [6, 1])
    OTHER = in_slots(request(PROMPTS[2:], MIXED[2:], [4, 3], keys=["2", "3"]), [0, 9], first=100)
    UNKNOWN = DraftRequest(
        Feed(np.array([200, 201]), np.array([3, 4]), np.array([0, 5]), np.array([2, 1]), np.array([1, 2, 3])),
        (Opening(200, philox_key(0, 0, "4", 0), MIXED[0]),),
        (),
        np.array([2, 2]),
        np.zeros(2, dtype=np.int64),
        np.zeros(2, dtype=bool),
    )

    def alone(self, asked: DraftRequest) -> Proposal:
        return drafter().propose(asked)

    @staticmethod
    def same(one: Any, other: Proposal) -> None:
        assert one.tokens.tolist() == other.tokens.tolist()
        assert one.lengths.tolist() == other.lengths.tolist()
        assert one.support_ids.tolist() == other.support_ids.tolist()
        np.testing.assert_allclose(one.support_probs, other.support_probs, atol=1e-5)

    def test_each_is_answered_as_if_it_were_alone(self) -> None:
        made = drafter()
        answers = made.propose_all([self.ONE, self.OTHER])
        self.same(answers[0], self.alone(self.ONE))
        self.same(answers[1], self.alone(self.OTHER))
        follow = [self.ONE, self.OTHER]
        for i, asked in enumerate(follow):  # and in the next step, after what was cached together
            ends = asked.feed.cached + asked.feed.lengths
            feed = replace(asked.feed, cached=ends, lengths=np.array([1, 1]), tokens=answers[i].tokens[:, 0])
            follow[i] = replace(asked, feed=feed, openings=(), starts=asked.starts + 1)
        again = made.propose_all(follow)
        for i, first in enumerate([self.ONE, self.OTHER]):
            single = drafter()
            single.propose(first)
            self.same(again[i], single.propose(follow[i]))

    def test_a_miss_of_one_harms_no_other(self) -> None:
        made = drafter()
        answers = made.propose_all([self.ONE, self.UNKNOWN, self.OTHER])
        assert isinstance(answers[1], CacheMiss)
        assert answers[1].sequences == (201,)
        self.same(answers[0], self.alone(self.ONE))
        self.same(answers[2], self.alone(self.OTHER))
        alone = made.propose_all([self.UNKNOWN])
        assert isinstance(alone[0], CacheMiss)

    def test_out_of_memory_nothing_is_held_and_everything_can_be_fed_again(self) -> None:
        made = drafter()
        made.propose_all([self.ONE, self.OTHER])
        forward = made.runner.model.forward

        def exhausted(*arguments: Any, **named: Any) -> Any:
            raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 3 GB")

        made.runner.model.forward = exhausted
        with pytest.raises(OutOfMemory, match="the draft model ran out of memory"):
            made.propose_all([self.ONE, self.OTHER])
        assert sum(b.numel() for b in made.runner.cache.keys + made.runner.cache.values) == 0
        assert not len(made.runner.held)
        assert not made.runner.openings
        made.runner.model.forward = forward
        again = replace(self.ONE, feed=replace(self.ONE.feed, cached=np.array([1, 1])))
        with pytest.raises(CacheMiss):
            made.propose(again)
        self.same(made.propose(self.ONE), self.alone(self.ONE))
