"""What happens where a model runs out of memory: its cache is given up, and whoever asked is told so.

Knows nothing of requests. A smaller batch may do; whoever asks decides that.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

from pipeline.errors import OutOfMemory


class Cache(Protocol):
    """What can be given up: a `Runner` has it."""

    def release(self) -> None:
        """Forget all sequences, and give the memory back that held them."""
        ...


@contextmanager
def released_on_exhaustion(cache: Cache, whose: str) -> Iterator[None]:
    """Raise OutOfMemory for what torch raises, after `cache` was released. `whose` is for the message."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        traceback.clear_frames(error.__traceback__)  # their tensors hold memory too
        cache.release()
        raise OutOfMemory(f"{whose} ran out of memory: a smaller decoding.batch or context needs less") from None


def is_out_of_memory(error: Exception) -> bool:
    """Processors and GPUs say it in different ways."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)
