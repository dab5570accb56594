"""The statistics of an audit, against references of their own: tails, calibration, what is left out, what fails."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest

from pipeline import audit
from pipeline.audit import (
    END,
    Audit,
    Difference,
    Drawn,
    GreedyAudit,
    GreedyText,
    Law,
    LawAudit,
    NextToken,
    behind,
    chi_square_tail,
    compare,
    g_statistic,
)
from tests import oracle


def next_token(likely: dict[int, float], rest: float = 0.0, vocabulary: int = 12, **more: Any) -> NextToken:
    """All ids of `likely` are possible, and the highest ones if there is a rest."""
    possible = np.zeros(vocabulary, dtype=bool)
    possible[[token for token in likely if token != END]] = True
    possible[8:] |= rest > 0
    return NextToken(likely, rest, possible, **more)


FLAT = {token: 0.2 for token in range(5)}
TREE: Law = {
    (): next_token({0: 0.5, 1: 0.3, END: 0.2}),
    (0,): next_token({2: 0.6, 3: 0.3}, rest=0.1),
    (1,): next_token(FLAT),
}


def sampled(law: Law, count: int, seed: int) -> Counter[tuple[int, ...]]:
    """Outcomes of two tokens, drawn by numpy."""
    rng = np.random.default_rng(seed)
    outcomes: Counter[tuple[int, ...]] = Counter()
    for _ in range(count):
        text: tuple[int, ...] = ()
        while text in law:
            after = law[text]
            tokens = [*after.likely, 9]
            chances = np.array([*after.likely.values(), after.rest])
            token = int(rng.choice(tokens, p=chances / chances.sum()))
            text = (*text, token)
            if token == END:
                break
        outcomes[text] += 1
    return outcomes


def compared(law: Law, outcomes: Counter[tuple[int, ...]], noise: float = 0.0, looks: int = 1) -> LawAudit:
    return compare(["prefix"], [law], [Drawn(outcomes, 4, 3)], noise, looks)


# --- tails


def chi_square_by_steps(statistic: float, freedom: int) -> float:
    """The density, summed with Simpson's rule from the statistic on."""
    x = np.linspace(statistic, statistic + 400.0, 400_001)
    logs = (freedom / 2 - 1) * np.log(x) - x / 2 - freedom / 2 * math.log(2) - math.lgamma(freedom / 2)
    weights = np.where(np.arange(len(x)) % 2, 4.0, 2.0)
    weights[[0, -1]] = 1.0
    return float((np.exp(logs) * weights).sum() * (x[1] - x[0]) / 3)


@pytest.mark.parametrize("freedom", [1, 2, 3, 7, 24, 151])
@pytest.mark.parametrize("statistic", [0.5, 5.0, 40.0, 220.0])
def test_the_chi_square_tail_is_the_integral_of_its_density(statistic: float, freedom: int) -> None:
    assert chi_square_tail(statistic, freedom) == pytest.approx(chi_square_by_steps(statistic, freedom), rel=1e-6)


def test_the_tail_agrees_with_known_quantiles_and_with_the_oracle() -> None:
    assert chi_square_tail(3.841458820694124, 1) == pytest.approx(0.05, rel=1e-9)
    assert chi_square_tail(18.307038053275146, 10) == pytest.approx(0.05, rel=1e-9)
    assert chi_square_tail(30.0, 12) == pytest.approx(oracle.chi_square_tail(30.0, 12), rel=0.05)
    assert chi_square_tail(-1.0, 3) == chi_square_tail(3.0, 0) == 1.0


def test_williams_correction_makes_g_a_little_smaller() -> None:
    cells = [(14, 10.0), (6, 10.0)]
    plain = 2 * (14 * math.log(1.4) + 6 * math.log(0.6))
    assert g_statistic(cells) == pytest.approx(plain / (1 + (4 - 1) / (6 * 20 * 1)))
    assert g_statistic([(20, 20.0)]) == 0.0


def test_p_values_of_a_right_engine_are_not_too_small() -> None:
    """4000 tables of 25 cells that expect 10 each: where chi-square fits worst."""
    counts = np.random.default_rng(0).multinomial(250, [1 / 25] * 25, size=4000)
    tails = np.array([chi_square_tail(g_statistic([(int(c), 10.0) for c in row]), 24) for row in counts])
    for level in (0.1, 0.01, 0.002):
        assert (tails < level).mean() < 1.5 * level + 3 * math.sqrt(level / 4000)
    assert (tails < 0.5).mean() > 0.4


# --- outcomes and their law


def test_samples_of_the_law_fit_and_those_of_another_do_not() -> None:
    assert not compared(TREE, sampled(TREE, 600, 1)).rejected
    other = {**TREE, (1,): next_token({0: 0.6, 1: 0.1, 2: 0.1, 3: 0.1, 4: 0.1})}
    found = compared(TREE, sampled(other, 600, 1))
    assert found.rejected
    assert found.worst.impossible == 0
    assert found.worst.p_value < 1e-8


def test_every_outcome_has_one_cell_and_the_statistic_is_that_of_a_flat_table() -> None:
    counts = sampled(TREE, 1000, 3)
    test = compared(TREE, counts).tests[0]
    law = {(0, 2): 0.3, (0, 3): 0.15, (0, 9): 0.05, (END,): 0.2, **{(1, t): 0.06 for t in range(5)}}
    cells = [(counts[outcome], 1000 * p) for outcome, p in law.items()]
    assert test.cells == 9
    assert test.statistic == pytest.approx(g_statistic(cells))
    assert test.p_value == pytest.approx(chi_square_tail(g_statistic(cells), 8))


