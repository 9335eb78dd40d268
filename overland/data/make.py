"""One shard from its chunks: read, encode, check, write. A pure function of source, tokenizer,
policy and number, whoever runs it: a background process, a build, or a reader in need."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from itertools import islice
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from overland.data.arrays import Unfit, as_array, require_weights
from overland.data.claims import Claims
from overland.data.layout import Layout
from overland.data.shard import TOKENS, WEIGHTS, ShardInfo, write_shard
from overland.data.sources.marks import FileMark, changed_files
from overland.data.sources.source import FileSource, Source, list_chunks
from overland.data.tokenizer import Tokenizer
from overland.errors import DataError

# Handed to the tokenizer at once: a third of a second for one core, and enough documents to spread
# over the library's threads where it uses any.
BATCH_CHARACTERS = 1 << 20
BATCH_DOCUMENTS = 1024

Ids: TypeAlias = npt.NDArray[Any]
Tick: TypeAlias = Callable[[int, int], None]
"""Told after every batch how many documents and tokens it held; raises to give up."""


class Record(NamedTuple):
    """A document as the source gave it, and where it was."""

    chunk: str
    number: int
    document: Any


class Maker:
    """Makes shards of one corpus."""

    def __init__(self, layout: Layout, source: Source, tokenizer: Tokenizer | None) -> None:
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
            before = self._num_bad_so_far()
            return write_shard(
                path,
                self._documents(chunks, marks, touch_and_tick),
                self.layout.dtype,
                (chunks[0], chunks[-1]),
                lambda: self._num_bad_so_far() - before,
                claim.part,
                self.layout.channels,
            )
        finally:
            claim.release()

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
            for number, document in enumerate(_read(self.source, chunk)):
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
        """Files are checked by their sources; a source of somebody's own gives what it likes."""
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
                documents.append(_with_channels(record.document, channels, limit))
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


def _with_channels(document: Any, channels: Mapping[str, str], limit: int) -> Ids:
    """The ids of a document; where it has channels, an array with a field for each."""
    if not channels:
        return _ids(document, limit)
    expected = [TOKENS, *channels]
    if not isinstance(document, Mapping) or set(document) != set(expected):
        raise Unfit(f"is no dict of {', '.join(expected)}")
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
        raise Unfit(f"is {ids.dtype} of shape {ids.shape}, where ids were expected")
    if ids.min() < 0 or ids.max() >= limit:
        wrong = ids[(ids < 0) | (ids >= limit)][0]
        raise Unfit(f"has the id {wrong:,}, outside a vocabulary of {limit:,}")
    return ids


def _channel(given: Any, name: str, dtype: np.dtype[Any], num_tokens: int) -> Ids:
    """The elements of a channel, in the type that was declared. Floats are rounded to it, but what
    is no whole number, or too large a one, becomes no other number unnoticed."""
    values = as_array(given, name)
    if values.shape != (num_tokens,) or values.dtype.kind not in "biuf":
        found = f"{values.dtype} of shape {values.shape}"
        raise Unfit(f"has {name} as {found}, where a {dtype.name} per token was expected")
    with np.errstate(invalid="ignore", over="ignore"):
        stored = values.astype(dtype)
    if dtype.kind != "f" and (stored != values).any():
        wrong = values[stored != values][0]
        raise Unfit(f"has {wrong:,} in {name}, where a {dtype.name} was expected")
    if name == WEIGHTS:
        require_weights(stored, name)
    return stored


def _read(source: Source, chunk: str) -> Iterator[Any]:
    """Refuses what only a source of somebody's own can do wrong."""
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
