"""Tutorials run as they are written, block by block, in one folder (docs/testing.md); here their
first parts, and all of them in `make prove-all` (tests/prove_docs.py)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.cli.processes import ROOT
from tests.docs.pages import blocks, page
from tests.docs.tutorials import STORIES

ON_SLURM = ("docs/tutorials/first-cluster-job.md", "docs/tutorials/one-gpu-to-64-nodes.md")


@pytest.mark.parametrize(
    "name",
    [pytest.param(one, marks=pytest.mark.long if one in ON_SLURM else ()) for one in STORIES],
)
def test_a_page_runs_as_it_is_written(name: str, tmp_path: Path) -> None:
    steps = []
    for step in STORIES[name].run(name, tmp_path, whole=bool(os.environ.get("DOCS_WHOLE"))):
        steps.append(step)
        if os.environ.get("DOCS_SHOW"):  # to be put into the page
            print(f"\n$ {step.script}\n{step.said}", flush=True)
    assert len(steps) >= 2
    # A message that was reworded is found by `make prove-all`, which compares every line; a page
    # that shows another program's output fails here.
    missing = [line for step in steps for line in step.missing]
    assert len(missing) <= sum(step.comparable for step in steps) / 3, missing


def test_every_tutorial_is_run() -> None:
    pages = {str(path.relative_to(ROOT)) for path in (ROOT / "docs/tutorials").glob("*.md")}
    assert pages == {name for name in STORIES if name.startswith("docs/tutorials/")}


@pytest.mark.parametrize("name", STORIES)
def test_commands_are_in_blocks_that_are_run(name: str) -> None:
    """Other languages show files, outputs and Python."""
    assert {block.language for block in blocks(page(name))} <= {
        "bash", "text", "toml", "json", "python"
    }  # fmt: skip
