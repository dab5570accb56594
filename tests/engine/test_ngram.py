"""N-gram lookup: what followed last time, of the longest suffix that occurred before."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.engine.drafters.ngram import LONGEST, SHORTEST, History, NgramDrafter, one_hot
from pipeline.errors import CacheMiss
from pipeline.messages import DraftRequest, Feed, Opening, PrefixCopy
from pipeline.records import SamplingParams


def history(tokens: list[int]) -> History:
    made = History()
    made.extend(tokens)
    return made


def proposed_by_search(tokens: list[int], wanted: int) -> list[int]:
    """The rule in words: longest suffix first, latest earlier occurrence that something follows."""
    for n in range(LONGEST, SHORTEST - 1, -1):
        for end in range(len(tokens) - 1, n - 1, -1):
            if len(tokens) > n and tokens[end - n : end] == tokens[-n:]:
                return tokens[end : end + wanted]
    return []


@pytest.mark.parametrize(
    ("tokens", "proposed"),
    [
        ([], []),
        ([1], []),
        ([1, 2, 3], []),
        ([1, 2, 9, 1], []),  # single tokens mean nothing
        ([1, 2, 9, 8, 1, 2], [9, 8, 1, 2]),
        ([1, 2, 9, 1, 2, 8, 1, 2], [8, 1, 2]),  # the latest
        ([5, 1, 2, 9, 4, 6, 1, 2, 8, 4, 5, 1, 2], [9, 4, 6, 1]),  # the longest before the latest
        ([7, 7, 7], [7]),
    ],
)
def test_what_is_proposed(tokens: list[int], proposed: list[int]) -> None:
    assert history(tokens).propose(4) == proposed


def test_proposals_are_those_of_a_search_through_the_text() -> None:
    rng = np.random.default_rng(0)
    for _ in range(400):
        tokens = rng.integers(0, 3, int(rng.integers(0, 30))).tolist()
        cut, wanted = int(rng.integers(0, len(tokens) + 1)), int(rng.integers(1, 6))
        made = history(tokens)
        assert made.propose(wanted) == proposed_by_search(tokens, wanted)
        made.truncate(cut)
        assert made.propose(wanted) == proposed_by_search(tokens[:cut], wanted)
        made.extend(tokens[cut:])
        assert made.propose(wanted) == proposed_by_search(tokens, wanted)


def test_each_token_has_all_the_mass_of_its_law() -> None:
    proposal = one_hot([[3, 4], [], [5]])
    assert proposal.tokens.tolist() == [[3, 4], [-1, -1], [5, -1]]
    assert proposal.lengths.tolist() == [2, 0, 1]
    assert proposal.support_ids[..., 0].tolist() == proposal.tokens.tolist()
    assert proposal.support_probs[..., 0].tolist() == [[1, 1], [0, 0], [1, 0]]


def request(
    rows: list[tuple[int, int, int, list[int], int]],
    opened: list[int] | None = None,
    copies: tuple[PrefixCopy, ...] = (),
) -> DraftRequest:
    """Rows of (handle, slot, cached, tokens, wanted); all are opened unless it says which."""
    handles, slots, cached, tokens, wanted = zip(*rows, strict=True)
    new = handles if opened is None else opened
    return DraftRequest(
        feed=Feed(
            np.array(handles),
            np.array(slots),
            np.array(cached),
            np.array([len(t) for t in tokens]),
            np.concatenate([np.array(t) for t in tokens]),
        ),
        openings=tuple(Opening(h, (0, 0, 0), SamplingParams(9)) for h in new),
        copies=copies,
        wanted=np.array(wanted),
        starts=np.zeros(len(rows), dtype=np.int64),
        greedy=np.zeros(len(rows), dtype=bool),
    )


def test_rows_get_as_many_as_they_want_and_find() -> None:
    loop = [1, 2, 3, 1, 2, 3, 1, 2]
    rows = [(1, 0, 0, loop, 2), (2, 1, 0, loop, 0), (3, 2, 0, [4, 5, 6], 3), (4, 3, 0, loop, 9)]
    proposal = NgramDrafter(4).propose(request(rows))
    assert proposal.lengths.tolist() == [2, 0, 0, 5 - 2]
    assert proposal.tokens[0].tolist() == [3, 1, -1]


def test_rejected_text_is_forgotten() -> None:
    drafter = NgramDrafter(1)
    drafter.propose(request([(1, 0, 0, [1, 2, 7, 8], 0)]))
    drafter.propose(request([(1, 0, 2, [9, 1, 2], 0)], opened=[]))
    assert drafter.histories[0].tokens == [1, 2, 9, 1, 2]
    assert drafter.histories[0].propose(1) == [9]


def test_prefixes_are_copied_one_after_the_other() -> None:
    drafter = NgramDrafter(3)
    drafter.propose(request([(1, 2, 0, [1, 2, 3, 4, 5, 6], 0)]))
    copies = (PrefixCopy(2, 0, 5), PrefixCopy(0, 1, 4))
    drafter.propose(request([(2, 0, 5, [9], 0), (3, 1, 4, [8], 0)], copies=copies))
    assert [h.tokens for h in drafter.histories] == [[1, 2, 3, 4, 5, 9], [1, 2, 3, 4, 8], [1, 2, 3, 4, 5, 6]]


@pytest.mark.parametrize(
    ("asked", "missing"),
    [
        (request([(1, 0, 3, [1], 0)], opened=[]), (1,)),
        (request([(2, 1, 1, [1], 0)]), (2,)),
        (request([(1, 0, 2, [1], 0), (9, 1, 0, [1], 0)], opened=[]), (9,)),
        (request([(4, 1, 5, [1], 0)], copies=(PrefixCopy(0, 1, 5),)), (4,)),
    ],
)
def test_prefix_that_is_not_held_is_a_cache_miss(asked: DraftRequest, missing: tuple[int, ...]) -> None:
    drafter = NgramDrafter(2)
    drafter.propose(request([(1, 0, 0, [1, 2], 0)]))
    with pytest.raises(CacheMiss) as miss:
        drafter.propose(asked)
    assert miss.value.sequences == missing
