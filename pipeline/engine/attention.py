"""Attention of a packed pass, called by transformers' models through their attention interface.

A pass is one row `[1, N]`: the tokens of all its sequences end to end. Each token first writes its key and
value at (slot, position), then attends to positions `0..own` of its own slot and to nothing else. Rows of
like length are computed together, as views of neighbouring slots; the query heads that share a key-value
head are laid out as further query rows, so that keys and values are never repeated.

Shapes: N tokens in the pass, R slots of a class, T tokens per row of it, L longest valid length in it,
H query heads, J key-value heads, G = H / J, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

from pipeline.engine.kv_cache import KVCache
from pipeline.messages import Feed

NAME = "nightdesk_packed"
LAYOUT_ARGUMENT = "nightdesk_layout"
LARGEST_GAP = 2  # idle slots between two rows of a class that are computed along rather than split off
SHORT = 16  # rows of at most this many tokens share a class, padded to the longest


@dataclass(slots=True)
class LengthClass:
    """Rows computed in one attention call: the slots `first:last`, T query positions each, L keys."""

    first: int
    last: int
    queries: int  # T
    keys: int  # L
    gather_RT: Tensor  # index into the N tokens; idle places repeat token 0
    scatter_n: Tensor  # which of the R*T places are real …
    tokens_n: Tensor  # … and which of the N tokens each is
    positions_RT: Tensor  # [R, T] position of each query; -1 where idle
    whole: bool  # the class is the whole pass, in order, without idle places
    masks: dict[tuple[int, int | None], Tensor] = field(default_factory=dict)

    def mask(self, group: int, window: int | None) -> Tensor:
        """Bool `[R, 1, G*T, L]`: key position <= query position, and inside the sliding window if any."""
        key = (group, window)
        if key not in self.masks:
            keys_L = torch.arange(self.keys, device=self.positions_RT.device)
            own = self.positions_RT.clamp(min=0)[:, :, None]  # an idle place sees position 0, never nothing
            seen = keys_L <= own
            if window is not None:
                seen &= keys_L > own - window
            self.masks[key] = seen.repeat(1, group, 1)[:, None]
        return self.masks[key]


@dataclass(slots=True)
class PackedLayout:
    """Where the tokens of one pass belong; built once per pass and read by every layer."""

    cache: KVCache
    slots_N: Tensor
    positions_N: Tensor
    classes: list[LengthClass]
    calls: int = 0  # layers that have attended: the runner checks that none went another way


def build_layout(cache: KVCache, feed: Feed, extra_B: np.ndarray, device: torch.device) -> PackedLayout:
    """Lay out a pass in which row b feeds `feed.lengths[b] + extra_B[b]` tokens, rows end to end."""
    lengths_B = feed.lengths + extra_B
    starts_B = np.concatenate(([0], np.cumsum(lengths_B)[:-1]))
    total = int(lengths_B.sum())
    row_N = np.repeat(np.arange(len(lengths_B)), lengths_B)
    positions_N = np.arange(total) - starts_B[row_N] + feed.cached[row_N]
    slots_N = feed.slots[row_N]
    ends_B = feed.cached + lengths_B
    cache.ensure(int(ends_B.max()))
    classes = [
        _length_class(rows, feed.slots, starts_B, lengths_B, ends_B, feed.cached, total, device)
        for rows in _split_rows(feed.slots, lengths_B)
    ]
    return PackedLayout(
        cache=cache,
        slots_N=torch.as_tensor(slots_N, device=device),
        positions_N=torch.as_tensor(positions_N, device=device),
        classes=classes,
    )


def _split_rows(slots_B: np.ndarray, lengths_B: np.ndarray) -> list[np.ndarray]:
    """Rows that are computed together: short rows of neighbouring slots; every long row for itself."""
    short = np.flatnonzero(lengths_B <= SHORT)
    short = short[np.argsort(slots_B[short], kind="stable")]
    gaps = np.flatnonzero(np.diff(slots_B[short]) > LARGEST_GAP) + 1
    groups = [g for g in np.split(short, gaps) if len(g)]
    return groups + [np.array([row]) for row in np.flatnonzero(lengths_B > SHORT)]


def _length_class(
    rows: np.ndarray,
    slots_B: np.ndarray,
    starts_B: np.ndarray,
    lengths_B: np.ndarray,
    ends_B: np.ndarray,
    cached_B: np.ndarray,
    total: int,
    device: torch.device,
) -> LengthClass:
    first, last = int(slots_B[rows].min()), int(slots_B[rows].max()) + 1
    queries = int(lengths_B[rows].max())
    gather = np.zeros((last - first, queries), dtype=np.int64)
    positions = np.full((last - first, queries), -1, dtype=np.int64)
    for row in rows:
        place, n = slots_B[row] - first, lengths_B[row]
        gather[place, :n] = np.arange(starts_B[row], starts_B[row] + n)
        positions[place, :n] = np.arange(cached_B[row], cached_B[row] + n)
    real = np.flatnonzero(positions.ravel() >= 0)
    tokens = gather.ravel()[real]
    whole = gather.size == total and np.array_equal(gather.ravel(), np.arange(total)) and len(real) == total
    return LengthClass(
        first=first,
        last=last,
        queries=queries,
        keys=int(ends_B[rows].max()),
        gather_RT=torch.as_tensor(gather.ravel(), device=device),
        scatter_n=torch.as_tensor(real, device=device),
        tokens_n=torch.as_tensor(tokens, device=device),
        positions_RT=torch.as_tensor(positions, device=device),
        whole=whole,
    )


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Write keys and values, then attend. `query [1, H, N, D]`, `key`, `value [1, J, N, D]` → `[1, N, H, D]`."""
    layout: PackedLayout = kwargs[LAYOUT_ARGUMENT]
    layer: int = module.layer_idx  # type: ignore[assignment]
    layout.calls += 1
    layout.cache.write(layer, layout.slots_N, layout.positions_N, key[0], value[0])
    keys, values = layout.cache.keys[layer], layout.cache.values[layer]
    if len(layout.classes) == 1 and layout.classes[0].whole:
        return _attend(layout.classes[0], query[0], keys, values, scaling, sliding_window)[None], None
    heads, tokens, size = query.shape[1:]
    out_NHD = query.new_empty(tokens, heads, size)
    for c in layout.classes:
        attended = _attend(c, query[0].index_select(1, c.gather_RT), keys, values, scaling, sliding_window)
        out_NHD[c.tokens_n] = attended.index_select(0, c.scatter_n)
    return out_NHD[None], None


def _attend(
    c: LengthClass, query_HnD: Tensor, keys: Tensor, values: Tensor, scaling: float | None, window: int | None
) -> Tensor:
    """Attention of one class: `query [H, R*T, D]` → `[R*T, H, D]`."""
    heads, _, size = query_HnD.shape
    kv_heads = keys.shape[1]
    group, rows, queries = heads // kv_heads, c.last - c.first, c.queries
    query = query_HnD.view(kv_heads, group, rows, queries, size).permute(2, 0, 1, 3, 4)
    out = scaled_dot_product_attention(
        query.reshape(rows, kv_heads, group * queries, size),
        keys[c.first : c.last, :, : c.keys],
        values[c.first : c.last, :, : c.keys],
        attn_mask=c.mask(group, window),
        scale=scaling,
    )
    out = out.view(rows, kv_heads, group, queries, size).permute(0, 3, 1, 2, 4)
    return out.reshape(rows * queries, heads, size)


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """Transformers need not build a mask: the layout says who sees whom."""
    return None


AttentionInterface.register(NAME, packed_attention)
AttentionMaskInterface.register(NAME, _no_mask)
