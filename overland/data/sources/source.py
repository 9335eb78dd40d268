"""What a source is: the methods that a user's own needs and the defaults of the rest, the kinds of
documents, which files below a folder are read, and what happens to a bad document.

A `Source` lists chunks and reads each front to back; everything else about it has a default. A
user's own needs only these two methods, and `as_source` adds the rest. Sources that read files know
more (`FileSource`): their columns, the number of documents in a chunk if it is known without
reading it, and a mark of each file to detect changes.

A document is a text, token ids, named arrays, or a whole record; `kind` says which, and defaults to
"text". A source of arrays declares its `fields`, see arrays.py. Token ids may have channels, with
one element per id, such as its loss weight: a source declares them, `channels = {"weights":
"float32"}`, and its documents are dicts with `tokens` and each of the channels.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from overland.data.sources.file_marks import FileMark, changed_files, digest_of, marks_of_files
from overland.errors import DataError
from overland.words import number_of

Kind = Literal["text", "tokens", "arrays", "records"]
Tokens: TypeAlias = npt.NDArray[np.int64]
Arrays: TypeAlias = Mapping[str, npt.NDArray[Any]]
Document: TypeAlias = str | Tokens | Arrays | Mapping[str, Any]
TOKEN_DTYPES = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64")
Bad: TypeAlias = Callable[[str], None]
"""Called with a message about an unusable document; raises, or counts it and returns."""
SHOWN = 5
USERS_OWN = ("kind", "format", "column", "columns", "dtype", "fields", "channels", "made_by")
"""Attributes that a user's source may have, besides its methods."""


class BadDocument(DataError):
    """Raised for a document that cannot be used but could be skipped."""


class Located(dict[str, Any]):
    """A whole record that knows where it was read from."""

    def __init__(self, record: Mapping[str, Any], where: object) -> None:
        """`where` becomes text only for a message: it may have to count lines."""
        super().__init__(record)
        self.where = where


class Source:
    """Lists chunks and reads them. All attributes are plain data, so that a source can be sent to
    another process."""

    format: str | None = None
    kind: Kind = "text"
    column: str | None = None
    """The column that holds the documents, if the format has columns."""
    columns: Mapping[str, str] = {}
    dtype: str | None = None
    """The data type of token ids, if the files do not specify one."""
    fields: Any = None
    """The fields of arrays, see arrays.py."""
    channels: Mapping[str, str] | None = None
    """The types of the channels that accompany each token id, by name."""
    tokenizer: Any = None
    """The tokenizer that made the token ids, if it is known."""
    made_by: dict[str, Any] | None = None
    """What else determines the token ids: part of a corpus's fingerprint."""
    root: Path = Path()
    """The folder that files and chunks are relative to."""
    files: Sequence[str] = ()
    is_walked = False
    """Whether the files were found by searching the folder, not named by a list or an index."""
    not_read = ""
    """A note about other files in the folder that are skipped."""
    together = ""
    """A note about subsets that are read together."""
    num_bad = 0
    counts: Mapping[str, int] = {}
    """How many documents were left out or truncated as requested, by what was done."""

    def chunks(self) -> Sequence[str]:
        """Returns the names of the chunks, always in the same order."""
        raise NotImplementedError

    def read(self, chunk: str) -> Iterator[Document]:
        """Yields the documents of one chunk, front to back."""
        raise NotImplementedError

    @property
    def class_name(self) -> str:
        return type(self).__name__

    @property
    def module(self) -> str:
        """The module of its class, which other processes import."""
        return type(self).__module__

    @property
    def place(self) -> Path | str:
        """What to call it in messages."""
        return self.class_name

    @property
    def notes(self) -> list[str]:
        """What a user may want to know about which files are read."""
        return [note for note in (self.not_read, self.together) if note]

    def num_documents(self, chunk: str) -> int | None:
        """Returns the number of documents in a chunk, if it is known without reading it."""
        return None

    def num_bytes(self, chunk: str) -> int | None:
        """Estimates the size of a chunk's text, if that is not an even share of its file."""
        return None

    def depends_on(self) -> Sequence[str]:
        """Returns every file that the documents depend on."""
        return self.files

    def files_of(self, chunk: str) -> list[str]:
        """Returns the files that one chunk is read from."""
        return []

    def identity(self, name: str) -> str:
        """Returns a fingerprint of a source without files, which has the name that is given."""
        return digest_of([name, type(self).__qualname__])

    def use_policy(self, skip_bad: bool) -> None:
        """Says whether bad documents are skipped; those that read files were opened with it."""

    def marks(self) -> dict[str, FileMark]:
        """Takes a mark of each file, to store and to pass to `changes_since` later."""
        return marks_of_files(self.root, self.depends_on())

    def changes_since(self, marks: Mapping[str, FileMark]) -> list[str]:
        """Returns a sentence for each file that was changed, deleted or added since."""
        new = [file for file in self.depends_on() if file not in marks]
        return [*changed_files(self.root, marks), *(f"{self.root / file} is new" for file in new)]

    def fingerprint(self, marks: Mapping[str, FileMark] | None = None) -> str:
        """Returns a digest of what is read: the column, and each file's name, order, size and
        content.

        Pass `marks` that were just taken to avoid taking them again.
        """
        marks = self.marks() if marks is None else marks
        return digest_of([self.format, self.column, self.dtype, dict(marks)])


