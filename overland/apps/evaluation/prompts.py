"""Prompts: from a file with one text, or one JSON object, per line, or from standard input."""

from __future__ import annotations

import fcntl
import json
import os
import stat
import sys
import termios
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overland.data.chat import ASSISTANT, ChatError, Message
from overland.data.conversations import Columns, conversation
from overland.data.learned_tokens import split_specials
from overland.data.tokenizer import Tokenizer
from overland.errors import DataError
from overland.words import any_of

KEYS = ("prompt", "text", "question")
TURNS = "messages"
JSON_LINES = (".jsonl", ".ndjson", ".json")
STDIN = Path("-")


@dataclass(frozen=True)
class Prompt:
    """A text to continue, a question to answer, or a conversation that needs its next turn."""

    text: str
    messages: tuple[Message, ...] = ()
    tools: tuple[Any, ...] | None = None


def read_prompts(path: Path) -> list[Prompt]:
    """Reads a file, or standard input if the path is `-`. Blank lines are skipped."""
    lines = _lines(path)
    if path.suffix.lower() in JSON_LINES or (path == STDIN and _holds_objects(lines)):
        prompts = list(_parsed_lines(lines, path))
    else:
        prompts = [Prompt(line) for line in lines if line.strip()]
    if not prompts:
        raise DataError(f"--file {path} contains no prompts")
    return prompts


def piped_prompts(note: Callable[[str], None]) -> list[Prompt]:
    """Returns what standard input holds: one text, or JSON lines. A terminal and /dev/null hold
    nothing; a pipe or a file that is empty is an error, since somebody meant to fill it."""
    if not _is_piped():
        note("no prompt: the model begins a new document")
        return [Prompt("")]
    note("reading the prompt from standard input (--file - reads a prompt per line)")
    lines = _lines(STDIN)
    if _holds_objects(lines):
        return list(_parsed_lines(lines, STDIN))
    text = "\n".join(lines).removesuffix("\n")
    if not text:
        raise DataError(
            "standard input is empty: give a prompt, or '' to let the model begin a new document"
        )
    return [Prompt(text)]


def has_unread_input() -> bool:
    """Whether a text waits in standard input, which is not read if there are other prompts."""
    try:
        waiting = fcntl.ioctl(sys.stdin, termios.FIONREAD, bytes(4))
        return _is_piped() and int.from_bytes(waiting, sys.byteorder) > 0
    except (AttributeError, TypeError, ValueError, OSError):
        return False


def check_turn(line: str) -> None:
    """Raises an error for a line of standard input that is a JSON object, not a turn."""
    if _holds_objects([line]):
        raise DataError(
            "standard input holds JSON lines, but with --chat alone its lines are the turns of one "
            "conversation: add --file - to answer each of them"
        )


def _is_piped() -> bool:
    if sys.stdin is None or sys.stdin.closed:
        return False
    try:
        return not stat.S_ISCHR(os.fstat(sys.stdin.fileno()).st_mode)
    except (OSError, ValueError):  # not a file of the system
        return not sys.stdin.isatty()


def encode_prompt(tokenizer: Tokenizer, text: str, parse_specials: bool = True) -> list[int]:
    """Returns the ids of a text as the beginning of a document, for a model to continue. The names
    of special tokens in it stand for the tokens, as in transformers, unless told otherwise; a BOS
    that is written out is not doubled. An empty prompt becomes the end of a previous document."""
    pieces = split_specials(text, tokenizer.specials) if parse_specials else ()
    if any(isinstance(piece, int) for piece in pieces):
        ids: list[int] = tokenizer.encode_pieces(pieces)[0].tolist()
    else:
        ids = tokenizer.encode(text)
    if tokenizer.add_bos and tokenizer.bos_id is not None and ids[:1] != [tokenizer.bos_id]:
        ids = [tokenizer.bos_id, *ids]
    if not ids and tokenizer.eos_id is None:
        raise DataError(
            f"{tokenizer.path} has no BOS or EOS token to begin an empty prompt with: give some "
            "text"
        )
    return ids or [tokenizer.eos_id]  # type: ignore[list-item]


def check_prompts(prompts: Iterable[Prompt]) -> None:
    """Raises an error for prompts that are not valid text: command line bytes or JSON escapes that
    are not characters."""
    for number, prompt in enumerate(prompts, start=1):
        turns = (turn.get("content") for turn in prompt.messages)
        for text in (prompt.text, *(one for one in turns if isinstance(one, str))):
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise DataError(
                    f"prompt {number:,} is not valid UTF-8: character {error.start + 1:,} is "
                    f"{text[error.start]!a}, an unpaired surrogate"
                ) from None


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
    known = record if isinstance(record, dict) else {}
    keys = [key for key in (*KEYS, TURNS) if known.get(key) is not None]
    if len(keys) > 1:
        raise DataError(f"{where} has {any_of(keys, 'and')}: keep the one that is the prompt")
    if keys == [TURNS]:
        return _conversation(record, where)
    if keys and isinstance(record[keys[0]], str):
        return Prompt(record[keys[0]])
    raise DataError(
        f"{where}: expected a string, or an object with a string under {KEYS[0]!r} or turns under "
        f"{TURNS!r}"
    )


def _conversation(record: dict[str, Any], where: str) -> Prompt:
    """Returns the prompt of a record as training would read it, up to the answer."""
    try:
        told = conversation(record, Columns("messages", TURNS, tools="tools", system="system"))
    except ChatError as error:
        raise DataError(f"{where}: {error}") from None
    last = told.turns[-1]
    if last["role"] == ASSISTANT:
        raise DataError(f"{where}: its last turn is the assistant's: remove that turn")
    said = last["content"]
    return Prompt(said if isinstance(said, str) else json.dumps(said), told.turns, told.tools)
