"""What a job needs in memory and, roughly, in time. Knows models by their configuration; loads none of their weights.

The time is that of plain decoding with answers of full length, so that drafts and early ends only shorten it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from pipeline.engine.checkpoint import Checkpoint, resolve_dtype
from pipeline.errors import ModelError

PROBE_SIZE = 4096  # side of the matrix that is multiplied: well beyond any cache in float32
PROBE_ROWS = 64  # rows that are multiplied at once where arithmetic is the limit
PROBE_SECONDS = 0.2
CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


@dataclass(frozen=True)
class Memory:
    """Bytes that a replica takes, and that are there."""

    weights: int
    cache: int
    available: int | None  # None: not known here, since the GPUs are elsewhere

    @property
    def needed(self) -> int:
        return self.weights + self.cache


@dataclass(frozen=True)
class Work:
    """Tokens of a whole job: prompts, and answers at their longest."""

    prompt_tokens: int
    new_tokens: int


@dataclass(frozen=True)
class Speed:
    """What the hardware was seen to do, in the target's dtype: bytes read and operations done per second."""

    bytes_per_second: float
    operations_per_second: float


def memory_of(checkpoint: Checkpoint, dtype_name: str, device: str, slots: int, context: int) -> tuple[int, int]:
    """(bytes of weights, bytes of cache) of one model with `slots` sequences of `context` tokens each."""
    dtype = resolve_dtype(dtype_name, device)
    config: Any = checkpoint.config()
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    entries = 2 * config.num_hidden_layers * kv_heads * head_dim
    return checkpoint.parameters_bytes(_name(dtype)), entries * slots * context * dtype.itemsize


def is_elsewhere(device: str) -> bool:
    """Is it a GPU, and has this machine none?"""
    return device == "cuda" and not torch.cuda.is_available()


def available_memory(device: str) -> int | None:
    """Bytes that a new process may take: of the GPU (None: elsewhere), or of this machine within its container."""
    if is_elsewhere(device):
        return None
    if device == "cuda":
        return int(torch.cuda.mem_get_info()[0])
    free = psutil.virtual_memory().available
    limits = [_container_room(Path(path)) for path in CGROUP_LIMITS]
    return min([free, *(limit for limit in limits if limit is not None)])


def _container_room(limit_file: Path) -> int | None:
    try:
        limit = int(limit_file.read_text())
    except (OSError, ValueError):  # no such file, or the word "max"
        return None
    return max(limit - psutil.Process().memory_info().rss, 0)


def require_memory(memory: Memory, slots: int, context: int) -> None:
    """ModelError, with what to lower, unless it fits."""
    if memory.available is not None and memory.needed > memory.available:
        raise ModelError(
            f"target.model: needs {gigabytes(memory.needed)} ({gigabytes(memory.weights)} of weights and "
            f"{gigabytes(memory.cache)} of cache for {slots} sequences of {context:,} tokens), but only "
            f"{gigabytes(memory.available)} are free; lower decoding.batch or decoding.context, or take a smaller model"
        )


def gigabytes(count: int) -> str:
    return f"{count / 1e9:.2f} GB"


def probe(dtype_name: str, device: str) -> Speed:
    """Measure a product with one row (limited by reading the matrix) and with many (limited by arithmetic)."""
    dtype = resolve_dtype(dtype_name, device)
    matrix = torch.ones(PROBE_SIZE, PROBE_SIZE, dtype=dtype, device=device)
    one, many = (torch.ones(rows, PROBE_SIZE, dtype=dtype, device=device) for rows in (1, PROBE_ROWS))
    reading = _seconds(lambda: one @ matrix.T, device)
    computing = _seconds(lambda: many @ matrix.T, device)
    return Speed(matrix.nbytes / reading, 2 * PROBE_ROWS * PROBE_SIZE**2 / computing)


def _seconds(action: Callable[[], object], device: str) -> float:
    """Seconds per call, the best of several: what gets in the way only adds."""
    action()
    best = float("inf")
    end = time.perf_counter() + PROBE_SECONDS
    while time.perf_counter() < end:
        start = time.perf_counter()
        action()
        if device == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return best


def seconds_from_probe(work: Work, checkpoint: Checkpoint, dtype_name: str, device: str, batch: int) -> float:
    """Prompts at the rate of arithmetic; answers in steps that each read the weights and compute for the batch."""
    speed = probe(dtype_name, device)
    dtype = resolve_dtype(dtype_name, device)
    weights = checkpoint.parameters_bytes(_name(dtype))
    per_token = 2 * weights / dtype.itemsize / speed.operations_per_second
    steps = work.new_tokens / batch
    return work.prompt_tokens * per_token + steps * (weights / speed.bytes_per_second + batch * per_token)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
