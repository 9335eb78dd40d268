"""Random token ids: a corpus of any size, for tests of speed."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from overland.data.sources.marks import digest_of
from overland.data.sources.source import Kind, Tokens

DOCUMENTS_PER_CHUNK = 1024


class RandomTokens:
    """Every document is a function of the seed and its chunk."""

    format = "random"
    kind: Kind = "tokens"
    column: str | None = None

    def __init__(self, vocab_size: int, num_documents: int, length: int, seed: int = 0) -> None:
        self.vocab_size, self.length, self.seed = vocab_size, length, seed
        self.total = num_documents
        self.columns: dict[str, str] = {}
        self.num_bad = 0

    def chunks(self) -> list[str]:
        return [str(number) for number in range(-(-self.total // DOCUMENTS_PER_CHUNK))]

    def num_documents(self, chunk: str) -> int:
        return min(DOCUMENTS_PER_CHUNK, self.total - int(chunk) * DOCUMENTS_PER_CHUNK)

    def read(self, chunk: str) -> Iterator[Tokens]:
        draw = np.random.default_rng([self.seed, int(chunk)])
        for _ in range(self.num_documents(chunk)):
            yield draw.integers(0, self.vocab_size, self.length, dtype=np.int64)

    def fingerprint(self) -> str:
        return digest_of([self.format, self.vocab_size, self.total, self.length, self.seed])
