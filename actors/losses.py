"""How often in a row the holder of one place was lost: an accident, or something that kills everyone who sits there."""

from __future__ import annotations

STEADY = 100  # answers after which earlier losses are forgotten; a replaced worker's first ones prove nothing
TOO_MANY = 3  # in a row: no accident


class Losses:
    """Counts; decides nothing."""

    def __init__(self) -> None:
        self.in_a_row = 0
        self._answers = 0

    def lost(self) -> None:
        """One more."""
        self.in_a_row += 1
        self._answers = 0

    def answered(self) -> None:
        """The holder has done a piece of work."""
        self._answers += 1
        if self._answers >= STEADY:
            self.in_a_row = 0

    @property
    def too_many(self) -> bool:
        """The next one would go the same way."""
        return self.in_a_row >= TOO_MANY
