"""Keys and values of all resident sequences: one buffer per layer, one slot per sequence.

How much of a slot is valid is not known here: callers hold that number and send it with every request, so
taking back rejected tokens costs nothing and touches no memory. What lies behind the valid part is stale
but always finite, because a masked NaN would still poison a weighted sum (0 × NaN is NaN): buffers start as
zeros, and a slot that met a non-finite sequence is scrubbed. Buffers that were made inside of a pass, in torch's
inference mode, can be changed in that mode only: so whatever may change them between passes enters it.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from pipeline.messages import PrefixCopy

SMALLEST_CAPACITY = 128  # tokens; below this, growing costs more than the memory it saves


class KVCache:
    """Buffers `[slots, kv_heads, capacity, head_dim]`, a pair per layer; slots and capacity grow by doubling."""

    def __init__(
        self,
        layers: int,
        slots: int,
        kv_heads: int,
        head_dim: int,
        limit: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`slots` are there at once, and more when they are asked for. `limit` is the longest sequence in tokens:
        capacity never grows beyond it.
        """
        self.slots = slots
        self.limit = limit
        self.capacity = min(SMALLEST_CAPACITY, limit)
        shape = (slots, kv_heads, self.capacity, head_dim)
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]

    def ensure(self, tokens: int) -> None:
        """Make room for `tokens` per slot, keeping what is there."""
        if tokens <= self.capacity:
            return
        assert tokens <= self.limit, f"{tokens} tokens in a slot of at most {self.limit}"
        capacity = max(self.capacity, SMALLEST_CAPACITY)
        while capacity < tokens:
            capacity *= 2
        self._resize(self.slots, min(capacity, self.limit))

    def ensure_slots(self, slots: int) -> None:
        """Make room for so many sequences, keeping what is there."""
        if slots > self.slots:
            self._resize(max(slots, 2 * self.slots), self.capacity)

    def release(self) -> None:
        """Let go of all memory and of what it held; it is taken anew when it is needed."""
        for buffers in (self.keys, self.values):
            for layer, old in enumerate(buffers):
                buffers[layer] = old.new_zeros(0, old.shape[1], 0, old.shape[3])
        self.slots = self.capacity = 0

    def _resize(self, slots: int, capacity: int) -> None:
        for buffers in (self.keys, self.values):
            for layer, old in enumerate(buffers):
                new = old.new_zeros(slots, old.shape[1], capacity, old.shape[3])
                new[: self.slots, :, : self.capacity] = old
                buffers[layer] = new
        self.slots, self.capacity = slots, capacity

    @torch.inference_mode()
    def copy(self, copies: Iterable[PrefixCopy]) -> None:
        """Copy prefixes from slot to slot, in the order given."""
        for c in copies:
            for buffers in (self.keys, self.values):
                for buffer in buffers:
                    buffer[c.target, :, : c.length] = buffer[c.source, :, : c.length]

    def write(self, layer: int, slots_N: Tensor, positions_N: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store `[kv_heads, N, head_dim]` keys and values at (slot, position) of each of the N tokens."""
        self.keys[layer][slots_N, :, positions_N] = keys.transpose(0, 1)
        self.values[layer][slots_N, :, positions_N] = values.transpose(0, 1)

    @torch.inference_mode()
    def scrub(self, slot: int) -> None:
        """Zero a slot whose sequence produced non-finite numbers."""
        for buffers in (self.keys, self.values):
            for buffer in buffers:
                buffer[slot].zero_()
