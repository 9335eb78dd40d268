"""Lays out the folder of a corpus: decides which chunks form which shard, records the tokenizer and
marks of the files, and decides whether an existing folder is reused.

Consecutive chunks form a shard: as many as come closest to `shard_documents` documents or 64 MiB,
whichever is less. This depends only on the source's list of chunks, so a corpus has the same shards
whether they are made ahead of time or on demand. Its folder:

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
import hashlib
import json
import os
import shutil
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from overland.data import shard
from overland.data.arrays import Arrays
from overland.data.sources.compression import times_smaller
from overland.data.sources.file_marks import FileMark, digest_of, unsure_of
from overland.data.sources.source import Kind, Source
from overland.data.tokenizer import Tokenizer
from overland.errors import ChoiceRequired, DataError
from overland.files import new_file, publish, sync

# Part of every fingerprint, from which the order of a run follows. Shards hold the same documents
# in every format, so a new format does not change it.
CONTENT = 1
FORMAT = 1
SHARDS_PER_FOLDER = 1000
SHARD_DOCUMENTS = 4096
SHARD_BYTES = 64 << 20  # of text: 15 M tokens, which take one core about ten seconds
DOCUMENT_BYTES = 4096  # a web page; used if the number of documents in a file is unknown
CHUNK_DOCUMENTS = 1000  # used if a source gives no numbers
OWN_FIELDS = (shard.TOKENS, "labels", "positions", "documents")  # names that a batch itself uses
# Only in the corpus.json of corpora that have them.
OPTIONAL = ("fields", "channels", "made_by", "column")

Report = Callable[[str], None]


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
                "the folder, and it will be rebuilt"
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


def lay_out(
    name: str,
    source: Source,
    tokenizer: Tokenizer | None,
    root: Path,
    *,
    shard_documents: int = SHARD_DOCUMENTS,
    skip_bad: bool = False,
    vocab_size: int | None = None,
    report: Report = lambda message: None,
) -> Path:
    """Returns the folder of the corpus for these arguments, which is found under `root` or created
    there.

    An existing corpus is reused, under any name, if the request was the same and no file has
    changed since, judging by sizes and times. Two processes may call this at the same time.
    """
    policy, chunks = policy_of(name, source, tokenizer, skip_bad, vocab_size), list(source.chunks())
    about = [FORMAT, CONTENT, shard_documents, SHARD_BYTES, policy]
    described = [source.class_name, source.format, source.column, source.dtype]
    described.append(source.identity(name))
    request = digest_of([about, described, _digest(chunks)])
    found = _find(name, source, root, request, report)
    if found is not None:
        return found
    if not chunks:
        raise DataError(f"{source.place} is empty: it lists no chunks")
    marks, fields = source.marks(), policy.get("fields")
    sample_bytes = Arrays.declared(name, fields).num_bytes if fields is not None else 0
    weights = weigh(source, chunks, marks, sample_bytes)
    groups = group(chunks, weights, shard_documents)
    content = source.fingerprint(marks) if marks else ""
    fingerprint = digest_of([request, content, [len(group) for group in groups]])[:16]
    layout = CorpusLayout(
        name=name,
        fingerprint=fingerprint,
        request=request,
        source=str(source.place),
        **policy,
        num_shards=len(groups),
        documents_per_shard=sum(documents for documents, _ in weights) / len(groups),
        folder=root / f"{name.replace('/', '-')}-{fingerprint}",
        column=source.column,
    )
    made_by = _tokenizer_of(source, tokenizer)
    files = made_by.files() if made_by is not None else {}
    _write(layout, _lines(source, groups, marks), files)
    return layout.folder


def policy_of(
    name: str,
    source: Source,
    tokenizer: Tokenizer | None,
    skip_bad: bool,
    vocab_size: int | None,
) -> dict[str, Any]:
    """Returns how documents become tokens; those of a token source are used as they are."""
    kind = source.kind
    tokenizer = _tokenizer_of(source, tokenizer)
    if kind == "arrays":
        vocab_size = None
    elif tokenizer is not None:
        vocab_size = tokenizer.vocab_size
    elif kind == "text":
        raise ChoiceRequired(f"{name} is text: specify the tokenizer for it with ", "tokenizer", "")
    is_short = vocab_size is not None and vocab_size <= 1 << 16
    ids = "<u2" if is_short else "<u4"
    return {
        "kind": kind,
        "dtype": shard.BYTES if kind == "arrays" else ids,
        "vocab_size": vocab_size,
        "bos_id": tokenizer.bos_id if tokenizer is not None else None,
        "eos_id": tokenizer.eos_id if tokenizer is not None else None,
        "add_bos": tokenizer is not None and tokenizer.add_bos,
        "add_eos": tokenizer is not None and tokenizer.add_eos,
        "tokenizer": tokenizer.fingerprint if tokenizer is not None else None,
        "skip_bad": skip_bad,
        **_further(name, kind, source),
    }


def _tokenizer_of(source: Source, tokenizer: Tokenizer | None) -> Tokenizer | None:
    """Returns the tokenizer of a source: the given one for text; conversations have their own."""
    return tokenizer if source.kind == "text" else source.tokenizer


def _further(name: str, kind: Kind, source: Source) -> dict[str, Any]:
    """Returns the keys that only some corpora have, so that the others keep their fingerprints."""
    if kind == "arrays":
        return {"fields": Arrays.declared(name, source.fields).to_json()}
    channels, made_by = source.channels, source.made_by
    if kind != "tokens" or not channels:
        return {}
    # A channel is one number per token, like a scalar field.
    declared = Arrays.declared(name, {channel: (one, ()) for channel, one in channels.items()})
    for channel in declared.fields:
        if channel in OWN_FIELDS:
            raise DataError(f"{name}: a channel cannot be named {channel!r}")
    about = {"channels": {channel: one.dtype for channel, one in declared.fields.items()}}
    return about if made_by is None else {**about, "made_by": made_by}


def _find(name: str, source: Source, root: Path, request: str, report: Report) -> Path | None:
    """Finds a corpus under `root` with the same request, whose files have not changed."""
    # Hidden folders are still being written.
    found = (path.parent for path in sorted(root.glob("*/corpus.json")))
    folders = [folder for folder in found if not folder.name.startswith(".")]
    for folder in sorted(folders, key=lambda folder: not folder.name.startswith(f"{name}-")):
        with contextlib.suppress(DataError):  # of another version, or being deleted
            layout = read_layout(folder)
            if layout.request != request:
                continue
            changed = source_changes(folder, source)
            if not changed:
                _say_what_is_unsure(folder, source, report)
                return folder
            if layout.source != str(source.place):  # another folder with the same file names
                continue
            more = f" (and {len(changed) - 1:,} more)" if len(changed) > 1 else ""
            report(f"{changed[0]}{more}: {name} is rebuilt")
    return None


def _say_what_is_unsure(folder: Path, source: Source, report: Report) -> None:
    """Reports touched files that count as unchanged only because samples of them match."""
    unsure = unsure_of(source.root, read_layout(folder).all_chunks()[1])
    if unsure:
        more = f" (and {len(unsure) - 1:,} more)" if len(unsure) > 1 else ""
        report(
            f"note: {source.root / unsure[0]}{more} was touched, copied or edited after {folder} "
            "was laid out. Its size and samples of its content are the same, so it counts as "
            "unchanged; this corpus has no hash of the whole file"
        )


def weigh(
    source: Source, chunks: Sequence[str], marks: Mapping[str, FileMark], sample_bytes: int
) -> list[tuple[float, float]]:
    """Estimates the documents and bytes of each chunk; a sample of arrays has `sample_bytes`."""
    if not marks:
        counts = [source.num_documents(chunk) or CHUNK_DOCUMENTS for chunk in chunks]
        return [(count, count * sample_bytes) for count in counts]
    files = [source.files_of(chunk) for chunk in chunks]
    sharers = Counter(file for names in files for file in names)
    sizes = {
        file: marks[file].size * times_smaller(file) / count for file, count in sharers.items()
    }
    weights = []
    for chunk, names in zip(chunks, files, strict=True):
        size = source.num_bytes(chunk) or sum(sizes[file] for file in names)
        documents = source.num_documents(chunk)
        weights.append((max(1, size / DOCUMENT_BYTES) if documents is None else documents, size))
    return weights


def group(
    chunks: Sequence[str], weights: Sequence[tuple[float, float]], shard_documents: int
) -> list[list[str]]:
    """Returns runs of chunks, each of which ends where it is closest to being full."""
    groups: list[list[str]] = [[]]
    filled = 0.0
    for chunk, (documents, size) in zip(chunks, weights, strict=True):
        share = max(documents / shard_documents, size / SHARD_BYTES)
        if groups[-1] and filled + share - 1 > 1 - filled:
            groups.append([])
            filled = 0.0
        groups[-1].append(chunk)
        filled += share
    return groups


def _lines(
    source: Source, groups: Sequence[Sequence[str]], marks: Mapping[str, FileMark]
) -> Iterator[bytes]:
    rest = dict(marks)
    for group in groups:
        files = dict.fromkeys(file for chunk in group for file in source.files_of(chunk))
        yield json.dumps([group, {file: marks[file] for file in files}]).encode() + b"\n"
        for file in files:
            rest.pop(file, None)
    yield json.dumps([[], rest]).encode() + b"\n"


def _write(layout: CorpusLayout, lines: Iterator[bytes], tokenizer: Mapping[str, bytes]) -> None:
    """Writes the folder, which appears complete or not at all."""
    root = layout.folder.parent
    root.mkdir(parents=True, exist_ok=True)
    beside = root / f".{layout.folder.name}.{uuid.uuid4().hex}"
    beside.mkdir()
    try:
        for name, data in tokenizer.items():
            (beside / "tokenizer").mkdir(exist_ok=True)
            with new_file(beside / "tokenizer" / name) as file:
                file.write(data)
        borders = [0]
        with new_file(beside / "chunks.jsonl") as file:
            for line in lines:
                borders.append(borders[-1] + file.write(line))
        with new_file(beside / "lines.npy") as file:
            np.save(file, np.asarray(borders, np.int64))
        about = {"format": FORMAT, **asdict(layout)}
        for key in ("folder", *(key for key in OPTIONAL if about[key] is None)):
            del about[key]
        with new_file(beside / "corpus.json") as file:
            file.write((json.dumps(about, indent=1) + "\n").encode())
        try:
            publish(beside, layout.folder)
        except OSError:
            if not is_corpus(layout.folder):  # otherwise another process was faster
                raise
        sync(root)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _digest(names: Sequence[str]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name in names:
        digest.update(f"{len(name)}:{name}".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()
