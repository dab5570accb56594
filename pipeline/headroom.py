"""How many sequences at once memory allows: halved when it runs out, and tried again when all has gone well for long.

Knows nothing of sequences or of memory.
"""

from __future__ import annotations

CALM = 100  # steps without trouble before twice as many are tried; each time that was too many, twice as many steps


class Headroom:
    """`slots` is how many sequences there had better be at once."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.slots = most
        self._patience = CALM
        self._calm = 0
        self._raised = False  # since memory ran out last

    def too_many(self, running: int) -> None:
        """Memory ran out with so many."""
        self.slots = max(1, min(self.slots, running) // 2)
        self._calm = 0
        if self._raised:
            self._patience *= 2
        self._raised = False

    def step(self) -> None:
        """A step went well."""
        self._calm += 1
        if self.slots < self.most and self._calm >= self._patience:
            self.slots = min(self.most, 2 * self.slots)
            self._calm = 0
            self._raised = True

    def blameless(self) -> None:
        """It was not their number: one of them was too large even alone, and is gone."""
        self.slots, self._patience, self._calm = self.most, CALM, 0
