"""Writes a `JobConfig` as TOML that `load_config` reads back to the same config, and the reference
of all keys as text, table, JSON and JSON Schema."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from overland.config.fields import Key, all_keys, sections
from overland.config.schema import IN_PLACE_OF, SFT_DEFAULTS, JobConfig, Section
from overland.config.variables import with_literal_paths
from overland.files import replace_file

if TYPE_CHECKING:
    from rich.console import RenderableType


# If it were left out, the run folder would be named after the file when it is read back.
ALWAYS = ("job.dump_folder",)


def write_config(
    config: JobConfig, path: Path, full: bool = False, heading: str = "", resolved: bool = True
) -> None:
    """Writes `to_toml(config)` to a file."""
    text = to_toml(config, full=full, heading=heading, resolved=resolved)
    replace_file(path, text)


def to_toml(
    config: JobConfig,
    full: bool = False,
    comments: bool = True,
    heading: str = "",
    written: Mapping[str, str] | None = None,
    resolved: bool = True,
) -> str:
    """Returns the config as TOML.

    Args:
        config: What to write.
        full: Also write keys that have their default value.
        comments: Write each key's description above it.
        heading: Comment at the top.
        written: Paths before variables were resolved, by key; each becomes a comment.
        resolved: Whether variables in paths were resolved; a `$` in a path is then literal.
    """
    if resolved:
        config = with_literal_paths(config)
    written = written or {}
    blocks = [_comment(heading)] if heading else []
    known = all_keys()
    replaced = {
        other for key, other in IN_PLACE_OF.items() if _value(config, known[key]) is not None
    }
    always = {*(ALWAYS if resolved else ()), *(SFT_DEFAULTS if config.sft.shape != "off" else ())}
    for section in sections():
        keys = [key for key in known.values() if key.section == section]
        chosen = [
            key
            for key in keys
            if key.dotted not in replaced
            and (full or _value(config, key) != key.default or key.dotted in always)
        ]
        plain = [key for key in chosen if not (key.table and _value(config, key))]
        if plain:
            lines = [
                line
                for key in plain
                for line in (
                    *_as_written(key.dotted, written),
                    *_lines(key, _value(config, key), comments),
                )
            ]
            blocks.append("\n".join([f"[{section}]", *lines]))
        for key in chosen:
            if key not in plain:
                blocks += _tables(key, _value(config, key), written)
    return "\n\n".join(blocks) + "\n"


def toml_value(value: Any) -> str:
    """Returns a value as TOML writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # JSON's escapes are valid in TOML's basic strings, except that TOML also escapes DEL.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Section):
        return toml_value(value.model_dump(exclude_defaults=True))
    if isinstance(value, list | tuple):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    if isinstance(value, dict):
        items = ", ".join(
            f"{_toml_key(key)} = {toml_value(item)}"
            for key, item in value.items()
            if item is not None  # TOML has no null: not set
        )
        return "{ " + items + " }" if items else "{}"
    return repr(value)


def _lines(key: Key, value: Any, comments: bool) -> list[str]:
    lines = _comment(key.description).splitlines() if comments else []
    lines.append(
        f"# {key.name} is not set" if value is None else f"{key.name} = {toml_value(value)}"
    )
    return lines


def _tables(key: Key, tables: dict[str, Section], written: Mapping[str, str]) -> list[str]:
    """Returns one TOML table each, with the keys that are set."""
    blocks = []
    for name, table in tables.items():
        values = table.model_dump(exclude_defaults=True)
        lines = _as_written(f"{key.dotted}.{name}", written)
        lines += [f"{inner} = {toml_value(value)}" for inner, value in values.items()]
        blocks.append("\n".join([f"[{key.dotted}.{_toml_key(name)}]", *lines]))
    return blocks


def _as_written(dotted: str, written: Mapping[str, str]) -> list[str]:
    """Returns comments with the original text of paths at or below this key."""
    return [
        f"# {key.rpartition('.')[2]} is written {toml_value(text)}"
        for key, text in written.items()
        if key == dotted or key.startswith(f"{dotted}.")
    ]


def _comment(text: str) -> str:
    lines = [line for part in text.splitlines() for line in textwrap.wrap(part, 97)]
    return "\n".join(f"# {line}" for line in lines)


def _value(config: JobConfig, key: Key) -> Any:
    return getattr(getattr(config, key.section), key.attribute)


def _toml_key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else toml_value(name)


def reference_rows(word: str = "") -> list[dict[str, Any]]:
    """Returns one row per key: section, key, type, default, description; only those with `word` in
    their name or description, if one is given."""
    rows = []
    for key in all_keys().values():
        rows.append(_row(key, key.section, key.name))
        for name in key.table.model_fields if key.table else ():
            inner = key.inside((key.section, key.name, "NAME", name))
            assert inner is not None
            rows.append(_row(inner, key.section, f"{key.name}.NAME.{name}"))
        for name, field in key.record.model_fields.items() if key.record else ():
            rows.append(_row(Key(key.dotted, name, field), key.section, f"{key.name}.{name}"))
    return [row for row in rows if _says(row, word.lower())]


def _says(row: dict[str, Any], word: str) -> bool:
    return word in f"{row['section']}.{row['key']}\n{row['description']}".lower()


def _row(key: Key, section: str, name: str) -> dict[str, Any]:
    return {
        "section": section,
        "key": name,
        "type": key.type_words,
        "default": key.default,
        "description": key.description,
    }


def reference_text(word: str = "", width: int = 100) -> str:
    """Returns the reference as plain text, or the part of it that has `word`."""
    lines: list[str] = []
    for section, about in sections().items():
        rows = _rows_of(section, word)
        if word and not rows:
            continue
        lines += [f"[{section}]  {about}", ""]
        for row in rows:
            lines.append(f"  {row['key']} = {_default(row)}   ({row['type']})")
            lines += textwrap.wrap(
                row["description"], width - 6, initial_indent=" " * 6, subsequent_indent=" " * 6
            )
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def reference_tables(word: str = "") -> list[RenderableType]:
    """Returns the reference for a terminal, one table per section, or the part of it that has
    `word`."""
    from rich.table import Table
    from rich.text import Text

    tables: list[RenderableType] = []
    for section, about in sections().items():
        rows = _rows_of(section, word)
        if word and not rows:
            continue
        title = Text(f"[{section}] {about}")
        table = Table(title=title, title_justify="left", title_style="bold", expand=True)
        for heading in ("key", "default", "expected", "description"):
            table.add_column(heading, ratio=4 if heading == "description" else 2, overflow="fold")
        for row in rows:
            cells = (row["key"], _default(row), row["type"], row["description"])
            table.add_row(*(Text(cell) for cell in cells))
        tables.append(table)
    return tables


def json_schema() -> dict[str, Any]:
    """Returns a JSON Schema of the config file, for editors that complete and check TOML
    or YAML."""
    schema = JobConfig.model_json_schema()
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "title": "Overland run config",
    }


def _rows_of(section: str, word: str) -> list[dict[str, Any]]:
    return [row for row in reference_rows(word) if row["section"] == section]


def _default(row: dict[str, Any]) -> str:
    return "not set" if row["default"] is None else toml_value(row["default"])
