"""Config files as a flat map from key path to value and place.

TOML and YAML end in the same `Entries`, so that nothing after this module knows which one it was.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overland.config.errors import ConfigError, Problem
from overland.config.foreign import LARGEST_CONFIG, check_yaml
from overland.config.schema import IN_PLACE_OF
from overland.config.toml_lines import LineIndex, index_lines

KeyPath = tuple[str, ...]


@dataclass(frozen=True)
class Entry:
    """A value and the place it was written at (`run.toml:12`, `command line`, …)."""

    value: Any
    where: str
    section_where: str = ""


Entries = dict[KeyPath, Entry]

SUFFIXES = (".toml", ".yaml", ".yml")


def read_file(path: Path, shown: str) -> Entries:
    """Entries of a .toml, .yaml or .yml file; `shown` is its name in messages."""
    try:
        if path.stat().st_size > LARGEST_CONFIG:
            message = f"larger than {LARGEST_CONFIG:,} bytes, which no config is"
            raise ConfigError([Problem(message, where=shown)])
        text = path.read_text(encoding="utf-8-sig")  # editors on Windows begin with a mark
    except UnicodeDecodeError as error:
        message = f"not a text file in UTF-8 (byte {error.start} cannot be read)"
        raise ConfigError([Problem(message, where=shown)]) from None
    except OSError as error:
        raise ConfigError([Problem(f"cannot be read: {error.strerror}", where=shown)]) from None
    if path.suffix == ".toml":
        return read_toml(text, shown)
    if path.suffix in SUFFIXES:
        return read_yaml(text, shown)
    raise ConfigError([Problem("expected a file that ends in .toml, .yaml or .yml", where=shown)])


def read_toml(text: str, shown: str) -> Entries:
    try:
        index = index_lines(text)
        tree = tomllib.loads(text)
        return flatten(tree, index.lines, shown)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError([_toml_problem(str(error), text, index, shown)]) from None
    except RecursionError:
        raise ConfigError([Problem("its values are nested too deep", where=shown)]) from None
    except ValueError as error:  # a number with thousands of digits
        raise ConfigError([Problem(f"not valid TOML: {error}", where=shown)]) from None


def read_yaml(text: str, shown: str) -> Entries:
    import yaml

    try:
        loader = _yaml_loader()(text)
        node = loader.get_single_node()
        lines: dict[KeyPath, int] = {}
        problems: list[Problem] = []
        check_yaml(node)
        if node is not None:
            _index_yaml(node, (), lines, problems, shown)
        if problems:
            raise ConfigError(problems)
        tree = loader.construct_document(node) if node is not None else {}
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        last = max(1, len(text.splitlines()))
        where = f"{shown}:{min(mark.line + 1, last)}" if mark else shown
        detail = error.problem or error.context or "cannot be read"
        raise ConfigError([Problem(f"not valid YAML: {detail}", where=where)]) from None
    except RecursionError:
        raise ConfigError([Problem("its values are nested too deep", where=shown)]) from None
    except ConfigError:
        raise
    except (yaml.YAMLError, ValueError, TypeError) as error:
        detail = (str(error).splitlines() or ["cannot be read"])[0]
        raise ConfigError([Problem(f"not valid YAML: {detail}", where=shown)]) from None
    if not isinstance(tree, dict):
        raise ConfigError([Problem("expected sections with keys, as in `training:`", where=shown)])
    # `training:` with nothing below it is an empty section.
    return flatten({key: {} if v is None else v for key, v in tree.items()}, lines, shown)


def flatten(tree: dict[Any, Any], lines: dict[KeyPath, int], shown: str) -> Entries:
    """Leaves of a nested mapping; an empty mapping is a leaf of its own."""
    entries: Entries = {}

    def visit(value: Any, path: KeyPath) -> None:
        if isinstance(value, dict) and (value or not path):
            for key, item in value.items():
                visit(item, (*path, str(key)))
            return
        line = next((lines[path[:n]] for n in range(len(path), 0, -1) if path[:n] in lines), None)
        entries[path] = Entry(value, place(line), place(lines.get(path[:1])))

    def place(line: int | None) -> str:
        return f"{shown}:{line}" if line else shown

    visit(tree, ())
    return entries


def nest(entries: Entries) -> dict[str, Any]:
    """The opposite of `flatten`. A later entry takes the place of an earlier one on its way."""
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
    """`base` with `top` on it: a value takes away what it replaces, above and below its path, or
    in another unit: steps take the place of epochs."""
    pairs = [tuple(tuple(key.split(".")) for key in pair) for pair in IN_PLACE_OF.items()]
    other_unit = {pair[1 - i] for pair in pairs for i in (0, 1) if pair[i] in top}
    kept = {
        path: entry
        for path, entry in base.items()
        if path not in other_unit and not any(_one_inside_other(path, above) for above in top)
    }
    return {**kept, **top}


def _one_inside_other(a: KeyPath, b: KeyPath) -> bool:
    shorter = min(len(a), len(b))
    return a[:shorter] == b[:shorter]


def _toml_problem(message: str, text: str, index: LineIndex, shown: str) -> Problem:
    found = re.search(r" \(at (?:line (\d+), column \d+|end of document)\)$", message)
    detail = message[: found.start()] if found else message
    rows = text.splitlines()
    line = int(found.group(1)) if found and found.group(1) else len(rows)
    where = f"{shown}:{line}"
    for path, second, first in index.repeats:
        # tomllib stops at the first repeat, which is also the first that the index saw.
        if detail.startswith(REPEATED):
            message = f"given twice; first on line {first}"
            return Problem(message, where=f"{shown}:{second}", key=".".join(path))
    detail = _TOML_WORDS.get(detail, detail[:1].lower() + detail[1:])
    row = rows[line - 1].strip() if 0 < line <= len(rows) else ""
    word = re.match(r"([^=]+?)\s*=\s*([A-Za-z_./~][^#\"']*?)\s*(#.*)?$", row)
    if detail == "no valid value" and word:
        hint = f'text needs quotes: {word.group(1)} = "{word.group(2)}"'
        return Problem(f"not valid TOML, {hint}", where=where)
    shown_row = f" in `{row}`" if row else ""
    return Problem(f"not valid TOML: {detail}{shown_row}", where=where)


REPEATED = ("Cannot overwrite", "Cannot declare", "Cannot mutate", "Duplicate")

_TOML_WORDS = {
    "Invalid value": "no valid value",
    "Illegal character '\\n'": "a text without its closing quote",
    "Unterminated string": "a text without its closing quote",
    "Unclosed array": "a list without its closing ]",
    "Expected ']' at the end of a table declaration": "a section without its closing ]",
    "Expected '=' after a key in a key/value pair": "no = after the key",
    "Expected newline or end of document after a statement": "something after the value",
}


def _yaml_loader() -> Any:
    """PyYAML's safe loader, which reads 3e-4 as a number (by YAML 1.1 it would be text)."""
    import yaml

    class Loader(yaml.SafeLoader):
        pass

    number = re.compile(r"[-+]?(\d[\d_]*)(\.[\d_]*)?[eE][-+]?\d+$|[-+]?\.\d[\d_]*([eE][-+]?\d+)?$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+.0123456789"))
    return Loader


def _index_yaml(
    node: Any, path: KeyPath, lines: dict[KeyPath, int], problems: list[Problem], shown: str
) -> None:
    import yaml

    if not isinstance(node, yaml.MappingNode):
        return
    seen: dict[str, int] = {}
    for key_node, value_node in node.value:
        key, line = str(key_node.value), key_node.start_mark.line + 1
        here = (*path, key)
        if key in seen:
            message = f"given twice; first on line {seen[key]}"
            problems.append(Problem(message, where=f"{shown}:{line}", key=".".join(here)))
        seen.setdefault(key, line)
        lines.setdefault(here, line)
        _index_yaml(value_node, here, lines, problems, shown)
