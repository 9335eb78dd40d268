"""How long each test file takes: `make test` starts with the longest, so that no worker is left
with one of them at the end, and `make quick` takes as many as fit into its time.

make times    runs all tests, and writes times.json again
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

PATH = Path(__file__).with_name("times.json")


def read_times() -> dict[str, float]:
    """Seconds by file, as seen from the project's folder."""
    times: dict[str, float] = json.loads(PATH.read_text())
    return times


def longest_first(items: list[pytest.Item], times: dict[str, float]) -> None:
    """Sorts tests in place, file by file; a file's own order stays. A new file counts as short."""
    items.sort(key=lambda item: -times.get(file_of(item.nodeid), 0.0))


def file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


# As a plugin: pytest -p tests.times

_seconds: Counter[str] = Counter()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _seconds[file_of(report.nodeid)] += report.duration  # type: ignore[assignment]


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workerinput") or not _seconds:
        return
    measured = {file: round(seconds, 1) for file, seconds in _seconds.items()}
    times = {**read_times(), **measured}  # only a part may have been run
    known = {
        file: times[file] for file in sorted(times) if (session.config.rootpath / file).exists()
    }
    PATH.write_text(json.dumps(known, indent=0) + "\n")
