"""Where documents come from.

A source lists its chunks and reads one chunk front to back. Anything with these two methods is a
source; `register_source` in `registry.py` gives it a name.
"""

from __future__ import annotations

import gzip
import json
import os
import sysconfig
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Protocol

from overland.data.errors import DataError

TEXT_SUFFIXES = {".txt", ".md", ".rst", ".py", ".tex"}
JSON_SUFFIXES = {".jsonl", ".json"}

# Left out of the built-in corpus: third-party packages, generated tables and the test suite, whose
# long literals are half of all text and teach little.
STDLIB_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}
HELD_OUT_EVERY = 20


class Source(Protocol):
    def chunks(self) -> Sequence[str]:
        """Names of the chunks, always in the same order."""

    def read(self, chunk: str) -> Iterator[str]:
        """The documents of one chunk, front to back."""


class StandardLibrary:
    """The source text of Python's own standard library: on every machine, without a download."""

    def __init__(self, held_out: bool = False) -> None:
        self.root = Path(sysconfig.get_paths()["stdlib"])
        self.held_out = held_out

    def chunks(self) -> list[str]:
        paths = sorted(
            str(path.relative_to(self.root))
            for path in self.root.rglob("*.py")
            if not STDLIB_SKIPPED & set(path.relative_to(self.root).parts)
        )
        return [path for i, path in enumerate(paths) if (i % HELD_OUT_EVERY == 0) == self.held_out]

    def read(self, chunk: str) -> Iterator[str]:
        yield (self.root / chunk).read_text(encoding="utf-8", errors="replace")


class TextFolder:
    """Text files (one document each) and JSON lines (`text` of each line; gzip is fine)."""

    def __init__(self, path: Path) -> None:
        self.root = path
        if not path.exists():
            raise DataError(f"{path} does not exist")

    def chunks(self) -> list[str]:
        paths = [self.root] if self.root.is_file() else sorted(self.root.rglob("*"))
        found = [str(path) for path in paths if path.is_file() and _kind(path)]
        if not found:
            known = ", ".join(sorted(TEXT_SUFFIXES | JSON_SUFFIXES))
            raise DataError(f"{self.root} holds no text: looked for {known} (also with .gz)")
        return found

    def read(self, chunk: str) -> Iterator[str]:
        path = Path(chunk)
        try:
            with _open(path) as lines:
                if _kind(path) in TEXT_SUFFIXES:
                    yield lines.read()
                    return
                for number, line in enumerate(lines, start=1):
                    if line.strip():
                        yield _text_of(line, f"{path}:{number}")
        except UnicodeDecodeError as error:
            raise DataError(f"{path}: expected UTF-8 text: {error.reason}") from None
        except (OSError, EOFError, zlib.error) as error:  # the last two: a broken .gz
            raise DataError(f"{path} cannot be read: {error}") from None

    def versions(self) -> list[str]:
        """Size and time of every file: what changes when a text does and its name does not."""
        stats = [os.stat(chunk) for chunk in self.chunks()]
        return [f"{stat.st_size}/{stat.st_mtime_ns}" for stat in stats]


def _kind(path: Path) -> str | None:
    suffix = Path(path.stem).suffix if path.suffix == ".gz" else path.suffix
    return suffix if suffix in TEXT_SUFFIXES | JSON_SUFFIXES else None


def _open(path: Path) -> IO[str]:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8")
    return path.open(encoding="utf-8")


def _text_of(line: str, where: str) -> str:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not a JSON object: {error.msg}") from None
    text = record.get("text") if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise DataError(f'{where}: expected an object with a "text", got {line.strip()[:60]!r}')
    return text
