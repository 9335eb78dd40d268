"""Runs tasks with lm-evaluation-harness: loads them with their data, applies the options, and
returns their results as a list of scores.

The harness is imported only when tasks are run, which takes seconds.
"""

from __future__ import annotations

import logging
import math
import os
import random
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from overland.apps.evaluation.task_data import NO_NETWORK, fetched
from overland.apps.evaluation.task_index import matching, open_manager
from overland.errors import DataError, OverlandError, sentence
from overland.world.signals import SIGNALS

LARGEST_EXPONENT = math.log(sys.float_info.max)
BOOTSTRAP = 100_000  # the harness's default
SEEDS = (0, 1234, 1234, 1234)  # for Python, NumPy, torch and few-shot examples, as in the harness


@dataclass(frozen=True, kw_only=True)
class TaskOptions:
    """Options from the command line for running tasks."""

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


@dataclass(frozen=True, kw_only=True)
class TaskSettings(TaskOptions):
    """Settings that affect the scores, in addition to weights and data."""

    tasks: tuple[str, ...]
    context: int
    """Maximum number of tokens in a prompt and its answer."""
    dtype: str
    limit: float | None = None
    """Number of documents per task; below 1, a fraction of them."""


def no_network() -> None:
    """Disables network access in the libraries; must be called before they are imported."""
    os.environ.update(NO_NETWORK)


def run_harness(model: Any, settings: TaskSettings, root: Path) -> dict[str, Any]:
    """Does what the harness's own `simple_evaluate` does, without probing the machine."""
    from lm_eval.evaluator import evaluate

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    end_children_silently()
    include = None if settings.include_path is None else Path(settings.include_path)
    manager = open_manager(settings.tasks, include)
    python, numpy, pytorch, examples = SEEDS
    random.seed(python)
    np.random.seed(numpy)
    torch.manual_seed(pytorch)
    started = time.time()
    loaded = load_tasks(manager, settings.tasks, root)
    for task in loaded["tasks"].values():
        adjust(task, settings, examples)
    if any(task.OUTPUT_TYPE == "generate_until" for task in loaded["tasks"].values()):
        model.engine.require_texts()  # fail now, not after everything else was scored
    with task_errors("these tasks"), quiet(), unbounded():
        results = evaluate(
            lm=model,
            task_dict=loaded,
            limit=settings.limit,
            log_samples=settings.log_samples,
            bootstrap_iters=settings.bootstrap,
            system_instruction=settings.system,
            apply_chat_template=settings.chat_template or False,
            fewshot_as_multiturn=settings.multiturn,
            confirm_run_unsafe_code=settings.unsafe_code,
        )
    results["config"] = {
        "model": "overland",
        "model_args": {"pretrained": model.facts.get("model_path"), "dtype": settings.dtype},
        **model.get_model_info(),
        "limit": settings.limit,
        "bootstrap_iters": settings.bootstrap,
        "gen_kwargs": settings.gen_kwargs,
        "random_seed": python,
        "numpy_seed": numpy,
        "torch_seed": pytorch,
        "fewshot_seed": examples,
    }
    results["date"] = started
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

    tqdm.__init__ = without_bar
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        tqdm.__init__ = original


@contextmanager
def unbounded() -> Iterator[None]:
    """Makes a perplexity that overflows infinite, where the harness would fail. This happens easily
    for perplexity per word in languages written without spaces."""
    from lm_eval.api import metrics

    def exp(x: float) -> float:
        return math.inf if x > LARGEST_EXPONENT else math.exp(x)

    original = metrics.math
    metrics.math = SimpleNamespace(**{**vars(math), "exp": exp})
    try:
        yield
    finally:
        metrics.math = original


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


def adjust(task: Any, settings: TaskSettings, seed: int) -> None:
    """Applies options to a task by the harness's rules: a task that is defined without few-shot
    examples gets none."""
    if settings.gen_kwargs and task.get_config("output_type") == "generate_until":
        from lm_eval.utils import simple_parse_args_string

        wanted = simple_parse_args_string(settings.gen_kwargs)
        task.set_config(key="generation_kwargs", value=wanted, update=True)
    own = task.get_config("num_fewshot")
    if settings.num_fewshot is not None and own != 0:
        task.set_config(key="num_fewshot", value=settings.num_fewshot)
    elif own is None:
        task.set_config(key="num_fewshot", value=0)
    task.set_fewshot_seed(seed=seed)


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
