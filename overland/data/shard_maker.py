"""One shard from its chunks: read, encode, check, write.

A shard is a pure function of source, tokenizer, policy and number, whoever makes it: a background
process, a build, or a reader in need.

Who is making which shard is told by a claim, a small file beside it, so that two do not do the same
work. A claim saves work and guards nothing: a shard's bytes are the same whoever makes them, and
they are published in one step. So a claim may be wrong at times (two take over a stale one at once)
but must never last for ever. It is stale if

- its process is gone, seen from the same machine,
- it was not touched for `STALE_SECONDS` by the clock of the file system, which all nodes share, or
- it did not change for `STALE_SECONDS` while we watched, should even that clock be wrong.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy.typing as npt

from overland.data.arrays import Unfit, with_channels
from overland.data.corpus_folder import CorpusLayout
from overland.data.shard import ShardInfo, write_shard
from overland.data.sources.marks import FileMark, changed_files
from overland.data.sources.source import FileSource, Source, list_chunks
from overland.data.tokenizer import Tokenizer
from overland.errors import DataError
from overland.files import replace_file
from overland.processes import host, is_running, this_process

# Handed to the tokenizer at once: a third of a second for one core, and enough documents to spread
# over the library's threads where it uses any.
BATCH_CHARACTERS = 1 << 20
BATCH_DOCUMENTS = 1024
Ids: TypeAlias = npt.NDArray[Any]
Tick: TypeAlias = Callable[[int, int], None]
"""Told after every batch how many documents and tokens it held; raises to give up."""
STALE_SECONDS = 30.0
TOUCH_SECONDS = 5.0  # a claim may miss five touches, as when a file system pauses
LEFT_BEHIND_SECONDS = 3600.0  # a half-made shard that nobody has written to for so long


class Record(NamedTuple):
    """A document as the source gave it, and where it was."""

    chunk: str
    number: int
    document: Any


class ShardMaker:
    """Makes shards of one corpus."""

    def __init__(self, layout: CorpusLayout, source: Source, tokenizer: Tokenizer | None) -> None:
        self.layout, self.source, self.tokenizer = layout, source, tokenizer
        self.claims = Claims(layout.folder)
        self._num_bad = 0
        if hasattr(source, "skip_bad"):
            source.skip_bad = layout.skip_bad

    def make(self, number: int, tick: Tick = lambda documents, tokens: None) -> ShardInfo | None:
        """Makes a shard; None if it is there, or if somebody else is at work on it."""
        path = self.layout.shard_path(number)
        if path.exists():
            return None
        path.parent.mkdir(parents=True, exist_ok=True)
        claim = self.claims.take(self.layout.claim_path(number))
        if claim is None:
            return None

        def touch_and_tick(documents: int, tokens: int) -> None:
            claim.touch()
            tick(documents, tokens)

        try:
            if path.exists():  # published between the look and the claim
                return None
            chunks, marks = self.layout.chunks_of(number)
            before, counted = self._num_bad_so_far(), self.counts()
            return write_shard(
                path,
                self._documents(chunks, marks, touch_and_tick),
                self.layout.dtype,
                (chunks[0], chunks[-1]),
                lambda: self._num_bad_so_far() - before,
                claim.part,
                self.layout.channels,
                lambda: self.counts() - counted,
            )
        finally:
            claim.release()

    def counts(self) -> Counter[str]:
        """What the source has left out or cut so far, as asked for."""
        return Counter(getattr(self.source, "counts", {}))

    def try_out(self, num_documents: int, num_characters: int) -> tuple[int, int, bool]:
        """Prepares the first documents of the source as a shard's are, and writes nothing; returns
        how many there were, how many tokens they have (arrays: samples), and whether that is
        all."""
        tokens = documents = characters = 0
        for batch in _batches(islice(self._records(list_chunks(self.source)), num_documents)):
            prepared = self._prepare(batch)
            tokens += len(prepared) if self.layout.arrays else sum(map(len, prepared))
            documents += len(batch)
            characters += sum(map(_size, batch))
            if characters >= num_characters:
                return documents, tokens, False
        return documents, tokens, documents < num_documents

    def _documents(
        self, chunks: Sequence[str], marks: dict[str, FileMark], tick: Tick
    ) -> Iterator[Ids]:
        for batch in _batches(self._records(chunks)):
            documents = self._prepare(batch)
            tick(len(documents), sum(map(len, documents)))
            yield from documents
        # Before it is published, so that no shard is made from other files than the rest.
        if isinstance(self.source, FileSource):
            for change in changed_files(self.source.root, marks):
                raise DataError(f"{change}, since {self.layout.folder} was laid out: build it anew")

    def _records(self, chunks: Sequence[str]) -> Iterator[Record]:
        announced = getattr(self.source, "num_documents", lambda chunk: None)
        for chunk in chunks:
            bad_before, found = getattr(self.source, "num_bad", 0), 0
            for number, document in enumerate(_documents_of(self.source, chunk)):
                yield Record(chunk, number, document)
                found += 1
            found += getattr(self.source, "num_bad", 0) - bad_before
            expected = announced(chunk)
            if expected is not None and found != expected:
                raise DataError(
                    f"{self._place(chunk)} holds {found:,} documents where {expected:,} were "
                    "announced"
                )

    def _encode(self, batch: list[Record]) -> list[Ids]:
        assert self.tokenizer is not None
        batch = [record for record in batch if self._is_text(record)]
        if not batch:
            return []
        encoded = self.tokenizer.encode_documents([record.document for record in batch])
        num_added = self.layout.add_bos + self.layout.add_eos
        documents = []
        for record, ids in zip(batch, encoded, strict=True):
            if len(ids) > num_added:
                documents.append(ids)
            else:
                self._bad(record, "tokenises to nothing")
        return documents

    def _is_text(self, record: Record) -> bool:
        """Checks a document: files are checked by their sources, a user's own source is not."""
        if not isinstance(record.document, str):
            self._bad(record, f"is {type(record.document).__name__}, where text was expected")
            return False
        if not record.document.isascii():
            try:
                record.document.encode()
            except UnicodeEncodeError:
                self._bad(record, "has half of a surrogate pair, no UTF-8 text")
                return False
        return True

    @property
    def _prepare(self) -> Callable[[list[Record]], list[Ids]]:
        """How documents become what is stored."""
        if self.layout.kind == "arrays":
            return self._pack
        return self._encode if self.layout.kind == "text" else self._check

    def _pack(self, batch: list[Record]) -> list[Ids]:
        """Arrays as the bytes of a record, if they are what the source has declared."""
        assert self.layout.arrays is not None
        documents: list[Ids] = []
        for record in batch:
            try:
                documents.append(self.layout.arrays.encode(record.document))
            except Unfit as error:
                self._bad(record, str(error))
        return documents

    def _check(self, batch: list[Record]) -> list[Ids]:
        """Ids as they are stored, if they are ids, with their channels."""
        limit = self.layout.vocab_size or 1 << 32
        channels = self.layout.channels or {}
        documents = []
        for record in batch:
            try:
                documents.append(with_channels(record.document, channels, limit))
            except Unfit as error:
                self._bad(record, str(error))
        return documents

    def _bad(self, record: Record, what: str) -> None:
        if not self.layout.skip_bad:
            is_build = self.layout.keep_path.exists()
            option = "--skip-bad" if is_build else 'data.bad_documents = "skip"'
            raise DataError(
                f"{self._place(record.chunk)}: document {record.number:,} {what}; {option} skips it"
            )
        self._num_bad += 1

    def _num_bad_so_far(self) -> int:
        return self._num_bad + int(getattr(self.source, "num_bad", 0))

    def _place(self, chunk: str) -> str:
        root = getattr(self.source, "root", None)
        return chunk if root is None else str(root / chunk)


