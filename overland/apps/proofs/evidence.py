"""A table of verdicts in a Markdown file, written row by row, so that a long proof can resume."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


class Evidence:
    """The table. `head` is the text above the rows, including the header; `keys` are the columns
    that identify a row, and the last column says "equal" if all is well."""

    def __init__(self, path: Path | None, head: str, keys: Sequence[int]) -> None:
        self.path = path
        self.rows: set[tuple[str, ...]] = set()
        if path is None:
            return
        if path.exists():
            for line in path.read_text().splitlines():
                cells = [cell.strip(" `") for cell in line.split("|")[1:-1]]
                if cells and cells[-1].startswith("equal"):
                    self.rows.add(tuple(cells[key].split()[0] for key in keys))
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(head)

    def holds(self, *names: str) -> bool:
        return names in self.rows

    def add(self, *cells: str) -> None:
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(f"| {' | '.join(cells)} |\n")
