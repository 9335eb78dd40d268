"""What a source is.

Anything that lists chunks and reads one front to back is a source (`Source`); a user's own needs no
more. Those that read files know more (`FileSource`): the kind of their documents, their columns,
how many documents a chunk holds where that can be told without reading it, and a mark per file by
which a changed one is found.

A document is a text, token ids, arrays by name, or a whole record; `kind` says which, and is "text"
where a source does not say it. One of arrays declares its `fields`, see arrays.py. Token ids may
have channels, an element for each id, such as how much predicting it counts: a source declares
them, `channels = {"weights": "float32"}`, and its documents are dicts with `tokens` and each of
these.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from overland.data.sources.marks import FileMark, changed_files, digest_of, marks_of_files
from overland.errors import DataError

Kind = Literal["text", "tokens", "arrays", "records"]
Tokens: TypeAlias = npt.NDArray[np.int64]
Arrays: TypeAlias = Mapping[str, npt.NDArray[Any]]
Document: TypeAlias = str | Tokens | Arrays | Mapping[str, Any]
TOKEN_DTYPES = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64")
RULES = (2, 1)
"""How files are marked and cut into chunks. What was laid out under earlier rules keeps them:
1 marks large files by blocks of them, and cuts JSON lines every 64 MiB."""
Bad: TypeAlias = Callable[[str], None]
"""Told of a document that cannot be used; raises, or counts and lets the reader go on."""
SHOWN = 5


class BadDocument(DataError):
    """A document that cannot be used, and could be skipped."""


class Located(dict[str, Any]):
    """A whole record, which knows where it was read."""

    def __init__(self, record: Mapping[str, Any], where: str | Callable[[], str]) -> None:
        """`where` may be asked for only when a message needs it: it may take counting lines."""
        super().__init__(record)
        self._where = where

    @property
    def where(self) -> str:
        return self._where if isinstance(self._where, str) else self._where()


class Source(Protocol):
    """Anything that lists chunks and reads them; a user's own needs no more."""

    def chunks(self) -> Sequence[str]:
        """Names of the chunks, always in the same order."""

    def read(self, chunk: str) -> Iterator[Document]:
        """The documents of one chunk, front to back."""


class FileSource:
    """Files of one format under one folder. Chunks are named relative to it, so that a corpus may
    be moved; everything held is plain, so that a source can be sent to another process."""

    format = ""
    kind: Kind = "text"
    column: str | None = None
    """The column that documents are taken from, where the format has columns."""
    dtype: str | None = None
    """Of token ids, where the files do not say it."""
    rules = RULES[0]

    def __init__(self, root: Path, files: Iterable[str], skip_bad: bool = False) -> None:
        self.root = root
        self.files = list(files)
        self.names = frozenset(self.files)
        self.columns: dict[str, str] = {}
        self.is_walked = False
        """Whether all files below its folder are read, which no list or index names."""
        self.not_read = ""
        """Files beside these that are left out, in a sentence."""
        self.together = ""
        """Subsets that are read as one, in a sentence."""
        self.skip_bad = skip_bad
        self.num_bad = 0
        if not self.files:
            raise DataError(f"{root} is empty: it holds no {self.format} files")

    @property
    def notes(self) -> list[str]:
        """What a user may want to know about what is read."""
        return [note for note in (self.not_read, self.together) if note]

    @property
    def place(self) -> Path:
        """What messages name: the file, where there is only one."""
        return self.root / self.files[0] if len(self.files) == 1 else self.root

    def chunks(self) -> list[str]:
        """Names of the chunks, always in the same order."""
        return list(self.files)

    def num_documents(self, chunk: str) -> int | None:
        """How many documents the chunk holds, where the format says so beforehand."""
        return None

    def about_documents(self) -> int | None:
        """About how many documents there are in all, if that can be told without reading them."""
        counts = [self.num_documents(chunk) for chunk in self.chunks()]
        known = [count for count in counts if count is not None]
        return sum(known) if len(known) == len(counts) else None

    def num_bytes(self, chunk: str) -> int | None:
        """Returns about the size of its text, where that is not an even share of its file."""
        return None

    def read(self, chunk: str) -> Iterator[Document]:
        """The documents of one chunk, front to back."""
        raise NotImplementedError

    def depends_on(self) -> list[str]:
        """Every file that the documents depend on."""
        return self.files

    def files_of(self, chunk: str) -> list[str]:
        """Returns those of them that one chunk is read from."""
        file, part = split_part(chunk)
        return [chunk if part is None or chunk in self.names else file]

    def marks(self) -> dict[str, FileMark]:
        """A mark of each of these files, to be kept and given to `changes_since`."""
        return marks_of_files(self.root, self.depends_on(), whole=self.rules > 1)

    def changes_since(self, marks: Mapping[str, FileMark]) -> list[str]:
        """A sentence for each file that is not as it was when marked, is gone, or is new."""
        new = [file for file in self.depends_on() if file not in marks]
        return [*changed_files(self.root, marks), *(f"{self.root / file} is new" for file in new)]

    def fingerprint(self, marks: Mapping[str, FileMark] | None = None) -> str:
        """Changes with what is read: the column, and any file's name, place, size or content.

        `marks` of the same moment save taking them again.
        """
        marks = self.marks() if marks is None else marks
        return digest_of([self.format, self.column, self.dtype, dict(marks)])

    def bad(self, message: str) -> None:
        """Bad content, never a file that cannot be read: an error, or skipped and counted."""
        if not self.skip_bad:
            raise BadDocument(message)
        self.num_bad += 1


