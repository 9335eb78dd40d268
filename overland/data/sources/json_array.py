"""A JSON file that is an array of objects, read item by item, as JSON lines are read line by line.

Public fine-tuning datasets often use this format (`alpaca_data.json`). Several arrays may follow
one another, as `cat a.json b.json` joins them. Only one item is in memory.
"""

from __future__ import annotations

import codecs
import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

from overland.data.sources.compression import READ_BYTES, bare_suffix, open_bytes, reading
from overland.errors import DataError

BETWEEN = re.compile(r"\s*[,\]]")
BOM = "\ufeff"
BLANKS = " \t\r\n" + BOM  # joined files may have several byte order marks
HEAD_BYTES = 256  # blanks before the array


def is_array(path: Path) -> bool:
    """Whether a file is one array. Only .json files can be; .jsonl and .ndjson have lines."""
    if bare_suffix(path) != ".json":
        return False
    with reading(path), open_bytes(path) as file:
        head = file.read(HEAD_BYTES)
    return head.removeprefix(BOM.encode()).lstrip().startswith(b"[")


def array_items(path: Path, longest: int) -> Iterator[bytes]:
    """Yields the text of each item. Invalid JSON is an error even if bad documents are skipped,
    because nothing that follows it can be read."""
    # Invalid UTF-8 spoils only the item that contains it; its bytes are passed through unchanged.
    decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
    scan = json.JSONDecoder().raw_decode
    with reading(path), open_bytes(path) as file:
        text, is_whole, number = "", False, 1

        def more() -> None:
            nonlocal text, is_whole
            data = file.read(READ_BYTES)
            is_whole = not data
            text += decoder.decode(data, final=is_whole)

        def next_character() -> str:
            """Skips blanks; returns an empty string at the end of the file."""
            nonlocal text
            while not (text := text.lstrip(BLANKS)) and not is_whole:
                more()
            return text[:1]

        while next_character():
            if not text.startswith("["):
                raise DataError(
                    f"{path}: {text[:40]!r} follows its JSON array: after an array there may only "
                    "be another one; put the rest into a file of its own"
                )
            text, border = text[1:], None
            while border != "]":
                if next_character() == "]" and border is None:
                    text, border = text[1:], "]"
                    continue
                if text.startswith("]"):
                    raise DataError(f"{path}:{number}: a comma before the end of the JSON array")
                found, end = None, 0
                with contextlib.suppress(ValueError, RecursionError):
                    _, end = scan(text)
                    found = BETWEEN.match(text, end)
                if found is not None:
                    yield text[:end].encode("utf-8", "surrogateescape")
                    text, border, number = text[found.end() :], found[0][-1], number + 1
                elif not is_whole and len(text) <= longest:
                    more()
                elif text.rstrip().endswith("]") or not is_whole:
                    raise DataError(
                        f"{path}:{number}: not a JSON object, or one of more than {longest:,} "
                        f"characters, in an array, so what follows cannot be read: {text[:60]!r}"
                    )
                else:
                    raise DataError(f"{path} is truncated: its JSON array has no end")
