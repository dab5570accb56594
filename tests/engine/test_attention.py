"""Packed attention against a softmax written out in float64, for rows of any length in any slots."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.engine.attention import LARGEST_GAP, LAYOUT_ARGUMENT, SHORT, build_layout, packed_attention
from pipeline.engine.kv_cache import KVCache
from pipeline.messages import Feed

SIZE, CPU = 8, torch.device("cpu")
Row = tuple[int, int, int]  # slot, valid cache entries, tokens fed

LAYOUTS: dict[str, list[Row]] = {
    "one token": [(0, 0, 1)],
    "one row in a later slot": [(3, 5, 2)],
    "decoding in neighbouring slots": [(0, 9, 1), (1, 3, 1), (2, 30, 1)],
    "blocks of different lengths": [(0, 9, 5), (1, 3, 1), (2, 30, 3)],
    "small gaps": [(0, 9, 2), (LARGEST_GAP, 3, 2), (2 * LARGEST_GAP, 30, 1)],
    "large gaps": [(0, 9, 2), (5, 3, 2), (6, 1, 1), (11, 30, 1)],
    "prefill beside decoding": [(0, 9, 2), (1, 0, 40), (2, 3, 1), (4, 20, SHORT + 1)],
    "prefill alone": [(2, 0, 70)],
    "two prefills": [(0, 0, 40), (1, 24, 40)],
    "at the border of short": [(0, 0, SHORT), (1, 0, SHORT + 1), (2, 7, SHORT), (3, 7, SHORT + 1)],
    "slots in no order": [(4, 2, 3), (0, 9, 1), (7, 0, 20), (2, 1, 1)],
    "beyond the first capacity": [(0, 126, 5), (1, 2, 1), (2, 140, 20)],
    "equal rows": [(0, 4, 2), (1, 4, 2), (2, 4, 2)],
}


def attend(
    rows: list[Row], heads: int, kv_heads: int, window: int | None, scaling: float | None, stale: float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """Ours and the reference, `[N, H, D]`: random caches, with `stale` numbers wherever nothing is valid."""
    rng = np.random.default_rng([len(rows), heads, kv_heads])
    slots = max(slot for slot, _, _ in rows) + 2
    cache = KVCache(1, slots, kv_heads, SIZE, 400, torch.float32, CPU)
    cache.ensure(max(cached for _, cached, _ in rows) + 1)
    for buffer in (cache.keys[0], cache.values[0]):
        buffer.fill_(stale)
        for slot, cached, _ in rows:
            buffer[slot, :, :cached] = torch.as_tensor(rng.normal(size=(kv_heads, cached, SIZE)), dtype=torch.float32)
    total = sum(fed for _, _, fed in rows)
    query, key, value = (
        torch.as_tensor(rng.normal(size=(1, h, total, SIZE)), dtype=torch.float32) for h in (heads, kv_heads, kv_heads)
    )
    past = [
        tuple(b[slot, :, :cached].double().numpy() for b in (cache.keys[0], cache.values[0]))
        for slot, cached, _ in rows
    ]
    feed = Feed(
        np.arange(len(rows)),
        np.array([slot for slot, _, _ in rows]),
        np.array([cached for _, cached, _ in rows]),
        np.array([1 for _ in rows]),
        np.zeros(total, dtype=np.int64),
    )
    layout = build_layout(cache, feed, np.array([fed - 1 for _, _, fed in rows]), CPU)
    module: Any = SimpleNamespace(layer_idx=0)
    out, _ = packed_attention(
        module, query, key, value, None, scaling=scaling, sliding_window=window, **{LAYOUT_ARGUMENT: layout}
    )
    assert layout.calls == 1
    return out[0].double().numpy(), reference(rows, query, key, value, past, window, scaling)


def reference(
    rows: list[Row], query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, past: Any, window: Any, scaling: Any
) -> np.ndarray:
    q, k, v = (x[0].double().numpy() for x in (query, key, value))
    heads, total, size = q.shape
    out, start = np.zeros((total, heads, size)), 0
    for (_, cached, fed), (past_keys, past_values) in zip(rows, past, strict=True):
        for h in range(heads):
            j = h // (heads // len(k))
            keys = np.concatenate([past_keys[j], k[j, start : start + fed]])
            values = np.concatenate([past_values[j], v[j, start : start + fed]])
            for t in range(fed):
                own = cached + t
                first = 0 if window is None else max(0, own - window + 1)
                scores = keys[first : own + 1] @ q[h, start + t] * (scaling or 1 / math.sqrt(size))
                weights = np.exp(scores - scores.max())
                out[start + t, h] = weights / weights.sum() @ values[first : own + 1]
        start += fed
    return out


@pytest.mark.parametrize("window", [None, 1, 8, 33])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_packed_rows_attend_as_each_alone_would(layout: str, window: int | None) -> None:
    ours, expected = attend(LAYOUTS[layout], 4, 2, window, None)
    assert np.abs(ours - expected).max() < 2e-6


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (4, 1), (6, 2)])
@pytest.mark.parametrize("scaling", [None, 0.7])
def test_query_heads_share_key_value_heads(heads: int, kv_heads: int, scaling: float | None) -> None:
    ours, expected = attend(LAYOUTS["prefill beside decoding"], heads, kv_heads, None, scaling)
    assert np.abs(ours - expected).max() < 2e-6


@pytest.mark.parametrize("layout", LAYOUTS)
def test_stale_entries_are_never_seen(layout: str) -> None:
    ours, expected = attend(LAYOUTS[layout], 4, 2, None, None, stale=1e4)
    assert np.abs(ours - expected).max() < 2e-6


def test_random_layouts() -> None:
    rng = np.random.default_rng(0)
    for _ in range(40):
        slots = rng.permutation(14)[: rng.integers(1, 9)]
        rows = [(int(s), int(rng.integers(0, 60)), int(rng.choice([1, 1, 2, 5, SHORT, 30]))) for s in slots]
        ours, expected = attend(rows, 4, 2, None if rng.random() < 0.5 else 8, None)
        assert np.abs(ours - expected).max() < 2e-6, rows


def test_short_rows_of_neighbouring_slots_are_computed_together() -> None:
    cache = KVCache(1, 20, 2, SIZE, 400, torch.float32, CPU)
    rows = [(0, 9, 2), (1, 0, 40), (2, 3, 1), (10, 20, 3)]
    slots, cached, fed = (np.array(x) for x in zip(*rows, strict=True))
    feed = Feed(np.arange(4), slots, cached, fed, np.zeros(fed.sum(), dtype=np.int64))
    classes = build_layout(cache, feed, np.zeros(4, dtype=np.int64), CPU).classes
    assert [(c.first, c.last, c.queries, c.keys) for c in classes] == [(0, 3, 2, 11), (10, 11, 3, 23), (1, 2, 40, 40)]