def list_chunks(source: Source) -> list[str]:
    """The names of a source's chunks; one of somebody's own may list what is none."""
    chunks = list(source.chunks())
    for chunk in chunks:
        if not isinstance(chunk, str):
            raise DataError(
                f"chunks() of {type(source).__name__} lists {chunk!r:.60}, expected names: str"
            )
    return chunks


def check_dtype(dtype: str | None) -> str | None:
    if dtype is not None and dtype not in TOKEN_DTYPES:
        known = ", ".join(TOKEN_DTYPES)
        raise DataError(f"dtype {dtype!r} is no type of token ids; known: {known}")
    return dtype


def part_of(file: str, number: int) -> str:
    return f"{file}#{number}"


def split_part(chunk: str) -> tuple[str, int | None]:
    """`a.jsonl#3` is part 3 of a.jsonl; a name without a number is the whole file."""
    file, mark, number = chunk.rpartition("#")
    return (file, int(number)) if mark and number.isdecimal() else (chunk, None)


def inside_folder(folder: Path, name: object, index: Path) -> Path:
    """The file that an index names, which must lie in the index's own folder.

    By its name and not by where links lead: Hugging Face's cache is made of links.
    """
    path = Path(str(name))
    if not isinstance(name, str) or not name or path.is_absolute() or ".." in path.parts:
        raise DataError(f"{index} names {name!r}, which is outside its folder: refused")
    return folder / path


def decode(data: bytes, where: str, bad: Bad) -> str | None:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        bad(f"{where}: expected UTF-8 text, got {error.reason} at byte {error.start:,}")
        return None


def token_ids(values: object, where: str, bad: Bad) -> Tokens | None:
    """One document's ids, of any integer type and any shape, as int64 in one row."""
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
        bad(f"{where}: {low if low < 0 else high:,} is no token id")
        return None
    return ids.astype(np.int64)


@dataclass
class LeftOut:
    """Files and folders that are not read: how many, and the first of them with the reason."""

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
        files = "file" if self.count == 1 else "files"
        return f"{self.count:,} {files} not read: {', '.join(self.shown)}{more}"


def walk(root: Path, left_out: LeftOut) -> list[str]:
    """The files below a folder, relative to it and in order; nothing hidden.

    Linked folders are followed, unless they lead to one that is read already: into the folder
    itself, above it, or to where another link has led.
    """
    found: list[str] = []
    top = os.path.realpath(root)
    seen = {top}
    folders = [("", top)]
    while folders:
        start, real = folders.pop()
        try:
            with os.scandir(root / start) as listed:
                entries = sorted(listed, key=lambda entry: entry.name, reverse=True)
        except OSError as error:
            left_out.add(start or ".", f"a folder that cannot be opened: {error.strerror}")
            continue
        for entry in entries:
            name = start + entry.name
            if entry.name.startswith("."):
                continue
            try:
                is_folder, is_file = entry.is_dir(), entry.is_file()
            except OSError as error:  # a chain of links without an end
                left_out.add(name, str(error.strerror))
                continue
            if is_file:
                found.append(name)
            elif is_folder:
                is_link = entry.is_symlink()
                leads_to = os.path.realpath(entry.path) if is_link else f"{real}/{entry.name}"
                if leads_to in seen or (is_link and _overlap(leads_to, top)):
                    left_out.add(f"{name}/", "a link to a folder that is read already")
                else:
                    seen.add(leads_to)
                    folders.append((f"{name}/", leads_to))
            else:
                is_link = entry.is_symlink()
                left_out.add(name, "a link to nothing" if is_link else "not a regular file")
    return sorted(found, key=lambda name: name.split("/"))


def _overlap(one: str, other: str) -> bool:
    return f"{one}/".startswith(f"{other}/") or f"{other}/".startswith(f"{one}/")
