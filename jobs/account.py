"""What one call of `run` has done to an output: filled in as it becomes known, whichever way the call ends."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Account:
    """Rows of all plans that the call worked on."""

    run: str | None = None  # the last of those plans
    new: int = 0
    replaced: int = 0
    removed: int = 0
    failed: int = 0  # answered with an error, by whoever told this process
    left: int | None = None  # planned and not published; None: nobody has looked
