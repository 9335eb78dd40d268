"""Saves evaluation results near their checkpoint, never inside it: file names, fingerprints,
unfinished parts (what is one result: evaluate.py, tasks.py).

    run/evaluations/step_80/perplexity-c4-3f9a….json      for a checkpoint of a run
    my-model.evaluations/perplexity-c4-3f9a….json         for anything else: next to it

The name ends with a fingerprint of the weights, the data and everything else that affects the
numbers, so the same evaluation finds its result again. Finished parts of an unfinished evaluation
are in a hidden folder next to it, with one file per process and one line per part, so that it can
be resumed on any number of ranks. Truncated lines are ignored.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from overland.apps.dialects.peft import ADAPTER_CONFIG
from overland.apps.watch.files import object_in
from overland.errors import sentence
from overland.files import read_json, replace_file, sync
from overland.run_folder import CHECKPOINT, COMMITTED, EVALUATIONS

FORMAT = 1
LARGEST = 2**24  # bytes of a result
Record = dict[str, Any]
Report = Callable[[str], None]
MOST = 2000  # scores per run
PERPLEXITY = ("loss", "perplexity", "bits_per_byte", "byte_perplexity", "word_perplexity")


def place_of(path: Path, run: Path | None, output: Path | None = None) -> Path:
    """Returns the folder for results of `path`: a checkpoint of `run`, or anything with weights."""
    if output is not None:
        return output
    path = path.resolve() if path.name in ("", "..") else path
    return run / EVALUATIONS / path.name if run else path.with_name(f"{path.name}.{EVALUATIONS}")


def mark_of_weights(*paths: Path | None) -> str:
    """Returns a fingerprint of the weights at these paths: for a committed checkpoint from its
    marker, for other files from their sizes and samples of their bytes."""
    from overland.data.sources.file_marks import digest_of

    return digest_of([_mark(path) for path in paths if path is not None])


def base_of(path: Path) -> Path | None:
    """Returns the folder that PEFT adapters name as their base, if it exists."""
    with suppress(OSError, ValueError, AttributeError):
        said = read_json(path / ADAPTER_CONFIG).get("base_model_name_or_path")
        places = (Path(said).expanduser(), path / said) if isinstance(said, str) and said else ()
        return next((one for one in places if one.is_dir()), None)
    return None


def _mark(path: Path) -> Any:
    from overland.data.sources.file_marks import marks_of_files

    path = path.expanduser()
    if (path / COMMITTED).is_file():
        return (path / COMMITTED).read_text(errors="replace")
    if path.is_file():
        return marks_of_files(path.parent, [path.name], whole=False)
    inside = [one for one in sorted(path.rglob("*")) if one.is_file() and not _is_ours(one, path)]
    return marks_of_files(path, [str(one.relative_to(path)) for one in inside], whole=False)


def _is_ours(file: Path, root: Path) -> bool:
    """Whether a file in a folder of weights is hidden or was created by an evaluation."""
    return any(one.startswith(".") or one == EVALUATIONS for one in file.relative_to(root).parts)


class Kept:
    """The result of one evaluation, and its finished parts. If nothing can be written, that is
    reported once and the evaluation continues."""

    def __init__(
        self, place: Path, kind: str, name: str, key: Any, report: Report, again: bool = False
    ) -> None:
        """`key`: everything that affects the result. `again`: ignore what is saved."""
        from overland.data.sources.file_marks import digest_of

        self.key = digest_of([FORMAT, kind, key])[:16]
        label = f"{kind}-{re.sub(r'[^A-Za-z0-9._-]+', '_', name)[:80]}"
        self.path = place / f"{label}-{self.key}.json"
        self.parts = place / f".{label}-{self.key}.parts"
        self.others = f".{label}-*.parts"
        self._report, self._again = report, again
        self._file: BinaryIO | None = None
        self._is_off = False

    def result(self) -> Record | None:
        """Returns the saved result of an evaluation with the same key, and reports it."""
        with suppress(OSError, ValueError):
            found = None if self._again else read_json(self.path, LARGEST)
            if isinstance(found, dict) and found.get("key") == self.key:
                self._report(f"using the saved result in {self.path} (--again recomputes it)")
                return {**found, "kept": str(self.path)}
        return None

    def done(self) -> list[Record]:
        """Returns the finished parts of all processes."""
        found: list[Record] = []
        for file in [] if self._again else sorted(self.parts.glob("*.jsonl")):
            with suppress(OSError):
                found += filter(None, map(object_in, file.read_bytes().splitlines()))
        return found

    def left_over(self) -> list[Path]:
        """Returns unfinished evaluations of the same name with another key."""
        return [one for one in sorted(self.path.parent.glob(self.others)) if one != self.parts]

    def add(self, record: Mapping[str, Any]) -> None:
        """Saves a finished part; it is on disk when this returns."""
        if self._is_off:
            return
        try:
            if self._file is None:
                self.parts.mkdir(parents=True, exist_ok=True)
                self._file = (self.parts / f"{uuid.uuid4().hex[:12]}.jsonl").open("ab")
                sync(self.parts)
            self._file.write(json.dumps(record).encode() + b"\n")
            self._file.flush()
            sync(Path(self._file.name))
        except OSError as error:
            self._is_off = True
            self._report(
                f"note: progress cannot be saved, so an interrupted evaluation would start over: "
                f"{sentence(error)}"
            )

    def finish(self, record: Record) -> Record:
        """Saves the result and removes the parts. Returns the result with the place where it is
        `kept`, which is None if it cannot be written."""
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
        record = {**record, "key": self.key}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            text = json.dumps(record, indent=1, allow_nan=False)
            replace_file(self.path, text + "\n", shared=True)
        except OSError as error:
            self._report(
                f"note: the result was not saved: {sentence(error)}; use another folder (--output)"
            )
            return {**record, "kept": None}
        shutil.rmtree(self.parts, ignore_errors=True)
        return {**record, "kept": str(self.path)}


def read_results(run: Path) -> list[Record]:
    """Returns all results of a run's checkpoints, by step and name, skipping unreadable ones."""
    found = []
    for path in sorted((run / EVALUATIONS).glob("*/*.json")):
        with suppress(OSError, ValueError):
            record, step = read_json(path, LARGEST), CHECKPOINT.fullmatch(path.parent.name)
            if isinstance(record, dict) and step is not None:
                found.append({**record, "step": int(step[1]), "path": str(path)})
    return sorted(found, key=lambda one: (one["step"], one.get("kind", ""), one.get("name", "")))


