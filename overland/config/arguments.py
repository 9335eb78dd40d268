"""Settings from the command line (`key=value`, `--section.key value`) and from environment
variables such as NGPU; decides how the text of a value is read.

`key=value`, `--section.key value`, `--section.key=value`, `--section.flag` and
`--section.no-flag` all become the same kind of entry. A value is parsed as TOML if possible, and
otherwise taken as text; the type of the key decides (`model.flavor=8B`, `job.dump_folder=123` are
text).
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from overland.config.errors import ConfigError, Problem
from overland.config.fields import Key, find_key, nearest_key
from overland.config.source import Entries, Entry, KeyPath, flatten
from overland.plugins import plugin

COMMAND_LINE = "command line"
CONFIG_FILE = ("job", "config_file")


@dataclass
class Arguments:
    """The parsed command line; `config_files` are the files given by `--job.config_file`."""

    entries: Entries = field(default_factory=dict)
    config_files: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def parse_arguments(arguments: Sequence[str]) -> Arguments:
    found = Arguments()
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        name, equals, text = word.removeprefix("--").partition("=")
        path = _path(name.strip())
        if len(path) < 2 or not all(path) or not (equals or word.startswith("--")):
            message = "expected section.key=value, such as training.steps=20"
            near = nearest_key(f".{path[0]}") if len(path) == 1 and path[0] else None
            if advice := plugin("dialects").lesson(path[-1]):
                near = None
                message = f"no such setting; {advice}"
            elif word.startswith("--"):
                message = f"no such option (`--help` lists them); {message}"
            found.problems.append(Problem(message, where=COMMAND_LINE, value=word, nearest=near))
            continue
        path, negated = _without_no(path)
        if negated:
            _put(found, path, False)
        elif equals:
            _put(found, path, parse_value(text, key_of(path)))
        elif rest and _is_value(rest[0], key_of(path)):
            _put(found, path, parse_value(rest.pop(0), key_of(path)))
        elif (key := key_of(path)) is None or key.accepts(bool):
            _put(found, path, True)
        else:
            message = f"needs a value; expected {key.type_words}"
            found.problems.append(Problem(message, where=COMMAND_LINE, key=key.dotted))
    return found


def key_of(path: KeyPath) -> Key | None:
    """Returns the key that a path names, also by an older name."""
    return find_key(path) or find_key(plugin("dialects").todays_key(path))


def _path(name: str) -> KeyPath:
    """Splits a name into its path. Keys may be written with dashes; the third part is a name that
    the user chose, as in `data.sources.fine-web.weight`, and is kept."""
    return tuple(
        word if place == 2 else word.replace("-", "_") for place, word in enumerate(name.split("."))
    )


def parse_value(text: str, key: Key | None) -> Any:
    """Parses the text of a value, given its key."""
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    if key is None:
        return {"true": True, "false": False}.get(text.lower(), value)
    if text.lower() in ("none", "null") and key.accepts(type(None)):
        return None
    if key.accepts(bool) and text.lower() in ("true", "false"):
        return text.lower() == "true"
    if key.accepts(list) and not isinstance(value, list) and not key.accepts(str):
        return [part.strip() for part in text.split(",") if part.strip()]
    if key.accepts(str) and not isinstance(value, str | list):
        return text
    takes_int = key.accepts(int) and not key.accepts(float)  # data.holdout = 1.0 is no document
    if takes_int and isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def environment_entries(env: Mapping[str, str]) -> Entries:
    """Reads COMM_BACKEND; the other variables are not settings of a run (see below)."""
    backend = env.get("COMM_BACKEND", "")
    return {("comm", "backend"): Entry(backend, "environment COMM_BACKEND")} if backend else {}


def ngpu(env: Mapping[str, str]) -> int | None:
    """Reads NGPU, the number of processes to start on this machine; None: one per device."""
    text = _variable(env, "NGPU", r"0*[1-9]\d*", "a positive whole number")
    return int(text) if text else None


def log_ranks(env: Mapping[str, str]) -> list[int]:
    """Reads LOG_RANK, the ranks that print, such as 0 or 0,1; by default only rank 0."""
    expected = "ranks separated by commas, such as 0,1"
    text = _variable(env, "LOG_RANK", r"\d+(\s*,\s*\d+)*", expected)
    return sorted({int(part) for part in (text or "0").split(",")})


def dry_run(env: Mapping[str, str]) -> bool:
    """Reads DRY_RUN: 1 checks the config without training."""
    return _variable(env, "DRY_RUN", "(?i)0|1|false|true", "0 or 1").lower() in ("1", "true")


def _variable(env: Mapping[str, str], name: str, pattern: str, expected: str) -> str:
    """Returns the text of a variable; empty if it is not set."""
    text = env.get(name, "").strip()
    if text and not re.fullmatch(pattern, text):
        message = f"expected {expected}"
        raise ConfigError([Problem(message, where=f"environment {name}", value=text)])
    return text


def _without_no(path: KeyPath) -> tuple[KeyPath, bool]:
    """Reads `checkpoint.no_enable` as `checkpoint.enable`, negated, unless such a key exists."""
    if path[-1].startswith("no_") and key_of(path) is None:
        plain = (*path[:-1], path[-1].removeprefix("no_"))
        key = key_of(plain)
        if key is not None and key.accepts(bool):
            return plain, True
    return path, False


def _is_value(word: str, key: Key | None) -> bool:
    """Returns whether the word after `--section.key` is its value, not the next argument."""
    if word.startswith("--"):
        return False
    if key is not None and key.accepts(bool):
        return word.lower() in ("true", "false") or word in key.choices
    return True


def _put(found: Arguments, path: KeyPath, value: Any) -> None:
    if path == CONFIG_FILE:
        found.config_files.append(str(value))
        return
    if isinstance(value, dict) and value:
        nested = flatten({"": value}, {}, COMMAND_LINE)
        found.entries.update({(*path, *sub[1:]): entry for sub, entry in nested.items()})
        return
    found.entries[path] = Entry(value, COMMAND_LINE)
