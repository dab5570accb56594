"""The token store: what stands at each position of a slot, whatever was written there before."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.engine import token_store
from pipeline.engine.token_store import TokenStore
from pipeline.messages import Feed, PrefixCopy


def write(store: TokenStore, *rows: tuple[int, int, Sequence[int], Sequence[int]]) -> None:
    """Rows of (slot, cached, fed tokens, drafted tokens)."""
    slots, cached, fed, drafted = zip(*rows, strict=True)
    lengths_B = np.array([len(f) for f in fed])
    feed = Feed(np.arange(len(rows)), np.array(slots), np.array(cached), lengths_B, np.concatenate(fed))
    store.write(feed, [np.array(d, dtype=np.int64) for d in drafted])


def held(store: TokenStore, slot: int, length: int) -> list[int]:
    return store.tokens[slot, :length].tolist()  # type: ignore[no-any-return]


def test_drafted_tokens_stand_behind_the_fed_ones() -> None:
    store = TokenStore(2)
    write(store, (1, 0, [5, 6, 7], [8, 9]))
    assert held(store, 1, 5) == [5, 6, 7, 8, 9]
    assert not store.tokens[0].any()


def test_what_was_rejected_is_written_over() -> None:
    """Of three drafted tokens one is kept; the next pass feeds the token drawn instead of the second, at its place."""
    store = TokenStore(1)
    write(store, (0, 0, [5, 6], [10, 11, 12]))
    write(store, (0, 3, [20], [21]))
    assert held(store, 0, 5) == [5, 6, 10, 20, 21]


def test_rows_of_different_lengths_in_slots_of_any_order() -> None:
    store = TokenStore(4)
    write(store, (3, 0, [1], []), (0, 0, [2, 3, 4], [5]), (2, 0, [6, 7], [8, 9, 10]))
    assert [held(store, slot, 5) for slot in range(4)] == [[2, 3, 4, 5, 0], [0] * 5, [6, 7, 8, 9, 10], [1, 0, 0, 0, 0]]
    write(store, (2, 3, [11], [12]), (3, 1, [13, 14], []))
    assert (held(store, 2, 5), held(store, 3, 3)) == ([6, 7, 8, 11, 12], [1, 13, 14])
    assert held(store, 0, 4) == [2, 3, 4, 5]


def test_prompt_fed_in_chunks_is_one_text() -> None:
    store, text = TokenStore(1), list(range(100, 130))
    for start in range(0, 30, 7):
        write(store, (0, start, text[start : start + 7], []))
    assert held(store, 0, 30) == text


def test_copy_takes_the_common_beginning_and_leaves_the_source() -> None:
    store = TokenStore(2)
    write(store, (0, 0, [1, 2, 3, 4], []), (1, 0, [9, 9, 9, 9], []))
    store.copy(PrefixCopy(0, 1, 3))
    assert (held(store, 0, 4), held(store, 1, 4)) == ([1, 2, 3, 4], [1, 2, 3, 9])
    write(store, (1, 3, [7], []))
    assert (held(store, 0, 4), held(store, 1, 4)) == ([1, 2, 3, 4], [1, 2, 3, 7])


def test_copy_to_itself_changes_nothing() -> None:
    store = TokenStore(1)
    write(store, (0, 0, [1, 2, 3], []))
    store.copy(PrefixCopy(0, 0, 2))
    assert held(store, 0, 3) == [1, 2, 3]


@pytest.mark.parametrize("fed", [255, 256, 257, 1000])
@pytest.mark.parametrize("drafted", [0, 1, 2])
def test_growing_keeps_what_was_there(fed: int, drafted: int) -> None:
    """Capacity is 256 at first; the fed tokens fit or do not, and drafted ones alone may make it grow."""
    store = TokenStore(2)
    write(store, (1, 0, [3, 4, 5], []))
    text = list(range(1, fed + drafted + 1))
    write(store, (0, 0, text[:fed], text[fed:]))
    assert held(store, 0, fed + drafted) == text
    assert held(store, 1, 3) == [3, 4, 5]
    assert store.tokens.shape[1] >= fed + drafted


def test_capacity_doubles_so_that_a_long_text_is_seldom_copied() -> None:
    store, widths = TokenStore(1), set()
    for place in range(3000):
        write(store, (0, place, [place], []))
        widths.add(store.tokens.shape[1])
    assert held(store, 0, 3000) == list(range(3000))
    assert len(widths) <= 5


def test_write_of_no_row_is_harmless() -> None:
    store, nothing = TokenStore(1), np.zeros(0, dtype=np.int64)
    store.write(Feed(nothing, nothing, nothing, nothing, nothing), [])
    assert not store.tokens.any()


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.data())
def test_any_sequence_of_writes_and_copies_is_that_of_plain_lists(data: st.DataObject) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_store, "_FIRST_CAPACITY", 4)
        store = TokenStore(data.draw(st.integers(0, 3)))
    plain: list[list[int]] = [[], [], []]
    next_token = 1
    for _ in range(data.draw(st.integers(1, 8))):
        slots = data.draw(st.permutations(range(3)))
        if data.draw(st.booleans()):
            length = data.draw(st.integers(0, len(plain[slots[0]])))
            if not plain[slots[0]]:
                continue  # nobody copies from a slot that was never written to
            store.copy(PrefixCopy(slots[0], slots[1], length))
            plain[slots[1]] = plain[slots[0]][:length] + plain[slots[1]][length:]
        rows = []
        for slot in slots[: data.draw(st.integers(1, 3))]:
            cached = data.draw(st.integers(0, len(plain[slot])))
            fed, drafted = data.draw(st.integers(1, 6)), data.draw(st.integers(0, 4))
            tokens = list(range(next_token, next_token + fed + drafted))
            next_token += fed + drafted
            rows.append((slot, cached, tokens[:fed], tokens[fed:]))
            plain[slot] = plain[slot][:cached] + tokens + plain[slot][cached + len(tokens) :]
        write(store, *rows)
        assert [held(store, slot, len(text)) if text else [] for slot, text in enumerate(plain)] == plain


def test_slots_that_are_written_or_copied_to_come_into_being() -> None:
    store = TokenStore(1)
    write(store, (0, 0, [1, 2, 3], []), (5, 0, [4, 5], [6]))
    store.copy(PrefixCopy(5, 17, 2))
    assert (held(store, 0, 3), held(store, 5, 3), held(store, 17, 3)) == ([1, 2, 3], [4, 5, 6], [4, 5, 0])
    write(store, (40, 0, list(range(1, 301)), []))
    assert (held(store, 40, 300), held(store, 5, 3)) == (list(range(1, 301)), [4, 5, 6])


def test_slots_double_so_that_they_are_seldom_copied() -> None:
    store, heights = TokenStore(1), set()
    for slot in range(300):
        write(store, (slot, 0, [slot + 1], []))
        heights.add(store.tokens.shape[0])
    assert store.tokens[:300, 0].tolist() == list(range(1, 301))
    assert len(heights) <= 10


def test_released_rows_are_empty_when_they_come_back() -> None:
    store = TokenStore(2)
    write(store, (1, 0, [1, 2, 3], []))
    store.release()
    assert store.tokens.size == 0
    write(store, (0, 0, [7], []))
    assert held(store, 0, 3) == [7, 0, 0]