def test_cells_that_are_expected_seldom_are_counted_together() -> None:
    found = compared(TREE, sampled(TREE, 60, 2))  # of nine cells only (0, 2) and the end are expected ten times
    assert found.tests[0].cells == 4
    assert compared(TREE, sampled(TREE, 8, 2)).tests[0].p_value == 1.0


@pytest.mark.parametrize(
    "outcome", [(7,), (0, 7), (0, END), (1, 99), ()], ids=["first", "inner", "end", "no token", "a failed request"]
)
def test_one_outcome_that_the_law_does_not_have_is_enough(outcome: tuple[int, ...]) -> None:
    counts = sampled(TREE, 600, 1) + Counter({outcome: 1})
    found = compared(TREE, counts)
    assert found.rejected
    assert found.worst.impossible == 1
    assert found.worst.p_value == 0.0


def test_outcomes_on_the_border_of_a_filter_are_left_out() -> None:
    law = {**TREE, (): next_token({0: 0.5, 1: 0.3, END: 0.2}, doubtful=frozenset([6]))}
    counts = sampled(TREE, 600, 1)
    found = compared(law, counts + Counter({(6,): 50, (6, 3): 50}))
    assert not found.rejected
    assert found.tests[0].doubtful == 100
    assert found.tests[0].statistic == compared(TREE, counts).tests[0].statistic


def test_rounding_of_16_bit_numbers_is_taken_off_and_no_more() -> None:
    counts = sampled(TREE, 600, 1)
    plain, noisy = compared(TREE, counts).tests[0], compared(TREE, counts, noise=0.05).tests[0]
    assert noisy.statistic == pytest.approx(max(0.0, plain.statistic - 2 * 0.05**2 * 600))


def test_small_deviations_of_many_prefixes_are_found_together() -> None:
    law: Law = {(): next_token({0: 0.5, 1: 0.5})}
    drawn = [Drawn(Counter({(0,): 560, (1,): 440}), 0, 0)] * 12
    found = compare([str(i) for i in range(12)], [law] * 12, drawn, 0.0, 4)
    assert all(test.p_value > found.threshold for test in found.tests)
    assert found.rejected
    assert found.worst.name == "together"


def test_the_threshold_is_shared_by_prefixes_their_sum_and_looks() -> None:
    found = compare(["a", "b"], [TREE, TREE], [Drawn(sampled(TREE, 50, s), 0, 0) for s in (1, 2)], 0.0, 4)
    assert found.threshold == pytest.approx(audit.ALPHA / 12)
    assert found.together.samples == 100


def test_only_likely_tokens_are_looked_behind_and_never_the_end() -> None:
    assert behind(TREE[()], 1.0) == [0, 1]
    assert behind(TREE[(0,)], 0.1) == [2]


# --- greedy texts, and the verdict


def greedy(*margins: float, tie: float = 1e-3, error: str | None = None) -> GreedyAudit:
    found = tuple(Difference(i, 5, 6, margin) for i, margin in enumerate(margins))
    return GreedyAudit((GreedyText("17", "answer", 10, found, error), GreedyText("18", "answer", 10, ())), tie, 8, 6)


def test_a_near_tie_is_no_failure_and_is_counted() -> None:
    found = greedy(5e-4, 0.0)
    assert found.failure is None
    assert (found.equal, found.rate) == (1, 0.1)


@pytest.mark.parametrize("margin", [1e-3, 0.4, math.inf, math.nan])
def test_a_difference_that_is_no_near_tie_fails_with_its_place(margin: float) -> None:
    failure = greedy(margin).failure
    assert failure is not None
    assert failure.startswith("greedy: document 17, task answer, token 0: token id 6 where plain decoding has token")
    assert greedy(0.4, tie=1.0).failure is None


def test_a_text_that_the_engine_could_not_give_fails() -> None:
    assert greedy(error="not finite").failure == "greedy: document 17, task answer: not finite"
    assert greedy(error="not finite").equal == 1


def whole(part_one: GreedyAudit, sampled_by: Law, wrong_by: Law) -> Audit:
    right, wrong = (compared(TREE, sampled(law, 600, 1)) for law in (sampled_by, wrong_by))
    return Audit("ratio", "ngram", "float32", part_one, right, wrong, "is wrong", ("a note",), 1.5)


WRONG: Law = {**TREE, (): next_token({0: 0.9, 1: 0.1})}


def test_an_audit_passes_if_the_right_engine_fits_and_the_wrong_one_does_not() -> None:
    found = whole(greedy(), TREE, WRONG)
    assert found.passed
    assert found.failure is None


@pytest.mark.parametrize(
    ("part_one", "right", "wrong", "beginning"),
    [
        (greedy(0.5), TREE, WRONG, "greedy: "),
        (greedy(), WRONG, WRONG, "sampled law: prefix: p = "),
        (greedy(), TREE, TREE, "no power: an engine that is wrong passed as well, with 600 samples"),
    ],
)
def test_a_failure_names_its_part(part_one: GreedyAudit, right: Law, wrong: Law, beginning: str) -> None:
    found = whole(part_one, right, wrong)
    assert not found.passed
    assert found.failure is not None
    assert found.failure.startswith(beginning)


def test_json_holds_all_numbers_and_only_such_as_json_has() -> None:
    document = whole(greedy(math.inf), TREE, WRONG).as_json()
    assert document["passed"] is False
    assert document["failure"].startswith("greedy")
    assert document["greedy"]["texts"][0]["differences"] == [{"position": 0, "expected": 5, "got": 6, "margin": None}]
    assert document["greedy"]["equal"] == 1
    assert document["sampled"]["tests"][0]["samples"] == 600
    assert document["wrong"]["rejected"] is True
    assert document["notes"] == ["a note"]
