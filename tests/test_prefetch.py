"""Reading ahead: bounded, in order, and failures arrive where the items would."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from pipeline.prefetch import Prefetched


def drain(source: Prefetched[int]) -> list[int]:
    items = []
    while not source.ended:
        item = source.poll()
        if item is not None:
            items.append(item)
    return items


def test_items_come_in_order() -> None:
    with Prefetched(iter(range(1, 500)), depth=3) as source:
        assert drain(source) == list(range(1, 500))
        assert source.poll() is None


def test_an_error_of_the_source_is_raised_behind_its_last_item() -> None:
    def failing() -> Iterator[int]:
        yield 1
        raise OSError("disk")

    with Prefetched(failing(), depth=3) as source:
        assert wait_for(source) == 1
        with pytest.raises(OSError, match="disk"):
            wait_for(source)


def wait_for(source: Prefetched[int]) -> int:
    while True:
        item = source.poll()
        if item is not None:
            return item


def test_no_more_than_depth_items_are_read_ahead() -> None:
    read: list[int] = []

    def counting() -> Iterator[int]:
        for number in range(1, 100):
            read.append(number)
            yield number

    with Prefetched(counting(), depth=4) as source:
        wait_for(source)
        time.sleep(0.05)
        assert len(read) <= 6  # one consumed, four in the queue, one at the door


def test_leaving_early_ends_the_thread() -> None:
    before = threading.active_count()
    with Prefetched(iter(range(10**9)), depth=2):
        pass
    assert threading.active_count() == before


def test_a_source_that_blocks_is_not_waited_for() -> None:
    released = threading.Event()

    def blocking() -> Iterator[int]:
        released.wait()
        yield 1

    began = time.monotonic()
    with Prefetched(blocking(), depth=2) as source:
        assert source.poll() is None
    assert time.monotonic() - began < 5
    released.set()
