"""Scheduling over simulated workers, whose slots are looked into: see tests.simulation."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.messages import DraftRequest, PrefixCopy, Proposal, Verdict, VerifyReply, VerifyRequest
from pipeline.records import Completion, FinishReason, Request, SamplingParams
from pipeline.scheduler import SHORTEST_COPY, Limits, Resident, Scheduler, _common
from pipeline.sequence import Sequence
from pipeline.step import Plan, Row, empty_proposal
from tests.simulation import (
    QUIET,
    ShuffledFlight,
    Simulation,
    SlotCache,
    Trouble,
    certain,
    continuation,
    plain_text,
    related_requests,
)

TROUBLED_TARGET = Trouble(emptied=0.05, refuses=0.08, loses_answer=0.05)
TROUBLED_DRAFT = Trouble(emptied=0.05, refuses=0.08, lost=0.08, scrubbed=0.08)

simulated = settings(
    max_examples=120, derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)


@st.composite
def limits(draw: st.DrawFn) -> Limits:
    context = draw(st.integers(12, 60))
    return Limits(
        slots=draw(st.integers(1, 6)),
        context=context,
        draft_tokens=draw(st.integers(0, 5)),
        prefill_chunk=draw(st.integers(2, 24)),
        draft_context=draw(st.none() | st.integers(8, context)),
    )


@st.composite
def simulations(draw: st.DrawFn, target: Trouble = QUIET, draft: Trouble = QUIET, rests: float = 0.0) -> Simulation:
    return Simulation(
        draw(limits()),
        eos=draw(st.sampled_from([(), (0,)])),
        keeps_proposals=draw(st.booleans()),
        draft_chunk=draw(st.none() | st.integers(1, 24)),
        target_trouble=target,
        draft_trouble=draft,
        rests=rests,
        skill=draw(st.sampled_from([0.0, 0.8, 1.0])),
        seed=draw(st.integers(0, 2**32)),
    )


def decode_related(simulation: Simulation, count: int = 12) -> None:
    rng = np.random.default_rng(simulation.seed)
    simulation.run(related_requests(rng, count, simulation.limits.context))


# what holds whatever happens


@simulated
@given(simulations())
def test_slots_hold_what_is_relied_on_and_nothing_is_missing(simulation: Simulation) -> None:
    decode_related(simulation)


@simulated
@given(simulations(TROUBLED_TARGET, TROUBLED_DRAFT, rests=0.1))
def test_slots_hold_what_is_relied_on_when_both_workers_forget_refuse_and_vanish(simulation: Simulation) -> None:
    decode_related(simulation)


@simulated
@given(simulations(draft=Trouble(refuses=0.3), rests=0.3))
def test_a_drafter_that_comes_and_goes_changes_no_text(simulation: Simulation) -> None:
    decode_related(simulation)


@simulated
@given(simulations(TROUBLED_TARGET, TROUBLED_DRAFT, rests=0.1), st.integers(2, 4), st.integers(1, 3))
def test_cohorts_under_way_together_and_several_draft_workers_change_no_text(
    simulation: Simulation, cohorts: int, pool: int
) -> None:
    settings = {f.name: getattr(simulation, f.name) for f in fields(simulation) if f.init}
    divided = Simulation(**{**settings, "cohorts": cohorts, "pool": pool})
    with patch("pipeline.decode.Flight", ShuffledFlight):
        decode_related(divided, 24)


def leave_plans_undone(simulation: Simulation) -> None:
    """Before some steps, make another plan, carry it out in part or not at all, and give it up."""
    rng = np.random.default_rng(simulation.seed)
    step, scheduler = simulation.decoder.step, simulation.scheduler

    def carry_out(asked: DraftRequest | VerifyRequest | None, cache: SlotCache) -> bool:
        if asked is None or rng.random() < 0.3:
            return False
        some = asked.copies[: int(rng.integers(len(asked.copies) + 1))] if rng.random() < 0.5 else asked.copies
        for copy in some:
            cache.written[copy.target] = cache.written[copy.source][: copy.length]
        if len(some) == len(asked.copies):
            cache.write(asked.feed, [[]] * len(asked.feed.slots))
        return True

    def interrupted() -> list[tuple[Request, Completion]]:
        if rng.random() < 0.3 and (plan := scheduler.plan()) is not None:
            carry_out(plan.draft_request(), simulation.drafter.cache)
            carry_out(plan.verify_request(None), simulation.verifier.cache)
            scheduler.abandon(plan)
        return step()

    simulation.decoder.step = interrupted  # type: ignore[method-assign]


@simulated
@given(simulations())
def test_leaving_a_plan_undone_changes_no_text(simulation: Simulation) -> None:
    leave_plans_undone(simulation)
    decode_related(simulation)


# the simulation sees bugs


def remembers_nothing_undone(self: Scheduler, plan: Plan) -> None:
    """`abandon` left out."""


def shares_whatever_was_once_there(
    self: Scheduler,
    sequence: Sequence,
    model: str,
    residents: list[Resident],
    most: int,
    copies: list[PrefixCopy],
    least: int = SHORTEST_COPY,
) -> int:
    """Looks at the tokens of a slot, not at how many of them are valid in this model's cache."""
    held = [min(_common(r.tokens, sequence.tokens), most) for r in residents]
    source = int(np.argmax(held))
    if held[source] >= held[sequence.slot] + least:
        copies.append(PrefixCopy(source, sequence.slot, held[source]))
        return held[source]
    return held[sequence.slot]


