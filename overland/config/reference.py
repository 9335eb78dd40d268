"""The reference of all keys as text, table, JSON and JSON Schema, made from the schema alone."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

from overland.config.fields import Key, all_keys, sections
from overland.config.schema import JobConfig
from overland.config.write import toml_value

if TYPE_CHECKING:
    from rich.console import RenderableType


def reference_rows() -> list[dict[str, Any]]:
    """One row per key: section, key, type, default, description."""
    rows = []
    for key in all_keys().values():
        rows.append(_row(key, key.section, key.name))
        for name in key.table.model_fields if key.table else ():
            inner = key.inside((key.section, key.name, "NAME", name))
            assert inner is not None
            rows.append(_row(inner, key.section, f"{key.name}.NAME.{name}"))
    return rows


def _row(key: Key, section: str, name: str) -> dict[str, Any]:
    return {
        "section": section,
        "key": name,
        "type": key.type_words,
        "default": key.default,
        "description": key.description,
    }


def reference_text(width: int = 100) -> str:
    """The reference as plain text."""
    lines: list[str] = []
    for section, about in sections().items():
        lines += [f"[{section}]  {about}", ""]
        for row in _rows_of(section):
            lines.append(f"  {row['key']} = {_default(row)}   ({row['type']})")
            lines += textwrap.wrap(
                row["description"], width - 6, initial_indent=" " * 6, subsequent_indent=" " * 6
            )
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def reference_tables() -> list[RenderableType]:
    """The reference for a terminal: one table per section."""
    from rich.table import Table
    from rich.text import Text

    tables: list[RenderableType] = []
    for section, about in sections().items():
        title = Text(f"[{section}] {about}")
        table = Table(title=title, title_justify="left", title_style="bold", expand=True)
        for heading in ("key", "default", "expected", "description"):
            table.add_column(heading, ratio=4 if heading == "description" else 2, overflow="fold")
        for row in _rows_of(section):
            cells = (row["key"], _default(row), row["type"], row["description"])
            table.add_row(*(Text(cell) for cell in cells))
        tables.append(table)
    return tables


def json_schema() -> dict[str, Any]:
    """JSON Schema of the config file, for editors that complete and check TOML or YAML."""
    schema = JobConfig.model_json_schema()
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "title": "Overland run config",
    }


def _rows_of(section: str) -> list[dict[str, Any]]:
    return [row for row in reference_rows() if row["section"] == section]


def _default(row: dict[str, Any]) -> str:
    return "not set" if row["default"] is None else toml_value(row["default"])
