"""Reads TOML and YAML config files as a flat map from key path to value and place (file and line),
and decides which values of a file the command line replaces.

TOML and YAML both become `Entries`, so that nothing after this module depends on the format.
"""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from overland.config.errors import ConfigError, Problem
from overland.config.schema import IN_PLACE_OF
from overland.files import (
    KEY_PART,
    LARGEST_CONFIG,
    QUOTED,
    TOO_DEEP,
    YAML_VALUE_ERRORS,
    compose_yaml,
    parse_toml,
)

KeyPath = tuple[str, ...]


@dataclass(frozen=True)
class Entry:
    """A value and the place where it was set (`run.toml:12`, `command line`, …)."""

    value: Any
    where: str
    section_where: str = ""


Entries = dict[KeyPath, Entry]


class Translated(NamedTuple):
    entries: Entries
    notes: list[str]
    problems: list[Problem]
    routine: frozenset[str] = frozenset()
    """The notes that only say what became of a key."""
    about: str = ""
    """Names the trainer that the file is for."""


MOST_BITS = 4096
SUFFIXES = (".toml", ".yaml", ".yml")


def read_file(path: Path, shown: str) -> Entries:
    """Returns the entries of a .toml, .yaml or .yml file; `shown` is its name in messages."""
    try:
        if path.stat().st_size > LARGEST_CONFIG:
            raise _error(f"larger than {LARGEST_CONFIG:,} bytes, too large for a config", shown)
        text = path.read_text(encoding="utf-8-sig")  # editors on Windows write a byte-order mark
    except UnicodeDecodeError as error:
        message = f"not a text file in UTF-8 (byte {error.start} cannot be read)"
        raise _error(message, shown) from None
    except OSError as error:
        raise _error(f"cannot be read: {error.strerror}", shown) from None
    if path.suffix == ".toml":
        return read_toml(text, shown)
    if path.suffix in SUFFIXES:
        return read_yaml(text, shown)
    raise _error("expected a file that ends in .toml, .yaml or .yml", shown)


def _error(message: str, where: str) -> ConfigError:
    return ConfigError([Problem(message, where=where)])


def read_toml(text: str, shown: str) -> Entries:
    try:
        tree = parse_toml(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError([_toml_problem(str(error), text, shown)]) from None
    except ValueError as error:
        raise _error(f"not valid TOML: {error}", shown) from None
    return flatten(tree, index_lines(text), shown)


def read_yaml(text: str, shown: str) -> Entries:
    import yaml

    try:
        loader, node = compose_yaml(text, _yaml_loader())
        lines = list(_yaml_lines(node))
        if problems := _repeated(lines, shown):
            raise ConfigError(problems)
        tree = loader.construct_document(node) if node is not None else {}
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        last = max(1, len(text.splitlines()))
        where = f"{shown}:{min(mark.line + 1, last)}" if mark else shown
        detail = error.problem or error.context or "cannot be read"
        raise _error(f"not valid YAML: {detail}", where) from None
    except RecursionError:
        raise _error(TOO_DEEP, shown) from None
    except (yaml.YAMLError, *YAML_VALUE_ERRORS) as error:
        detail = (str(error).splitlines() or ["cannot be read"])[0]
        raise _error(f"not valid YAML: {detail}", shown) from None
    if not isinstance(tree, dict):
        raise _error("expected sections with keys, as in `training:`", shown)
    # `training:` with nothing below it is an empty section.
    return flatten({key: {} if v is None else v for key, v in tree.items()}, dict(lines), shown)


def flatten(tree: dict[Any, Any], lines: Mapping[KeyPath, int], shown: str) -> Entries:
    """Returns the leaves of a nested mapping; an empty mapping is a leaf itself."""
    entries: Entries = {}

    def visit(value: Any, path: KeyPath) -> None:
        if isinstance(value, dict) and (value or not path):
            for key, item in value.items():
                visit(item, (*path, str(key)))
            return
        where = place_of(path, lines, shown)
        if _is_huge(value):
            raise ConfigError([Problem("too large", where, ".".join(path))])
        entries[path] = Entry(value, where, place_of(path[:1], lines, shown))

    visit(tree, ())
    return entries


def place_of(path: KeyPath, lines: Mapping[KeyPath, int], shown: str) -> str:
    """Returns the file and line of a key, or of what it is in."""
    line = next((f":{lines[path[:n]]}" for n in range(len(path), 0, -1) if path[:n] in lines), "")
    return f"{shown}{line}"


def _is_huge(value: Any) -> bool:
    """Whether a number is in it that could not even be printed."""
    if isinstance(value, dict | list):
        return any(map(_is_huge, value.values() if isinstance(value, dict) else value))
    return isinstance(value, int) and value.bit_length() > MOST_BITS


def nest(entries: Entries) -> dict[str, Any]:
    """Undoes `flatten`. A later entry replaces an earlier one on its path."""
    tree: dict[str, Any] = {}
    for path, entry in entries.items():
        node = tree
        for part in path[:-1]:
            if not isinstance(node.get(part), dict):
                node[part] = {}
            node = node[part]
        node[path[-1]] = dict(entry.value) if isinstance(entry.value, dict) else entry.value
    return tree


def overlay(base: Entries, top: Entries) -> Entries:
    """Returns `base` overridden by `top`. A value also removes what it replaces above and below its
    path, and the same setting in another form: steps replace epochs. The order stays, since that of
    data sources decides which is read first."""
    pairs = [tuple(tuple(key.split(".")) for key in pair) for pair in IN_PLACE_OF.items()]
    given = {path for path, entry in top.items() if entry.value is not None}
    other_unit = {pair[1 - i] for pair in pairs for i in (0, 1) if pair[i] in given}
    kept = {
        path: entry
        for path, entry in base.items()
        if path in top
        or (path not in other_unit and not any(_one_inside_other(path, above) for above in top))
    }
    return {**kept, **top}


def _one_inside_other(a: KeyPath, b: KeyPath) -> bool:
    shorter = min(len(a), len(b))
    return a[:shorter] == b[:shorter]


def _toml_problem(message: str, text: str, shown: str) -> Problem:
    found = re.search(r" \(at (?:line (\d+), column \d+|end of document)\)$", message)
    detail = message[: found.start()] if found else message
    rows = text.removesuffix("\n").split("\n")
    line = int(found.group(1)) if found and found.group(1) else len(rows)
    where = f"{shown}:{line}"
    if detail.startswith(REPEATED):  # the rest of the text may be anything
        for problem in _repeated(key_lines("\n".join(rows[:line])), shown):
            return problem
    detail = _TOML_WORDS.get(detail, detail[:1].lower() + detail[1:])
    row = rows[line - 1].strip()[:LONGEST_ROW] if 0 < line <= len(rows) else ""
    word = re.match(r"([^=]+?)\s*=\s*([A-Za-z_./~][^#\"']*?)\s*(#.*)?$", row)
    if detail == "invalid value" and word:
        hint = f'text needs quotes: {word.group(1)} = "{word.group(2)}"'
        return Problem(f"not valid TOML, {hint}", where=where)
    shown_row = f" in `{row}`" if row else ""
    return Problem(f"not valid TOML: {detail}{shown_row}", where=where)


LONGEST_ROW = 200  # characters of the file that a message shows
REPEATED = ("Cannot overwrite", "Cannot declare", "Cannot mutate", "Duplicate")

_TOML_WORDS = {
    "Invalid value": "invalid value",
    "Illegal character '\\n'": "missing closing quote",
    "Unterminated string": "missing closing quote",
    "Unclosed array": "missing closing ] of a list",
    "Expected ']' at the end of a table declaration": "missing closing ] of a section",
    "Expected '=' after a key in a key/value pair": "missing = after the key",
    "Expected newline or end of document after a statement": "unexpected text after the value",
}


def _yaml_loader() -> Any:
    """Returns PyYAML's safe loader, made to read 3e-4 as a number (in YAML 1.1 it is text)."""
    import yaml

    class Loader(yaml.SafeLoader):
        pass

    number = re.compile(r"[-+]?(\d[\d_]*)(\.[\d_]*)?[eE][-+]?\d+$|[-+]?\.\d[\d_]*([eE][-+]?\d+)?$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+.0123456789"))
    return Loader