def keeps_the_last_drafted_token(
    self: Scheduler, sequence: Sequence, drafted: list[int], accepted: int, next_token: int, row: Row
) -> None:
    """Believes that the drafter has fed itself the last token that it drew."""
    judge(self, sequence, drafted, accepted, next_token, row)
    if row.draft_fed and sequence.finish is None:
        sequence.draft_cached = len(sequence.tokens) - 1


def keeps_rejected_tokens(
    self: Scheduler, sequence: Sequence, drafted: list[int], accepted: int, next_token: int, row: Row
) -> None:
    """Rolls the target back one token too few."""
    judge(self, sequence, drafted, accepted, next_token, row)
    sequence.target_cached = len(sequence.tokens)


def forgets_rows_but_not_slots(self: Scheduler, handles: Any = None) -> None:
    """After a loss, still shares from slots of sequences that have ended."""
    for sequence in self.running if handles is None else self._named(handles):
        sequence.draft_cached, sequence.draft_opened = 0, False


judge = Scheduler._judge
def shares_across_cohorts(
    self: Scheduler, slot: int, residents: list[Resident], home: int | None
) -> list[Resident]:
    """Copies from slots that another cohort's step may be writing over."""
    return [r if r.home == home else replace(r, draft=0) for r in residents]


def shares_across_homes(
    self: Scheduler, slot: int, residents: list[Resident], home: int | None
) -> list[Resident]:
    """Copies what another draft worker holds."""
    return [r if self._cohort(i) == self._cohort(slot) else Resident([]) for i, r in enumerate(residents)]


BUGS_OF_MANY: dict[str, Callable[..., Any]] = {"cohorts": shares_across_cohorts, "homes": shares_across_homes}


