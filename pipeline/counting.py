"""Numbers of things, as messages say them: 0 rows, 1 row, 1,204 rows."""

from __future__ import annotations


def counted(count: int, noun: str) -> str:
    """`count` and its noun, which gets an s unless it is one."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
