"""Reading with seeks fetches what is wanted, in few requests, and keeps little."""

from __future__ import annotations

import io
import random

import pytest

from pipeline.errors import StoreError
from pipeline.remote.files import Files, Listed
from pipeline.remote.stream import KEPT_BLOCKS, RemoteStream

BLOCK = 10
DATA = bytes(range(256)) * 4


class Counted(Files):
    """One file; notes what is fetched."""

    def __init__(self) -> None:
        super().__init__("counted")
        self.fetched: list[tuple[int | None, int | None]] = []
        self.data = DATA

    def get(self, path: str, start: int | None = None, stop: int | None = None, version: str | None = None) -> bytes:
        self.fetched.append((start, stop))
        return self.data[start:stop]


@pytest.fixture
def counted() -> Counted:
    return Counted()


def stream(files: Counted, size: int = len(DATA)) -> RemoteStream:
    return RemoteStream(files, Listed("b/a", size, "1", 0.0), BLOCK)


def test_it_reads_as_a_file_does(counted: Counted) -> None:
    chance = random.Random(0)
    ours, theirs = io.BufferedReader(stream(counted), 7), io.BytesIO(DATA)
    for _ in range(300):
        place, whence = chance.choice([(chance.randrange(1100), 0), (-chance.randrange(100), 2), (3, 1)])
        size = chance.choice([-1, 0, 1, 9, 10, 11, 95])
        assert ours.seek(place, whence) == theirs.seek(place, whence)
        assert ours.read(size) == theirs.read(size)
        assert ours.tell() == theirs.tell()


def test_small_reads_beside_each_other_are_one_request(counted: Counted) -> None:
    file = stream(counted)
    assert b"".join(file.read(3) for _ in range(3)) == DATA[:9]
    assert counted.fetched == [(0, 10)]


def test_a_large_read_is_one_request(counted: Counted) -> None:
    file = stream(counted)
    file.seek(15)
    assert file.read(500) == DATA[15:515]
    assert counted.fetched == [(10, 520)]


def test_the_end_is_the_end(counted: Counted) -> None:
    file = stream(counted)
    file.seek(-4, io.SEEK_END)
    assert file.read(100) == DATA[-4:]
    assert file.read(100) == b""
    assert counted.fetched == [(1020, 1024)]


def test_streams_side_by_side_do_not_displace_each_other(counted: Counted) -> None:
    file = stream(counted)
    places = [place * 100 for place in range(KEPT_BLOCKS)]
    for step in range(BLOCK):
        for place in places:
            file.seek(place + step)
            assert file.read(1) == DATA[place + step : place + step + 1]
    assert len(counted.fetched) == KEPT_BLOCKS


def test_a_file_that_is_shorter_than_it_was_is_a_failure(counted: Counted) -> None:
    file = stream(counted)
    counted.data = DATA[:100]
    file.seek(95)
    with pytest.raises(StoreError, match="replaced or removed while it was read"):
        file.read(10)


def test_an_empty_file_needs_no_request(counted: Counted) -> None:
    assert stream(counted, size=0).read() == b""
    assert counted.fetched == []
