"""Token shards with channels: what goes with each token stays with it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from overland.data.batch import load_batch
from overland.data.corpus import Corpus
from overland.data.lanes import IGNORED
from overland.data.pack import Packing
from overland.data.shard import open_shard
from overland.data.sources import open_source
from overland.errors import DataError
from overland.training.saving import digests
from tests.data.corpora import Numbered, make_corpus, one_segment, rows_of
from tests.data.test_shard import write_shard


class Weighted(Numbered):
    """Tokens that are all different, each with half of itself as its weight."""

    channels = {"weights": "float32"}

    def read(self, chunk: str) -> Iterator[Any]:
        for i in range(int(chunk), int(chunk) + self.num_documents(chunk)):
            tokens = self.first + 100 * i + np.arange(self.lengths[i])
            yield {"tokens": tokens, "weights": tokens / 2}


@pytest.fixture
def corpora(tmp_path: Path) -> dict[str, Corpus]:
    sources = {"chat": Weighted(1, 60), "plain": Numbered(20_000, 40)}
    return {name: make_corpus(name, one, tmp_path) for name, one in sources.items()}


@pytest.mark.parametrize("packing", ["pack", "overflow", "trunc", "best_fit"])
@pytest.mark.parametrize("mask", [False, True])
def test_weights_stay_with_the_labels_that_they_are_for(
    corpora: dict[str, Corpus], packing: Packing, mask: bool
) -> None:
    plan = one_segment(corpora, {"chat": 1.0, "plain": 1.0}, packing=packing, document_mask=mask)
    half = replace(plan.segments[0], first_batch=9, seq_len=11)  # cuts what is left over again
    rows = rows_of(replace(plan, segments=(plan.segments[0], half)), corpora)
    for number in range(18):
        batch = load_batch(rows, number)
        labels, weights = batch["labels_BS"], batch["weights_BS"]
        assert weights.dtype == torch.float32
        expected = torch.where(labels >= 20_000, 1.0, labels / 2)
        assert torch.equal(weights[labels != IGNORED], expected[labels != IGNORED])
        if not mask:  # all that has no label is padding
            assert (weights[labels == IGNORED] == 0).all()


def test_sources_without_channels_make_the_batches_that_they_made(
    corpora: dict[str, Corpus],
) -> None:
    plain = {"plain": corpora["plain"]}
    alone = load_batch(rows_of(one_segment(plain, {"plain": 1.0}), plain), 3)
    assert "weights_BS" not in alone
    # One that joins with weight 0 is not read, and changes nothing.
    beside = load_batch(rows_of(one_segment(corpora, {"plain": 1.0, "chat": 0.0}), corpora), 3)
    assert beside.fields.keys() == alone.fields.keys()


def test_a_changed_weight_shows_in_the_digest(corpora: dict[str, Corpus]) -> None:
    chat = {"chat": corpora["chat"]}
    batch = load_batch(rows_of(one_segment(chat, {"chat": 1.0}), chat), 0)
    weights = batch["weights_BS"].clone()
    weights[2, 7] += 0.25
    changed = digests(batch.replace(weights_BS=weights)) != digests(batch)
    assert changed.tolist() == [False, False, True, False]


def test_a_shard_keeps_channels_and_its_checksum_covers_them(tmp_path: Path) -> None:
    types = [("tokens", "<i8"), ("weights", "<f4"), ("turn", "<u2")]
    documents = [np.zeros(length, types) for length in (5, 1, 6)]
    for i, document in enumerate(documents):
        document["tokens"] = np.arange(len(document)) + 10 * i
        document["weights"] = document["tokens"] / 4
        document["turn"] = i
    channels = {"weights": "<f4", "turn": "<u2"}
    path = tmp_path / "0.shard"
    written = write_shard(path, documents, "<u2", channels)
    shard = open_shard(path)
    shard.verify()
    assert shard.info == written
    assert shard.document(2).tolist() == [20, 21, 22, 23, 24, 25]
    assert (shard.channels["weights"] == shard.tokens / 4).all()
    assert shard.channels["turn"].tolist() == [0] * 5 + [1] + [2] * 6
    damaged = bytearray(path.read_bytes())
    damaged[64 + 24 + 2] ^= 1  # the first weight, after 12 tokens of 2 bytes
    path.write_bytes(damaged)
    with pytest.raises(DataError, match="its checksum does not match"):
        open_shard(path).verify()


def test_a_built_corpus_gives_its_channels_back(corpora: dict[str, Corpus]) -> None:
    corpus = corpora["chat"]
    sizes = [corpus.shard(number).info[:2] for number in range(corpus.num_shards)]
    np.save(corpus.layout.sizes_path, np.asarray(sizes, np.int64))
    source = open_source(corpus.folder)
    for chunk in source.chunks():
        for document in source.read(chunk):
            assert isinstance(document, dict)
            assert (document["weights"] == document["tokens"] / 2).all()


class Short(Weighted):
    def read(self, chunk: str) -> Iterator[Any]:
        for document in super().read(chunk):
            yield {**document, "weights": document["weights"][1:]}


class Bare(Weighted):
    def read(self, chunk: str) -> Iterator[Any]:
        for document in super().read(chunk):
            yield document["tokens"]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (
            Short(1, 4),
            "document 0 has weights as float64 of shape .*; expected a float32 per",
        ),
        (Bare(1, 4), "document 0 is not a dict of tokens, weights"),
    ],
)
def test_documents_without_the_declared_channels_are_bad(
    tmp_path: Path, source: Weighted, words: str
) -> None:
    with pytest.raises(DataError, match=words):
        make_corpus("chat", source, tmp_path).shard(0)


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({"tokens": [1, 2], "weights": [1, -0.5], "turn": [0, 1]}, "-0.5 in weights"),
        ({"tokens": [1, 2], "weights": [1, np.nan], "turn": [0, 1]}, "nan in weights"),
        ({"tokens": [1, 2], "weights": [1, 1], "turn": [0, 256]}, "256 in turn; .* uint8"),
        ({"tokens": [1, 2], "weights": [1, 1], "turn": [0, 0.5]}, "0.5 in turn"),
        ({"tokens": [1, [2]], "weights": [1, 1], "turn": [0, 1]}, "lists of different lengths"),
    ],
)
def test_channels_that_would_become_other_numbers_are_bad(
    tmp_path: Path, document: Any, words: str
) -> None:
    class Turns(Weighted):
        channels = {"weights": "float32", "turn": "uint8"}

        def read(self, chunk: str) -> Iterator[Any]:
            yield document

    with pytest.raises(DataError, match=f"document 0 has .*{words}"):
        make_corpus("chat", Turns(1, 1), tmp_path).shard(0)


@pytest.mark.parametrize("name", ["tokens", "labels", "positions", "documents"])
def test_a_channel_takes_no_field_of_the_batch(tmp_path: Path, name: str) -> None:
    class Taken(Weighted):
        channels = {name: "int64"}

    with pytest.raises(DataError, match=f"a channel cannot be named '{name}'"):
        make_corpus("chat", Taken(1, 4), tmp_path)


class Marked(Weighted):
    """Weights that are 0 or 1, in 8 bits."""

    channels = {"weights": "uint8"}

    def read(self, chunk: str) -> Iterator[Any]:
        for document in super().read(chunk):
            yield {**document, "weights": document["tokens"] % 2}


def test_a_mixture_holds_the_weights_of_all_its_sources(tmp_path: Path) -> None:
    sources = {"chat": Weighted(1, 40), "marked": Marked(20_000, 40)}
    corpora = {name: make_corpus(name, one, tmp_path) for name, one in sources.items()}
    batch = load_batch(rows_of(one_segment(corpora, {"chat": 1.0, "marked": 1.0}), corpora), 0)
    labels, weights = batch["labels_BS"], batch["weights_BS"]
    expected = torch.where(labels >= 20_000, labels % 2, labels / 2)
    assert torch.equal(weights[labels != IGNORED], expected[labels != IGNORED])
