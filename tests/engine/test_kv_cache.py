"""Slots keep what was written, through growth and copies, and lose it when scrubbed."""

from __future__ import annotations

import pytest
import torch

from pipeline.engine.kv_cache import SMALLEST_CAPACITY, KVCache
from pipeline.messages import PrefixCopy

LAYERS, SLOTS, HEADS, SIZE = 2, 3, 2, 4


def cache(limit: int = 1000) -> KVCache:
    return KVCache(LAYERS, SLOTS, HEADS, SIZE, limit, torch.float32, torch.device("cpu"))


def filled(limit: int = 1000) -> KVCache:
    made = cache(limit)
    for buffer in made.keys + made.values:
        buffer.copy_(torch.rand(buffer.shape, generator=torch.Generator().manual_seed(0)))
    return made


def test_it_starts_as_zeros_of_the_smallest_capacity() -> None:
    made = cache()
    assert made.capacity == SMALLEST_CAPACITY
    assert all(b.shape == (SLOTS, HEADS, SMALLEST_CAPACITY, SIZE) and not b.any() for b in made.keys + made.values)
    assert cache(limit=40).capacity == 40


@pytest.mark.parametrize(
    ("tokens", "capacity"), [(1, 128), (128, 128), (129, 256), (256, 256), (257, 512), (513, 1000), (1000, 1000)]
)
def test_it_grows_by_doubling_up_to_its_limit_and_keeps_what_is_there(tokens: int, capacity: int) -> None:
    made = filled()
    before = [b.clone() for b in made.keys + made.values]
    made.ensure(tokens)
    assert made.capacity == capacity
    for old, new in zip(before, made.keys + made.values, strict=True):
        assert new.shape[2] == capacity
        assert (new[:, :, :SMALLEST_CAPACITY] == old).all()
        assert not new[:, :, SMALLEST_CAPACITY:].any()


def test_it_never_shrinks() -> None:
    made = cache()
    made.ensure(300)
    made.ensure(5)
    assert made.capacity == 512


def test_more_than_its_limit_is_a_bug_that_names_both() -> None:
    with pytest.raises(AssertionError, match="1001 tokens in a slot of at most 1000"):
        cache().ensure(1001)


def test_tokens_are_written_where_they_belong_and_nowhere_else() -> None:
    made = cache()
    slots, positions = torch.tensor([2, 0, 2]), torch.tensor([5, 0, 6])
    keys, values = torch.rand(2, HEADS, 3, SIZE)
    made.write(1, slots, positions, keys, values)
    for buffer, given in ((made.keys, keys), (made.values, values)):
        for n in range(3):
            assert (buffer[1][slots[n], :, positions[n]] == given[:, n]).all()
        assert int((buffer[1].abs().sum((1, 3)) > 0).sum()) == 3
        assert not buffer[0].any()


def test_copies_are_made_in_order_in_every_layer_and_no_further_than_told() -> None:
    made = filled()
    before = [b.clone() for b in made.keys + made.values]
    made.copy([PrefixCopy(0, 1, 10), PrefixCopy(1, 2, 7)])
    for old, new in zip(before, made.keys + made.values, strict=True):
        assert (new[0] == old[0]).all()
        assert (new[1, :, :10] == old[0, :, :10]).all()
        assert (new[1, :, 10:] == old[1, :, 10:]).all()
        assert (new[2, :, :7] == old[0, :, :7]).all()
        assert (new[2, :, 7:] == old[2, :, 7:]).all()


def test_a_scrubbed_slot_is_finite_again_and_others_stay() -> None:
    made = filled()
    before = [b.clone() for b in made.keys + made.values]
    for buffer in made.keys + made.values:
        buffer[1, :, 3] = torch.nan
    made.scrub(1)
    for old, new in zip(before, made.keys + made.values, strict=True):
        assert not new[1].any()
        assert (new[[0, 2]] == old[[0, 2]]).all()


@pytest.mark.parametrize(("wanted", "slots"), [(1, 3), (3, 3), (4, 6), (7, 7), (20, 20)])
def test_slots_grow_by_doubling_and_keep_what_is_there(wanted: int, slots: int) -> None:
    made = filled()
    before = [b.clone() for b in made.keys + made.values]
    made.ensure_slots(wanted)
    assert made.slots == slots
    for old, new in zip(before, made.keys + made.values, strict=True):
        assert new.shape == (slots, HEADS, SMALLEST_CAPACITY, SIZE)
        assert (new[:SLOTS] == old).all()
        assert not new[SLOTS:].any()


def test_growing_both_ways_keeps_what_is_there() -> None:
    made = filled()
    before = [b.clone() for b in made.keys + made.values]
    made.ensure(200)
    made.ensure_slots(5)
    made.ensure(300)
    assert (made.slots, made.capacity) == (6, 512)
    for old, new in zip(before, made.keys + made.values, strict=True):
        assert (new[:SLOTS, :, :SMALLEST_CAPACITY] == old).all()
        assert int((new != 0).sum()) == int((old != 0).sum())


@pytest.mark.parametrize("limit", [40, 1000])
def test_what_is_released_is_taken_anew_and_empty(limit: int) -> None:
    made = filled(limit)
    made.release()
    assert sum(b.numel() for b in made.keys + made.values) == 0
    made.ensure_slots(2)
    made.ensure(30)
    assert (made.slots, made.capacity) == (2, min(SMALLEST_CAPACITY, limit))
    assert all(b.shape == (2, HEADS, made.capacity, SIZE) and not b.any() for b in made.keys + made.values)


def test_buffers_that_grew_during_a_pass_can_be_changed_outside_of_one() -> None:
    made = filled()
    with torch.inference_mode():
        made.ensure(300)
        made.ensure_slots(9)
    made.copy([PrefixCopy(source=0, target=8, length=5)])
    for buffer in made.keys + made.values:
        assert (buffer[8, :, :5] == buffer[0, :, :5]).all()
    made.scrub(0)
    assert not any(buffer[0].any() for buffer in made.keys + made.values)
    made.ensure(600)
    for buffer in made.keys + made.values:
        assert buffer[8, :, :5].any()
