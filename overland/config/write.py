"""Writes a `JobConfig` as TOML that `load_config` reads back to the same config."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from overland.config.errors import toml_key, toml_value
from overland.config.fields import Key, all_keys, sections
from overland.config.paths import with_paths
from overland.config.schema import IN_PLACE_OF, SFT_DEFAULTS, JobConfig, Section
from overland.files import replace_file

# If it were left out, the run folder would be named after the file when it is read back.
ALWAYS = ("job.dump_folder",)


def write_config(
    config: JobConfig, path: Path, full: bool = False, heading: str = "", resolved: bool = True
) -> None:
    """Writes `to_toml(config)` to a file."""
    replace_file(path, to_toml(config, full=full, heading=heading, resolved=resolved))


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
        config = with_paths(config, lambda key, path: path.replace("$", "$$"))
    written = written or {}
    blocks = [_comment(heading)] if heading else []
    known = all_keys()
    replaced = {other for key, other in IN_PLACE_OF.items() if config.value(key) is not None}
    always = {*(ALWAYS if resolved else ()), *(SFT_DEFAULTS if config.sft.shape != "off" else ())}
    for section in sections():
        lines, tables = [f"[{section}]"], []
        for key in known.values():
            if key.section != section or key.dotted in replaced:
                continue
            value = getattr(getattr(config, section), key.attribute)
            if not (full or value != key.default or key.dotted in always):
                continue
            if key.table and value:
                tables += _tables(key, value, written)
            else:
                lines += _as_written(key.dotted, written) + _lines(key, value, comments)
        if len(lines) > 1:
            blocks.append("\n".join(lines))
        blocks += tables
    return "\n\n".join(blocks) + "\n"


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
        blocks.append("\n".join([f"[{key.dotted}.{toml_key(name)}]", *lines]))
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
