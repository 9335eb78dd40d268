"""Files of text, also compressed: plain text, JSON lines and CSV; and the built-in corpus, the
source code of Python's standard library.

A plain text file is a document. In JSON lines and CSV, a line or row is a record, and one of its
values holds the documents.
"""

from __future__ import annotations

import contextlib
import csv
import json
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import IO, ClassVar, Literal

from overland.data.sources.columns import (
    WHOLE,
    Column,
    ColumnFiles,
    ColumnSample,
    column_name,
    joined,
    nearest_hint,
    values_at,
)
from overland.data.sources.compression import (
    bare_suffix,
    is_compressed,
    open_bytes,
    read_whole,
    reading,
    times_smaller,
)
from overland.data.sources.jsonl import (
    BOM,
    JSON_SUFFIXES,
    LONGEST_LINE,
    NO_ARRAY,
    LineRange,
    bytes_of_part,
    parts_of,
    read_part,
    read_records,
    split_lines,
)
from overland.data.sources.source import Bad, Document, FileSource, decode
from overland.errors import DataError

TEXT_SUFFIXES = {".txt", ".md", ".rst", ".py", ".tex"}
CSV_SUFFIXES = {".csv", ".tsv"}
# Read to choose the column: this much from all files together, but at least one line of each.
SAMPLE_RECORDS = 1000
SAMPLE_BYTES = 4 << 20
SAMPLE_FILES = 16
FEW_FILES = 64  # only with fewer compressed files is the expansion of each one measured
# Skipped: third-party packages, generated tables, and the test suite, whose long literals are half
# of all text and teach a model little.
STDLIB_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}
HELD_OUT_EVERY = 20

Form = Literal["text", "jsonl", "csv"]
FORMS: dict[str, Form] = {
    **dict.fromkeys(TEXT_SUFFIXES, "text"),
    **dict.fromkeys(JSON_SUFFIXES, "jsonl"),
    **dict.fromkeys(CSV_SUFFIXES, "csv"),
}


class TextFiles(ColumnFiles):
    """Files of one or more of these forms."""

    one_form: ClassVar[Form | None] = None
    """The form of all files, if their suffixes do not decide."""

    def form(self, file: str) -> Form:
        return self.one_form or FORMS[bare_suffix(Path(file))]

    def chunks(self) -> list[str]:
        lines = {file for file in self.files if self.form(file) == "jsonl"}
        measures = sum(map(is_compressed, lines)) < FEW_FILES
        return [
            chunk
            for file in self.files
            for chunk in (parts_of(self.root, file, measures) if file in lines else [file])
        ]

    def files_of(self, chunk: str) -> list[str]:
        return [split_lines(chunk, self.names)[0]]

    def num_bytes(self, chunk: str) -> int | None:
        return bytes_of_part(split_lines(chunk, self.names)[1])

    def num_documents(self, chunk: str) -> int | None:
        return 1 if self.form(split_lines(chunk, self.names)[0]) == "text" else None

    def read(self, chunk: str) -> Iterator[Document]:
        file, part = split_lines(chunk, self.names)
        path, form = self.root / file, self.form(file)
        if form == "text":
            with reading(path):
                document = decode(read_whole(path), path, self.bad)
            if document is not None:
                yield document
            return
        records: Iterable[tuple[object, str, object]] = read_records(path, part, self.bad)
        if form == "csv":
            columns = None if self.kind == "records" else [column_name(self.steps)]
            records = ((row, "", where) for row, where in read_rows(path, self.bad, columns))
        for record, text, where in records:
            problem, values = partial(self._problem, record, text), values_at(record, self.steps)
            documents = (self.document(value, where, problem) for value in values)
            found = [document for document in documents if document is not None]
            yield from [joined(found)] if self.joins and found else found

    def _problem(self, record: object, text: str) -> str:
        """Says what is wrong with a record, which is written like this, if it has no document."""
        hint = NO_ARRAY if isinstance(record, list) else ""
        if isinstance(record, dict) and self.steps and self.steps[0] not in record:
            hint = nearest_hint(str(self.steps[0]), record)
        what = f' with a "{column_name(self.steps)}"' if self.steps else ""
        what += " of token ids" if self.kind == "tokens" else ""
        return f"expected an object{what}, got {text.strip()[:60]!r}{hint}"


