"""Gathers everything a report shows about one run, from its folder alone: key figures, facts,
settings, environment, samples and scores.

Any file may be missing, truncated or written by another version: what is unknown is omitted.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from pydantic_core import to_jsonable_python

from overland.apps.console.readme import optimizer_in_words, schedule_in_words
from overland.apps.evaluation.results import CheckpointScore, read_scores
from overland.apps.report.lines import Lines, MetricColumns, bin_sizes, means, spacing_of
from overland.apps.report.mixture import DrawnMixture, drawn_mixture
from overland.apps.report.sessions import (
    Goodput,
    Happening,
    ReportedSession,
    RunStory,
    where_time_went,
)
from overland.apps.watch.files import read_json, read_text, read_toml, samples_in, table_in
from overland.apps.watch.status import RunStatus, Watch
from overland.config.derived import model_name
from overland.config.fields import all_keys
from overland.config.schema import JobConfig
from overland.errors import NoRun
from overland.run_folder import CONFIG, MODEL_CONFIG, SAMPLES, SUBMITTED, VALIDATION_LOSS
from overland.words import command, duration

MOST_SAMPLES = 40
LONGEST_SAMPLE = 4000
ALIVE = ("training", "starting", "restarting", "stopping")
AXES = {
    "dp_replicate": "replicated",
    "dp_shard": "sharded (FSDP)",
    "tp": "tensor parallel",
    "pp": "pipeline stages",
    "cp": "context parallel",
}


@dataclass(frozen=True)
class Figure:
    """One key figure, as text and as a number."""

    name: str
    words: str
    note: str = ""
    value: float | None = None


@dataclass(frozen=True)
class Setting:
    """One key of the config."""

    key: str
    value: str
    default: str
    differs: bool
    description: str


@dataclass
class RunReport:
    path: Path
    name: str
    status: RunStatus
    lines: Lines
    sessions: list[ReportedSession]
    happenings: list[Happening]
    goodput: Goodput
    mixture: DrawnMixture
    scores: list[CheckpointScore]
    settings: list[Setting]
    facts: list[tuple[str, str]] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    samples: list[tuple[int, str]] = field(default_factory=list)
    prompt: str = ""
    environment: list[tuple[str, str]] = field(default_factory=list)

    @property
    def resume(self) -> str:
        return command("overland", "train", self.path / CONFIG)

    @property
    def was_submitted(self) -> bool:
        return (self.path / SUBMITTED).is_dir()

    def to_json(self) -> dict[str, Any]:
        return {
            "run": str(self.path),
            "name": self.name,
            "description": self.status.description,
            "state": self.status.state,
            "because": self.status.because,
            "step": self.status.step,
            "steps": self.status.steps,
            "facts": dict(self.facts),
            "figures": {one.name: one.value for one in self.figures},
            "sessions": [
                {name: value for name, value in asdict(one).items() if name != "facts"}
                for one in self.sessions
            ],
            "happenings": [asdict(one) for one in self.happenings],
            "time": {**asdict(self.goodput), "goodput": self.goodput.share},
            "mixture": [asdict(one) for one in self.mixture.sources],
            "evaluations": [asdict(one) for one in self.scores],
            "samples": [{"step": step, "text": text} for step, text in self.samples],
            "environment": dict(self.environment),
            "resume": self.resume,
        }


class RunReader:
    """Reads a run repeatedly, and only the new parts of files that grow."""

    def __init__(self, path: Path, name: str | None = None) -> None:
        self.path, self.name = path, name or path.absolute().name
        self.lines, self.story = Lines(path), RunStory(path)
        self.watch = Watch(path)

    def read_on(self, progress: Callable[[float, float], object] = lambda *_: None) -> None:
        self.lines.read_on(progress)
        self.story.read_on()

    def report(self, patience: float = 0.0) -> RunReport:
        status = self.watch.look(patience)
        status.step = max(status.step, self.lines.logged.last_step, 0)
        sessions = self.story.sessions(self.lines, status.state in ALIVE)
        config = read_toml(self.path / CONFIG)
        report = RunReport(
            path=self.path,
            name=self.name,
            status=status,
            lines=self.lines,
            sessions=sessions,
            happenings=self.story.happenings(sessions),
            goodput=where_time_went(sessions),
            mixture=drawn_mixture(self.path),
            scores=read_scores(self.path),
            settings=settings_of(config),
            samples=some_samples(read_text(self.path / SAMPLES)),
            prompt=str(table_in(config, "metrics").get("sample_prompt") or ""),
        )
        report.facts = list(facts_of(report, config))
        report.figures = list(figures_of(report))
        report.environment = environment_of(report)
        return report


def open_runs(paths: list[Path]) -> list[RunReader]:
    """Returns readers of these runs. Runs with the same name are named by as much of their paths as
    distinguishes them."""
    given = [Path(os.path.realpath(path)) for path in paths]  # unlike resolve(), takes link loops
    for path in given:
        if given.count(path) > 1:
            raise NoRun(f"{path} is given twice: name each run once")
    depth = 1
    names = [path.name for path in given]
    while len(set(names)) < len(names) and depth < 16:
        depth += 1
        names = ["/".join(path.parts[-depth:]) for path in given]
    return [RunReader(path, name) for path, name in zip(paths, names, strict=True)]


# What was trained on what


def facts_of(report: RunReport, config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields what was trained on what, as far as it is known."""
    latest = report.sessions[-1].facts if report.sessions else {}
    if name := _model(report.path, config):
        yield "model", name
    if isinstance(count := latest.get("parameters"), int):
        yield "parameters", f"{count:,}"
    if data := _data(config):
        yield "data", data
    length = table_in(config, "training").get("seq_len")
    if isinstance(rows := latest.get("rows"), int):
        batch = f"{rows:,} samples per step"
        if latest.get("unit") != "samples" and isinstance(length, int):
            batch = f"{rows:,} sequences of {length:,} tokens: {rows * length:,} tokens per step"
        yield "batch", batch
    if devices := devices_in_words(latest, f" × {latest.get('device', 'device')}"):
        yield "devices", devices
    if degrees := table_in(latest, "degrees"):
        split = [(degrees.get(axis), words) for axis, words in AXES.items()]
        parts = [f"{n} × {words}" for n, words in split if isinstance(n, int) and n > 1]
        yield "layout", ", ".join(parts) or "the whole model on one device"
    if precision := table_in(latest, "precision"):
        yield "precision", ", ".join(f"{what} {kind}" for what, kind in precision.items())
    yield from _in_config_words(config)


