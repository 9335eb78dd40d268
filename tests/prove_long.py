"""Runs the tests that take minutes, which `make test` leaves out, and writes a page of results. It
resumes where it stopped: delete the page to start over.

    python -m tests.prove_long docs/evidence/long.md
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

HOW = "By `python -m tests.prove_long` (part of `make prove-all`): the tests marked `long`."


class Page:
    """Keeps how each test ended, in a file; a test that has passed there is not run again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        lines = path.read_text().splitlines() if path.exists() else []
        self.rows = [line for line in lines if "| passed |" in line]

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        done = [item for item in items if row(item.nodeid, "passed") in self.rows]
        config.hook.pytest_deselected(items=done)
        items[:] = [item for item in items if item not in done]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.rows.append(row(report.nodeid, report.outcome))
            head = ["# Tests that take minutes", "", "| test | outcome | file |", "|---|---|---|"]
            self.path.write_text("\n".join([*head, *self.rows, "", HOW, ""]))


def row(test: str, outcome: str) -> str:
    file, _, name = test.partition("::")
    return f"| {name.removeprefix('test_').replace('_', ' ')} | {outcome} | `{file}` |"


def main(path: Path) -> int:
    code = pytest.main(["-m", "long"], plugins=[Page(path)])
    return 0 if code == pytest.ExitCode.NO_TESTS_COLLECTED else int(code)  # all have passed before


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve()))  # tests change the folder
