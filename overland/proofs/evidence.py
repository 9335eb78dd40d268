"""A table of verdicts in a Markdown file: written row by row, so that a long proof can go on."""

from __future__ import annotations

from pathlib import Path

from overland.proofs.layout import TOLERANCES, Verdict

HEAD = """\
# Layouts that compute what one process computes

Written by `overland prove layout --table` (`make prove-all`). A row: a tiny model, trained from \
the same seed on real processes over gloo; the largest relative difference to one process in any \
step, of the loss and of the gradient norm. How to read a name: `overland/proofs/layouts.py`.

| layout | ranks | number format | loss | gradient norm | verdict |
|---|---|---|---|---|---|
"""


class Evidence:
    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.rows: set[tuple[str, str]] = set()
        if path is None:
            return
        if path.exists():
            for line in path.read_text().splitlines():
                cells = [cell.strip(" `") for cell in line.split("|")]
                if len(cells) == 8 and cells[6] == "equal":
                    self.rows.add((cells[1], cells[3].split()[0]))
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(HEAD)

    def holds(self, layout: str, dtype: str) -> bool:
        return (layout, dtype) in self.rows

    def add(self, verdict: Verdict) -> None:
        if self.path is None:
            return
        said = "equal" if verdict.is_equal else f"differs {verdict.error}"
        with self.path.open("a") as file:
            file.write(
                f"| `{verdict.layout}` | {verdict.ranks} | {verdict.dtype} (≤ "
                f"{TOLERANCES[verdict.dtype]:g}) | {verdict.loss_difference:.1e} | "
                f"{verdict.norm_difference:.1e} | {said} |\n"
            )
