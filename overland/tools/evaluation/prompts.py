"""Prompts: from a file with one text, or one JSON object, per line, or from standard input."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overland.data.chat import Message, split_specials
from overland.data.tokenizer import Tokenizer
from overland.errors import DataError

KEYS = ("prompt", "text", "question")
JSON_LINES = (".jsonl", ".ndjson", ".json")
STDIN = Path("-")


@dataclass(frozen=True)
class Prompt:
    """A text to continue, a question to answer, or a conversation that needs its next turn."""

    text: str
    messages: tuple[Message, ...] = ()


def read_prompts(path: Path) -> list[Prompt]:
    """Reads a file, or standard input if the path is `-`. Blank lines are skipped."""
    prompts = list(_prompts(path))
    if not prompts:
        raise DataError(f"--file {path} contains no prompts")
    return prompts


def piped_prompts(note: Callable[[str], None]) -> list[Prompt]:
    """Returns what standard input holds, if it is not a terminal: one text, or JSON lines. Nothing,
    if it is empty."""
    if sys.stdin is None or sys.stdin.closed or sys.stdin.isatty():
        return []
    note("reading the prompt from standard input (--file - reads a prompt per line)")
    lines = _lines(STDIN)
    if _holds_objects(lines):
        return list(_parsed_lines(lines, STDIN))
    text = "\n".join(lines).removesuffix("\n")
    return [Prompt(text)] if text.strip() else []


def encode_prompt(tokenizer: Tokenizer, text: str, parse_specials: bool = True) -> list[int]:
    """Returns the ids of a text to continue. The names of special tokens in it stand for the
    tokens, as in transformers, unless told otherwise; a BOS that is written out is not doubled."""
    pieces = split_specials(text, tokenizer.specials) if parse_specials else ()
    if not any(isinstance(piece, int) for piece in pieces):
        return tokenizer.encode_prompt(text)
    ids: list[int] = tokenizer.encode_pieces(pieces)[0].tolist()
    begins = tokenizer.add_bos and tokenizer.bos_id is not None and ids[0] != tokenizer.bos_id
    return [tokenizer.bos_id, *ids] if begins else ids  # type: ignore[list-item]


def check_prompts(prompts: Iterable[Prompt]) -> None:
    """Raises an error for prompts that are not valid text: command line bytes or JSON escapes that
    are not characters."""
    for number, prompt in enumerate(prompts, start=1):
        for text in (prompt.text, *(turn["content"] for turn in prompt.messages)):
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise DataError(
                    f"prompt {number:,} is not valid UTF-8: character {error.start + 1:,} is "
                    f"{text[error.start]!a}, an unpaired surrogate"
                ) from None


def _prompts(path: Path) -> Iterator[Prompt]:
    lines = _lines(path)
    if path.suffix.lower() in JSON_LINES or (path == STDIN and _holds_objects(lines)):
        yield from _parsed_lines(lines, path)
    else:
        yield from (Prompt(line) for line in lines if line.strip())


def _parsed_lines(lines: Sequence[str], path: Path) -> Iterator[Prompt]:
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield _parsed(line, f"{'standard input' if path == STDIN else path}, line {number:,}")


def _holds_objects(lines: Sequence[str]) -> bool:
    """Whether lines without a file name are JSON lines: the first one is an object."""
    first = next((line for line in lines if line.strip()), "")
    try:
        return first.lstrip().startswith("{") and isinstance(json.loads(first), dict)
    except (ValueError, RecursionError):
        return False


def _lines(path: Path) -> list[str]:
    """Returns the lines of a file. Only newlines end a line, since a text may contain other line
    separators."""
    try:
        data = sys.stdin.buffer.read() if path == STDIN else path.expanduser().read_bytes()
        text = data.decode("utf-8-sig")
    except OSError as error:
        raise DataError(f"--file {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise DataError(f"--file {path} is not UTF-8 text (byte {error.start:,})") from None
    return [line.removesuffix("\r") for line in text.split("\n")]


def _parsed(line: str, where: str) -> Prompt:
    try:
        record: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: invalid JSON ({error!s:.100})") from None
    if isinstance(record, str):
        return Prompt(record)
    if isinstance(record, dict):
        for key in KEYS:
            if isinstance(record.get(key), str):
                return Prompt(record[key])
        turns: Any = record.get("messages")
        if _is_conversation(turns):
            return Prompt(turns[-1]["content"], tuple(turns))
    raise DataError(
        f"{where}: expected a string, or an object with a string under {KEYS[0]!r} or turns under "
        "'messages'"
    )


def _is_conversation(turns: Any) -> bool:
    return bool(isinstance(turns, list) and turns) and all(
        isinstance(turn, dict)
        and isinstance(turn.get("role"), str)
        and isinstance(turn.get("content"), str)
        for turn in turns
    )
