"""The number of cohorts that is found, against the best there is, over steps whose costs are known."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from pipeline.cohorts import FEWEST_ROWS, MOST, Cohorts


@dataclass(frozen=True)
class Costs:
    """Seconds that a cohort of n rows takes: in the drafters, of which each cohort may have one for itself, in the
    target, which takes one cohort at a time, and on the way.
    """

    draft: Callable[[int], float]
    verify: Callable[[int], float]
    message: float = 0.0
    noise: float = 0.0

    def run(self, slots: int, steps: int, cohorts: Cohorts | None, count: int = 1, seed: int = 0) -> float:
        """Seconds for so many steps of all rows; with `cohorts` it is asked, and told, as a decoder does."""
        rng = np.random.default_rng(seed)
        now, target_free, done = 0.0, 0.0, 0
        under_way: list[tuple[float, int]] = []  # (when it ends, rows)

        def begin(rows: int) -> None:
            nonlocal target_free
            target_free = self._end(now, target_free, rows, rng)
            heapq.heappush(under_way, (target_free, rows))

        while done < steps * slots:
            if not under_way:
                count = count if cohorts is None else cohorts.count
                for _ in range(count):
                    begin(slots // count)
            now, rows = heapq.heappop(under_way)
            done += rows
            if cohorts is not None:
                cohorts.observe(now, rows, full=True)
            if cohorts is None or cohorts.count == count:
                begin(rows)
        return now

    def _end(self, now: float, target_free: float, rows: int, rng: np.random.Generator) -> float:
        noise = float(np.exp(self.noise * rng.standard_normal()))
        begins = max(now + self.draft(rows) + self.message, target_free)
        return begins + self.verify(rows) * noise


FLAT = Costs(lambda n: 0.03, lambda n: 0.1)  # bound by memory: halving a cohort saves nothing
STEEP = Costs(lambda n: 0.004 * n, lambda n: 0.01 * n)  # bound by arithmetic: halving is free
SLOW_DRAFT = Costs(lambda n: 0.002 * n + 0.05, lambda n: 0.01 + 0.004 * n, 0.01)
NO_DRAFT = Costs(lambda n: 0.0, lambda n: 0.05 + 0.001 * n, 0.001)


@pytest.mark.parametrize("costs", [FLAT, STEEP, SLOW_DRAFT, NO_DRAFT])
@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("slots", [16, 64])
def test_the_number_found_is_about_as_good_as_the_best(costs: Costs, noise: float, slots: int) -> None:
    costs = Costs(costs.draft, costs.verify, costs.message, noise)
    best = min(costs.run(slots, 400, None, count) for count in range(1, MOST + 1))
    assert costs.run(slots, 400, Cohorts(slots)) <= 1.12 * best
    known = [costs.run(slots, 100, None, count) for count in (1, 2)]
    pays = costs.draft in (STEEP.draft, SLOW_DRAFT.draft)
    assert (known[1] < 0.9 * known[0]) == pays, "the cases are what they say"


def test_a_change_of_costs_is_noticed() -> None:
    cohorts = Cohorts(16)
    FLAT.run(16, 400, cohorts)
    assert cohorts.count == 1
    STEEP.run(16, 600, cohorts)
    assert cohorts.count > 1


def test_steps_with_too_little_to_do_say_nothing() -> None:
    cohorts = Cohorts(16)
    for step in range(1000):
        cohorts.observe(step / 100, 1, full=False)
    assert cohorts.count == 1


@pytest.mark.parametrize(("slots", "most"), [(1, 1), (FEWEST_ROWS, 1), (2 * FEWEST_ROWS, 2), (64, MOST)])
def test_cohorts_have_a_few_rows_at_least(slots: int, most: int) -> None:
    cohorts = Cohorts(slots)
    for step in range(1000):
        cohorts.observe(step / 100 / cohorts.count, slots // cohorts.count, full=True)
        assert 1 <= cohorts.count <= most
