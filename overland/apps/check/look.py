"""Opens sources as a run does, but reads only their beginnings and writes nothing: this is how
`overland check` and `overland submit` find what a run would refuse."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from overland.data.arrays import Arrays
from overland.data.corpora import Opener, check_vocabulary, named_by_keys, shard_documents
from overland.data.holdout import check_countable
from overland.data.layout import CorpusLayout, group, policy_of, weigh
from overland.data.sampler import AnyCorpus
from overland.data.shard_maker import ShardMaker
from overland.data.sources.file_marks import FileMark
from overland.data.sources.image_files import ArrayList
from overland.data.sources.source import Source
from overland.data.wanted import WantedSource
from overland.errors import DataError
from overland.words import any_of, counted_words

FEW_DOCUMENTS = 1000
FEW_CHARACTERS = 4 << 20


@dataclass(frozen=True)
class Untrained:
    """Stands in for the tokenizer that the run will train: one token per byte."""

    vocab_size: int
    bos_id: int | None = None
    eos_id: int = 0
    add_bos: bool = False
    add_eos: bool = True
    fingerprint: str = ""

    def encode_documents(self, texts: list[str]) -> list[Any]:
        return [np.frombuffer(text.encode() + b"\0", np.uint8) for text in texts]


@dataclass(frozen=True)
class Beginning:
    """What is known about a source from its first documents."""

    arrays: Arrays | None
    documents: int | None = None
    """Their number, if these are all."""
    kind: str = "arrays"


def look_at(wanted: WantedSource, opener: Opener) -> AnyCorpus | Beginning:
    """Does what `Opener.open` does, except that a streamed source is not laid out. The tokenizer
    may be `Untrained`."""
    config, name = wanted.config, wanted.name
    if wanted.is_made or wanted.built:
        return opener.open(wanted)
    source = wanted.open()
    if isinstance(source, ArrayList):
        batch = max(config.training.global_batch_size, config.training.local_batch_size)
        source.fill(0, np.empty(source.shape, source.dtype_of_all))
        if len(source) < batch and not wanted.is_for_validation:
            opener.preparer.report(
                f"note: {name} has {len(source):,} images, less than a batch of {batch:,}"
            )
        return Beginning(Arrays.declared(name, source.fields))
    return _beginning(wanted, source, opener)


def _beginning(wanted: WantedSource, source: Source, opener: Opener) -> Beginning:
    """Tokenizes the first documents."""
    config, name = wanted.config, wanted.name
    tokenizer, preparer = opener.tokenizer, opener.preparer
    data, training = config.data, config.training
    for note in source.notes:
        preparer.report(f"note: {name}: {note}")
    with named_by_keys():
        skip_bad = data.bad_documents == "skip"
        layout = CorpusLayout(  # of no shards and in no folder: nothing is written
            name=name,
            fingerprint="",
            request="",
            source=str(source.place),
            **policy_of(name, source, tokenizer, skip_bad, opener.vocab_size),
            num_shards=0,
            documents_per_shard=0,
            folder=Path(os.devnull),
        )
    check_vocabulary(name, layout.vocab_size, opener.vocab_size)
    is_trained = isinstance(tokenizer, Untrained) and config.model.hf_assets_path is None
    if layout.kind == "text" and is_trained and data.add_bos:
        raise DataError(
            "a tokenizer that is trained here has no beginning-of-document token; turn "
            "data.add_bos off"
        )
    maker = ShardMaker(layout, source, tokenizer)
    documents, tokens, is_all = maker.try_out(FEW_DOCUMENTS, FEW_CHARACTERS)
    counted = counted_words(maker.counts())
    if not tokens:
        what = ", ".join([f"it holds no {layout.unit}", *counted])
        raise DataError(f"{layout.source} is empty: {what}")
    if counted:
        of_these = any_of(counted, "and")
        preparer.report(f"note: {name}: of the first {documents:,} documents, {of_these}")
    is_number = data.holdout and not isinstance(data.holdout, float)
    if is_number and preparer.holdout is None and not wanted.is_for_validation:
        num_shards = count_shards(source, shard_documents(data))
        check_countable(int(data.holdout), name, num_shards, is_built=False)
    batch = max(training.global_batch_size, training.local_batch_size)
    batch *= training.seq_len if layout.arrays is None else 1
    if is_all and tokens < batch:
        more = "at most " if layout.kind == "text" and isinstance(tokenizer, Untrained) else ""
        preparer.report(
            f"note: {name} has {more}{tokens:,} {layout.unit}, less than a batch of {batch:,}"
        )
    return Beginning(layout.arrays, documents if is_all else None, layout.kind)


def count_shards(source: Source, shard_documents: int) -> int:
    """Returns the number of shards that `lay_out` would make."""
    chunks = list(source.chunks())
    files = {file for chunk in chunks for file in source.files_of(chunk)}
    marks = {file: FileMark((source.root / file).stat().st_size, 0, "") for file in files}
    return len(group(chunks, weigh(source, chunks, marks, 0), shard_documents))
