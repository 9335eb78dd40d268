"""Evaluations as they are asked for: on this process, or as one rank of a world."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from overland.config.schema import Comm, DataSource
from overland.parallel.comm import process_group
from overland.tools.evaluation.evaluate import (
    Asked,
    evaluate_set,
    open_session,
    sets_for,
    settings_of,
    wait_long,
)
from overland.tools.evaluation.model import device_of, dtype_of
from overland.tools.evaluation.results import Record, Report
from overland.tools.evaluation.sweep import steps_of
from overland.words import visible
from overland.world import World
from overland.world.devices import device_type

if TYPE_CHECKING:
    from overland.tools.evaluation.tasks import AskedTasks


def evaluate(
    path: str | Path,
    *,
    data: Sequence[str] = (),
    tasks: Sequence[str] = (),
    step: int | None = None,
    context: int | None = None,
    stride: int | None = None,
    limit: int | None = None,
    batch_size: int | None = None,
    dtype: str | None = None,
    tokenizer: str | Path | None = None,
    output: str | Path | None = None,
    again: bool = False,
    quiet: bool = True,
    **task_settings: Any,
) -> list[Record]:
    """Measures perplexity and scores of tasks, as `overland eval` does, in this process.

    Args:
        path: A run, a checkpoint of any format, or a Hugging Face folder.
        data: PATH, NAME or NAME=PATH to measure perplexity on. Without data and tasks, a run is
            measured on what it validates on.
        tasks: Tasks of lm-evaluation-harness, whose datasets `overland fetch tasks` has brought.
        step: The checkpoint of a run; default: the newest.
        context: Tokens of a window; default: as trained, 4096 at most.
        stride: Tokens between windows; default: half of the context.
        limit: Only so many documents.
        batch_size: Windows that go through the model together.
        dtype: float32, bfloat16 or float16; default: by the device.
        tokenizer: A tokenizer, where the path brings none.
        output: Folder for results; default: beside the checkpoint.
        again: Whether to compute again what was computed before.
        quiet: Whether to say nothing about what is found and kept.
        **task_settings: Of `overland.tools.evaluation.tasks.AskedTasks`, such as `num_fewshot`.

    Returns:
        A record per set or group of tasks, as `overland eval --json` prints them.
    """
    asked = Asked(
        path=Path(path).expanduser(),
        choices=DataSource(),
        data=tuple([data] if isinstance(data, str) else data),
        context=context,
        stride=stride,
        limit=limit,
        batch_size=batch_size,
        dtype=None if dtype is None else dtype_of(dtype, device_of(None)),
        tokenizer=None if tokenizer is None else Path(tokenizer).expanduser(),
        step=step,
        output=None if output is None else Path(output).expanduser(),
        again=again,
    )
    wanted = asked_tasks([tasks] if isinstance(tasks, str) else tasks, None, **task_settings)
    return evaluate_here(asked, wanted, None, World(), quiet)


def asked_tasks(tasks: Sequence[str], datasets: Path | None, **settings: Any) -> AskedTasks | None:
    """What is asked of tasks; None without any. Libraries that could open connections are told not
    to before they are imported."""
    if not tasks:
        return None
    from overland.packages import need
    from overland.tools.evaluation.task_data import task_names, tasks_root
    from overland.tools.evaluation.task_run import no_network

    no_network()
    need("lm_eval", "--tasks", "eval")
    from overland.tools.evaluation.tasks import AskedTasks

    root = tasks_root() if datasets is None else datasets.expanduser()
    return AskedTasks(names=task_names(list(tasks)), root=root, **settings)


def evaluate_here(
    asked: Asked, tasks: AskedTasks | None, steps: str | None, world: World, quiet: bool = False
) -> list[Record]:
    """What every rank does; the first one's results are all."""

    def report(message: str) -> None:
        if world.is_first and not quiet:
            print(visible(message), file=sys.stderr, flush=True)

    some = [asked]
    if steps is not None:
        some = [replace(asked, step=step) for step in steps_of(asked.path, steps)]
    if world.size == 1:
        device = torch.device(device_type())
        return [r for one in some for r in evaluate_one(one, tasks, world, device, report)]
    backend = os.environ.get("COMM_BACKEND") or "auto"
    # Ranks of a large model may read its weights at very different speeds.
    comm = Comm.model_validate({"backend": backend, "init_timeout_seconds": 1800})
    with process_group(comm, world, device_type()) as device:
        wait_long()
        return [r for one in some for r in evaluate_one(one, tasks, world, device, report)]


def evaluate_one(
    asked: Asked,
    tasks: AskedTasks | None,
    world: World,
    device: torch.device,
    report: Report,
) -> list[Record]:
    """Everything about one checkpoint."""
    session = open_session(asked, world, device, report)
    results = []
    if asked.data or tasks is None:
        settings = settings_of(session)
        results += [evaluate_set(session, one, settings) for one in sets_for(session)]
    if tasks is not None:
        from overland.tools.evaluation.tasks import evaluate_tasks

        results.append(evaluate_tasks(session, tasks))
    return results
