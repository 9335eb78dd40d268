"""Uniform random ids, for proofs and benchmarks: block i depends on the seed and i alone."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from overland.data.blocks import Origins, Room

Array = npt.NDArray[np.int64]
DOCUMENTS_PER_BLOCK = 4


@dataclass(frozen=True)
class RandomBlocks:
    """Blocks hold about `DOCUMENTS_PER_BLOCK` documents, for those who ask for borders."""

    vocab_size: int
    seed: int = 0
    source: int = 0
    """Its number in the plan."""
    seq_len: int = 0

    @property
    def fingerprint(self) -> str:
        return f"random-{self.vocab_size}"

    def as_lane(self, source: int, seq_len: int) -> RandomBlocks:
        return replace(self, source=source, seq_len=seq_len)

    def read(self, numbers: Array, rows: Array, into: Room) -> tuple[Array, Array]:
        begins = [
            self._read(number, into.tokens[row])
            for number, row in zip(numbers.tolist(), rows.tolist(), strict=True)
        ]
        piece_rows = np.repeat(rows, [len(one) for one in begins])
        into.num_tokens[rows] = self.seq_len + 1
        into.sample[rows], into.epoch[rows] = (self.source << 56) + numbers, 0
        return piece_rows, np.concatenate(begins)

    def origins(self, numbers: Array, rows: Array) -> list[Origins]:
        none = np.zeros_like(rows)
        return [Origins(rows, none + self.source, numbers, none, none + self.seq_len + 1)]

    def _read(self, number: int, row: Array) -> Array:
        draw = np.random.default_rng((self.seed, number))
        row[:] = draw.integers(self.vocab_size, size=self.seq_len + 1)
        borders = draw.random(self.seq_len + 1) < DOCUMENTS_PER_BLOCK / self.seq_len
        borders[0] = True
        return np.flatnonzero(borders)
