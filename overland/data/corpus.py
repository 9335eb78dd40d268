"""A corpus: numbered token shards, made ahead of time or on demand; decides who makes a missing
shard, how long a reader waits for it, and which are deleted to stay within `data.cache_gb`.

`shard(number)` opens a shard. If it is missing, it waits for a background process of this rank,
another rank or another node to make it; if none does so within a moment, this process makes it.
A dead process or a stale lock therefore costs time, but never stops a run.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from overland.data.layout import CorpusLayout, read_layout
from overland.data.shard import Shard, ShardInfo, open_shard
from overland.data.shard_maker import Claims, ShardMaker, sweep
from overland.data.sources.source import Kind, Source
from overland.data.tokenizer import Tokenizer
from overland.data.workers import CannotStart, Workers
from overland.errors import DataError
from overland.words import counted_words

KEPT_CALLS = 3  # shards expected in this call or the two before count as in use
OPEN_SHARDS = 64  # each keeps a file open, and the limit per process is often 1,024
GRACE_SECONDS = 1.5  # a background process starts within a second
PATIENCE_SECONDS = 60.0  # if this process cannot make a shard itself
POLL_SECONDS = 0.02
LOOK_SECONDS = 0.25  # between checks of a claim, each of which takes a few file operations
# A corpus this small is made here: the tokenizer's own threads finish it before background
# processes have started.
FEW_SHARDS = 2
FEW_DOCUMENTS = 8192


class Corpus:
    """The numbered shards of one corpus that was laid out, made ahead of time or on demand. Every
    rank opens it."""

    def __init__(
        self,
        folder: Path,
        open_source: Callable[[], Source] | None = None,
        tokenizer: Tokenizer | None = None,
        *,
        processes: int = 0,
        cache_bytes: int | None = None,
        wait: bool = True,
    ) -> None:
        """With `open_source` (and the tokenizer, for text), missing shards can be made. On one rank
        per node, `processes` background processes make the shards that are expected, and other
        shards are deleted while the total size exceeds `cache_bytes`. Without `wait`, a missing
        shard that no one is making is made here at once, without waiting for others to begin."""
        self.layout = layout = read_layout(folder)
        self.name, self.folder, self.fingerprint = layout.name, layout.folder, layout.fingerprint
        self.num_shards = layout.num_shards
        self.documents_per_shard = layout.documents_per_shard
        self.vocab_size, self.eos_id = layout.vocab_size, layout.eos_id
        self.kind: Kind = layout.kind
        self.arrays, self.channels = layout.arrays, layout.channels or {}
        self.open_source, self.tokenizer = open_source, tokenizer
        self._processes = processes
        self._is_little = self.num_shards <= FEW_SHARDS and (
            self.documents_per_shard <= FEW_DOCUMENTS
        )
        self._is_alone = not wait or (processes > 0 and self._is_little)
        """Whether no one else was seen making shards, so that there is no one to wait for."""
        self._claims = Claims(layout.folder)
        self._cache = (
            ShardCache(layout, cache_bytes) if processes and cache_bytes is not None else None
        )
        self._maker: ShardMaker | None = None
        self.workers: Workers | None = None
        """The background processes of this rank, once they are needed."""
        self._opened = lru_cache(OPEN_SHARDS)(self._open)
        self._unusual: dict[int, ShardInfo] = {}
        """The shards opened so far that are empty, or from which documents were left out."""
        self._expected: list[int] = []
        self._is_closed = False
        self._lock, self._making = threading.RLock(), threading.Lock()

    @property
    def is_complete(self) -> bool:
        """Whether all shards are built."""
        return self.layout.sizes_path.exists()

    @property
    def num_bad(self) -> int:
        """The number of documents skipped in the shards opened so far."""
        return sum(one.num_bad for one in self._unusual.values())

    @property
    def counts(self) -> Counter[str]:
        """How many documents were left out or truncated in the shards opened so far, by what was
        done."""
        return sum((Counter(one.counts) for one in self._unusual.values()), Counter())

    def sizes(self) -> npt.NDArray[np.int64] | None:
        """Returns the documents and tokens of every shard if all are built, memory-mapped."""
        try:
            sizes: npt.NDArray[np.int64] = np.load(self.layout.sizes_path, mmap_mode="r")
        except FileNotFoundError:
            return None
        except (ValueError, EOFError):
            raise DamagedSizes(self.layout.sizes_path) from None
        if sizes.dtype != np.int64 or sizes.shape != (self.num_shards, 2):
            raise DamagedSizes(self.layout.sizes_path)
        return sizes

    def shard(self, number: int) -> Shard:
        """Opens a shard, once it exists."""
        if not 0 <= number < self.num_shards:
            raise IndexError(
                f"{self.folder} has {self.num_shards:,} shards; there is no {number:,}"
            )
        return self._opened(number)

    def expect(self, numbers: Sequence[int]) -> None:
        """Announces the shards that are needed next, in this order: background processes make the
        missing ones, and other shards may be evicted."""
        numbers = list(numbers)
        with self._lock:
            if not self._processes or numbers == self._expected or self.is_complete:
                return
            self._expected = numbers
            missing = [n for n in numbers if not self.layout.shard_path(n).exists()]
            if self._cache is not None:
                self._cache.expect(numbers, len(missing))
            if self.workers is None and missing:
                self._start_workers()
            if self.workers is not None:
                self.workers.expect(missing)

    def close(self) -> None:
        """Stops the background processes and everything that waits for a shard. Open shards stay
        readable."""
        self._is_closed = True
        with self._lock:
            if self.workers is not None:
                self.workers.close()
            self.workers, self._processes = None, 0
            self._opened.cache_clear()

    def _open(self, number: int) -> Shard:
        shard = self._await(number)
        shard.verify_index()
        with self._lock:
            self._count(number, shard.info)
        return shard

    def _await(self, number: int) -> Shard:
        path, claim = self.layout.shard_path(number), self.layout.claim_path(number)
        alone_since = next_look = time.monotonic()
        while True:
            with contextlib.suppress(FileNotFoundError):
                return open_shard(path)
            self._check_open()
            now = time.monotonic()
            if now >= next_look:
                next_look = now + LOOK_SECONDS
                self._look_after_workers(number)
                if self._claims.is_live(claim):
                    alone_since, self._is_alone = now, False
                elif self.open_source is None:
                    self._lose_patience(path, now - alone_since)
                elif self._is_alone or now - alone_since >= GRACE_SECONDS:
                    self._is_alone = self.workers is None
                    self._make(number)
                    continue
            time.sleep(POLL_SECONDS)

    def _look_after_workers(self, number: int) -> None:
        """Replaces workers that were killed, and raises the error they reported for this shard."""
        with self._lock:
            if self.workers is None:
                return
            self.workers.replace_dead()
            if not self.workers.num_alive:  # they keep being killed, so shards are made here
                self.workers.close()
                self.workers, self._processes, self._is_alone = None, 0, True
            elif (error := self.workers.error(number)) is not None:
                raise error

    def _make(self, number: int) -> None:
        with self._making:
            if self._maker is None:
                source, tokenizer = self.parts()
                self._maker = ShardMaker(self.layout, source, tokenizer)
            self._maker.make(number, lambda documents, tokens: self._check_open())

    def _check_open(self) -> None:
        if self._is_closed:
            raise DataError(f"{self.folder} was closed while waiting for a shard")

    def _lose_patience(self, path: Path, seconds: float) -> None:
        if self.is_complete:
            raise DataError(f"{path} is missing from a complete corpus: build it again")
        if seconds >= PATIENCE_SECONDS:
            raise DataError(
                f"{path} is missing and no process is making it: run `overland data build` on "
                f"{self.layout.source}"
            )

    def _start_workers(self) -> None:
        if self._is_little:
            self._is_alone = True
        elif self.open_source is not None:
            source, tokenizer = self.parts()
            try:
                self.workers = Workers(self.layout, source, tokenizer, self._processes)
                self._is_alone = False
            except CannotStart:  # a source that only this process can read
                self._processes, self._is_alone = 0, True

    def parts(self) -> tuple[Source, Tokenizer | None]:
        assert self.open_source is not None
        return self.open_source(), self.tokenizer if self.kind == "text" else None

    def _count(self, number: int, info: ShardInfo) -> None:
        if info.num_documents and not info.num_bad and not info.counts:
            return
        self._unusual[number] = info
        found = self._unusual.values()
        if len(found) == self.num_shards and not any(one.num_documents for one in found):
            skipped = counted_words(self.counts)
            skipped += [f"{self.num_bad:,} empty or bad"] if self.num_bad else []
            raise DataError(
                ", ".join([f"{self.layout.source} is empty: it holds no documents", *skipped])
            )


class DamagedSizes(DataError):
    """Raised when the sizes of a built corpus are not those of its shards."""

    def __init__(self, path: Path) -> None:
        super().__init__(
            f"{path} is damaged: it does not have the sizes of the shards; delete it and build the "
            "corpus again, which keeps its shards"
        )


class ShardCache:
    """Limits the size of shards made on demand: those not in use are deleted, the least recently
    expected first. Shards of a build are kept."""

    def __init__(self, layout: CorpusLayout, max_bytes: int) -> None:
        self.layout, self.max_bytes = layout, max_bytes
        self._calls = 0
        self._expected: dict[int, int] = {}
        """The number of the last call that named each shard."""

    def expect(self, numbers: Sequence[int], num_missing: int) -> None:
        """Makes room for the shards that are needed now and missing."""
        self._calls += 1
        self._expected.update(dict.fromkeys(numbers, self._calls))
        if self.layout.keep_path.exists():
            return
        if self._calls == 1:
            sweep(self.layout)
        made = self.layout.made()
        oldest = self._calls - KEPT_CALLS
        self._expected = {
            n: call for n, call in self._expected.items() if n in made or call > oldest
        }
        total = sum(made.values())
        total += num_missing * max(made.values(), default=0)  # as large as any so far
        for number in sorted(made, key=lambda number: (self._expected.get(number, 0), number)):
            if total <= self.max_bytes or self._expected.get(number, 0) > oldest:
                return
            self.layout.shard_path(number).unlink(missing_ok=True)
            total -= made[number]
