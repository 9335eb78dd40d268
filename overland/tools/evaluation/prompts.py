"""Reads prompts from a file with one text, or one JSON object, per line."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overland.data.chat import Message
from overland.errors import DataError

KEYS = ("prompt", "text", "question")
JSON_LINES = (".jsonl", ".ndjson", ".json")


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
    is_json = path.suffix.lower() in JSON_LINES
    for number, line in enumerate(_lines(path), start=1):
        if line.strip():
            yield _parsed(line, f"{path}, line {number:,}") if is_json else Prompt(line)


def _lines(path: Path) -> list[str]:
    """Returns the lines of a file. Only newlines end a line, since a text may contain other line
    separators."""
    try:
        data = sys.stdin.buffer.read() if str(path) == "-" else path.expanduser().read_bytes()
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
