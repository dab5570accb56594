"""Each known way to get speculative decoding wrong is caught.

A check takes what it checks as an argument: ours passes, and fails by a wide margin once a bug is planted there.
Bugs of the rules are planted here and found by enumeration; the same and others are planted in the whole engine by
engine/test_law_end_to_end.py (E, by the name of the plant) and engine/test_decoding_cases.py (C):

| bug | here | elsewhere |
| --- | --- | --- |
| redrawing from p | test_redrawing_from_… | E redraw_from_the_target |
| the residual of `block` without its scale | test_forgetting_the_weight_… | E redraw_without_the_scale |
| truncation not renormalised | test_a_truncated_law_… | E claim_the_whole_law |
| a greedy draft judged as sampled; another law claimed | test_claiming_a_law_… | E judge_a_greedy_draft_as_sampled, |
| | | claim_a_cooler_law, keep_whatever_is_likely |
| a draft dropped after it was seen | test_dropping_an_unlikely_token_… | E drop_what_looks_unlikely |
| `<=` for `<` | test_comparing_with_at_most_… | |
| draft and accept decisions share a stream | test_drafting_with_the_numbers_… | E draft_with_the_numbers_that_judge |
| draft and residual draws share a stream | test_redrawing_with_the_number_… | E redraw_with_the_numbers_that_drafted |
| uniforms by position under `block` | test_judging_the_next_block_… | E judge_each_position_with_its_own_numbers |
| noise of `coupled` that ignores the position | | E race_with_the_same_noise_everywhere, engine/test_coupled.py |
| filters missing at inner positions | | E forget_the_filters_of_the_block |
| penalties blind to the drafted tokens before a position | | E count_only_what_is_final |
| a bias at the last position alone | | E edit_the_last_position_alone |
| a request is proposed its own earlier text | | E test_proposing_a_request_its_own_earlier_text_… |
| ends: late EOS, stop strings unseen or cut by blocks, … | | C test_planted_bug_in_the_ends_is_seen |
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from pipeline import speculation
from pipeline.messages import Array, Proposal, Verdict
from pipeline.randomness import Stream, philox_key, uniforms, verdict_uniforms
from tests import oracle
from tests.oracle import Judge, Law, NextLaw, Prefix, Tabular
from tests.proposals import judge_with, lay_out, ours

RULES = ["ratio", "block"]
EXACT, WRONG = 1e-12, 1e-5  # distances of enumerated laws, which err by 1e-16
FITS, MISFITS = 1e-3, 1e-12  # p-values
VOCABULARY, LENGTH, DRAFTED = 3, 3, 2
TARGET, DRAFT = Tabular(71, VOCABULARY, sharpness=1.5), Tabular(72, VOCABULARY, sharpness=1.5)


def cut_to_two(prefix: Prefix) -> Law:
    """The draft's two most likely tokens, with the numbers of the whole law: they do not sum to 1."""
    return oracle.top(DRAFT(prefix), 2)


def cut_and_normalised(prefix: Prefix) -> Law:
    return cut_to_two(prefix) / cut_to_two(prefix).sum()


# ---------------------------------------------------------------------------------------- bugs in the rule: law


def law_error(judge: Judge, rule: str, draft: NextLaw = DRAFT, **how: Any) -> float:
    """How far the law of what is emitted is from the target's, by enumeration."""
    emitted = oracle.speculative_law(TARGET, draft, lambda prefix: DRAFTED, LENGTH, rule, judge, **how)
    return oracle.total_variation(emitted, oracle.enumerate_law(TARGET, LENGTH))


def redrawn_from_p(target: torch.Tensor, proposal: Proposal, accepted: Array, rule: str) -> torch.Tensor:
    law = speculation.at(target, accepted)
    return law / law.sum(-1, keepdim=True)


def unscaled(target: torch.Tensor, proposal: Proposal, accepted: Array, rule: str) -> torch.Tensor:
    """Forgets that `block` subtracts q from P · p."""
    return speculation.residual(target, proposal, accepted, "ratio")


def as_shipped(rule: str) -> Judge:
    """Takes support_probs for probabilities though they do not sum to 1, as the oracle does: it expects laws."""
    return oracle.judge_by(rule)


@pytest.mark.parametrize("rule", RULES)
def test_redrawing_from_the_target_law_is_caught(rule: str) -> None:
    assert law_error(ours(rule), rule) < EXACT
    assert law_error(judge_with(speculation.acceptance, redrawn_from_p, rule), rule) > WRONG


