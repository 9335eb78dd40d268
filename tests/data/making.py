"""Small corpora and a small tokenizer for the tests of shards, and processes to kill."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from overland.apps.data.build import build
from overland.apps.data.tokenizer_training import train_tokenizer
from overland.data.corpus import Corpus
from overland.data.layout import lay_out, read_layout
from overland.data.sources.file_marks import digest_of
from overland.data.sources.jsonl import JsonLines
from overland.data.sources.source import Document, Kind, Source, Tokens
from overland.data.tokenizer import Tokenizer

WORDS = ["the", "a", "train", "went", "over", "land", "and", "sea", "with", "tokens"]
DOCUMENTS_PER_CHUNK = 1024


def tokenizer_in(folder: Path) -> Tokenizer:
    folder.mkdir(exist_ok=True)
    train_tokenizer([" ".join(WORDS)], 300, folder / "tokenizer.json")
    return Tokenizer(folder)


def write_lines(folder: Path, num_files: int, documents_per_file: int = 20) -> Path:
    """JSON lines whose documents all differ."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(num_files)
    for number in range(num_files):
        texts = [
            f"{number} {place} " + " ".join(draw.choices(WORDS, k=draw.randrange(1, 40)))
            for place in range(documents_per_file)
        ]
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (folder / f"{number:03d}.jsonl").write_text(lines)
    return folder


def lines_of(folder: Path) -> JsonLines:
    return JsonLines(folder, sorted(path.name for path in folder.iterdir()))


class RandomTokens(Source):
    """Random token ids; every document is a function of the seed and its chunk."""

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

    def identity(self, name: str) -> str:
        return digest_of([self.format, self.vocab_size, self.total, self.length, self.seed])


class SlowLines(JsonLines):
    """Takes its time over every chunk, for tests of what happens meanwhile."""

    seconds = 0.1

    def read(self, chunk: str) -> Iterator[Document]:
        for number, document in enumerate(super().read(chunk)):
            if number % 10 == 0:
                time.sleep(self.seconds)
            yield document


class FatalLines(JsonLines):
    """Ends the process that reads it, as too little memory does."""

    def read(self, chunk: str) -> Iterator[Document]:
        os._exit(9)


def slow_lines_of(folder: Path, seconds: float = 0.1) -> SlowLines:
    source = SlowLines(folder, sorted(path.name for path in folder.iterdir()))
    source.seconds = seconds
    return source


def streamed(folder: Path, tokenizer: Tokenizer, root: Path, **options: object) -> Corpus:
    """A corpus of which each file is a shard, nothing made yet."""
    corpus = lay_out("lines", lines_of(folder), tokenizer, root, shard_documents=1)
    return Corpus(corpus, lambda: lines_of(folder), tokenizer, **options)  # type: ignore[arg-type]


def built(folder: Path, tokenizer: Tokenizer, root: Path, processes: int = 2) -> Path:
    corpus = lay_out("lines", lines_of(folder), tokenizer, root, shard_documents=1)
    build(corpus, lines_of(folder), tokenizer, processes=processes)
    return corpus


def bytes_of(folder: Path) -> list[bytes]:
    """Of all shards, in order; every one must be there."""
    layout = read_layout(folder)
    return [layout.shard_path(number).read_bytes() for number in range(layout.num_shards)]


def leftovers(folder: Path) -> list[Path]:
    return [path for path in (folder / "shards").glob("*/*") if path.suffix != ".shard"]


def documents_of(corpus: Corpus) -> list[list[int]]:
    shards = [corpus.shard(number) for number in range(corpus.num_shards)]
    return [
        np.asarray(shard.document(number)).tolist()
        for shard in shards
        for number in range(shard.info.num_documents)
    ]


def is_running(pid: int) -> bool:
    """Zombies have ended, too."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def children_of(pid: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[1]) == pid and fields[0] not in "ZX":
            found.append(int(stat.parent.name))
    return found
