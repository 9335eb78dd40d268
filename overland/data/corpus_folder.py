"""The folder of a corpus, and what it contains.

<root>/<name>-<fingerprint>/
  tokenizer/      a copy of the tokenizer, for text
  corpus.json     counts, types and policy; small whatever the size of the corpus
  chunks.jsonl    a line per shard: its chunks, and marks of the files they are read from; a
                  last line with the files that every chunk depends on
  lines.npy       the offset of each line, and the end
  shards/0012/0012345.shard
  sizes.npy       documents and tokens per shard, once all are made
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from overland.data.arrays import Arrays
from overland.data.sources.file_marks import FileMark
from overland.data.sources.source import Kind, Source
from overland.errors import DataError

FORMAT = 1
SHARDS_PER_FOLDER = 1000


@dataclass(frozen=True)
class CorpusLayout:
    """A corpus as described by its `corpus.json`, and the paths of its files."""

    name: str
    fingerprint: str
    """Fingerprint of everything that determines the tokens: files, tokenizer, policy, grouping."""
    request: str
    """Fingerprint of what was requested, without the content of the files."""
    source: str
    """What it was made from, for messages."""
    kind: Kind
    dtype: str
    vocab_size: int | None
    bos_id: int | None
    eos_id: int | None
    add_bos: bool
    add_eos: bool
    """Whether the tokenizer ended each document with the EOS token."""
    tokenizer: str | None
    """Its fingerprint; None for a source of token ids."""
    skip_bad: bool
    num_shards: int
    documents_per_shard: float
    """An estimate, from what the source knows."""
    folder: Path
    fields: dict[str, Any] | None = None
    """The fields of arrays, as their source declares them."""
    channels: dict[str, str] | None = None
    """The types of the channels that accompany each token, by name."""
    made_by: dict[str, Any] | None = None
    """For conversations: what determined their tokens besides the tokenizer (learned_tokens.py)."""
    column: str | None = None
    """Of the files, the column that was read."""

    @property
    def unit(self) -> str:
        """What is counted."""
        return "samples" if self.kind == "arrays" else "tokens"

    @cached_property
    def arrays(self) -> Arrays | None:
        """The fields of its samples, if they are arrays."""
        return None if self.fields is None else Arrays.declared(self.name, self.fields)

    def shard_path(self, number: int) -> Path:
        part = f"{number // SHARDS_PER_FOLDER:04d}"
        return self.folder / "shards" / part / f"{number:07d}.shard"

    def claim_path(self, number: int) -> Path:
        return self.shard_path(number).with_suffix(".claim")

    @property
    def tokenizer_path(self) -> Path | None:
        """A copy of the tokenizer that made it, so that its tokens can be decoded."""
        folder = self.folder / "tokenizer"
        return folder if folder.is_dir() else None

    @property
    def sizes_path(self) -> Path:
        return self.folder / "sizes.npy"

    @property
    def keep_path(self) -> Path:
        """A file that exists once a build has begun: from then on, no shard is evicted."""
        return self.folder / "keep"

    def chunks_of(self, number: int) -> tuple[list[str], dict[str, FileMark]]:
        """Returns the chunks of a shard, and marks of the files they are read from."""
        with self._read_whole(), (self.folder / "chunks.jsonl").open("rb") as file:
            start, stop = self._lines[number], self._lines[number + 1]
            file.seek(start)
            chunks, marks = json.loads(file.read(stop - start))
            return chunks, {name: FileMark(*mark) for name, mark in marks.items()}

    def all_chunks(self) -> tuple[list[str], dict[str, FileMark]]:
        chunks, marks = [], {}
        with self._read_whole(), (self.folder / "chunks.jsonl").open("rb") as file:
            for line in file:
                names, found = json.loads(line)
                chunks += names
                marks.update({name: FileMark(*mark) for name, mark in found.items()})
        return chunks, marks

    @contextlib.contextmanager
    def _read_whole(self) -> Iterator[None]:
        try:
            yield
        except (ValueError, TypeError, AttributeError, IndexError, OSError):
            raise DataError(
                f"{self.folder} is damaged: its chunks.jsonl or lines.npy cannot be read; delete "
                "the folder, and it is made again"
            ) from None

    def made(self) -> dict[int, int]:
        """Returns the size of each shard that exists. It lists folders, which is slow for 10⁶
        shards."""
        found = {}
        for folder in sorted((self.folder / "shards").glob("*")):
            for entry in os.scandir(folder):
                if entry.name.endswith(".shard"):
                    with contextlib.suppress(FileNotFoundError):  # being evicted
                        found[int(entry.name.removesuffix(".shard"))] = entry.stat().st_size
        return found

    @cached_property
    def _lines(self) -> npt.NDArray[np.int64]:
        return np.load(self.folder / "lines.npy", mmap_mode="r")


def read_layout(folder: Path) -> CorpusLayout:
    path = folder / "corpus.json"
    try:
        about = json.loads(path.read_bytes())
        version = about.pop("format")
        layout = CorpusLayout(**about, folder=folder) if version == FORMAT else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{folder} is not a corpus of token shards: {error}") from None
    if layout is None:
        raise DataError(
            f"{path} has format {version}, but this version reads {FORMAT}: build the corpus again"
        )
    return layout


def is_corpus(folder: Path) -> bool:
    return (folder / "corpus.json").is_file() and (folder / "lines.npy").is_file()


def source_changes(folder: Path, source: Source) -> list[str]:
    """Returns a sentence for each file that has changed since the corpus was laid out."""
    chunks, marks = read_layout(folder).all_chunks()
    if marks:
        return source.changes_since(marks)
    if list(source.chunks()) != chunks:
        return [f"{source.place} lists different chunks than when {folder} was laid out"]
    return []