def test_forgetting_the_weight_in_the_residual_of_block_is_caught() -> None:
    assert law_error(ours("block"), "block") < EXACT
    assert law_error(judge_with(speculation.acceptance, unscaled, "block"), "block") > WRONG


@pytest.mark.parametrize("rule", RULES)
def test_a_truncated_law_that_is_not_renormalised_is_caught(rule: str) -> None:
    assert law_error(ours(rule), rule, cut_and_normalised, claimed=cut_to_two) < EXACT
    assert law_error(as_shipped(rule), rule, cut_and_normalised, claimed=cut_to_two) > WRONG


@pytest.mark.parametrize("rule", RULES)
def test_claiming_a_law_that_the_token_was_not_drawn_from_is_caught(rule: str) -> None:
    """Drawn from the two most likely tokens, shipped with the whole law; and greedy tokens shipped as sampled."""
    assert law_error(ours(rule), rule, cut_and_normalised, claimed=cut_and_normalised) < EXACT
    for drawn_from in (cut_and_normalised, lambda prefix: oracle.one_hot(DRAFT(prefix))):
        assert law_error(ours(rule), rule, drawn_from, claimed=DRAFT) > WRONG


@pytest.mark.parametrize("rule", RULES)
def test_a_one_hot_law_may_be_claimed_for_a_token_chosen_in_any_way(rule: str) -> None:
    """The exception: a certain token is exact however it was chosen. Each choice makes an exact law."""
    for token in range(VOCABULARY):

        def certain(prefix: Prefix, token: int = token) -> Law:
            return np.eye(VOCABULARY)[(token + len(prefix)) % VOCABULARY]

        assert law_error(ours(rule), rule, certain) < EXACT


@pytest.mark.parametrize("rule", RULES)
def test_dropping_an_unlikely_token_after_seeing_it_is_caught(rule: str) -> None:
    def before_the_first_unlikely(block: oracle.Block) -> int:
        likely = [law[token] > 0.25 for law, token in zip(block.drafts, block.tokens, strict=True)]
        return likely.index(False) if False in likely else len(likely)

    assert law_error(ours(rule), rule, cut=before_the_first_unlikely) > WRONG


# -------------------------------------------------------------------------------------- bugs in the comparison

Verify = Callable[[torch.Tensor, Proposal, Array, str], Verdict]


def kept_impossible_tokens(verify: Verify, rule: str) -> int:
    """Tokens kept at uniform 0, of a block whose first token the target cannot emit."""
    even = np.array([0.5, 0.5])
    target, proposal = lay_out([oracle.Block((0,), [even], [np.array([0.0, 1.0]), even])])
    verdict = verify(target, proposal, np.zeros((1, target.shape[1], 2)), rule)
    return int(verdict.accepted)


def verify_at_most(target: torch.Tensor, proposal: Proposal, uniforms: Array, rule: str) -> Verdict:
    """Compares with <= instead of <."""
    cuts, numbers = speculation.acceptance(target, proposal, rule), torch.as_tensor(uniforms)
    good = numbers[:, :-1, 0] <= cuts
    accepted = speculation.accepted_tokens(good.double(), torch.full_like(cuts, 0.5), rule)
    accepted = torch.minimum(accepted, torch.as_tensor(proposal.lengths))
    law = speculation.residual(target, proposal, accepted, rule)
    return Verdict(accepted, speculation.draw(law, speculation.at(numbers, accepted)[:, 1]))


@pytest.mark.parametrize("rule", RULES)
def test_comparing_with_at_most_is_caught(rule: str) -> None:
    assert kept_impossible_tokens(speculation.verify, rule) == 0
    assert kept_impossible_tokens(verify_at_most, rule) == 1


# ------------------------------------------------------------------------------------------ bugs in the numbers

Numbers = Callable[[np.ndarray, np.ndarray, int], np.ndarray]  # keys [B, 3], starts [B], count
ROWS = 20_000


def draft_uniforms(keys: np.ndarray, starts: np.ndarray, count: int) -> np.ndarray:
    return uniforms(keys, starts, count, Stream.DRAFT)


