"""Published parts that are changed: some rows in place of others, some taken out, several parts as one.

Tables in, tables out; the order of rows stays. Knows nothing of storage.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from pipeline.output.plan import Span, rows_of


def amended(part: pa.Table, rows: Sequence[Span], answers: pa.Table) -> pa.Table:
    """The part with its `rows`, in order, replaced by those of `answers`."""
    places = rows_of(rows)
    assert len(places) == answers.num_rows, f"{answers.num_rows} rows for {len(places)} places"
    order = np.arange(part.num_rows)
    order[places] = part.num_rows + np.arange(answers.num_rows)
    return pa.concat_tables([part, answers.cast(part.schema)]).take(pa.array(order))


def without(part: pa.Table, rows: Sequence[Span]) -> pa.Table:
    """The part without its `rows`."""
    stays = np.ones(part.num_rows, dtype=bool)
    stays[rows_of(rows)] = False
    return part.filter(pa.array(stays))
