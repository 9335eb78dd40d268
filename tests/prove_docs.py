"""Runs the tutorials, and the commands of the docs that are too slow for `make test`, and writes
the results to a page.

    python -m tests.prove_docs docs/evidence/docs.md
"""

from __future__ import annotations

import sys
import tempfile
import time
from datetime import date
from pathlib import Path

import overland
from tests.docs.commands import listed_commands
from tests.docs.example import make_example
from tests.docs.shell import Shell
from tests.docs.tutorials import CLUSTER, STORIES


def main(page: Path) -> None:
    rows = [row for name in STORIES for row in run_story(name)] + run_commands()
    lines = [
        "# The commands of the docs",
        "",
        f"Every page that is run as a whole, and the commands of the others, on "
        f"{date.today():%Y-%m-%d} with Overland {overland.__version__}: tiny models, and for "
        "clusters a real Slurm whose nodes are on one machine. Written by `make prove-all` "
        "(`tests/prove_docs.py`).",
        "",
        "| page | command | result | seconds |",
        "|---|---|---|---|",
        *rows,
        "",
    ]
    page.write_text("\n".join(lines), encoding="utf-8")


def run_story(name: str) -> list[str]:
    """All blocks; one that ends otherwise than its page says ends this program."""
    story = CLUSTER if name.endswith("first-cluster-job.md") else STORIES[name]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        started = time.monotonic()
        for step in story.run(name, Path(folder), whole=True):
            assert step.missing == [], f"{name} shows what was not said: {step.missing}"
            ended = time.monotonic()
            rows.append(row(name, step.script, f"as shown, exit {step.code}", ended - started))
            started = ended
    return rows


def run_commands() -> list[str]:
    rows = []
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as empty:
        make_example(Path(folder), steps=80)
        in_example, in_empty = Shell(Path(folder), NGPU="1"), Shell(Path(empty), NGPU="1")
        shells = {"run": in_example, "prove": in_example, "prove in an empty folder": in_empty}
        for command, how in listed_commands().items():
            if shell := shells.get(how):
                started = time.monotonic()
                code, said = shell.run(command)
                assert code == 0, f"exit {code} of {command}\n{said}"
                rows.append(row("", command, "exit 0", time.monotonic() - started))
        in_example.close()
        in_empty.close()
    return rows


def row(page: str, script: str, result: str, seconds: float) -> str:
    first, *more = [line for line in script.splitlines() if line.strip()]
    shown = f"`{first}`".replace("|", "\\|") + (" …" if more else "")
    return f"| {page.removeprefix('docs/')} | {shown} | {result} | {seconds:.0f} |"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
