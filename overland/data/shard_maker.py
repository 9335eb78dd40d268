"""Makes one shard from its chunks: reads, checks and encodes documents, skips or refuses bad ones,
and writes the file, unless it exists or another process holds a claim on it.

A shard is a pure function of source, tokenizer, policy and number, whoever makes it: a background
process, a build, or a reader that needs it.

A claim, a small file next to the shard, says who is making it, so that no work is done twice. A
claim only saves work and protects nothing: a shard's bytes are the same whoever makes them, and
they are published atomically. A claim may therefore be wrong at times (two processes may take over
a stale one at once), but it must not last forever. It is stale if

- its process no longer exists, as seen from the same machine,
- it was not touched for `STALE_SECONDS` by the clock of the file system, which all nodes share, or
- it did not change for `STALE_SECONDS` while we watched, in case even that clock is wrong.
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
from typing import Any, BinaryIO, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from overland.data.arrays import Unfit, as_array, require_weights
from overland.data.layout import CorpusLayout
from overland.data.shard import TOKENS, WEIGHTS, ShardInfo, ShardWriter
from overland.data.sources.file_marks import changed_files
from overland.data.sources.source import BadDocument, Source
from overland.data.tokenizer import Tokenizer
from overland.errors import DataError
from overland.files import naming, replace_file, replaced
from overland.processes import host, is_running, this_process

# Passed to the tokenizer at once: a third of a second for one core, and enough documents to spread
# over the library's threads, if it uses any.
BATCH_CHARACTERS = 1 << 20
BATCH_DOCUMENTS = 1024
Ids: TypeAlias = npt.NDArray[Any]
Tick: TypeAlias = Callable[[int, int], None]
"""Called after every batch with its numbers of documents and tokens; raises to abort."""
STALE_SECONDS = 30.0
TOUCH_SECONDS = 5.0  # a claim may miss five touches, as when a file system pauses
LEFT_BEHIND_SECONDS = 3600.0  # age at which a partial shard counts as abandoned


class Record(NamedTuple):
    """A document as read from the source, and its place there."""

    chunk: str
    number: int
    document: Any


class ShardMaker:
    """Makes shards of one corpus."""

    def __init__(self, layout: CorpusLayout, source: Source, tokenizer: Tokenizer | None) -> None:
        self.layout, self.source, self.tokenizer = layout, source, tokenizer
        self.claims = Claims(layout.folder)
        self._num_bad = 0
        source.use_policy(layout.skip_bad)

    def make(self, number: int, tick: Tick = lambda documents, tokens: None) -> ShardInfo | None:
        """Makes a shard; returns None if it exists or someone else is working on it."""
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
            if path.exists():  # published between the check and the claim
                return None
            with replaced(path, beside=claim.part, shared=True) as file:
                return self._write(file, number, touch_and_tick)
        finally:
            claim.release()

    def _write(self, file: BinaryIO, number: int, tick: Tick) -> ShardInfo:
        layout = self.layout
        specials = int(layout.add_bos), int(layout.add_eos)
        shard = ShardWriter(file, layout.dtype, layout.channels, specials)
        chunks, marks = layout.chunks_of(number)
        bad_before, counts_before = self._num_bad_so_far(), self.counts()
        for batch in _batches(self._records(chunks)):
            documents = self._prepare(batch)
            tick(len(documents), sum(map(len, documents)))
            shard.add(documents)
        # Checked before publishing, so that all shards are made from the same files.
        for change in changed_files(self.source.root, marks):
            raise DataError(f"{change}, since {layout.folder} was laid out: build it again")
        num_bad = self._num_bad_so_far() - bad_before
        return shard.finish((chunks[0], chunks[-1]), num_bad, self.counts() - counts_before)

    def counts(self) -> Counter[str]:
        """Returns what the source left out or truncated so far, as requested."""
        return Counter(self.source.counts)

    def try_out(self, num_documents: int, num_characters: int) -> tuple[int, int, bool]:
        """Prepares the first documents of the source as for a shard, but writes nothing. Returns
        their number, the number of their tokens (for arrays: samples), and whether these are all
        documents."""
        tokens = documents = characters = 0
        for batch in _batches(islice(self._records(self.source.chunks()), num_documents)):
            prepared = self._prepare(batch)
            tokens += len(prepared) if self.layout.arrays else sum(map(len, prepared))
            documents += len(batch)
            characters += sum(map(_size, batch))
            if characters >= num_characters:
                return documents, tokens, False
        return documents, tokens, documents < num_documents

    def _records(self, chunks: Sequence[str]) -> Iterator[Record]:
        for chunk in chunks:
            bad_before, found = self.source.num_bad, 0
            try:
                for number, document in enumerate(self.source.read(chunk)):
                    yield Record(chunk, number, document)
                    found += 1
            except BadDocument as error:
                raise DataError(f"{error}; {self._skipping} skips it") from None
            found += self.source.num_bad - bad_before
            expected = self.source.num_documents(chunk)
            if expected is not None and found != expected:
                raise DataError(
                    f"{self._place(chunk)} has {found:,} documents, but {expected:,} were expected"
                )

    def _prepare(self, batch: list[Record]) -> list[Ids]:
        """Converts documents to what is stored: the tokens of text, the bytes of arrays, which must
        match what the source declares, or valid token ids with their channels."""
        layout = self.layout
        if layout.kind == "text":
            return self._encode(batch)
        limit, channels = layout.vocab_size or 1 << 32, layout.channels or {}
        documents: list[Ids] = []
        for record in batch:
            try:
                if layout.arrays is not None:
                    documents.append(layout.arrays.encode(record.document))
                else:
                    documents.append(_with_channels(record.document, channels, limit))
            except Unfit as error:
                self._bad(record, str(error))
        return documents

    def _encode(self, batch: list[Record]) -> list[Ids]:
        assert self.tokenizer is not None
        batch = [record for record in batch if self._is_text(record)]
        if not batch:
            return []
        encoded = self.tokenizer.encode_documents([record.document for record in batch])
        num_added = self.layout.add_bos + self.layout.add_eos
        documents = []
        for ids in encoded:
            if len(ids) > num_added:
                documents.append(ids)
            else:
                self._num_bad += 1  # skipped whatever the policy: nothing is lost
        return documents

    def _is_text(self, record: Record) -> bool:
        """Checks a document; only file sources have checked theirs, user-defined ones have not."""
        if not isinstance(record.document, str):
            self._bad(record, f"is {type(record.document).__name__}; expected text")
            return False
        if not record.document.isascii():
            try:
                record.document.encode()
            except UnicodeEncodeError:
                self._bad(record, "has half of a surrogate pair, so it is not UTF-8 text")
                return False
        return True

    def _bad(self, record: Record, what: str) -> None:
        if not self.layout.skip_bad:
            where = f"{self._place(record.chunk)}: document {record.number:,}"
            raise DataError(f"{where} {what}; {self._skipping} skips it")
        self._num_bad += 1

    @property
    def _skipping(self) -> str:
        """The option that skips bad documents, for whoever builds or trains."""
        is_build = self.layout.keep_path.exists()
        return "--skip-bad" if is_build else 'data.bad_documents = "skip"'

    def _num_bad_so_far(self) -> int:
        return self._num_bad + self.source.num_bad

    def _place(self, chunk: str) -> str:
        return str(self.source.root / chunk)


def _with_channels(document: Any, channels: Mapping[str, str], limit: int) -> Ids:
    """Returns the token ids of a document or, if it has channels, an array with a field for
    each."""
    if not channels:
        return _ids(document, limit)
    expected = [TOKENS, *channels]
    if not isinstance(document, Mapping) or set(document) != set(expected):
        raise Unfit(f"is not a dict of {', '.join(expected)}")
    ids = _ids(document[TOKENS], limit)
    joined = np.empty(len(ids), [(TOKENS, ids.dtype), *channels.items()])
    joined[TOKENS] = ids
    for name, dtype in channels.items():
        joined[name] = _channel(document[name], name, np.dtype(dtype), len(ids))
    return joined


def _ids(values: Any, limit: int) -> Ids:
    ids = as_array(values, TOKENS)
    if not ids.size:
        raise Unfit("holds no tokens")
    if ids.dtype.kind not in "iu" or ids.ndim != 1:
        raise Unfit(f"is {ids.dtype} of shape {ids.shape}; expected token ids")
    if ids.min() < 0 or ids.max() >= limit:
        wrong = ids[(ids < 0) | (ids >= limit)][0]
        raise Unfit(f"has the id {wrong:,}, which is outside a vocabulary of {limit:,}")
    return ids


def _channel(given: Any, name: str, dtype: np.dtype[Any], num_tokens: int) -> Ids:
    """Returns the elements of a channel in the declared type. Floats may be rounded, but a value
    that an integer type cannot hold exactly is an error."""
    values = as_array(given, name)
    if values.shape != (num_tokens,) or values.dtype.kind not in "biuf":
        found = f"{values.dtype} of shape {values.shape}"
        raise Unfit(f"has {name} as {found}; expected a {dtype.name} per token")
    with np.errstate(invalid="ignore", over="ignore"):
        stored = values.astype(dtype)
    if dtype.kind != "f" and (stored != values).any():
        wrong = values[stored != values][0]
        raise Unfit(f"has {wrong:,} in {name}; expected a {dtype.name}")
    if name == WEIGHTS:
        require_weights(stored, name)
    return stored


def _size(record: Record) -> int:
    """Returns the approximate size of a document, in characters, tokens or bytes."""
    document = record.document
    parts = document.values() if isinstance(document, Mapping) else [document]
    return sum(
        int(getattr(one, "nbytes", len(one) if isinstance(one, Sized) else 1)) for one in parts
    )


def _batches(records: Iterable[Record]) -> Iterator[list[Record]]:
    """Yields documents that are prepared at once."""
    batch: list[Record] = []
    size = 0
    for record in records:
        batch.append(record)
        size += _size(record)
        if size >= BATCH_CHARACTERS or len(batch) >= BATCH_DOCUMENTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


_numbers = itertools.count()


class Claim:
    """A claim that this process holds."""

    def __init__(self, path: Path, owner: dict[str, Any]) -> None:
        self.path, self.owner = path, owner
        self.part = _part(path, owner)
        """The holder's temporary file for the shard."""
        self._touched = time.monotonic()

    def touch(self) -> None:
        """Keeps the claim fresh; cheap enough to call often."""
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
        """Takes the claim at `path`; returns None if someone else holds it."""
        owner = {**this_process(), "number": next(_numbers)}
        try:
            with naming(path), path.open("xb") as file:
                file.write(json.dumps(owner).encode())
            return Claim(path, owner)
        except FileExistsError:
            if self.is_live(path):
                return None
        _remove_part(path)
        replace_file(path, json.dumps(owner), shared=True, durable=False)
        return Claim(path, owner) if _owner_of(path) == owner else None

    def is_live(self, path: Path) -> bool:
        """Whether someone holds this claim and is still working."""
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
        """Returns the time by the clock of the file system, which stamps the claims."""
        self._clock.touch()
        return self._clock.stat().st_mtime


def sweep(layout: CorpusLayout) -> None:
    """Removes files left behind by processes that were killed."""
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
    """When the claim was first seen in this state, by our own clock."""


def _owner_of(path: Path) -> dict[str, Any] | None:
    """Returns the holder, or None if there is none or the file is just being written."""
    try:
        owner = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    return owner if isinstance(owner, dict) else None


def _remove_part(path: Path) -> None:
    """Removes the partial shard of a claim's dead holder. A holder on another machine may be alive
    and only slow, so its file is kept."""
    owner = _owner_of(path)
    if owner is not None and owner.get("host") == host() and not is_running(owner):
        with contextlib.suppress(OSError):
            _part(path, owner).unlink(missing_ok=True)


def _part(path: Path, owner: dict[str, Any]) -> Path:
    on = str(owner.get("host")).replace("/", "-")
    return path.with_name(f"{path.stem}.{on}.{owner.get('process')}.{owner.get('number')}.part")
