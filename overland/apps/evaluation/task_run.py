"""Runs tasks with lm-evaluation-harness: loads them with their data, applies options such as
few-shot examples and system prompt, and returns a list of scores.

The harness is imported only when tasks are run, which takes seconds. Reading its 14,000 task
definitions takes 15 more, so their index is cached, in XDG_CACHE_HOME: keyed by the version of the
harness and the names, sizes and times of the files. If the cache cannot be written, the definitions
are read each time.
"""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from overland.apps.evaluation.task_data import (
    NO_NETWORK,
    Needs,
    data_of,
    fetched,
    is_file,
    leaves,
    local_files,
)
from overland.data.sources.file_marks import digest_of
from overland.errors import DataError, OverlandError, sentence
from overland.files import replace_file
from overland.plugins import need
from overland.words import did_you_mean
from overland.world.signals import SIGNALS

LARGEST_EXPONENT = math.log(sys.float_info.max)
BOOTSTRAP = 100_000  # the harness's default
INDEX_FORMAT = 2


@dataclass(frozen=True, kw_only=True)
class TaskOptions:
    """Which tasks are asked for, and how they are run."""

    num_fewshot: int | None = None
    chat_template: str | None = None
    """Name of the chat template; without it, prompts are plain text."""
    multiturn: bool = True
    """Whether few-shot examples are separate turns of a conversation."""
    system: str | None = None
    gen_kwargs: str | None = None
    add_bos: bool | None = None
    log_samples: bool = False
    unsafe_code: bool = False
    include_path: str | None = None
    bootstrap: int = BOOTSTRAP
    """Bootstrap samples for standard errors that have no formula; 0: none."""
    tasks: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class TaskSettings(TaskOptions):
    """Settings that affect the scores, in addition to weights and data."""

    context: int
    """Maximum number of tokens in a prompt and its answer."""
    dtype: str
    limit: float | None = None
    """Number of documents per task; below 1, a fraction of them."""


def no_network() -> None:
    """Disables network access in the libraries; must be called before they are imported."""
    os.environ.update(NO_NETWORK)


def run_harness(model: Any, settings: TaskSettings, root: Path) -> dict[str, Any]:
    """Calls the harness's own `simple_evaluate`, without probing the machine."""
    from lm_eval import evaluator

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    end_children_silently()
    include = None if settings.include_path is None else Path(settings.include_path)
    manager = open_manager(settings.tasks, include)

    def load(names: Iterable[str]) -> dict[str, Any]:
        loaded = load_tasks(manager, names, root)
        if any(task.OUTPUT_TYPE == "generate_until" for task in loaded["tasks"].values()):
            model.engine.require_texts()  # fail now, not after everything else was scored
        return loaded

    facts = {"pretrained": model.facts.get("model_path"), "dtype": settings.dtype}
    with (
        task_errors("these tasks"),
        quiet(),
        unbounded(),
        patch.object(evaluator, "add_env_info", lambda results: None),
        patch.object(evaluator, "get_git_commit_hash", lambda: None),
    ):
        results: dict[str, Any] = evaluator.simple_evaluate(
            model=model,
            model_args=facts,
            tasks=settings.tasks,
            task_manager=SimpleNamespace(load=load, task_index=manager.task_index),
            num_fewshot=settings.num_fewshot,
            gen_kwargs=settings.gen_kwargs,
            limit=settings.limit,
            log_samples=settings.log_samples,
            bootstrap_iters=settings.bootstrap,
            system_instruction=settings.system,
            apply_chat_template=settings.chat_template or False,
            fewshot_as_multiturn=settings.multiturn,
            confirm_run_unsafe_code=settings.unsafe_code,
        )
    results["config"]["model"] = "overland"
    results["eot_token_id"], results["max_length"] = model.eot_token_id, model.max_length
    return results