@dataclass(frozen=True)
class CheckpointScore:
    step: int
    name: str
    """The name of the task or the data."""
    metric: str
    value: float
    stderr: float | None = None


def read_scores(run: Path) -> list[CheckpointScore]:
    """Returns all scores, sorted by name, metric and step. If evaluations share a name but differ
    in their settings, a part of their key is appended to it."""
    records = read_results(run)
    times = Counter((one["step"], one.get("kind"), one.get("name")) for one in records)
    found: list[CheckpointScore] = []
    for record in records:
        is_one = times[record["step"], record.get("kind"), record.get("name")] == 1
        found += _scores(record, "" if is_one else f" ({str(record.get('key'))[:6]})")
    return sorted(found, key=lambda one: (one.name, one.metric, one.step))[:MOST]


def _scores(record: dict[str, Any], behind: str) -> Iterator[CheckpointScore]:
    step, scores = record["step"], record.get("scores")
    for one in scores if isinstance(scores, list) else ():
        if isinstance(one, dict) and (value := _number(one.get("value"))) is not None:
            shots = f", {one['shots']}-shot" if isinstance(one.get("shots"), int) else ""
            filtered = "" if one.get("filter") in (None, "none") else f", {one['filter']}"
            name, metric = f"{one.get('task')}{shots}{behind}", f"{one.get('metric')}{filtered}"
            yield CheckpointScore(step, name, metric, value, _number(one.get("stderr")))
    for metric in PERPLEXITY:
        if (value := _number(record.get(metric))) is not None:
            yield CheckpointScore(
                step, f"{record.get('name')}{behind}", metric.replace("_", " "), value
            )


def _number(value: object) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else None  # type: ignore[arg-type]
