"""Token shards: documents as one memory-mapped array of token ids, written once, never changed.

tokens.bin      ids, little-endian uint16 (uint32 for vocabularies above 65,536)
documents.npy   where each document starts, and the end
shards.json     counts, types and the fingerprint of what they were made from
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from overland.data.errors import DataError
from overland.data.sources import Source
from overland.data.tokenizer import Tokenizer

FORMAT = 1
DOCUMENTS_PER_CALL = 256  # handed to the tokenizer at once, which spreads them over its threads


@dataclass(frozen=True)
class ShardInfo:
    format: int
    fingerprint: str
    dtype: str
    vocab_size: int
    num_documents: int
    num_tokens: int


class TokenShards:
    """Reads a folder of token shards."""

    def __init__(self, folder: Path) -> None:
        try:
            self.info = ShardInfo(**json.loads((folder / "shards.json").read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise DataError(f"{folder} does not hold token shards: {error}") from None
        if self.info.format != FORMAT:
            raise DataError(f"{folder}: format {self.info.format}, this version reads {FORMAT}")
        self.tokens = np.memmap(folder / "tokens.bin", dtype=self.info.dtype, mode="r")
        self.document_starts = np.load(folder / "documents.npy", mmap_mode="r")
        if len(self.tokens) != self.info.num_tokens:
            raise DataError(
                f"{folder}/tokens.bin holds {len(self.tokens):,} tokens; "
                f"shards.json says {self.info.num_tokens:,}: it is cut short, build it again"
            )

    def read(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        return self.tokens[start:stop].astype(np.int64)

    def documents(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """The document that each token of [start, stop) belongs to."""
        places = np.arange(start, stop)
        return np.searchsorted(self.document_starts, places, side="right") - 1


def build_shards(
    source: Source,
    tokenizer: Tokenizer,
    folder: Path,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Tokenises a whole source into `folder`, which appears complete or not at all."""
    dtype = "<u2" if tokenizer.vocab_size <= 2**16 else "<u4"
    folder.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        starts = [0]
        with (beside / "tokens.bin").open("wb") as file:
            for ids in _encoded(source, tokenizer, progress):
                np.asarray(ids, dtype=dtype).tofile(file)
                starts.append(starts[-1] + len(ids))
        np.save(beside / "documents.npy", np.asarray(starts, dtype=np.int64))
        info = ShardInfo(
            FORMAT,
            fingerprint(source, tokenizer),
            dtype,
            tokenizer.vocab_size,
            num_documents=len(starts) - 1,
            num_tokens=starts[-1],
        )
        (beside / "shards.json").write_text(json.dumps(asdict(info), indent=1))
        try:
            os.rename(beside, folder)
        except OSError:
            if not (folder / "shards.json").exists():  # otherwise another node was first
                raise
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def wait_for_shards(folder: Path) -> None:
    """Waits until another process has built them; the launcher ends us if that process dies."""
    while not (folder / "shards.json").exists():
        time.sleep(0.2)


def fingerprint(source: Source, tokenizer: Tokenizer) -> str:
    """Changes with the list of chunks, their versions where the source knows any, and the
    tokenizer."""
    chunks = [*source.chunks(), *getattr(source, "versions", list)()]
    text = json.dumps([type(source).__name__, chunks, tokenizer.fingerprint])
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _encoded(
    source: Source, tokenizer: Tokenizer, progress: Callable[[int, int], None]
) -> Iterator[list[int]]:
    chunks = source.chunks()
    texts = (text for chunk in chunks for text in source.read(chunk))
    done = 0
    while batch := list(itertools.islice(texts, DOCUMENTS_PER_CALL)):
        yield from tokenizer.encode_documents(batch)
        done += len(batch)
        progress(done, len(chunks))