def _yaml_lines(node: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, int]]:
    """Yields the path and the line of each key."""
    import yaml

    for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
        here = (*path, str(key.value))
        yield here, key.start_mark.line + 1
        yield from _yaml_lines(value, here)


def _repeated(lines: Iterable[tuple[KeyPath, int]], shown: str) -> list[Problem]:
    """Returns the keys that are given twice, without what is inside of them."""
    problems: list[Problem] = []
    first: dict[KeyPath, int] = {}
    repeated: set[KeyPath] = set()
    for path, line in lines:
        if path in first and not any(path[:n] in repeated for n in range(len(path))):
            message = f"given twice; first on line {first[path]}"
            problems.append(Problem(message, f"{shown}:{line}", ".".join(path)))
            repeated.add(path)
        first.setdefault(path, line)
    return problems


_KEY = rf"{KEY_PART}(?:[ \t]*\.[ \t]*{KEY_PART})*"
_KEY_LINE = re.compile(rf"[ \t]*(?P<bracket>\[\[?)?[ \t]*(?P<key>{_KEY})[ \t]*(?(bracket)\]|=)")
_STRING_OR_COMMENT = re.compile(
    r'"""(?:[^\\]|\\.)*?"{3,5}' r"|'''.*?'{3,5}" rf"|{QUOTED}" r"|#[^\n]*", re.DOTALL
)


def key_lines(text: str) -> Iterator[tuple[KeyPath, int]]:
    """Yields the path and the line of each key and table of a TOML text, since `tomllib` keeps no
    positions. Keys of an inline table have its line. Equal tables of an array are told apart by
    their numbers."""
    bare = _STRING_OR_COMMENT.sub(lambda found: "\n" * found[0].count("\n"), text)
    prefix: KeyPath = ()
    counts: Counter[KeyPath] = Counter()
    depth = 0
    for line, (row, rest) in enumerate(zip(text.split("\n"), bare.split("\n"), strict=True), 1):
        found = _KEY_LINE.match(row)
        if found and depth == 0 and ("=" in rest or "[" in rest):  # not inside of a value
            path = key_path(found["key"])
            if found["bracket"] == "[[":
                counts[path] += 1
                path = (*path, str(counts[path] - 1))
            if found["bracket"]:
                prefix = path
            yield path if found["bracket"] else (*prefix, *path), line
        depth += rest.count("[") - rest.count("]")


def key_path(key: str) -> KeyPath:
    """Returns the parts of a key as TOML writes it, such as `a."b.c"`."""
    path: list[str] = []
    inside = tomllib.loads(f"{key} = 0")
    while isinstance(inside, dict):
        ((name, inside),) = inside.items()
        path.append(name)
    return tuple(path)


def index_lines(text: str) -> dict[KeyPath, int]:
    """Returns the line of each key and table, and of those that contain it."""
    lines: dict[KeyPath, int] = {}
    for path, line in key_lines(text):
        for end in range(1, len(path) + 1):
            lines.setdefault(path[:end], line)
    return lines
