"""Summarizes a source: reads everything once, and counts its documents, bad ones, lengths and
tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from overland.data.arrays import Field
from overland.data.shard import TOKENS
from overland.data.sources.source import Document, Source
from overland.errors import DataError
from overland.words import number_of

ENCODED_AT_ONCE = 256  # documents whose tokens are counted together


@dataclass
class SourceSummary:
    """Counts of a source. Lengths are in characters for text, in tokens for token ids, and in bytes
    for arrays."""

    source: Source
    num_chunks: int
    num_documents: int = 0
    num_bad: int = 0
    total: int = 0
    shortest: int = 0
    longest: int = 0
    by_power: dict[int, int] = field(default_factory=dict)
    """Number of documents by the number of bits of their length."""
    samples: list[Document] = field(default_factory=list)
    num_tokens: int | None = None
    """For text, if a tokenizer counted them."""

    @property
    def unit(self) -> str:
        return {"text": "characters", "tokens": "tokens", "arrays": "bytes"}[self.source.kind]

    @property
    def format(self) -> str:
        return self.source.format or self.source.class_name

    def histogram(self) -> list[tuple[int, int, int]]:
        """Returns (shortest, longest, documents) for each power of two, without gaps."""
        powers = range(min(self.by_power), max(self.by_power) + 1)
        return [(2**p // 2, max(2**p - 1, 0), self.by_power.get(p, 0)) for p in powers]

    def add(self, document: Document) -> None:
        length = length_of(document)
        self.shortest = min(self.shortest, length) if self.num_documents else length
        self.longest = max(self.longest, length)
        self.num_documents += 1
        self.total += length
        power = length.bit_length()
        self.by_power[power] = self.by_power.get(power, 0) + 1

    def to_json(self) -> dict[str, Any]:
        source = self.source
        return {
            "format": self.format,
            "kind": source.kind,
            "column": source.column,
            "columns": dict(source.columns),
            "files": len(source.files),
            "not_read": source.not_read,
            "together": source.together,
            "chunks": self.num_chunks,
            "documents": self.num_documents,
            "bad": self.num_bad,
            self.unit: self.total,
            **({"tokens": self.num_tokens} if self.num_tokens is not None else {}),
            "shortest": self.shortest,
            "longest": self.longest,
            "histogram": [
                {"from": first, "to": last, "documents": count}
                for first, last, count in self.histogram()
            ],
            "samples": [plain(one) for one in self.samples],
        }


def summarize(
    source: Source,
    num_samples: int = 0,
    each: Callable[[Document], None] = lambda document: None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    encode: Callable[[list[str]], Sequence[Sized]] | None = None,
) -> SourceSummary:
    """Reads a whole source in order, and calls `each` with every document; `encode` is of the
    tokenizer that counts the tokens of text."""
    chunks = source.chunks()
    summary = SourceSummary(source, len(chunks))
    texts: list[str] = []

    def count_tokens() -> None:
        if encode is not None and texts:
            summary.num_tokens = (summary.num_tokens or 0) + sum(map(len, encode(texts)))
            texts.clear()

    for done, chunk in enumerate(chunks):
        progress(done, len(chunks))
        before = summary.num_documents + source.num_bad
        for document in source.read(chunk):
            if summary.num_documents < num_samples:
                summary.samples.append(document)
            summary.add(document)
            each(document)
            if encode is not None and isinstance(document, str):
                texts.append(document)
            if len(texts) == ENCODED_AT_ONCE:
                count_tokens()
        found = summary.num_documents + source.num_bad - before
        expected = source.num_documents(chunk)
        if expected is not None and found != expected:
            raise DataError(f"{chunk} has {found:,} documents, but {expected:,} were expected")
    count_tokens()
    summary.num_bad = source.num_bad
    if not summary.num_documents:
        bad = f", {number_of(summary.num_bad, 'bad one')} skipped" if summary.num_bad else ""
        raise DataError(f"{source.place} is empty: it holds no documents{bad}")
    return summary


def document_hash(document: Document) -> str:
    """Returns the SHA-256 of a text's UTF-8 bytes, of ids as little-endian int64, or of the names
    and bytes of arrays."""
    if isinstance(document, str):
        return hashlib.sha256(document.encode()).hexdigest()
    if not isinstance(document, Mapping):
        return hashlib.sha256(np.asarray(document, "<i8").tobytes()).hexdigest()
    digest = hashlib.sha256()
    for name, values in sorted(document.items()):
        digest.update(name.encode() + b"\0" + np.ascontiguousarray(values).tobytes())
    return digest.hexdigest()


def length_of(document: Document) -> int:
    """Returns the length in characters, tokens or bytes."""
    if not isinstance(document, Mapping):
        return len(document)
    if TOKENS in document:
        return len(document[TOKENS])
    return sum(np.asarray(values).nbytes for values in document.values())


def plain(document: Document) -> Any:
    """Returns the document as JSON values."""
    if isinstance(document, Mapping):
        return {name: np.asarray(values).tolist() for name, values in document.items()}
    return document if isinstance(document, str) else document.tolist()


def describe_array(values: Any) -> str:
    """Describes an array: its type, shape and range."""
    values = np.asarray(values)
    about = Field(values.dtype.str, values.shape)
    if values.ndim == 0:
        return f"{about}: {values}"
    low, high, mean = (float(one) for one in (values.min(), values.max(), values.mean()))
    return f"{about}, from {low:.4g} to {high:.4g}, mean {mean:.4g}"
