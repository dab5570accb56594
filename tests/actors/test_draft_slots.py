"""Whose slot is whose at a draft worker."""

from __future__ import annotations

from typing import Any

import numpy as np

from actors.draft_slots import IDLE_SECONDS, RECENT_SECONDS, SlotTable
from pipeline.errors import CacheMiss
from pipeline.messages import DraftRequest, PrefixCopy
from tests.actors.exchange import Slots, continuation, request_of


def slots(asked: DraftRequest | CacheMiss) -> list[int]:
    assert not isinstance(asked, CacheMiss), asked
    return asked.feed.slots.tolist()  # type: ignore[no-any-return]


def localised(table: SlotTable, request: DraftRequest, now: float = 0.0) -> DraftRequest | CacheMiss:
    return table.localise([request], now)[0]


NEW = [(0, 0, [1, 2]), (3, 0, [3])]


def test_replicas_that_use_the_same_slots_get_different_ones_and_keep_them() -> None:
    table = SlotTable(10)
    first, second = (slots(each) for each in table.localise([request_of(1, NEW), request_of(2, NEW)], 0.0))
    assert sorted(first + second) == [0, 1, 2, 3]
    assert slots(localised(table, request_of(2, NEW))) == second
    assert slots(localised(table, request_of(1, NEW[::-1]))) == first[::-1]


def test_neighbours_stay_neighbours() -> None:
    rows = [(slot, 0, [1]) for slot in (4, 5, 6, 7)]
    table = SlotTable(99)
    localised(table, request_of(1, NEW))
    found = slots(localised(table, request_of(2, rows)))
    assert found == list(range(found[0], found[0] + 4))


def test_copies_name_the_replicas_own_slots() -> None:
    table = SlotTable(10)
    localised(table, request_of(2, NEW))
    localised(table, request_of(1, [(3, 0, [1, 2])]))
    asked = request_of(1, [(0, 2, [5]), (5, 1, [6])], [PrefixCopy(3, 0, 2), PrefixCopy(0, 5, 1)])
    local: Any = localised(table, asked)
    to, then = slots(local)
    assert [(c.source, c.target, c.length) for c in local.copies] == [(2, to, 2), (to, then, 1)]


def test_a_full_table_frees_the_one_asked_about_longest_ago_and_nobody_of_the_same_pass() -> None:
    table = SlotTable(3)
    for i, replica in enumerate((1, 2, 3)):
        localised(table, request_of(replica, [(0, 0, [1])]), float(i))
    localised(table, request_of(1, [(0, 1, [1])]), 4.0)
    assert slots(localised(table, request_of(4, [(0, 0, [1])]), 5.0)) == [1]  # replica 2's
    assert isinstance(localised(table, request_of(2, [(0, 1, [1])]), 6.0), CacheMiss)  # which takes replica 3's
    both = table.localise([request_of(r, [(0, 0, [1]), (1, 0, [1])]) for r in (5, 6)], 7.0)
    assert sorted(slots(both[0]) + slots(both[1])) == [0, 1, 2, 3]  # more than it may hold, as one pass needs them


def test_slots_of_a_replica_that_is_gone_are_used_again_before_new_ones() -> None:
    table = SlotTable(99)
    localised(table, request_of(1, NEW), 0.0)
    assert slots(localised(table, request_of(2, [(0, 0, [1])]), IDLE_SECONDS)) == [2]
    assert slots(localised(table, request_of(2, [(1, 0, [1])]), IDLE_SECONDS + 1)) == [0]


def test_what_another_left_in_a_slot_never_passes_for_a_prefix() -> None:
    """Neither to a row that relies on its own slot, nor as the source of a copy; a whole text is welcome."""
    table = SlotTable(1)
    localised(table, request_of(1, [(0, 0, [1, 2, 3])]))
    missed = localised(table, request_of(2, [(0, 2, [9])]))
    assert isinstance(missed, CacheMiss)
    assert missed.sequences == ((2 << 40) + 1,)
    assert slots(localised(table, request_of(3, [(0, 0, [9])]))) == [0]
    table = SlotTable(9)
    localised(table, request_of(1, [(0, 0, [1, 2, 3])]))
    for source in (0, 4):  # the one was never asked about, the other has only just got a slot
        missed = localised(table, request_of(2 + source, [(4, 0, [1]), (5, 2, [9])], [PrefixCopy(source, 5, 2)]))
        assert isinstance(missed, CacheMiss)
        assert missed.sequences == ((2 + source << 40) + 6,)


def test_load_is_what_other_replicas_asked_about_lately() -> None:
    table = SlotTable(99)
    localised(table, request_of(1, NEW), 0.0)
    localised(table, request_of(2, NEW), 30.0)
    localised(table, request_of(3, [(0, 0, [1])]), 31.0)
    assert table.in_use(31.0, apart_from=3) == 4
    assert table.in_use(31.0, apart_from=1) == 3
    assert table.in_use(RECENT_SECONDS + 1, apart_from=3) == 2


def test_out_of_memory_it_forgets_all_and_holds_fewer() -> None:
    table = SlotTable(99)
    for replica in range(1, 5):
        localised(table, request_of(replica, NEW))
    table.exhausted()
    assert isinstance(localised(table, request_of(1, [(0, 2, [1])])), CacheMiss)
    for replica in range(1, 9):
        localised(table, request_of(replica, NEW))
    assert len(table.places) == 4


def test_many_replicas_through_a_small_table_get_what_they_would_get_alone() -> None:
    """Rows come, go and come back to a worker with fewer slots than there are sequences."""
    rng, table, worker = np.random.default_rng(3), SlotTable(6), Slots()
    texts = {(replica, slot): [replica, slot] for replica in range(1, 5) for slot in range(4)}
    cached = dict.fromkeys(texts, 0)
    hits = misses = 0
    for step in range(300):
        replicas = rng.permutation(np.arange(1, 5))[: int(rng.integers(1, 3))].tolist()
        asked = []
        for replica in replicas:
            chosen = sorted(rng.permutation(4)[: int(rng.integers(1, 4))].tolist())
            rows = [(slot, cached[replica, slot], texts[replica, slot][cached[replica, slot] :]) for slot in chosen]
            asked.append(request_of(replica, rows))
        for request, local in zip(asked, table.localise(asked, float(step)), strict=True):
            keys = [(int(s) >> 40, slot) for s, slot in zip(request.feed.sequences, request.feed.slots, strict=True)]
            try:
                if isinstance(local, CacheMiss):
                    raise local
                proposal = worker.draft(local)
            except CacheMiss as miss:
                misses += 1
                for key, sequence in zip(keys, request.feed.sequences.tolist(), strict=True):
                    cached[key] = 0 if sequence in miss.sequences else cached[key]
                continue
            hits += 1
            for b, key in enumerate(keys):
                assert proposal.tokens[b, 0] == continuation(texts[key])
                cached[key] = len(texts[key])
                texts[key] = [*texts[key], int(proposal.tokens[b, 0])]
    assert hits > 100
    assert misses > 20
