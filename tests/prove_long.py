"""The tests that take minutes, which `make test` leaves out; a page of what came out.

python -m tests.prove_long docs/evidence/long.md
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

HOW = "By `python -m tests.prove_long` (part of `make prove-all`): the tests marked `long`."


class Page:
    """Collects how each test ended."""

    def __init__(self) -> None:
        self.rows: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            file, _, test = report.nodeid.partition("::")
            words = test.removeprefix("test_").replace("_", " ")
            self.rows.append(f"| {words} | {report.outcome} | `{file}` |")

    def text(self) -> str:
        head = ["# Tests that take minutes", "", "| test | outcome | file |", "|---|---|---|"]
        return "\n".join([*head, *self.rows, "", HOW, ""])


def main(path: Path) -> int:
    page = Page()
    code = pytest.main(["-m", "long"], plugins=[page])
    path.write_text(page.text())
    return int(code)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