class UserSource(Source):
    """A source of a user's module, which has at least `chunks` and `read`."""

    def __init__(self, own: Any) -> None:
        self.own = own
        for name in USERS_OWN:
            if hasattr(own, name):
                setattr(self, name, getattr(own, name))

    def chunks(self) -> Sequence[str]:
        chunks: list[str] = list(self.own.chunks())
        for chunk in chunks:
            if not isinstance(chunk, str):
                raise DataError(
                    f"chunks() of {self.class_name} returned {chunk!r:.60}; expected strings"
                )
        return chunks

    def read(self, chunk: str) -> Iterator[Document]:
        documents = self.own.read(chunk)
        if not isinstance(documents, Iterable):
            raise DataError(
                f"read({chunk!r}) of {self.class_name} returned {type(documents).__name__}; "
                "expected an iterable of documents"
            )
        for document in documents:
            self.num_bad = getattr(self.own, "num_bad", 0)
            yield document
        self.num_bad = getattr(self.own, "num_bad", 0)

    @property
    def class_name(self) -> str:
        return type(self.own).__name__

    @property
    def module(self) -> str:
        return type(self.own).__module__

    def num_documents(self, chunk: str) -> int | None:
        return self.own.num_documents(chunk) if hasattr(self.own, "num_documents") else None

    def identity(self, name: str) -> str:
        if hasattr(self.own, "fingerprint"):
            return str(self.own.fingerprint())
        return digest_of([name, type(self.own).__qualname__])

    def use_policy(self, skip_bad: bool) -> None:
        if hasattr(self.own, "skip_bad"):
            self.own.skip_bad = skip_bad


def as_source(own: Any) -> Source:
    """Returns a user's object as a source."""
    for name in ("chunks", "read"):
        is_default = getattr(type(own), name, None) is getattr(Source, name)
        if is_default or not callable(getattr(own, name, None)):
            raise DataError(
                f"the source {type(own).__name__} has no method {name}(); a source needs chunks() "
                "and read(chunk), see docs/extending.md"
            )
    return own if isinstance(own, Source) else UserSource(own)


class FileSource(Source):
    """Files of one format in one folder. Chunk names are relative to it, so that a corpus can be
    moved."""

    format: str = ""

    def __init__(self, root: Path, files: Iterable[str], skip_bad: bool = False) -> None:
        self.root = root
        self.files: list[str] = list(files)
        self.names = frozenset(self.files)
        self.num_parts: dict[str, int] = {}
        """How many chunks each file has; files that are not in it are a chunk each."""
        self.columns: dict[str, str] = {}
        self.skip_bad = skip_bad
        if not self.files:
            raise DataError(f"{root} is empty: it contains no {self.format} files")

    @property
    def place(self) -> Path:
        """The file if there is only one, otherwise the folder."""
        return self.root / self.files[0] if len(self.files) == 1 else self.root

    def chunks(self) -> list[str]:
        chunks: list[str] = []
        for file in self.files:
            count = self.num_parts.get(file)
            chunks += [file] if count is None else [f"{file}#{part}" for part in range(count)]
        return chunks

    def files_of(self, chunk: str) -> list[str]:
        file, part = split_part(chunk)
        return [chunk if part is None or chunk in self.names else file]

    def identity(self, name: str) -> str:
        """Nothing more: `fingerprint` covers the files."""
        return ""

    def bad(self, message: str) -> None:
        """Raises an error for a bad document, or counts it as skipped. Unreadable files are always
        errors and never come here."""
        if not self.skip_bad:
            raise BadDocument(message)
        self.num_bad += 1


