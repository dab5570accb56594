"""Shards on their way from polls to the reader."""

from __future__ import annotations

import threading

from actors.shard_feed import AHEAD, ShardFeed
from pipeline.output.plan import Shard


def shards(*numbers: int) -> list[Shard]:
    return [Shard(i, ()) for i in numbers]


def test_a_shard_that_is_given_twice_comes_once() -> None:
    feed = ShardFeed()
    feed.give(shards(3, 1))
    feed.give(shards(1, 3, 2))
    reader = iter(feed)
    assert [next(reader).index for _ in range(3)] == [3, 1, 2]


def test_it_wants_shards_once_somebody_reads_and_as_many_as_are_to_be_at_hand() -> None:
    feed = ShardFeed()
    assert feed.wants == 0
    feed.give(shards(0))
    reader = iter(feed)
    assert next(reader).index == 0
    assert feed.wants == AHEAD
    feed.give(shards(1))
    assert feed.wants == AHEAD - 1
    feed.close()
    assert feed.wants == 0


def test_what_was_not_begun_when_it_is_closed_is_handed_back() -> None:
    feed = ShardFeed()
    feed.give(shards(0, 1, 2))
    reader = iter(feed)
    assert next(reader).index == 0
    assert feed.returned == ()
    feed.close()
    assert list(reader) == []
    assert feed.returned == (1, 2)


def test_a_reader_waits_for_shards_and_ends_when_the_feed_is_closed() -> None:
    feed, read = ShardFeed(), []
    reader = threading.Thread(target=lambda: read.extend(shard.index for shard in feed), daemon=True)
    reader.start()
    feed.give(shards(0))
    reader.join(0.2)
    assert reader.is_alive()
    feed.close()
    reader.join(5)
    assert not reader.is_alive()
    assert read == [0]
