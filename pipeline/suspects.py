"""Which sequence makes the target's step fail: suspects are tried in ever smaller groups (DESIGN section 6).

A step that fails (its worker died or hung, or the model raised) makes suspects of all its sequences. Half of them are
tried, then the other half; whoever comes through a step is cleared. Only one that fails alone, twice, is condemned: an
accident costs a few half-empty steps and never a row. Knows nothing of workers, caches or time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

STRIKES = 2  # failures alone
DOUBTFUL = 3  # condemned in a row, without a step that went through: neighbours may be alike, so try a distant one
HOPELESS = DOUBTFUL + 1  # that one failed too: it is not the sequences
SOON = 10  # steps
CROWD = 3  # failures, each soon after everybody had been cleared of the one before: it is all of them together


class Suspects:
    """Handles of sequences, as groups that are tried one after another."""

    def __init__(self) -> None:
        self.groups: list[list[int]] = []  # the last one is tried next
        self.strikes: Counter[int] = Counter()
        self.in_a_row = 0  # condemned since the last step that went through
        self._fresh = 0  # failures without suspects, each soon after the one before
        self._steps = SOON  # that went through since the last suspect was cleared

    @property
    def on_trial(self) -> Collection[int] | None:
        """Who alone may be in the next step; None: there are no suspects, and everybody may."""
        if not self.groups:
            return None
        last = self.groups[-1]
        if self.in_a_row < DOUBTFUL or (len(last) == 1 and self.strikes[last[0]]):
            return last
        return self.groups[0][-1:]

    @property
    def hopeless(self) -> bool:
        """Whatever is tried fails."""
        return self.in_a_row >= HOPELESS

    @property
    def crowded(self) -> bool:
        """After a failure: nobody alone is to blame for what happens again and again, there are too many at once."""
        return not self.groups and self._steps < SOON and self._fresh + 1 >= CROWD

    def failed(self, handles: Collection[int]) -> int | None:
        """A step with these sequences failed. Returns the one that is condemned by it, if there is one."""
        if not self.groups:
            self._fresh = self._fresh + 1 if self._steps < SOON else 1
        self._steps = 0
        self._drop(handles)
        ordered = sorted(handles)
        if len(ordered) > 1:
            middle = len(ordered) // 2
            self.groups += [ordered[middle:], ordered[:middle]]
            return None
        [alone] = ordered
        self.strikes[alone] += 1
        if self.strikes[alone] < STRIKES:
            self.groups.append([alone])
            return None
        self.in_a_row += 1
        del self.strikes[alone]
        return alone

    def suspect(self, handle: int) -> None:
        """A step with it alone failed, but others' caches were there too: it is to be tried, and has no strike yet."""
        self._drop([handle])
        self.groups.append([handle])

    def cleared(self, handles: Iterable[int]) -> None:
        """These came through a step, to its verdict."""
        chosen = list(handles)
        if chosen:
            self.in_a_row = 0
        if not self.groups:
            self._steps += 1
        else:
            self._drop(chosen)
            for handle in chosen:
                self.strikes.pop(handle, None)

    def clear(self) -> None:
        """Begin anew: all sequences have left, or much else has changed."""
        self.groups.clear()
        self.strikes.clear()
        self._fresh, self._steps = 0, SOON

    def _drop(self, handles: Iterable[int]) -> None:
        gone = set(handles)
        self.groups = [left for group in self.groups if (left := [h for h in group if h not in gone])]