def check_dtype(dtype: str | None) -> str | None:
    if dtype is not None and dtype not in TOKEN_DTYPES:
        known = ", ".join(TOKEN_DTYPES)
        raise DataError(f"dtype {dtype!r} is not a type for token ids; use one of {known}")
    return dtype


def split_part(chunk: str) -> tuple[str, int | None]:
    """Splits `a.jsonl#3` into the file a.jsonl and part 3 (None for a whole file)."""
    file, mark, number = chunk.rpartition("#")
    return (file, int(number)) if mark and number.isdecimal() else (chunk, None)


def inside_folder(folder: Path, name: object, index: Path) -> Path:
    """Returns the path of a file that an index names, which must be in the index's own folder.

    Only the name is checked, not where links lead: Hugging Face's cache consists of links.
    """
    path = Path(str(name))
    if not isinstance(name, str) or not name or path.is_absolute() or ".." in path.parts:
        raise DataError(f"{index} names {name!r}, which is outside its folder and is not read")
    return folder / path


def token_ids(values: object, where: object, bad: Bad) -> Tokens | None:
    """Returns a document's token ids, of any integer type and shape, as a flat int64 array."""
    try:
        ids = np.asarray(values)
    except ValueError:  # rows of unequal lengths
        ids = np.asarray(None)
    if ids.size and ids.dtype.kind not in "iu":
        bad(f"{where}: expected token ids, got values of type {ids.dtype}")
        return None
    ids = ids.reshape(-1)
    low, high = (int(ids.min()), int(ids.max())) if ids.size else (0, 0)
    if low < 0 or high >= 1 << 63:
        bad(f"{where}: {low if low < 0 else high:,} is not a token id")
        return None
    return ids.astype(np.int64)


@dataclass
class LeftOut:
    """Files and folders that are not read: how many, and the first few with the reason."""

    count: int = 0
    shown: list[str] = field(default_factory=list)

    def add(self, file: str, reason: str) -> None:
        self.count += 1
        if len(self.shown) < SHOWN:
            self.shown.append(f"{file} ({reason})")

    def __str__(self) -> str:
        if not self.count:
            return ""
        more = f" and {self.count - SHOWN:,} more" if self.count > SHOWN else ""
        return f"{number_of(self.count, 'file')} not read: {', '.join(self.shown)}{more}"


def walk(root: Path, left_out: LeftOut) -> list[str]:
    """Returns the files below a folder, relative to it and in order, without hidden ones.

    Links to folders are followed, unless the target is already read: inside the folder itself,
    above it, or reached through another link.
    """
    found: list[str] = []
    top = os.path.realpath(root)
    seen, folders = {top}, [""]
    while folders:
        start = folders.pop()
        try:
            with os.scandir(root / start) as listed:
                entries = sorted(listed, key=lambda entry: entry.name, reverse=True)
        except OSError as error:
            left_out.add(start or ".", f"the folder cannot be opened: {error.strerror}")
            continue
        for entry in entries:
            name = start + entry.name
            if entry.name.startswith("."):
                continue
            try:
                is_folder, is_file = entry.is_dir(), entry.is_file()
            except OSError as error:  # a loop of links
                left_out.add(name, str(error.strerror))
                continue
            if is_file:
                found.append(name)
            elif not is_folder:
                left_out.add(name, "a broken link" if entry.is_symlink() else "not a regular file")
            else:
                real = os.path.realpath(entry.path)
                if real in seen or (entry.is_symlink() and _overlap(real, top)):
                    left_out.add(f"{name}/", "a link to a folder that is already read")
                else:
                    seen.add(real)
                    folders.append(f"{name}/")
    return sorted(found, key=lambda name: name.split("/"))


def _overlap(one: str, other: str) -> bool:
    return f"{one}/".startswith(f"{other}/") or f"{other}/".startswith(f"{one}/")
