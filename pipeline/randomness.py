"""Uniform numbers as a function of identity; no generator object is carried around.

Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011) turns a key
of 64 bits and a counter of 128 bits into 128 random bits. A sequence owns two key words and the last counter
word (`philox_key`); the other counter words say which number of that sequence is wanted (DESIGN section 5):

    blocks  (start of the block, offset in it, stream, word 3)      `uniforms`, `verdict_uniforms`
    coupled (position, token, Stream.COUPLED, word 3)               `coupled_uniforms`

So a number never depends on the sequence's neighbours, slot, batch or worker. Position 0 is the first
generated token. Knows nothing of models, laws or torch.

Shapes: B sequences, O offsets in a block, T tokens.
"""

from __future__ import annotations

import hashlib
from enum import IntEnum

import numpy as np
import numpy.typing as npt

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_ROUNDS = 10
_LOW = np.uint64(0xFFFFFFFF)
_WORD_BITS = np.uint64(32)


class Stream(IntEnum):
    """What a number decides. Different streams of one sequence are independent of each other."""

    DRAFT = 0  # which token is proposed
    ACCEPT = 1  # whether a proposed token is kept
    RESIDUAL = 2  # the token drawn after the kept ones
    COUPLED = 3  # noise that draft and target share, under the rule `coupled` alone


def philox_key(seed: int, salt: int, request_key: str, sample: int) -> tuple[int, int, int]:
    """The words a sequence owns: (key low, key high, counter word 3), each below 2**32.

    A hash of all four arguments, so any difference between two sequences makes their numbers independent.
    """
    # The numbers hold no comma and the key comes last: different arguments never encode to the same bytes.
    encoded = f"{seed},{salt},{sample},{request_key}".encode("utf-8", "surrogatepass")
    digest = hashlib.blake2b(encoded, digest_size=12, person=b"nightdesk").digest()
    low, high, word = (int.from_bytes(digest[i : i + 4], "little") for i in (0, 4, 8))
    return low, high, word


def uniforms(
    keys: npt.ArrayLike, starts: npt.ArrayLike, offsets: int | npt.ArrayLike, stream: Stream
) -> npt.NDArray[np.float64]:
    """[B, O] numbers in [0, 1) for blocks that begin at `starts` [B], of sequences with `keys` [B, 3].

    `offsets` is the number of offsets (0, 1, …), or the offsets themselves, [O] or [B, O].
    """
    keys_B3 = np.asarray(keys, dtype=np.uint64).reshape(-1, 3)
    starts_B1 = np.asarray(starts, dtype=np.uint64).reshape(-1, 1)
    offsets_O = np.arange(offsets) if isinstance(offsets, int | np.integer) else np.asarray(offsets)
    return _numbers(keys_B3, starts_B1, offsets_O.astype(np.uint64), stream)


def verdict_uniforms(keys: npt.ArrayLike, starts: npt.ArrayLike, count: int) -> npt.NDArray[np.float64]:
    """[B, count, 2] numbers as `speculation.verify` takes them: decisions, then the draws after them."""
    decide = uniforms(keys, starts, count, Stream.ACCEPT)
    draw = uniforms(keys, starts, count, Stream.RESIDUAL)
    return np.stack((decide, draw), axis=-1)


def coupled_uniforms(
    keys: npt.ArrayLike, positions: npt.ArrayLike, tokens: npt.ArrayLike
) -> npt.NDArray[np.float64]:
    """[B, T] numbers in [0, 1), one per candidate token, [T] or [B, T], at `positions` [B]."""
    keys_B3 = np.asarray(keys, dtype=np.uint64).reshape(-1, 3)
    positions_B1 = np.asarray(positions, dtype=np.uint64).reshape(-1, 1)
    return _numbers(keys_B3, positions_B1, np.asarray(tokens).astype(np.uint64), Stream.COUPLED)


def philox(
    counter: tuple[npt.ArrayLike, npt.ArrayLike, npt.ArrayLike, npt.ArrayLike],
    key: tuple[npt.ArrayLike, npt.ArrayLike],
) -> tuple[npt.NDArray[np.uint64], ...]:
    """Philox4x32-10: four 32-bit words (as uint64 arrays) per broadcast element of counter and key words."""
    c0, c1, c2, c3 = (np.asarray(word, dtype=np.uint64) for word in counter)
    k0, k1 = (np.asarray(word, dtype=np.uint64) for word in key)
    for _ in range(_ROUNDS):
        left, right = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (right >> _WORD_BITS) ^ c1 ^ k0,
            right & _LOW,
            (left >> _WORD_BITS) ^ c3 ^ k1,
            left & _LOW,
        )
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW, (k1 + _KEY_STEPS[1]) & _LOW
    return c0, c1, c2, c3


def _numbers(
    keys_B3: npt.NDArray[np.uint64],
    first_B1: npt.NDArray[np.uint64],
    second_BO: npt.NDArray[np.uint64],
    stream: Stream,
) -> npt.NDArray[np.float64]:
    low, high, word = keys_B3[:, 0:1], keys_B3[:, 1:2], keys_B3[:, 2:3]
    high_BO, low_BO, _, _ = philox((first_B1, second_BO, np.uint64(stream), word), (low, high))
    bits_BO = ((high_BO >> np.uint64(5)) << np.uint64(26)) | (low_BO >> np.uint64(6))
    return bits_BO.astype(np.float64) * 2.0**-53
