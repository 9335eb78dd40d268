"""Results of evaluations that are kept with a run, by checkpoint."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overland.files import read_json
from overland.run_folder import CHECKPOINT

FOLDER = "evaluations"
LARGEST = 2**24  # bytes of a result
MOST = 2000  # numbers of a run
NO_RESULT = ("key", "seconds", "time", "step", "format")


@dataclass(frozen=True)
class Score:
    step: int
    name: str
    """Of the task or the data."""
    metric: str
    value: float


def read_scores(run: Path) -> list[Score]:
    """All numbers of all results, by name, metric and step. What cannot be read is left out."""
    found: list[Score] = []
    for path in sorted((run / FOLDER).glob("*/*.json")):
        named = CHECKPOINT.fullmatch(path.parent.name)
        with suppress(OSError, ValueError, TypeError):
            record = read_json(path, LARGEST)
            if named and isinstance(record, dict):
                name = str(record.get("name") or path.stem)
                found += _scores(int(named[1]), name, record)
    return sorted(found, key=lambda one: (one.name, one.metric, one.step))[:MOST]


def _scores(step: int, name: str, record: dict[str, Any]) -> list[Score]:
    """Those of a table of tasks, as lm-evaluation-harness writes one, or the numbers of one."""
    results = record.get("results")
    if isinstance(results, dict):
        tables = {str(task): one for task, one in results.items() if isinstance(one, dict)}
        if tables:
            return [one for task, table in tables.items() for one in _numbers(step, task, table)]
        return _numbers(step, name, results)
    return _numbers(step, name, record)


def _numbers(step: int, name: str, table: dict[str, Any]) -> list[Score]:
    return [
        Score(step, name, str(metric), float(value))
        for metric, value in table.items()
        if isinstance(value, int | float)
        and not isinstance(value, bool)
        and metric not in NO_RESULT
    ]
