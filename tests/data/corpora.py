"""Small corpora whose documents can be told apart: document i is its number, repeated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from overland.data.corpus import Corpus
from overland.data.layout import lay_out
from overland.data.plan import Plan, PlannedSource, Segment
from overland.data.sampler import Sampler
from overland.data.sources.source import Source
from overland.data.windows import Reading

VOCABULARY = 50_000


class Numbered(Source):
    """Documents `first`, `first + 1`, …, some per chunk, with lengths from 1 to `longest`."""

    kind = "tokens"

    def __init__(self, first: int, count: int, longest: int = 40, per_chunk: int = 3) -> None:
        self.first, self.count, self.per_chunk = first, count, per_chunk
        self.lengths = np.random.default_rng(first).integers(1, longest + 1, count)

    def chunks(self) -> list[str]:
        return [str(i) for i in range(0, self.count, self.per_chunk)]

    def num_documents(self, chunk: str) -> int:
        return min(self.per_chunk, self.count - int(chunk))

    def read(self, chunk: str) -> Iterator[npt.NDArray[np.int64]]:
        for i in range(int(chunk), int(chunk) + self.num_documents(chunk)):
            yield np.full(self.lengths[i], self.first + i)


class Distinct(Numbered):
    """Tokens that are all different: document i has `STRIDE · i`, `STRIDE · i + 1`, …"""

    STRIDE = 256

    def read(self, chunk: str) -> Iterator[npt.NDArray[np.int64]]:
        for i in range(int(chunk), int(chunk) + self.num_documents(chunk)):
            yield np.arange(self.lengths[i]) + self.STRIDE * i


def make_corpus(name: str, source: Any, root: Path, built: bool = False) -> Corpus:
    folder = lay_out(name, source, None, root, shard_documents=6, vocab_size=VOCABULARY)
    corpus = Corpus(folder, lambda: source, wait=False)
    if built:
        sizes = [corpus.shard(number).info[:2] for number in range(corpus.num_shards)]
        np.save(corpus.layout.sizes_path, np.asarray(sizes, np.int64))
    return corpus


def one_segment(
    sources: Mapping[str, Any], weights: Mapping[str, float], mixture: str = "sequences", **how: Any
) -> Plan:
    settings = {"global_batch_size": 4, "seq_len": 16, **how}
    segment = Segment(0, weights=dict(weights), **settings)
    planned = {name: PlannedSource(corpus.fingerprint) for name, corpus in sources.items()}
    return Plan(0, 24, mixture, planned, (segment,))  # type: ignore[arg-type]


def rows_of(plan: Plan, corpora: Mapping[str, Any], memory: Path | None = None) -> Sampler:
    reading = Reading(plan.seed, True, plan.window_documents, memory, writes=memory is not None)
    return Sampler(plan, corpora, reading)
