"""The reference of the config: a page per section, from what `overland config reference` prints."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from words import as_code, as_markdown, table

from overland.apps.reference import reference_rows
from overland.config.errors import toml_value
from overland.config.fields import sections

FOLDER = "reference/config"
FOUND_FIRST = "---\nsearch:\n  boost: 2\n---\n\n"


def pages() -> dict[str, str]:
    made = {f"{FOLDER}/index.md": _overview()}
    for section, about in sections().items():
        entries = [_entry(row) for row in _rows_of(section)]
        heading = f"{FOUND_FIRST}# \\[{section}\\]\n\n{as_markdown(about)}"
        made[f"{FOLDER}/{section}.md"] = "\n\n".join([heading, *entries]) + "\n"
    return made


def place_of(code: str) -> str | None:
    """Returns where a key, or a section in brackets, is explained."""
    if code in _names():
        return f"{FOLDER}/{code.partition('.')[0]}.md#{code}"
    section = code.removeprefix("[").removesuffix("]")
    is_section = code == f"[{section}]" and section in sections()
    return f"{FOLDER}/{section}.md" if is_section else None


def _overview() -> str:
    rows = [
        (f"[`[{section}]`]({section}.md)", as_markdown(about), str(len(_rows_of(section))))
        for section, about in sections().items()
    ]
    return (
        "# Config keys\n\nEvery run is one TOML or YAML file with these sections; a key is set as "
        "`training.steps=20` on the command line. [The config of a run](../../config.md) explains "
        "where values come from. `overland config reference` prints these keys in a terminal, and "
        "`overland config schema` writes a JSON Schema for editors.\n\n"
        + table(("section", "what it sets", "keys"), rows)
    )


def _entry(row: dict[str, Any]) -> str:
    name = f"{row['section']}.{row['key']}"
    default = "not set" if row["default"] is None else as_code(toml_value(row["default"]))
    kind = re.sub(r'"[^"]*"', lambda word: as_code(word[0]), row["type"])
    facts = f"{as_markdown(kind)} · default: {default}"
    return f"## {as_markdown(name)} {{ #{name} }}\n\n{facts}\n{{ .facts }}\n\n{_description(row)}"


def _description(row: dict[str, Any]) -> str:
    return as_markdown(row["description"])


def _rows_of(section: str) -> list[dict[str, Any]]:
    return [row for row in _all_rows() if row["section"] == section]


@cache
def _all_rows() -> list[dict[str, Any]]:
    return reference_rows()


@cache
def _names() -> set[str]:
    return {f"{row['section']}.{row['key']}" for row in _all_rows()}