def _documents_of(source: Source, chunk: str) -> Iterator[Any]:
    """Reads a chunk; refuses what only a user's own source can do wrong."""
    documents = source.read(chunk)
    if not isinstance(documents, Iterable):
        raise DataError(
            f"read({chunk!r}) of {type(source).__name__} returned "
            f"{type(documents).__name__}, expected its documents, one after another"
        )
    return iter(documents)


def _size(record: Record) -> int:
    """Characters, tokens or bytes of a document, about."""
    if isinstance(record.document, Mapping):
        return sum(map(_length, record.document.values()))
    return _length(record.document)


def _length(values: Any) -> int:
    return int(getattr(values, "nbytes", len(values) if isinstance(values, Sized) else 1))


def _batches(records: Iterator[Record]) -> Iterator[list[Record]]:
    batch: list[Record] = []
    length = 0
    for record in records:
        batch.append(record)
        length += _size(record)
        if length >= BATCH_CHARACTERS or len(batch) >= BATCH_DOCUMENTS:
            yield batch
            batch, length = [], 0
    if batch:
        yield batch


_numbers = itertools.count()


class Claim:
    """A claim that this process holds."""

    def __init__(self, path: Path, owner: dict[str, Any]) -> None:
        self.path, self.owner = path, owner
        self.part = _part(path, owner)
        """Where the holder lets the shard grow."""
        self._touched = time.monotonic()

    def touch(self) -> None:
        """Keeps it fresh; called often, does little."""
        now = time.monotonic()
        if now - self._touched >= TOUCH_SECONDS:
            self._touched = now
            with contextlib.suppress(FileNotFoundError):
                os.utime(self.path)

    def release(self) -> None:
        if _owner_of(self.path) == self.owner:
            self.path.unlink(missing_ok=True)


