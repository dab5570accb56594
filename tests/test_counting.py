"""One is singular, everything else is not."""

from __future__ import annotations

from pipeline.counting import counted


def test_a_noun_is_singular_where_it_is_one() -> None:
    assert [counted(n, "row") for n in (0, 1, 2, 1204)] == ["0 rows", "1 row", "2 rows", "1,204 rows"]