@pytest.mark.parametrize("bug", [None, *BUGS_OF_MANY])
def test_planted_bug_of_cohorts_is_seen(bug: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same simulations that go through without a bug."""
    if bug is not None:
        monkeypatch.setattr(Scheduler, "_within_reach", BUGS_OF_MANY[bug])
    monkeypatch.setattr("pipeline.decode.Flight", ShuffledFlight)

    def go_through() -> None:
        for seed in range(12):
            simulation = Simulation(Limits(8, 40, 4, 8), skill=0.9, seed=seed, cohorts=3, pool=2)
            decode_related(simulation, 40)

    if bug is None:
        go_through()
    else:
        with pytest.raises(AssertionError):
            go_through()


BUGS: dict[str, tuple[str, Callable[..., Any]]] = {
    "no abandon": ("abandon", remembers_nothing_undone),
    "stale sharing": ("_share", shares_whatever_was_once_there),
    "last draft kept": ("_judge", keeps_the_last_drafted_token),
    "rejected kept": ("_judge", keeps_rejected_tokens),
    "slots not forgotten": ("forget_draft", forgets_rows_but_not_slots),
}


@pytest.mark.parametrize("bug", [None, *BUGS])
def test_planted_bug_is_seen(bug: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same simulations that go through without a bug."""
    if bug is not None:
        monkeypatch.setattr(Scheduler, *BUGS[bug])

    def go_through() -> None:
        for seed in range(12):
            simulation = Simulation(Limits(6, 40, 4, 8), draft_trouble=Trouble(lost=0.1), skill=0.9, seed=seed)
            leave_plans_undone(simulation)
            decode_related(simulation, 30)

    if bug is None:
        go_through()
    else:
        with pytest.raises(AssertionError):
            go_through()


# one step


def request(key: str, prompt: list[int], wanted: int = 10, **params: Any) -> Request:
    return Request(key, prompt, SamplingParams(wanted, **params))


def scheduler(requests: list[Request], **changes: Any) -> Scheduler:
    made = Scheduler(Limits(**{"slots": 4, "context": 100, "draft_tokens": 4, "prefill_chunk": 24, **changes}), (), 0)
    for r in requests:
        made.submit(r)
    return made


def advance(made: Scheduler, plan: Plan, drafts: list[list[int]] | None = None, accepted: int = 0) -> list[Sequence]:
    """Apply a plan: `drafts` were proposed, so many of each accepted, and the right token follows."""
    proposal = certain(drafts) if drafts else empty_proposal(len(plan.rows))
    asked = plan.verify_request(proposal)
    kept = np.minimum(asked.proposal.lengths, accepted)
    following = [
        continuation([*r.sequence.tokens, *asked.proposal.tokens[b][: kept[b]].tolist()]) if r.final else -1
        for b, r in enumerate(plan.rows)
    ]
    return made.apply(plan, asked, VerifyReply(Verdict(kept, np.array(following))))


def planned(made: Scheduler) -> Plan:
    plan = made.plan()
    assert plan is not None
    return plan


def test_nothing_to_do_is_no_plan() -> None:
    made = scheduler([])
    assert made.idle
    assert made.plan() is None


def test_long_prompt_is_cut_and_running_sequences_go_on_beside_it() -> None:
    made = scheduler([request("short", [1, 2, 3])])
    advance(made, planned(made))
    made.submit(request("long", [4] * 60))
    fed = []
    for _ in range(3):
        rows = {r.sequence.request.key: r for r in planned(made).rows}
        plan = Plan(tuple(rows.values()), (), ())
        fed.append((rows["long"].target_end - rows["long"].target_start, rows["long"].final, rows["short"].final))
        advance(made, plan)
    assert fed == [(24, False, True), (24, False, True), (12, True, True)]


def test_budget_goes_to_whoever_came_first_and_is_shared_by_what_is_left() -> None:
    made = scheduler([request(str(i), [i] * 10) for i in range(4)])
    steps = []
    for _ in range(3):
        plan = planned(made)
        steps.append({r.sequence.request.key: r.target_end - r.target_start for r in plan.rows})
        advance(made, plan)
    assert steps == [{"0": 10, "1": 10, "2": 4}, {"0": 1, "1": 1, "2": 6, "3": 10}, dict.fromkeys("0123", 1)]


@pytest.mark.parametrize(("wanted", "drafted"), [(1, 0), (2, 1), (3, 2), (5, 4), (6, 4), (50, 4)])
def test_block_never_reaches_past_the_limit(wanted: int, drafted: int) -> None:
    """One place is always left for the token that follows the block."""
    made = scheduler([request("a", [1, 2, 3], wanted)])
    [row] = planned(made).rows
    assert row.wanted == drafted


def test_context_clips_the_block_too() -> None:
    made = scheduler([request("a", [1] * 20)], context=23)
    [row] = planned(made).rows
    assert row.wanted == 2


def test_prompt_that_is_not_yet_fed_is_not_drafted_for() -> None:
    made = scheduler([request("a", [1] * 30)])
    [row] = planned(made).rows
    assert (row.final, row.wanted, row.draft_fed) == (False, 0, 24)


def test_no_drafting_asks_the_drafter_nothing() -> None:
    made = scheduler([request("a", [1, 2, 3])])
    plan = made.plan(drafting=False)
    assert plan is not None
    assert plan.draft_request() is None
    assert scheduler([request("a", [1, 2, 3])], draft_tokens=0).plan().draft_request() is None  # type: ignore[union-attr]


def test_finished_sequence_gives_its_slot_to_the_next_in_the_next_step() -> None:
    made = scheduler([request("a", [1], 1), request("b", [2], 3), request("c", [3], 3)], slots=2)
    ended = advance(made, planned(made))
    assert [s.request.key for s in ended] == ["a"]
    assert sorted(r.sequence.request.key for r in planned(made).rows) == ["b", "c"]


def test_rows_come_in_the_order_of_their_slots() -> None:
    made = scheduler([request(str(i), [i, i], 1 if i < 2 else 9) for i in range(6)])
    advance(made, planned(made))
    slots = [r.sequence.slot for r in planned(made).rows]
    assert slots == sorted(slots)


def test_full_acceptance_leaves_the_last_drafted_token_to_be_fed_to_the_drafter() -> None:
    made = scheduler([request("a", [1, 2, 3], 40)])
    plan = planned(made)
    advance(made, plan, [[4, 4, 4, 4]], accepted=4)
    [row] = planned(made).rows
    assert (row.target_end - row.target_start, row.draft_fed) == (1, 2)


def test_partial_acceptance_rolls_both_caches_back_by_a_number() -> None:
    made = scheduler([request("a", [1, 2, 3], 40)])
    advance(made, planned(made), [[4, 4, 4, 4]], accepted=1)
    [row] = planned(made).rows
    assert (row.target_start, row.target_end, row.draft_start, row.draft_end) == (4, 5, 4, 5)


def test_drafter_without_a_cache_of_its_own_proposals_is_fed_all_that_was_accepted() -> None:
    made = Scheduler(Limits(4, 100, 4, 24), (), 0, drafter_keeps_proposals=False)
    made.submit(request("a", [1, 2, 3], 40))
    advance(made, planned(made), [[4, 4, 4]], accepted=3)
    [row] = planned(made).rows
    assert (row.draft_start, row.draft_end) == (3, 7)


def test_row_without_a_verdict_is_an_error_and_its_slot_is_not_shared() -> None:
    made = scheduler([request("a", [1] * 20), request("b", [2, 3])], slots=2)
    plan = planned(made)
    [bad] = [b for b, r in enumerate(plan.rows) if r.sequence.request.key == "a"]
    following = np.array([0, 0])
    following[bad] = -1
    [ended] = made.apply(plan, plan.verify_request(None), VerifyReply(Verdict(np.zeros(2, dtype=np.int64), following)))
    assert ended.finish is FinishReason.ERROR
    made.submit(request("c", [1] * 20))
    again = planned(made)
    assert again.target_copies == ()
    assert [r.target_start for r in again.rows if r.sequence.request.key == "c"] == [0]


# sharing


def test_prefix_of_a_resident_is_copied_once_it_is_there() -> None:
    prompt = list(range(20))
    made = scheduler([request("a", prompt)], vocabulary=50)
    advance(made, planned(made))
    made.submit(request("b", [*prompt[:15], 40, 41]))
    plan = planned(made)
    [a], [b] = ([r for r in plan.rows if r.sequence.request.key == k] for k in "ab")
    assert plan.target_copies == (PrefixCopy(a.sequence.slot, b.sequence.slot, 15),)
    assert plan.draft_copies == plan.target_copies
    assert (b.target_start, b.draft_start) == (15, 15)


def test_last_token_of_an_equal_prompt_is_fed_again() -> None:
    prompt = list(range(20))
    made = scheduler([request("a", prompt, 1)])
    advance(made, planned(made))
    made.submit(request("b", prompt))
    [row] = planned(made).rows
    assert (row.target_start, row.target_end) == (19, 20)


def test_prefix_that_is_not_computed_yet_is_not_shared() -> None:
    prompt = list(range(40))
    made = scheduler([request("a", prompt), request("b", prompt)])
    plan = planned(made)
    assert [r.sequence.request.key for r in plan.rows] == ["a"]
    advance(made, plan)
    plan = planned(made)
    assert plan.target_copies == (PrefixCopy(0, 1, 24),)


def test_short_prefix_is_not_worth_a_copy() -> None:
    made = scheduler([request("a", list(range(20)))])
    advance(made, planned(made))
    made.submit(request("b", [*range(SHORTEST_COPY - 1), 90]))
    assert planned(made).target_copies == ()


def test_slot_that_begins_alike_is_chosen_and_needs_no_copy() -> None:
    made = scheduler([request("a", [1] * 9, 1), request("b", [2] * 9, 1)], slots=2)
    advance(made, planned(made))
    made.submit(request("c", [2] * 12))
    plan = planned(made)
    assert plan.target_copies == ()
    assert [(r.sequence.slot, r.target_start) for r in plan.rows] == [(1, 9)]


def test_prefix_that_the_drafter_does_not_hold_is_fed_to_both() -> None:
    """Else whether the first block is drafted, and with it the text, would depend on who was there before."""
    prompt = list(range(40))
    made = Scheduler(Limits(2, 200, 4, 24, draft_context=60), (), 0, draft_chunk=24)
    made.residents[0] = Resident([*prompt, *range(100, 140)], target=80)  # too long for the drafter
    made.residents[1] = Resident(prompt[:9], target=5, draft=9)
    made.submit(request("b", [*prompt, 90]))
    for _ in range(2):
        [b] = planned(made).rows
        assert (b.target_start, b.target_end) == (b.draft_start, b.draft_end)
        advance(made, planned(made))


def test_long_sequence_beyond_the_drafters_context_leaves_no_claim_on_its_slots() -> None:
    """Its copy would never be made, since the drafter is not asked about it; who came next relied on it."""
    prompt = list(range(20))
    made = scheduler([request("a", prompt, 1)], draft_context=30)
    advance(made, planned(made))
    made.submit(request("b", [*prompt, *range(50, 62)]))
    plan = planned(made)
    assert plan.draft_request() is None
    assert plan.draft_copies == ()


def test_rows_that_catch_up_share_the_drafters_chunk() -> None:
    made = Scheduler(Limits(4, 100, 4, 100), (), 0, draft_chunk=24)
    for i in range(4):
        made.submit(request(str(i), [i] * 25))
    advance(made, planned(made))
    made.forget_draft()
    fed = [r.draft_fed for r in planned(made).rows]
    assert sum(n for n in fed if n > 6) <= 24
    assert min(fed) > 0


# what is refused


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (request("a", []), "no tokens"),
        (request("a", [1] * 100), "no room"),
        (request("a", [1], 0), "max_new_tokens"),
        (request("a", [1, 50]), "outside"),
        (request("a", [-1]), "outside"),
        *(
            (request("a", prompt), "no list of token ids")
            for prompt in (None, "text", [1.5], ["1"], [None], [math.nan])  # type: ignore[arg-type]
        ),
        (Request("a", [1], None), "params"),  # type: ignore[arg-type]
        (Request("a", [], None), "no tokens"),  # type: ignore[arg-type]
        *(
            (Request("a", [1], SamplingParams(**{"max_new_tokens": 4, name: value})), name)  # type: ignore[arg-type]
            for name, value in [
                ("max_new_tokens", 2.5),
                ("temperature", -1.0),
                ("temperature", math.nan),
                ("temperature", "hot"),
                ("top_k", -1),
                ("top_k", 10**30),
                ("top_p", 0.0),
                ("top_p", 1.5),
                ("top_p", math.nan),
                ("min_p", 1.5),
                ("repetition_penalty", 0.0),
                ("presence_penalty", math.inf),
                ("frequency_penalty", "much"),
                ("logit_bias", {-1: 1.0}),
                ("logit_bias", {50: 1.0}),
                ("logit_bias", {3: math.nan}),
                ("logit_bias", [3]),
                ("stop", ("",)),
                ("stop", "x"),
                ("stop", ("\ufffd",)),
                ("stop", ("x",)),
                ("bad_words", (3,)),
                ("n", 0),
                ("n", 1.5),
                ("logprobs", "all"),
                ("top_logprobs", -1),
                ("min_new_tokens", -1),
                ("min_new_tokens", 2**63),
                ("temperature", 10**400),
                ("logit_bias", {3: 10**400}),
                ("top_p", -(10**5000)),
                ("n", 10**12),
                ("ignore_eos", "no"),
                ("logprobs", np.array(["raw", "law"])),
                ("stop", ("\ud83d",)),
                ("bad_words", ("\ud83d",)),
            ]
        ),
    ],
)
def test_request_that_cannot_be_decoded_is_answered_with_the_reason(bad: Request, words: str) -> None:
    made = scheduler([bad], vocabulary=50)
    assert made.idle
    [(answered, _, completion)] = made.take_rejected()
    assert answered is bad
    assert completion.finish_reason is FinishReason.ERROR
    assert words in (completion.error or "")
    assert made.take_rejected() == []


