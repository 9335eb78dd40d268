"""Runs examples/overland.ipynb as it is, cell by cell in one namespace, and writes the results to a
page.

    python -m tests.prove_notebook docs/evidence/notebook.md
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

import overland
from overland.world.devices import device_name

NOTEBOOK = Path(__file__).parents[1] / "examples" / "overland.ipynb"


def main(page: Path) -> None:
    page = page.absolute()
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    names: dict[str, Any] = {}
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        title = ""
        for cell in cells:
            source = "".join(cell["source"])
            if cell["cell_type"] == "markdown":
                title = source.splitlines()[0].lstrip("# ")
                continue
            started = time.monotonic()
            exec(compile(source, title, "exec"), names)
            rows.append((title, time.monotonic() - started))
        result = names["result"]
        assert result.finished
        first = names["records"][0]["loss"]
        assert result.loss < first
        os.chdir("/")
    lines = [
        "# The notebook",
        "",
        f"`examples/overland.ipynb`, every cell as it is, on {date.today():%Y-%m-%d} with Overland "
        f"{overland.__version__} on one {device_name()}. Written by `make prove-all` "
        "(`tests/prove_notebook.py`).",
        "",
        "| cell | seconds |",
        "|---|---|",
        *(f"| {title} | {seconds:.1f} |" for title, seconds in rows),
        "",
        f"The loss went from {first:.3f} at step 1 to {result.loss:.3f} at step {result.step}; "
        f"held out: {', '.join(f'{name} {loss:.3f}' for name, loss in result.validation.items())}.",
        "",
    ]
    page.write_text("\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