class Claims:
    """Claims on the shards of one corpus, as this process sees them."""

    def __init__(self, folder: Path) -> None:
        self._clock = folder / ".clock"
        self._seen: dict[Path, _Sight] = {}

    def take(self, path: Path) -> Claim | None:
        """The claim at `path`, or None if somebody else holds it."""
        owner = {**this_process(), "number": next(_numbers)}
        try:
            with path.open("xb") as file:
                file.write(json.dumps(owner).encode())
            return Claim(path, owner)
        except FileExistsError:
            if self.is_live(path):
                return None
        _remove_part(path)
        replace_file(path, json.dumps(owner), shared=True, durable=False)
        return Claim(path, owner) if _owner_of(path) == owner else None

    def is_live(self, path: Path) -> bool:
        """Whether somebody holds this claim and is at work."""
        try:
            stat = path.stat()
        except FileNotFoundError:
            self._seen.pop(path, None)
            return False
        owner = _owner_of(path)
        if owner is not None and owner.get("host") == host() and not is_running(owner):
            return False
        sight = self._seen.get(path)
        if sight is None or (sight.inode, sight.time_ns) != (stat.st_ino, stat.st_mtime_ns):
            sight = self._seen[path] = _Sight(stat.st_ino, stat.st_mtime_ns, time.monotonic())
        if time.monotonic() - sight.since >= STALE_SECONDS:
            return False
        return self.now() - stat.st_mtime < STALE_SECONDS

    def now(self) -> float:
        """The time by the clock that stamps the claims."""
        self._clock.touch()
        return self._clock.stat().st_mtime


def sweep(layout: CorpusLayout) -> None:
    """Removes what processes left that were killed at work."""
    claims = Claims(layout.folder)
    now = claims.now()
    for path in (layout.folder / "shards").glob("*/*"):
        with contextlib.suppress(FileNotFoundError):
            if path.suffix == ".claim":
                if not claims.is_live(path):
                    path.unlink()
            elif path.suffix != ".shard" and now - path.stat().st_mtime > LEFT_BEHIND_SECONDS:
                path.unlink()


class _Sight(NamedTuple):
    inode: int
    time_ns: int
    since: float
    """By our own clock, when the claim was first seen like this."""


def _owner_of(path: Path) -> dict[str, Any] | None:
    """Who holds it; None if nobody does or it is just being written."""
    try:
        owner = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    return owner if isinstance(owner, dict) else None


def _remove_part(path: Path) -> None:
    """Removes what the dead holder of a claim left half done. One on another machine may be alive
    and only slow: its file stays."""
    owner = _owner_of(path)
    if owner is not None and owner.get("host") == host() and not is_running(owner):
        with contextlib.suppress(OSError):
            _part(path, owner).unlink(missing_ok=True)


def _part(path: Path, owner: dict[str, Any]) -> Path:
    return path.with_name(f"{path.stem}.{_owner_name(owner)}.part")


def _owner_name(owner: dict[str, Any]) -> str:
    host = str(owner.get("host")).replace("/", "-")
    return f"{host}.{owner.get('process')}.{owner.get('number')}"