def devices_in_words(facts: Mapping[str, Any], kind: str = "") -> str:
    """Returns the number of devices of a session, of ranks if they share them, and of nodes if
    there are several."""
    number, nodes = facts.get("devices"), facts.get("nodes")
    if not isinstance(number, int):
        return ""
    where = f" on {nodes:,} nodes" if isinstance(nodes, int) and nodes > 1 else ""
    ranks = facts.get("ranks")  # not in sessions of earlier versions
    shared = f"{ranks:,} ranks on " if isinstance(ranks, int) and ranks > number else ""
    return f"{shared}{number:,}{kind}{where}"


def _model(run: Path, config: Mapping[str, Any]) -> str:
    model, shape = table_in(config, "model"), read_json(run / MODEL_CONFIG)
    name = str(model.get("config") or f"{model.get('name', '')} {model.get('flavor', '')}").strip()
    layers, width = shape.get("num_hidden_layers"), shape.get("hidden_size")
    if isinstance(layers, int) and isinstance(width, int):
        name += f", {layers:,} layers of width {width:,}"
    rank = table_in(config, "lora").get("rank")
    return f"{name}, adapters of rank {rank}" if name and rank else name


def _data(config: Mapping[str, Any]) -> str:
    training, sources = table_in(config, "training"), table_in(table_in(config, "data"), "sources")
    if not sources:
        return str(training.get("dataset_path") or training.get("dataset") or "")
    return ", ".join(
        f"{name} ({one.get('path') or one.get('dataset') or name})"
        for name, one in sources.items()
        if isinstance(one, dict)
    )