@pytest.mark.parametrize("wanted", [np.uint8(200), np.int64(200), True])
def test_numbers_of_numpy_are_numbers(wanted: Any) -> None:
    """A byte of numpy's wraps around where a prompt's length is added to it."""
    made = scheduler([request("a", np.array([1] * 90), wanted), request("b", (1, 2), 4)])  # type: ignore[arg-type]
    assert made.take_rejected() == []
    assert [s.limit for s in made.waiting] == [90 + min(int(wanted), 10), 6]


def test_spread_proposal_keeps_each_row_its_own() -> None:
    """Rows of which the drafter was not asked get length 0."""
    made = scheduler([request("a", [1] * 20), request("b", [2, 3]), request("c", [4, 5])], draft_context=10)
    plan = planned(made)
    asked = plan.draft_request()
    assert asked is not None
    names = {r.sequence.handle: r.sequence.request.key for r in plan.rows}
    assert [names[h] for h in asked.feed.sequences.tolist()] == ["b", "c"]
    proposal: Proposal = plan.verify_request(certain([[1, 2], [3]])).proposal
    assert proposal.lengths.tolist() == [0, 2, 1]
    assert proposal.tokens.tolist() == [[-1, -1], [1, 2], [3, -1]]


def test_common_prefix_of_lists() -> None:
    rng = np.random.default_rng(0)
    for _ in range(300):
        a, b = (rng.integers(0, 2, int(rng.integers(0, 12))).tolist() for _ in "ab")
        expected = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        assert _common(a, b) == expected


def test_plain_text_of_the_simulation_ends_as_told() -> None:
    asked = request("a", [1, 2, 3], 8)
    assert len(plain_text(asked, 100, ())) == 8
    assert len(plain_text(asked, 6, ())) == 3
