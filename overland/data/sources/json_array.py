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
BLANKS = re.compile(f"[ \\t\\r\\n{BOM}]*")  # joined files may have several byte order marks
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
        # `at` moves on inside of `text`, which is copied only when more is read.
        text, at, is_whole, number = "", 0, False, 1

        def more() -> None:
            nonlocal text, at, is_whole
            data = file.read(max(READ_BYTES, len(text) - at))  # an item is scanned few times
            is_whole = not data
            text, at = text[at:] + decoder.decode(data, final=is_whole), 0

        def next_character() -> str:
            """Skips blanks; returns an empty string at the end of the file."""
            nonlocal at
            while True:
                at = BLANKS.match(text, at).end()  # type: ignore[union-attr]
                if at < len(text) or is_whole:
                    return text[at : at + 1]
                more()

        while first := next_character():
            if first != "[":
                raise DataError(
                    f"{path}: {text[at : at + 40]!r} follows its JSON array: after an array there "
                    "may only be another one; put the rest into a file of its own"
                )
            at, border = at + 1, None
            while border != "]":
                if next_character() == "]":
                    if border is not None:
                        raise DataError(
                            f"{path}:{number}: a comma before the end of the JSON array"
                        )
                    at, border = at + 1, "]"
                    continue
                found, end = None, 0
                with contextlib.suppress(ValueError, RecursionError):
                    _, end = scan(text, at)
                    found = BETWEEN.match(text, end)
                if found is not None:
                    yield text[at:end].encode("utf-8", "surrogateescape")
                    at, border, number = found.end(), found[0][-1], number + 1
                elif not is_whole and len(text) - at <= longest:
                    more()
                elif text.rstrip().endswith("]") or not is_whole:
                    raise DataError(
                        f"{path}:{number}: not a JSON object, or one of more than {longest:,} "
                        f"characters, in an array, so what follows cannot be read: "
                        f"{text[at : at + 60]!r}"
                    )
                else:
                    raise DataError(f"{path} is truncated: its JSON array has no end")