def table(next_law: NextLaw, longest: int) -> np.ndarray:
    """Laws by `code`: prefixes numbered by length, then by their tokens."""
    laws, prefixes = [], [()]
    for _ in range(longest + 1):
        laws += [next_law(prefix) for prefix in prefixes]
        prefixes = [(*prefix, token) for prefix in prefixes for token in range(VOCABULARY)]
    return np.array(laws)


def longer(code: np.ndarray, token: np.ndarray) -> np.ndarray:
    return code * VOCABULARY + token + 1


def tokens_of(code: int) -> Prefix:
    return (*tokens_of((code - 1) // VOCABULARY), (code - 1) % VOCABULARY) if code else ()


def decode(rule: str, draft_numbers: Numbers, verdict_numbers: Numbers) -> Counter[Prefix]:
    """Decode `ROWS` sequences, block after block, each with a key of its own; counts what is emitted."""
    target, draft = table(TARGET, LENGTH + DRAFTED), table(DRAFT, LENGTH + DRAFTED)
    keys = np.array([philox_key(1, 0, str(row), 0) for row in range(ROWS)])
    done, code = np.zeros(ROWS, int), np.zeros(ROWS, int)
    while len(rows := np.flatnonzero(done < LENGTH)):
        heads, tokens = [code[rows]], []
        numbers = torch.from_numpy(draft_numbers(keys[rows], done[rows], DRAFTED))
        for i in range(DRAFTED):
            tokens.append(speculation.draw(torch.from_numpy(draft[heads[i]]), numbers[:, i]).numpy())
            heads.append(longer(heads[i], tokens[i]))
        ids = np.tile(np.arange(VOCABULARY), (len(rows), DRAFTED, 1))
        lengths, laws = np.full(len(rows), DRAFTED), draft[np.stack(heads[:-1], 1)]
        verdict = speculation.verify(
            torch.from_numpy(target[np.stack(heads, 1)]),
            Proposal(np.stack(tokens, 1), lengths, ids, laws),
            verdict_numbers(keys[rows], done[rows], DRAFTED + 1),
            rule,
        )
        kept = verdict.accepted.numpy()
        code[rows] = longer(np.stack(heads, 1)[np.arange(len(rows)), kept], verdict.next_token.numpy())
        done[rows] += kept + 1
    return Counter(tokens_of(int(c))[:LENGTH] for c in code)


def fit(rule: str, draft_numbers: Numbers, verdict_numbers: Numbers) -> float:
    """The p-value of what is emitted under the target's law, by a G-test of many sequences."""
    return oracle.g_test(decode(rule, draft_numbers, verdict_numbers), oracle.enumerate_law(TARGET, LENGTH))


def shared_with_the_decision(keys: np.ndarray, starts: np.ndarray, count: int) -> np.ndarray:
    """Draws the draft's tokens with the numbers that will judge them."""
    return uniforms(keys, starts, count, Stream.ACCEPT)


def shared_with_the_draft(keys: np.ndarray, starts: np.ndarray, count: int) -> np.ndarray:
    """Draws the next token with the number that drew the rejected one."""
    numbers = verdict_uniforms(keys, starts, count)
    numbers[..., 1] = uniforms(keys, starts, count, Stream.DRAFT)
    return numbers


def by_position_alone(keys: np.ndarray, starts: np.ndarray, count: int) -> np.ndarray:
    """The same numbers for a position in whichever block it is judged."""
    positions = starts[:, None] + np.arange(count)
    streams = (uniforms(keys, np.zeros(len(starts)), positions, s) for s in (Stream.ACCEPT, Stream.RESIDUAL))
    return np.stack(list(streams), -1)


@pytest.mark.parametrize("rule", RULES)
def test_our_numbers_give_the_target_law(rule: str) -> None:
    assert fit(rule, draft_uniforms, verdict_uniforms) > FITS


@pytest.mark.parametrize("rule", RULES)
def test_drafting_with_the_numbers_that_judge_is_caught(rule: str) -> None:
    assert fit(rule, shared_with_the_decision, verdict_uniforms) < MISFITS


@pytest.mark.parametrize("rule", RULES)
def test_redrawing_with_the_number_that_drafted_is_caught(rule: str) -> None:
    assert fit(rule, draft_uniforms, shared_with_the_draft) < MISFITS


def test_judging_the_next_block_with_numbers_already_looked_at_is_caught() -> None:
    assert fit("block", draft_uniforms, by_position_alone) < MISFITS
