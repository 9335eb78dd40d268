"""The reference of all keys of a config: text, tables, JSON and JSON Schema."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from overland.config.errors import toml_value
from overland.config.fields import Key, all_keys, sections
from overland.config.schema import JobConfig

if TYPE_CHECKING:
    from rich.console import RenderableType


def reference_rows(word: str = "") -> list[dict[str, Any]]:
    """Returns one row per key: section, key, type, default, description; only those with `word` in
    their name or description, if one is given."""
    rows = []
    for key in all_keys().values():
        rows.append(_row(key, key.section, key.name))
        above = ("NAME",) if key.table else ()
        for name, inner in key.inside(*above).items():
            rows.append(_row(inner, key.section, ".".join([key.name, *above, name])))
    said = "{section}.{key}\n{description}"
    return [row for row in rows if word.lower() in said.format(**row).lower()]


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
    for title, rows in _by_section(word):
        lines += [title, ""]
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
    for title, rows in _by_section(word):
        table = Table(title=Text(title), title_justify="left", title_style="bold", expand=True)
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


def _by_section(word: str) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yields the title and the rows of each section, or of those that have `word`."""
    found = reference_rows(word)
    for section, about in sections().items():
        rows = [row for row in found if row["section"] == section]
        if rows or not word:
            yield f"[{section}] {about}", rows


def _default(row: dict[str, Any]) -> str:
    return "not set" if row["default"] is None else toml_value(row["default"])