@cache
def end_children_silently() -> None:
    """Restores default signal handlers in forked processes. The harness forks for its bootstrap and
    ends the children with a signal, which they would report as an interrupted evaluation."""

    def as_usual() -> None:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_DFL)

    os.register_at_fork(after_in_child=as_usual)


@contextmanager
def quiet() -> Iterator[None]:
    """Hides the harness's progress bars in favor of ours, and keeps its output away from the
    results on stdout."""
    from tqdm import tqdm

    original = tqdm.__init__

    def without_bar(self: Any, *args: Any, **options: Any) -> None:
        original(self, *args, **{**options, "disable": True})

    with patch.object(tqdm, "__init__", without_bar), redirect_stdout(sys.stderr):
        yield


@contextmanager
def unbounded() -> Iterator[None]:
    """Makes a perplexity that overflows infinite, where the harness would fail. This happens easily
    for perplexity per word in languages written without spaces."""
    from lm_eval.api import metrics

    def exp(x: float) -> float:
        return math.inf if x > LARGEST_EXPONENT else math.exp(x)

    with patch.object(metrics, "math", SimpleNamespace(**{**vars(math), "exp": exp})):
        yield


def load_tasks(manager: Any, names: Iterable[str], root: Path) -> dict[str, Any]:
    """Loads tasks with their data, in the form that the harness expects."""
    import datasets

    datasets.disable_progress_bars()
    loaded: dict[str, Any] = {"tasks": {}, "groups": {}, "group_map": {}}
    for name in matching(manager, names):
        with fetched(root, [name]), task_errors(f"task {name}"), quiet():
            for kind, some in manager.load([name]).items():
                loaded[kind] |= some
    return loaded


@contextmanager
def task_errors(what: str) -> Iterator[None]:
    """Explains errors in task definitions and missing packages; our own errors pass through."""
    import jinja2
    import yaml

    try:
        yield
    except OverlandError:
        raise
    except ModuleNotFoundError as error:
        raise DataError(
            f"{what}: needs the package {error.name}: pip install {error.name}"
        ) from None
    except (ConnectionError, OSError) as error:
        raise DataError(f"{what}: {sentence(error)}") from None
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        AssertionError,
        ArithmeticError,
    ) as error:
        if "confirm_run_unsafe_code" in str(error):
            raise DataError(
                f"{what}: runs code that the model generates: use --unsafe-code to allow it"
            ) from None
        raise DataError(f"{what} cannot be used: {type(error).__name__}: {error}") from error
    except (jinja2.TemplateError, yaml.YAMLError) as error:
        raise DataError(f"{what} has an error in its definition: {error}") from None


