"""How many cohorts a batch is divided into, found by trying: drafts hide behind verification, where that pays.

While the target verifies one cohort, the drafters work on another. But halving a cohort does not halve the cost of its
pass, so more cohorts are not always faster: with draft time d, verification time v and messages m for a cohort of n
rows, C cohorts of B/C rows need max(C·v(B/C), v(B/C) + d(B/C) + m) for a step of all B. Those curves are not known
beforehand and change with lengths and with the pool, so what counts is what is measured: rows judged per second.

Knows nothing of sequences, workers or clocks.
"""

from __future__ import annotations

MOST = 4
FEWEST_ROWS = 2  # per cohort
SETTLING, WINDOW = 2, 10  # steps of all cohorts, before and while one number is measured
GAIN = 1.03  # more cohorts must be this much faster
REST = 200  # steps of all cohorts with the number found, before its neighbours are tried again


class Cohorts:
    """Told of every step, it says into how many cohorts to divide from now on (`count`)."""

    def __init__(self, slots: int, limit: int = MOST) -> None:
        """`slots` is the batch that is divided; `limit` the most cohorts."""
        self.limit = limit
        self.most = max(1, min(limit, slots // FEWEST_ROWS))
        self.count = 1
        self._rates: dict[int, float] = {}  # rows per second by number of cohorts, of the present trial
        self._best = 1
        self._steps = 0  # of single cohorts, since `count` was chosen
        self._rows = 0
        self._since: float | None = None  # when the window began
        self._resting = self.most == 1

    def observe(self, now: float, rows: int, full: bool) -> None:
        """A cohort's step has ended at `now` (seconds): `rows` were judged. Not `full`: there was too little to do."""
        if self.most == 1:
            return
        if not full:
            self._restart()
            return
        self._steps += 1
        if self._resting:
            if self._steps >= REST * self.count:
                self._resting = False
                self._rates.clear()
                self._restart()
            return
        if self._steps <= SETTLING * self.count:
            self._since = now
            return
        self._rows += rows
        if self._steps >= (SETTLING + WINDOW) * self.count and self._since is not None and now > self._since:
            self._rates[self.count] = self._rows / (now - self._since)
            self._choose()

    def of(self, slots: int) -> Cohorts:
        """The same for another batch."""
        return type(self)(slots, self.limit)

    def _choose(self) -> None:
        """Measure the neighbours of the best number so far; rest where neither is better."""
        best = min(self._rates)
        for count in sorted(self._rates):
            if self._rates[count] > GAIN * self._rates[best]:
                best = count
        untried = [n for n in (best + 1, best - 1) if 1 <= n <= self.most and n not in self._rates]
        self._resting = not untried
        self.count = untried[0] if untried else best
        self._restart()

    def _restart(self) -> None:
        self._steps = self._rows = 0
        self._since = None
