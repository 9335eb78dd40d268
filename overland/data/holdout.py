"""Holds out a share of the documents for validation, chosen by their content.

Each document has a mark, a keyed hash of its tokens without BOS and EOS, and is held out if the
mark is below the share. A document therefore stays on its side when files are added, moved or
shuffled, whatever the seed, and all copies of it are on the same side. Shards contain all
documents; the side of each is decided when they are read.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from overland.config.schema import Data as Settings
from overland.data.corpus import Corpus
from overland.data.corpus_folder import CorpusLayout
from overland.data.shard import Shard
from overland.data.sources.source import FileSource
from overland.errors import DataError
from overland.files import replaced

KEY = b"overland: held out or not"
FORMAT = 1

Marks = npt.NDArray[np.uint64]
FEW_SHARDS = 2  # up to 8,192 documents, which have to be tokenized before the first step anyway


def held_out_documents(corpus: Corpus, number: int, share: float) -> npt.NDArray[np.bool_]:
    """Returns which documents of a shard are held out."""
    limit = np.uint64(min(round(share * 2**64), 2**64 - 1))
    return _kept_marks(corpus.layout, corpus.shard(number), number) < limit


def share_of(data: Settings, corpus: Corpus) -> float:
    """Returns the share that `data.holdout` resolves to for a corpus. A number of documents is
    converted to a share of the estimated total, so it is met only roughly."""
    share = share_of_documents(data, corpus.name, partial(_num_documents, corpus))
    check_both_sides(corpus, share)
    return share


def share_of_documents(data: Settings, name: str, count: Callable[[], int]) -> float:
    if isinstance(data.holdout, float) or not data.holdout:
        return float(data.holdout)
    total = count()
    if data.holdout >= total:
        raise DataError(
            f"data.holdout = {data.holdout:,} would hold out all of {name}, which has about "
            f"{total:,} documents: lower it"
        )
    return data.holdout / total


def require_both_sides(name: str, share: float, held_out: int, total: int) -> None:
    """Raises an error unless there are documents to train on and documents to validate on."""
    if total and held_out in (0, total):
        side, fix = ("no document", "raise it") if held_out == 0 else ("every document", "lower it")
        raise DataError(
            f"data.holdout holds out {side} of {name} (a share of {share:.3g} of {total:,}): "
            f"{fix}, or name other data in validation.dataset_path. A text file is one document, "
            f"and copies of a document stay together"
        )


def check_both_sides(corpus: Corpus, share: float) -> None:
    """Raises an error if one side is empty. A small corpus is tokenized for that if necessary; in
    a larger one that is not yet built, an empty side is detected during training."""
    if not share or (corpus.sizes() is None and corpus.num_shards > FEW_SHARDS):
        return
    held = total = 0
    for number in range(corpus.num_shards):
        found = held_out_documents(corpus, number, share)
        held, total = held + int(found.sum()), total + len(found)
        if 0 < held < total:
            return
    require_both_sides(corpus.name, share, held, total)


def marks_of(shard: Shard, layout: CorpusLayout) -> Marks:
    first, last = int(layout.add_bos), int(layout.add_eos)
    tokens = np.asarray(shard.tokens)
    marks = np.empty(shard.info.num_documents, np.uint64)
    dtype = tokens.dtype if layout.kind == "arrays" else "<u4"
    for number in range(len(marks)):
        begin, end = shard.offsets[number] + first, shard.offsets[number + 1] - last
        ids = tokens[begin:end].astype(dtype).tobytes()
        digest = hashlib.blake2b(ids, digest_size=8, key=KEY).digest()
        marks[number] = int.from_bytes(digest, "little")
    return marks


def _kept_marks(layout: CorpusLayout, shard: Shard, number: int) -> Marks:
    """Returns the marks of a shard, cached in a file so that not every rank reads every token."""
    path = _path(layout, number)
    with contextlib.suppress(OSError, ValueError):
        marks: Marks = np.load(path)
        if marks.dtype == np.uint64 and len(marks) == shard.info.num_documents:
            return marks
    marks = marks_of(shard, layout)
    with contextlib.suppress(OSError):  # the corpus may be read-only
        path.parent.mkdir(parents=True, exist_ok=True)
        with replaced(path, shared=True, durable=False) as file:
            np.save(file, marks)
    return marks


def _path(layout: CorpusLayout, number: int) -> Path:
    shard = layout.shard_path(number)
    return layout.folder / f"marks-{FORMAT}" / shard.parent.name / f"{shard.stem}.npy"


def _num_documents(corpus: Corpus) -> int:
    sizes = corpus.sizes()
    if sizes is not None:
        return int(sizes[:, 0].sum())
    source = corpus.open_source() if corpus.open_source is not None else None
    about = source.about_documents() if isinstance(source, FileSource) else None
    return round(about or corpus.num_shards * corpus.documents_per_shard)