def scores_of(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns a flat list of scores, for groups as well as tasks."""
    found = []
    for kind in ("results", "groups"):
        for task, values in (results.get(kind) or {}).items():
            if kind == "groups" and task in results["results"]:
                continue
            for name, value in values.items():
                metric, comma, filtered = name.partition(",")
                if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
                    continue
                better = (results.get("higher_is_better") or {}).get(task) or {}
                samples = (results.get("n-samples") or {}).get(task) or {}
                found.append(
                    {
                        "task": task,
                        "alias": values.get("alias", task),
                        "shots": (results.get("n-shot") or {}).get(task),
                        "filter": filtered,
                        "metric": metric,
                        "value": finite(value),
                        "stderr": finite(values.get(f"{metric}_stderr,{filtered}")),
                        "higher_is_better": better.get(metric),
                        "documents": samples.get("effective"),
                    }
                )
    return found


def finite(value: object) -> float | None:
    """Returns None for anything that is not a finite number, since JSON cannot represent it."""
    return value if isinstance(value, int | float) and math.isfinite(value) else None


def by_task(scores: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, float | None]]:
    """Returns {task: {metric: value}}; the metric includes the filter, if there is one."""
    found: dict[str, dict[str, float | None]] = {}
    for one in scores:
        filtered = "" if one["filter"] == "none" else f", {one['filter']}"
        found.setdefault(one["task"], {})[one["metric"] + filtered] = one["value"]
    return found


def needs_of(names: Sequence[str], include_path: Path | None) -> Needs:
    """Returns the data that tasks, or tasks in groups, read."""
    manager = open_manager(tuple(names), include_path)
    needs = Needs({}, {}, {})
    for name, config in leaves(manager, matching(manager, names)):
        needs.definitions[name] = digest_of([json.dumps(config, default=str), local_files(config)])
        found = data_of(config)
        if isinstance(found, str):
            needs.others[name] = found
        for one in found if isinstance(found, list) else []:
            needs.datasets.setdefault(one, []).append(name)
    return needs


@lru_cache(maxsize=1)
def open_manager(names: tuple[str, ...], include_path: Path | None = None) -> Any:
    """Returns the harness's index of tasks. Its built-in index is large, and is skipped if all
    names are in `include_path`."""
    need("lm_eval", "a task", "eval")
    from lm_eval.tasks import TaskManager

    if include_path is not None:
        if not include_path.is_dir():
            raise DataError(f"--include-path {include_path} is not a folder of task definitions")
        own = TaskManager(include_path=str(include_path), include_defaults=False)
        if all(own.match_tasks([name]) or is_file(name) for name in names):
            return own
    with kept_index():
        return TaskManager(include_path=None if include_path is None else str(include_path))


def matching(manager: Any, names: Iterable[str]) -> list[str]:
    """Returns the matching tasks, groups and tags; `*` matches anything."""
    found: list[str] = []
    for name in names:
        some = [name] if is_file(name) else manager.match_tasks([name])
        if not some:
            near = did_you_mean(name, manager.all_tasks)
            if len(manager.all_tasks) > 50 and "did you mean" not in near:
                near = "; `lm_eval ls tasks` lists those of the harness"
            raise DataError(f"there is no task '{name}'{near}")
        found += some
    return list(dict.fromkeys(found))


@contextmanager
def kept_index() -> Iterator[None]:
    """Makes TaskManager use the cached index within this context."""
    from lm_eval.tasks._index import TaskIndex

    original = TaskIndex.build

    def build(paths: Iterable[Path], **options: Any) -> dict[str, Any]:
        paths = list(paths)
        place = place_for(paths)
        found = read_index(place)
        if found is None:
            found = original(paths, **options)
            write_index(place, found)
        return found

    with patch.object(TaskIndex, "build", staticmethod(build)):
        yield


def place_for(paths: list[Path]) -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    files = [mark for path in paths for mark in marks(path)]
    key = digest_of([INDEX_FORMAT, version("lm_eval"), [str(path) for path in paths], files])
    return Path(root) / "overland" / f"tasks-{key[:16]}.json"


def marks(root: Path) -> Iterator[tuple[str, int, int]]:
    for folder, _, names in os.walk(root):
        for name in sorted(names):
            if name.endswith((".yaml", ".yml")) or "." not in name:  # files that others include
                stat = os.stat(os.path.join(folder, name))
                yield os.path.join(folder, name), stat.st_size, stat.st_mtime_ns


def read_index(place: Path) -> dict[str, Any] | None:
    from lm_eval.tasks._index import Entry, Kind

    def entry(name: str, kind: str, yaml_path: str | None, tags: list[str], cfg: Any) -> Entry:
        return Entry(name, Kind[kind], Path(yaml_path) if yaml_path else None, cfg, set(tags))

    with suppress(OSError, ValueError, KeyError, TypeError):
        return {one["name"]: entry(**one) for one in json.loads(place.read_text("utf-8"))}
    return None


def write_index(place: Path, index: dict[str, Any]) -> None:
    entries = [
        {**vars(entry), "kind": entry.kind.name, "tags": sorted(entry.tags)}
        for entry in index.values()
    ]
    with suppress(OSError, ValueError, TypeError):
        place.parent.mkdir(parents=True, exist_ok=True)
        replace_file(place, json.dumps(entries, default=str))
