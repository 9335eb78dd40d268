"""Runs evaluations, in this process or as one rank of several."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from overland.apps.convert.formats.files import given_dtype
from overland.apps.evaluation.evaluate import (
    EvaluationRequest,
    evaluate_set,
    open_session,
    sets_for,
    settings_of,
    wait_long,
)
from overland.apps.evaluation.model import steps_of
from overland.apps.evaluation.results import Record, Report
from overland.arguments import integer_or_none, path_of, path_or_none, refused, texts
from overland.config.schema import Comm, DataSource
from overland.errors import ArgumentError
from overland.parallel.comm import process_group
from overland.words import any_of, visible
from overland.world import World
from overland.world.devices import device_type

if TYPE_CHECKING:
    from overland.apps.evaluation.tasks import AskedTasks

PREFIXES = ("auto", "bos", "eos", "none")


def evaluate(
    path: str | Path,
    *,
    data: str | Path | Sequence[str | Path] = (),
    tasks: str | Sequence[str] = (),
    step: int | None = None,
    steps: str | None = None,
    context: int | None = None,
    stride: int | None = None,
    joined: bool = False,
    prefix: str = "auto",
    limit: int | None = None,
    column: str | None = None,
    subset: str | None = None,
    split: str | None = None,
    skip_bad: bool = False,
    batch_size: int | None = None,
    dtype: str | torch.dtype | None = None,
    base: str | Path | None = None,
    tokenizer: str | Path | None = None,
    config: str | Path | None = None,
    output: str | Path | None = None,
    again: bool = False,
    quiet: bool = True,
    num_fewshot: int | None = None,
    apply_chat_template: bool = False,
    chat_template: str | None = None,
    fewshot_as_multiturn: bool = True,
    system: str | None = None,
    gen_kwargs: str | None = None,
    add_bos: bool | None = None,
    log_samples: bool = False,
    include_path: str | Path | None = None,
    datasets: str | Path | None = None,
    unsafe_code: bool = False,
) -> list[Record]:
    """Measures perplexity and task scores, as `overland eval` does, in this process.

    Args:
        path: A run, a checkpoint of any format, or a Hugging Face folder.
        data: PATH, NAME or NAME=PATH to measure perplexity on. Without data and tasks, a run is
            evaluated on its validation data.
        tasks: Tasks of lm-evaluation-harness; `overland fetch tasks` fetches their datasets.
        step: The checkpoint of a run; default: the newest.
        steps: Several checkpoints of a run: `all`, or such as `1000,2000`.
        context: Tokens per window; default: as in training, at most 4096.
        stride: Tokens between windows; default: half of the context.
        joined: Whether to join all documents into one text.
        prefix: What a document's first token is predicted from: bos, eos, none or auto.
        limit: Evaluate only this many documents.
        column: Column of `data` that holds the documents.
        subset: Subset of a dataset folder.
        split: Split of a dataset folder; default: validation or test.
        skip_bad: Whether to skip and count documents that cannot be read.
        batch_size: Number of windows processed together.
        dtype: float32, bfloat16 or float16; default: float32 on a CPU, bfloat16 on a GPU.
        base: Base model of adapters, if they do not name it.
        tokenizer: A tokenizer, if the path has none.
        config: A config.json, if the path has none.
        output: Folder for results; default: next to the checkpoint.
        again: Whether to recompute saved results.
        quiet: Whether to suppress messages about saved results and progress.
        num_fewshot: For tasks, as all that follow: examples before each question.
        apply_chat_template: Whether to format prompts as conversations.
        chat_template: Name of the template, if there are several.
        fewshot_as_multiturn: Whether examples are turns of the conversation.
        system: The system message.
        gen_kwargs: Settings of generation, such as `max_gen_toks=64`.
        add_bos: Whether prompts begin with BOS; default: as the tokenizer does.
        log_samples: Whether to save every prompt and answer.
        include_path: Folder of task definitions.
        datasets: Folder that the datasets were fetched to.
        unsafe_code: Whether tasks may run programs that the model writes.

    Returns:
        A record per dataset or group of tasks, as `overland eval --json` prints them.
    """
    if prefix not in PREFIXES:
        raise refused("prefix", prefix, any_of(PREFIXES))
    for_data = {"stride": stride, "joined": joined, "prefix": prefix != "auto", "column": column,
                "subset": subset, "split": split, "skip_bad": skip_bad}  # fmt: skip
    for_tasks = {"num_fewshot": num_fewshot is not None, "apply_chat_template": apply_chat_template,
                 "chat_template": chat_template, "fewshot_as_multiturn": not fewshot_as_multiturn,
                 "system": system, "gen_kwargs": gen_kwargs, "add_bos": add_bos is not None,
                 "log_samples": log_samples, "include_path": include_path, "datasets": datasets,
                 "unsafe_code": unsafe_code}  # fmt: skip
    tasks = texts(tasks, "tasks")
    unread, needed = ({} if data else for_data, "data") if tasks else (for_tasks, "tasks")
    for name, value in unread.items():
        if value:
            raise ArgumentError(f"{name} has no effect without {needed}: give both")
    if step is not None and steps is not None:
        raise ArgumentError("step and steps are given: omit one of them")
    asked = EvaluationRequest(
        path=path_of(path, "path"),
        choices=DataSource(column=column, subset=subset, split=split),
        skip_bad=skip_bad,
        joined=joined,
        prefix=prefix,
        base=path_or_none(base, "base"),
        config=path_or_none(config, "config"),
        data=tuple(texts(data, "data", "a path or a list of paths", or_paths=True)),
        context=integer_or_none(context, "context", least=2),
        stride=integer_or_none(stride, "stride", least=1),
        limit=integer_or_none(limit, "limit", least=1),
        batch_size=integer_or_none(batch_size, "batch_size", least=1),
        dtype=given_dtype(dtype),
        tokenizer=path_or_none(tokenizer, "tokenizer"),
        step=integer_or_none(step, "step", least=0),
        output=path_or_none(output, "output"),
        again=again,
    )
    include = path_or_none(include_path, "include_path")
    wanted = asked_tasks(
        tasks,
        path_or_none(datasets, "datasets"),
        num_fewshot=integer_or_none(num_fewshot, "num_fewshot", least=0),
        chat_template=chat_template or ("default" if apply_chat_template else None),
        multiturn=fewshot_as_multiturn,
        system=system,
        gen_kwargs=gen_kwargs,
        add_bos=add_bos,
        log_samples=log_samples,
        unsafe_code=unsafe_code,
        include_path=None if include is None else str(include.absolute()),
    )
    return evaluate_here(asked, wanted, steps, World(), quiet)


def asked_tasks(tasks: Sequence[str], datasets: Path | None, **settings: Any) -> AskedTasks | None:
    """Returns the requested tasks, or None if there are none. Network access is disabled before
    libraries that could open connections are imported."""
    if not tasks:
        return None
    from overland.apps.evaluation.task_data import task_names, tasks_root
    from overland.apps.evaluation.task_run import no_network
    from overland.plugins import need

    no_network()
    need("lm_eval", "--tasks", "eval")
    from overland.apps.evaluation.tasks import AskedTasks

    root = tasks_root() if datasets is None else datasets.expanduser()
    return AskedTasks(names=task_names(list(tasks)), root=root, **settings)


def evaluate_here(
    asked: EvaluationRequest,
    tasks: AskedTasks | None,
    steps: str | None,
    world: World,
    quiet: bool = False,
) -> list[Record]:
    """Evaluates on this rank; the first rank's results are complete."""

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
    asked: EvaluationRequest,
    tasks: AskedTasks | None,
    world: World,
    device: torch.device,
    report: Report,
) -> list[Record]:
    """Evaluates one checkpoint."""
    session = open_session(asked, world, device, report)
    results = []
    if asked.data or tasks is None:
        settings = settings_of(session)
        results += [evaluate_set(session, one, settings) for one in sets_for(session)]
    if tasks is not None:
        from overland.apps.evaluation.tasks import evaluate_tasks

        results.append(evaluate_tasks(session, tasks))
    return results
