"""A JSON file that is one array of objects, read item by item, as JSON lines are read line by line.

Public fine-tuning datasets often use this format (`alpaca_data.json`). Only one item is in memory.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from pathlib import Path

from overland.data.sources.compression import READ_BYTES, bare_suffix, open_bytes, reading
from overland.errors import DataError

BETWEEN = re.compile(r"\s*[,\]]")
BOM = "\ufeff"
HEAD_BYTES = 256  # blanks before the array


def is_array(path: Path) -> bool:
    """Whether a file is one array. Only .json files can be; .jsonl and .ndjson have lines."""
    if bare_suffix(path) != ".json":
        return False
    with reading(path), open_bytes(path) as file:
        head = file.read(HEAD_BYTES)
    return head.removeprefix(BOM.encode()).lstrip().startswith(b"[")


def array_items(path: Path, longest: int) -> Iterator[bytes]:
    """Yields the text of each item. Invalid JSON is yielded as one last item, together with
    everything that follows it."""
    # Invalid UTF-8 spoils only the item that contains it; its bytes are passed through unchanged.
    decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
    scan = json.JSONDecoder().raw_decode
    with reading(path), open_bytes(path) as file:
        text, is_whole = "", False

        def more() -> None:
            nonlocal text, is_whole
            data = file.read(READ_BYTES)
            is_whole = not data
            text += decoder.decode(data, final=is_whole)

        more()
        text = text.removeprefix(BOM).lstrip().removeprefix("[")
        while True:
            text = text.lstrip()
            if text.startswith("]"):
                return
            try:
                if not text:
                    raise ValueError
                _, end = scan(text)
                border = BETWEEN.match(text, end)
            except (ValueError, RecursionError):
                border = None
            if border is not None:
                yield text[:end].encode("utf-8", "surrogateescape")
                text = text[border.end() :]
                if border[0].endswith("]"):
                    return
            elif not is_whole and len(text) <= longest:
                more()
            elif text.rstrip().endswith("]") or not is_whole:
                yield text[: longest + 1].encode("utf-8", "surrogateescape")
                return
            else:
                raise DataError(f"{path} is truncated: its JSON array has no end")
