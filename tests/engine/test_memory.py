"""Running out of memory: what it is taken for, and what is given up."""

from __future__ import annotations

import weakref

import pytest
import torch

from pipeline.engine.memory import released_on_exhaustion
from pipeline.errors import OutOfMemory


class Cache:
    def __init__(self) -> None:
        self.releases = 0

    def release(self) -> None:
        self.releases += 1


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError(), RuntimeError("can't allocate memory: 8 GB")]
)
def test_it_is_named_and_the_cache_is_given_up(error: Exception) -> None:
    cache = Cache()
    with (
        pytest.raises(OutOfMemory, match=r"^the target ran out of memory: a smaller decoding\.batch"),
        released_on_exhaustion(cache, "the target"),
    ):
        raise error
    assert cache.releases == 1


def test_any_other_error_is_left_as_it_is() -> None:
    cache = Cache()
    with pytest.raises(RuntimeError, match="shapes"), released_on_exhaustion(cache, "the target"):
        raise RuntimeError("shapes do not match")
    with released_on_exhaustion(cache, "the target"):
        pass
    assert cache.releases == 0


def test_what_the_pass_had_computed_is_gone_before_the_cache_is_given_up() -> None:
    """Else the memory of its activations would still be taken."""
    seen: list[object] = []
    kept: list[weakref.ref[torch.Tensor]] = []

    class Looking:
        def release(self) -> None:
            seen.append(kept[0]())

    def a_pass() -> None:
        activations = torch.zeros(10)
        kept.append(weakref.ref(activations))
        raise MemoryError

    with pytest.raises(OutOfMemory), released_on_exhaustion(Looking(), "the target"):
        a_pass()
    assert seen == [None]
