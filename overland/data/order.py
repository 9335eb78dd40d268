"""Which sample comes when: keyed permutations that are computed, never stored.

A Feistel network permutes [0, 4^k); indices that fall outside [0, n) are sent through again until
they land inside (at most about four times on average). So the place of one sample among trillions
costs a few multiplications, and every rank, restart and session computes the same place.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.uint64]

ROUNDS = 6


def permute(indices: npt.ArrayLike, size: int, *key: object) -> npt.NDArray[np.int64]:
    """Where each of `indices` goes in the permutation of [0, size) that `key` names."""
    places = np.array(indices, dtype=np.uint64, ndmin=1)
    if size <= 0 or (places >= size).any():
        raise IndexError(f"indices must lie in [0, {size})")
    if size == 1:
        return places.astype(np.int64)
    half_bits = max(1, (max(size - 1, 1).bit_length() + 1) // 2)
    round_keys = _round_keys(key)
    todo = np.ones(places.shape, dtype=bool)
    while todo.any():
        places[todo] = _feistel(places[todo], half_bits, round_keys)
        todo = places >= size
    return places.astype(np.int64)


def _feistel(places: Indices, half_bits: int, round_keys: Indices) -> Indices:
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = places >> shift, places & mask
    for key in round_keys:
        left, right = right, left ^ (mix(right ^ key) & mask)
    return (left << shift) | right


def mix(x: Indices) -> Indices:
    """The finaliser of splitmix64: every input bit reaches every output bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _round_keys(key: tuple[object, ...]) -> Indices:
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8 * ROUNDS).digest()
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)