class JsonLines(TextFiles):
    """One object per line; one of the object's values holds the documents."""

    format = "jsonl"
    one_form = "jsonl"

    def __init__(
        self, root: Path, files: list[str], column: str | None = None, skip_bad: bool = False
    ) -> None:
        super().__init__(root, files, skip_bad)
        self._line_bytes, sample = sample_lines(root, files)
        columns = sample.columns(column)
        # Without a single good line there is nothing to choose from; reading will report why.
        if columns or column == WHOLE:
            self.choose(self.place, column, columns, lambda: sample.examples)
        elif column is not None:
            self.column, self.steps = column, (column,)

    def about_documents(self) -> int | None:
        if not self._line_bytes:
            return None
        sizes = ((self.root / file).stat().st_size * times_smaller(file) for file in self.files)
        return round(sum(sizes) / self._line_bytes)


def sample_lines(root: Path, files: Sequence[str]) -> tuple[float, ColumnSample]:
    """Samples the first records of some files, spread evenly over all of them. Returns the mean
    length of a line, too."""
    sample = ColumnSample()
    chosen = dict.fromkeys(files[len(files) * i // SAMPLE_FILES] for i in range(SAMPLE_FILES))
    num_lines = all_bytes = 0
    for file in chosen:
        num_bytes = 0
        for number, (line, _) in enumerate(read_part(root / file, LineRange()), start=1):
            with contextlib.suppress(ValueError, RecursionError):
                if len(line) <= LONGEST_LINE:
                    sample.add(json.loads(line))
            num_bytes, num_lines = num_bytes + len(line), num_lines + 1
            if number * len(chosen) >= SAMPLE_RECORDS or num_bytes * len(chosen) >= SAMPLE_BYTES:
                break
        all_bytes += num_bytes
    return all_bytes / max(num_lines, 1), sample


class CsvRows(TextFiles):
    """CSV and TSV: a row is a record of texts, and the first one names the columns. A chunk is a
    whole file: a quoted value may contain line breaks, so the start of a row can only be found by
    reading from the top."""

    format = "csv"
    one_form = "csv"

    def __init__(
        self, root: Path, files: list[str], column: str | None = None, skip_bad: bool = False
    ) -> None:
        super().__init__(root, files, skip_bad)
        for file in self.files:
            columns = {name: Column("string", (name,), "text") for name in header(root / file)}
            examples = lambda file=file: dict(_first_row(root / file))
            self.choose(root / file, column, columns, examples)


class TextFolder(TextFiles):
    """Text files, and with them JSON lines and CSV, whose documents are in the column `text`."""

    format = "text"

    def __init__(
        self, root: Path, files: list[str], column: str | None = None, skip_bad: bool = False
    ) -> None:
        super().__init__(root, files, skip_bad)
        if column == WHOLE:
            raise DataError(
                f"{root} is text, or mixes formats: records must all be in one format, which can "
                "be JSON lines, CSV, parquet, Arrow or MDS"
            )
        if column not in (None, "text"):
            if all(self.form(file) == "text" for file in files):
                raise DataError(
                    f"{root} is plain text: it has no columns, so there is no {column!r}"
                )
            self.column, self.steps = column, (column,)


def header(path: Path) -> list[str]:
    """Returns the names of a CSV file's columns."""
    _, row = next(rows_of(path, lambda message: None), (1, []))
    names = [name.strip() for name in row]
    if not any(names):
        raise DataError(f"{path} is empty: it has no header with the names of its columns")
    return names


def _first_row(path: Path) -> Iterator[tuple[str, str]]:
    rows = rows_of(path, lambda message: None)
    yield from zip(next(rows)[1], next(rows, (1, []))[1], strict=False)


def read_rows(
    path: Path, bad: Bad, columns: Sequence[str] | None = None
) -> Iterator[tuple[dict[str, str], str]]:
    """Yields each row as a dict of all columns, or of the given ones, and where it is."""
    names = header(path)
    for name in columns or names:
        if name and names.count(name) > 1:
            raise DataError(
                f"{path}: its header names the column {name!r} twice, so it is not clear which one "
                "is meant: rename one of them"
            )
    rows = rows_of(path, bad)
    next(rows)
    for line, row in rows:
        where = f"{path}:{line}"
        if len(row) != len(names):
            bad(f"{where}: {len(row):,} values, but the header names {len(names):,} columns")
            continue
        record = dict(zip(names, row, strict=True))
        record = {name: record[name] for name in columns or names}
        try:
            for name in record:
                record[name].encode()
        except UnicodeEncodeError:
            bad(f"{where}: {name} is not UTF-8 text")
            continue
        yield record, where


def rows_of(path: Path, bad: Bad) -> Iterator[tuple[int, list[str]]]:
    """Yields each row that is not blank, with the number of its last line."""
    csv.field_size_limit(LONGEST_LINE)  # the library's own is 131,072
    begins = num_bytes = 0

    def lines(file: IO[bytes]) -> Iterator[str]:
        nonlocal num_bytes
        while line := file.readline(LONGEST_LINE + 1):
            num_bytes += len(line)
            if num_bytes > LONGEST_LINE:  # as after a quote that is never closed
                raise DataError(
                    f"{path}:{begins}: a row of more than {LONGEST_LINE:,} bytes; look for a quote "
                    "that is opened and never closed, or split the document"
                )
            # Invalid UTF-8 spoils only the value that contains it, not the file.
            text = line.decode("utf-8", "surrogateescape")
            yield text if reader.line_num else text.removeprefix(BOM)

    with reading(path), open_bytes(path) as file:
        is_tabbed = bare_suffix(path) == ".tsv"
        reader = csv.reader(lines(file), delimiter="\t" if is_tabbed else ",", strict=True)
        while True:
            begins, num_bytes = reader.line_num + 1, 0
            try:
                row = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                if "unexpected end of data" in str(error):
                    raise DataError(
                        f"{path}:{begins}: a quote is opened and never closed"
                    ) from None
                bad(f"{path}:{reader.line_num}: not a valid CSV row: {error}")
                continue
            if row:
                yield reader.line_num, row


class StandardLibrary(FileSource):
    """The source code of Python's standard library, on every machine without a download.

    Every twentieth file is held out. `part` (k, n) takes every n-th of the others, starting with
    the k-th, to make small corpora that stand in for large ones.
    """

    format = "stdlib"

    def __init__(self, held_out: bool = False, part: tuple[int, int] = (0, 1)) -> None:
        self.held_out = held_out
        root, modules = library_modules()
        files = [path for i, path in enumerate(modules) if (i % HELD_OUT_EVERY == 0) == held_out]
        # Some __init__.py are empty, and a document without tokens is an error.
        files = [file for file in files if (root / file).stat().st_size]
        super().__init__(root, part_of_files(files, self.format, part))

    def num_documents(self, chunk: str) -> int | None:
        return 1

    def read(self, chunk: str) -> Iterator[str]:
        yield (self.root / chunk).read_text(encoding="utf-8", errors="replace")


def part_of_files(files: list[str], name: str, part: tuple[int, int]) -> list[str]:
    """Returns part k of n: every n-th file, starting with the k-th."""
    which, of = part
    if of < 1:
        raise DataError(f"{name}:{which}/{of}: expected at least one part, such as {name}:0/1")
    if not 0 <= which < of:
        raise DataError(f"{name}:{which}/{of}: parts are numbered from 0 to {of - 1}")
    return files[which::of]


def library_modules() -> tuple[Path, list[str]]:
    """Returns the folder of Python's standard library, and the modules in it."""
    root = Path(sysconfig.get_paths()["stdlib"])
    return root, _modules(root)


@cache
def _modules(root: Path) -> list[str]:
    """Lists modules without entering the skipped folders, which hold most of the files."""
    found = []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in STDLIB_SKIPPED]
        found += [os.path.relpath(os.path.join(folder, file), root)
                  for file in files if file.endswith(".py")]  # fmt: skip
    return sorted(found)
