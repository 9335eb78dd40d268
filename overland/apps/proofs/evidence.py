"""A table of verdicts in a Markdown file, written row by row, so that a long proof can resume."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from overland.config.errors import ConfigError, Problem
from overland.files import replace_file

OTHERWISE = "was written with other settings or by another version"
WITH = "With `"


class Evidence:
    """The table. `head` is the text above the rows, which says with which settings they are proven
    and ends with the header; `keys` are the columns that identify a row, and the last column says
    "equal" if all is well.

    A file of the same title must have the same head. One of another title is somebody's own page,
    and needs the same columns, and the same line about settings if there is one. What stands below
    the table stays.
    """

    def __init__(self, path: Path | None, head: str, keys: Sequence[int]) -> None:
        self.path, self.keys, self.head = path, keys, head.splitlines()
        if path is None:
            return
        lines = _read(path)
        if lines:
            self._check(path, lines)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, head)

    def holds(self, *names: str) -> bool:
        rows = _rows(_read(self.path)) if self.path else []
        return any(self._key(row) == names and row[-1].startswith("equal") for row in rows)

    def add(self, *cells: str) -> None:
        """Adds a row; one with the same key is replaced: what differed may be fixed by now."""
        if self.path is None:
            return
        new = [cell.replace("|", "/") for cell in cells]
        lines = _read(self.path)
        head = lines[: _header(lines) + 2]
        rows = [row for row in _rows(lines) if self._key(row) != self._key(new)]
        table = [f"| {' | '.join(row)} |" for row in [*rows, new]]
        replace_file(self.path, "\n".join([*head, *table, *lines[_end(lines) :], ""]))

    def _check(self, path: Path, lines: list[str]) -> None:
        header, ours = _header(lines), _header(self.head)
        if lines[header:][:1] != self.head[ours:][:1]:
            problem = "is not a table of this proof"
        elif lines[0] != self.head[0]:
            problem = "" if _settings(lines) == _settings(self.head) else OTHERWISE
        elif lines[:header] != self.head[:ours]:
            problem = OTHERWISE
        else:
            problem = ""
        if not problem:
            return
        message = f"{problem}; name another file, or delete this one to start over"
        raise ConfigError([Problem(message, "command line", "--table", str(path))])

    def _key(self, row: Sequence[str]) -> tuple[str, ...]:
        return tuple((row[key].strip(" `").split() or [""])[0] for key in self.keys)


def with_settings(head: str, settings: Sequence[str]) -> str:
    """Returns the head with a line that says how the rows are proven, where not by default."""
    if not settings:
        return head
    text, table = head.split("\n|", 1)
    return f"{text}\nWith {', '.join(f'`{one}`' for one in settings)}.\n\n|{table}"


def _read(path: Path) -> list[str]:
    return path.read_text(errors="replace").splitlines() if path.exists() else []


def _header(lines: list[str]) -> int:
    """Returns the place of the table's first line, or of the end."""
    return next((i for i, line in enumerate(lines) if line.startswith("|")), len(lines))


def _end(lines: list[str]) -> int:
    """Returns the place of the first line below the table."""
    header = _header(lines)
    return next((i for i in range(header, len(lines)) if not lines[i].startswith("|")), len(lines))


def _settings(lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith(WITH)]


def _rows(lines: list[str]) -> list[list[str]]:
    """Returns the cells of each row; half a row, from a kill, is none."""
    header = _header(lines)
    columns = lines[header].count("|") if header < len(lines) else 0
    whole = (line for line in lines[header + 2 : _end(lines)] if line.count("|") == columns)
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in whole]
