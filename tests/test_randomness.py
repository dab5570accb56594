"""Numbers are Philox4x32-10's, hang on identity alone, and are uniform."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.randomness import Stream, coupled_uniforms, philox, philox_key, uniforms, verdict_uniforms
from tests.oracle import chi_square_tail

# Random123's kat_vectors, philox4x32 with 10 rounds: counter, key, result.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
PINNED = (3789788980, 2578066788, 3161959301)
KEYS = [philox_key(7, 0, f"request {i}", 0) for i in range(50)]


def scalar_philox(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    """The same generator in plain integers."""
    (a, b, c, d), (k, l) = counter, key  # noqa: E741
    for i in range(10):
        if i:
            k, l = (k + 0x9E3779B9) % 2**32, (l + 0xBB67AE85) % 2**32  # noqa: E741
        high0, low0 = divmod(0xD2511F53 * a, 2**32)
        high1, low1 = divmod(0xCD9E8D57 * c, 2**32)
        a, b, c, d = high1 ^ b ^ k, low1, high0 ^ d ^ l, low0
    return a, b, c, d


def scalar_uniform(key: tuple[int, int, int], first: int, second: int, stream: int) -> float:
    words = scalar_philox((first, second, stream, key[2]), key[:2])
    return ((words[0] >> 5) * 2**26 + (words[1] >> 6)) / 2**53


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_known_answers_of_philox(counter: tuple, key: tuple, expected: tuple) -> None:
    assert tuple(int(word) for word in philox(counter, key)) == expected
    assert scalar_philox(counter, key) == expected


@pytest.mark.parametrize("stream", list(Stream))
def test_uniforms_equal_the_scalar_reference(stream: Stream) -> None:
    starts = np.arange(len(KEYS)) * 40_503 % 100_000
    numbers = uniforms(KEYS, starts, 6, stream)
    expected = [
        [scalar_uniform(key, int(start), offset, int(stream)) for offset in range(6)]
        for key, start in zip(KEYS, starts, strict=True)
    ]
    assert numbers.dtype == np.float64
    assert numbers.tolist() == expected


def test_coupled_uniforms_hang_on_position_and_token() -> None:
    positions, tokens = np.arange(len(KEYS)), np.array([0, 3, 151_935])
    expected = [
        [scalar_uniform(key, int(position), int(token), int(Stream.COUPLED)) for token in tokens]
        for key, position in zip(KEYS, positions, strict=True)
    ]
    assert coupled_uniforms(KEYS, positions, tokens).tolist() == expected
    per_row = np.broadcast_to(tokens, (len(KEYS), 3))
    assert coupled_uniforms(KEYS, positions, per_row).tolist() == expected


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    starts = np.arange(len(KEYS)) + 3
    together = uniforms(KEYS, starts, 5, Stream.ACCEPT)
    for i in (0, 17, 49):
        alone = uniforms([KEYS[i]], [starts[i]], 5, Stream.ACCEPT)
        assert alone.tolist() == together[i : i + 1].tolist()


def test_offsets_may_be_named_instead_of_counted() -> None:
    counted = uniforms(KEYS, np.zeros(len(KEYS), int), np.int64(4), Stream.DRAFT)
    assert uniforms(KEYS, np.zeros(len(KEYS), int), [2], Stream.DRAFT).tolist() == counted[:, 2:3].tolist()
    each = np.arange(len(KEYS))[:, None] % 4
    picked = uniforms(KEYS, np.zeros(len(KEYS), int), each, Stream.DRAFT)
    assert picked.tolist() == np.take_along_axis(counted, each, axis=1).tolist()


def test_no_rows_and_no_offsets_are_allowed() -> None:
    assert uniforms(np.zeros((0, 3)), [], 3, Stream.DRAFT).shape == (0, 3)
    assert uniforms(KEYS, np.zeros(len(KEYS)), 0, Stream.DRAFT).shape == (len(KEYS), 0)


def test_verdict_uniforms_decide_and_draw_from_different_streams() -> None:
    starts = np.arange(len(KEYS))
    both = verdict_uniforms(KEYS, starts, 3)
    assert both.shape == (len(KEYS), 3, 2)
    assert both[..., 0].tolist() == uniforms(KEYS, starts, 3, Stream.ACCEPT).tolist()
    assert both[..., 1].tolist() == uniforms(KEYS, starts, 3, Stream.RESIDUAL).tolist()


def test_no_number_comes_twice_in_any_stream_start_or_offset() -> None:
    blocks = np.repeat(np.arange(60), len(KEYS))
    keys = np.tile(np.array(KEYS), (60, 1))
    numbers = np.concatenate([uniforms(keys, blocks, 8, stream).ravel() for stream in Stream])
    assert len(np.unique(numbers)) == numbers.size == 60 * 50 * 8 * len(Stream)


@pytest.mark.parametrize("axis", ["keys", "starts", "offsets", "tokens"])
def test_numbers_are_uniform_along_every_axis(axis: str) -> None:
    n = 40_000
    if axis == "keys":
        numbers = uniforms([philox_key(0, 0, str(i), 0) for i in range(n)], np.zeros(n), 1, Stream.ACCEPT)
    elif axis == "starts":
        numbers = uniforms(np.tile(KEYS[0], (n, 1)), np.arange(n), 1, Stream.DRAFT)
    elif axis == "offsets":
        numbers = uniforms(KEYS[:1], [0], n, Stream.RESIDUAL)
    else:
        numbers = coupled_uniforms(KEYS[:1], [9], np.arange(n))
    numbers = numbers.ravel()
    assert numbers.min() >= 0.0
    assert numbers.max() < 1.0
    for values in (numbers, numbers * 2**20 % 1, numbers * 2**44 % 1):  # high, middle and low bits
        counts = np.bincount((values * 128).astype(int), minlength=128)
        assert chi_square_tail(float(((counts - n / 128) ** 2 / (n / 128)).sum()), 127) > 1e-4
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 5 / n**0.5


def test_streams_of_one_sequence_are_uncorrelated() -> None:
    starts = np.repeat(np.arange(400), len(KEYS))
    columns = [uniforms(np.tile(KEYS, (400, 1)), starts, 1, stream).ravel() for stream in Stream]
    correlation = np.corrcoef(columns) - np.eye(len(columns))
    assert np.abs(correlation).max() < 5 / len(starts) ** 0.5


def test_numbers_have_53_bits() -> None:
    numbers = uniforms(KEYS[:1], [0], 2_000, Stream.DRAFT).ravel()
    assert ((numbers * 2**53) % 1 == 0).all()
    assert len({int(x * 2**53) % 2 for x in numbers}) == 2


def test_a_key_is_three_words_that_never_change() -> None:
    """A resumed or repeated run must find the same words, on any machine and in any version."""
    words = philox_key(0, 0, "a", 0)
    assert all(0 <= word < 2**32 for word in words)
    assert words == PINNED


def test_any_difference_makes_another_key() -> None:
    asked = [
        (seed, salt, key, sample)
        for seed in (0, 1, -1, 2**70)
        for salt in (0, 1, 11)
        for key in ("", "1", "0,1", "é", "\ud83d")
        for sample in (0, 1, 11)
    ]
    words = {philox_key(*arguments) for arguments in asked}
    assert len(words) == len(asked)
    for i in range(3):
        assert len({key[i] for key in words}) > len(asked) - 3