def _in_config_words(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields facts that need a config that is valid in this version: otherwise today's defaults may
    not be those of the run."""
    if config:
        with suppress(ValueError):
            job = JobConfig.model_validate(config)
            if not config.get("model"):
                yield "model", model_name(job)
            yield "optimizer", optimizer_in_words(job.optimizer)
            yield "schedule", schedule_in_words(job)


# Key figures


def figures_of(report: RunReport) -> Iterator[Figure]:
    """Yields the key figures that are known."""
    logged, status, goodput = report.lines.logged, report.status, report.goodput
    steps = f"of {status.steps:,}" if status.steps else ""
    if status.steps and status.seconds_left and status.state in ALIVE:
        steps += f", {duration(status.seconds_left)} left"
    yield Figure("steps", f"{status.step:,}", steps, status.step)
    for unit in ("tokens", "samples"):
        if len(values := logged.points(unit)[1]):
            last = float(values[-1])
            yield Figure(unit, in_short(last), "seen so far", last)
    yield from _losses(logged, report.lines.held_out.get(VALIDATION_LOSS, MetricColumns()))
    if seconds := goodput.in_sessions:
        between = f"plus {duration(goodput.between)} between sessions"
        note = between if goodput.between >= 1 else ""
        yield Figure("time in sessions", duration(seconds), note, seconds)
    if (share := goodput.share) is not None:
        words = "of session time spent on steps that count"
        yield Figure("goodput", f"{share:.1%}", words, share)
    devices = report.sessions[-1].facts.get("devices") if report.sessions else None
    for unit in ("tokens", "samples"):
        if len(rates := logged.points(f"{unit}_per_second")[1]):
            rate = float(np.median(rates))
            note = f"{unit}/s per device, median"
            if isinstance(devices, int) and devices > 1:
                note += f"; {in_short(rate * devices)} in total"
            yield Figure("throughput", f"{rate:,.0f}", note, rate)
    if len(mfu := logged.points("mfu")[1]):
        middle = float(np.median(mfu))
        yield Figure("MFU", f"{middle:.1%}", "median", middle)
    if len(memory := logged.points("memory_gib")[1]):
        most = float(memory.max())
        yield Figure("memory", f"{most:.1f} GiB", "peak per device", most)
    if count := len(report.sessions):
        lost = sum(one.lost_steps for one in report.sessions)
        words = f"{lost:,} steps lost and repeated" if lost else "no steps were lost"
        yield Figure("sessions", f"{count:,}", words, count)
    if count := len(status.faults):
        yield Figure("faults", f"{count:,}", "", count)


def _losses(logged: MetricColumns, held_out: MetricColumns) -> Iterator[Figure]:
    steps, losses = logged.points("loss")
    if (since := logged.not_finite_since("loss")) is not None:
        before = f"; before: {losses[-1]:.4f}" if len(losses) else ""
        yield Figure("loss", "not finite", f"since step {since:,}{before}")
    elif len(steps):
        fine, _ = bin_sizes(float(logged.last_step), spacing_of(steps))
        mean = float(means(steps, losses, fine)[1][-1])
        what = f"mean of the last {fine:,} steps" if fine > 1 else "at the last step logged"
        yield Figure("loss", f"{mean:.4f}", what, mean)
    steps, losses = held_out.points("value")
    if len(losses):
        best = int(np.argmin(losses))
        is_finite = held_out.not_finite_since("value") is None
        last = f"{losses[-1]:.4f}" if is_finite else "not finite"
        note = f"best, at step {int(steps[best]):,}; last {last}"
        yield Figure("validation loss", f"{losses[best]:.4f}", note, float(losses[best]))


def environment_of(report: RunReport) -> list[tuple[str, str]]:
    """Returns the environment of the newest session, and what differed in earlier ones."""
    rows = []
    for name in ("overland", "torch", "cuda", "rocm", "python", "system", "machine", "job"):
        facts = [one.facts for one in report.sessions]
        said = [table_in(one, "software").get(name) or one.get(name) for one in facts]
        if values := list(dict.fromkeys(str(value) for value in said if value)):
            before = f" (before: {', '.join(values[:-1][-8:])})" if len(values) > 1 else ""
            rows.append((name, values[-1] + before))
    return rows


# Files


def settings_of(config: Mapping[str, Any]) -> list[Setting]:
    """Returns every key with its value in this run; unknown keys come last. Returns nothing if the
    config cannot be read."""
    if not config:
        return []
    found, known = [], set()
    for key in all_keys().values():
        section = table_in(config, key.section)
        known.add((key.section, key.name))
        value, default = to_jsonable_python((section.get(key.name, key.default), key.default))
        differs = value != default
        texts = _written(value), _written(default)
        found.append(Setting(key.dotted, *texts, differs, key.description))
    for other in config:
        for name, value in table_in(config, other).items():
            if (other, name) not in known:
                found.append(Setting(f"{other}.{name}", _written(value), "no such key", True, ""))
    return found


def _written(value: Any) -> str:
    if value is None:
        return "not set"
    if isinstance(value, str):
        return value or '""'
    return json.dumps(value, ensure_ascii=False, default=str)


def some_samples(text: str) -> list[tuple[int, str]]:
    """Returns the model's samples by step; if there are many, only the first and the last ones."""
    samples = [
        (step, f"{one[:LONGEST_SAMPLE]} …" if len(one) > LONGEST_SAMPLE else one)
        for step, one in sorted(samples_in(text).items())
    ]
    half = MOST_SAMPLES // 2
    return samples if len(samples) <= MOST_SAMPLES else [*samples[:half], *samples[-half:]]


def in_short(number: float) -> str:
    """Returns a number as `1.23 billion` or `45.6 million`, or in full if it is small."""
    if not math.isfinite(number):
        return str(number)
    for size, word in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if abs(number) >= size:
            return f"{number / size:.3g} {word}"
    return f"{number:,.0f}"


def moment(seconds: float) -> str:
    """Returns the date and time, in the time zone where the report is created."""
    with suppress(ValueError, OverflowError, OSError):
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    return ""
