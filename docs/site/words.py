"""Plain text of docstrings and descriptions as Markdown."""

from __future__ import annotations

import re

from overland.config.fields import all_keys

MARKUP = re.compile(r"([\\*_{}\[\]#|~])")
# Code, a dotted name, or what lies between them.
PIECE = re.compile(r"`[^`]+`|(?<![\w./])[a-z_0-9]+\.[a-z_0-9]+(?![\w/])|.+?", re.DOTALL)


def as_markdown(text: str) -> str:
    """Escapes what Markdown would take for markup. Code in backticks stays; keys become code."""
    return "".join(_piece(found[0]) for found in PIECE.finditer(text))


def as_code(text: str) -> str:
    """Returns a span of code, whatever it holds."""
    return f"`` {text} ``" if "`" in text else f"`{text}`"


def table(headings: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Returns a table; a column without any text is left out."""
    filled = [place for place, _ in enumerate(headings) if any(row[place] for row in rows)]
    lines = [headings, ("---",) * len(headings), *rows]
    return "\n".join(f"| {' | '.join(line[place] for place in filled)} |" for line in lines) + "\n"


def _piece(text: str) -> str:
    if text.startswith("`") and len(text) > 1:
        return text
    if text in all_keys():
        return f"`{text}`"
    return MARKUP.sub(r"\\\1", text.replace("&", "&amp;").replace("<", "&lt;"))
