"""`overland eval`: how good a model is, in numbers."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from overland.cli.common import user_errors
from overland.cli.eval_tables import tables
from overland.run_folder import CONFIG, LOGS
from overland.words import visible
from overland.world.signals import end_at_signal

STOPPED_WORDS = "stopped; what is done is kept, and the same command continues"
FOR_TASKS = (
    "num_fewshot", "apply_chat_template", "chat_template", "fewshot_as_multiturn", "system",
    "gen_kwargs", "add_bos", "log_samples", "include_path", "datasets", "unsafe_code",
)  # fmt: skip
FOR_DATA = ("stride", "joined", "prefix", "column", "subset", "split", "skip_bad")


class Prefix(StrEnum):
    auto = "auto"
    bos = "bos"
    eos = "eos"
    none = "none"


class Dtype(StrEnum):
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


@user_errors
def evaluate(
    words: typer.Context,
    path: Annotated[
        Path,
        typer.Argument(help="A run, a checkpoint of any format, or a folder of Hugging Face."),
    ],
    data: Annotated[
        list[str] | None,
        typer.Option(help="PATH, NAME or NAME=PATH to measure perplexity on; repeatable."),
    ] = None,
    tasks: Annotated[
        list[str] | None,
        typer.Option(help="Tasks of lm-evaluation-harness: a,b or @LIST; repeatable."),
    ] = None,
    num_fewshot: Annotated[
        int | None, typer.Option(help="Examples before a question; default: the task's.", min=0)
    ] = None,
    apply_chat_template: Annotated[
        bool, typer.Option("--apply-chat-template", help="Prompts of tasks are conversations.")
    ] = False,
    chat_template: Annotated[
        str | None, typer.Option(help="Name of the template, where there are several.")
    ] = None,
    fewshot_as_multiturn: Annotated[
        bool, typer.Option(help="Examples are turns of the conversation.")
    ] = True,
    system: Annotated[str | None, typer.Option(help="System message of tasks.")] = None,
    gen_kwargs: Annotated[
        str | None, typer.Option(help="How tasks generate, such as max_gen_toks=64.")
    ] = None,
    add_bos: Annotated[
        bool | None,
        typer.Option(help="Prompts of tasks begin with BOS; default: as the tokenizer says."),
    ] = None,
    log_samples: Annotated[
        bool, typer.Option("--log-samples", help="Keep every prompt and answer of tasks.")
    ] = False,
    include_path: Annotated[
        Path | None, typer.Option(help="A folder with task definitions of your own.")
    ] = None,
    datasets: Annotated[
        Path | None, typer.Option(help="The folder that datasets of tasks were fetched to.")
    ] = None,
    unsafe_code: Annotated[
        bool, typer.Option("--unsafe-code", help="Let tasks run what the model writes.")
    ] = False,
    context: Annotated[
        int | None,
        typer.Option(
            help="Tokens of a window; default: as trained, 4096 at most; see the docs.", min=2
        ),
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option(help="Tokens between windows; default: half of the context.", min=1),
    ] = None,
    joined: Annotated[
        bool, typer.Option("--joined", help="All documents as one text, as C4 is measured.")
    ] = False,
    prefix: Annotated[
        Prefix, typer.Option(help="What a document's first token is predicted from.")
    ] = Prefix.auto,
    limit: Annotated[int | None, typer.Option(help="Only so many documents.", min=1)] = None,
    column: Annotated[str | None, typer.Option(help="Column that holds the documents.")] = None,
    subset: Annotated[str | None, typer.Option(help="Subset of a dataset folder.")] = None,
    split: Annotated[
        str | None, typer.Option(help="Split of a dataset folder; default: validation or test.")
    ] = None,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Skip and count documents that cannot be read.")
    ] = False,
    batch_size: Annotated[
        int | None, typer.Option(help="Windows that go through the model together.", min=1)
    ] = None,
    dtype: Annotated[
        Dtype | None, typer.Option(help="Type to compute in; default: by the device.")
    ] = None,
    base: Annotated[
        Path | None, typer.Option(help="The model that adapters belong to, if they do not say.")
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="A tokenizer, where PATH brings none.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="A config.json, where PATH brings none.")
    ] = None,
    step: Annotated[int | None, typer.Option(help="The checkpoint of a run.")] = None,
    steps: Annotated[
        str | None, typer.Option(help="Checkpoints of a run, for a curve: all, or 1000,2000.")
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(help="Processes to start here; default: NGPU, or one per GPU.", min=1),
    ] = None,
    shard: Annotated[
        bool, typer.Option("--shard", help="Shard the parameters over the ranks.")
    ] = False,
    tensor_parallel: Annotated[int, typer.Option(help="Ranks that split each matrix.", min=1)] = 1,
    output: Annotated[
        Path | None, typer.Option(help="Folder for results; default: beside the checkpoint.")
    ] = None,
    again: Annotated[
        bool, typer.Option("--again", help="Compute again what was computed before.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure perplexity and scores: overland eval PATH --data c4=/scratch/c4 --tasks hellaswag

    A run is evaluated on what it validates on if neither is named. Run it again to continue one
    that was stopped. Results are kept beside the checkpoint.
    """
    end_at_signal(STOPPED_WORDS)
    check_together(words)
    from overland.config.arguments import log_ranks, ngpu
    from overland.world import World
    from overland.world.launchers import export_world, find_world

    world = find_world()
    if world is not None:
        export_world(world)
    if world is None:
        num_ranks = ranks or ngpu(os.environ) or num_devices()
        require_degree(tensor_parallel, num_ranks)
        if num_ranks > 1:
            raise typer.Exit(launch(num_ranks, log_ranks(os.environ), path, output))
    else:
        require_degree(tensor_parallel, world.size)

    from overland.config.schema import DataSource
    from overland.tools.evaluation.evaluate import Asked
    from overland.tools.evaluation.model import DTYPES
    from overland.tools.evaluation.run import asked_tasks, evaluate_here

    asked = Asked(
        path=path.expanduser(),
        data=tuple(data or ()),
        choices=DataSource(column=column, subset=subset, split=split),
        skip_bad=skip_bad,
        context=context,
        stride=stride,
        joined=joined,
        prefix=prefix.value,
        limit=limit,
        batch_size=batch_size,
        dtype=None if dtype is None else DTYPES[dtype],
        base=base,
        tokenizer=tokenizer,
        config=config,
        step=step,
        shard=shard,
        tensor_parallel=tensor_parallel,
        output=output,
        again=again,
    )
    wanted = asked_tasks(
        tasks or [],
        datasets,
        num_fewshot=num_fewshot,
        chat_template=chat_template or ("default" if apply_chat_template else None),
        multiturn=fewshot_as_multiturn,
        system=system,
        gen_kwargs=gen_kwargs,
        add_bos=add_bos,
        log_samples=log_samples,
        unsafe_code=unsafe_code,
        include_path=None if include_path is None else str(include_path.expanduser().absolute()),
    )
    results = evaluate_here(asked, wanted, steps, world or World())
    if world is None or world.is_first:
        if as_json:
            print(json.dumps(results, indent=2))
            return
        print(*map(visible, tables(results, is_sweep=steps is not None)), sep="\n\n")


def check_together(words: Any) -> None:  # a Context of typer, or of the click inside of it
    """Refuses options that contradict each other, or that nothing would read."""
    given = {
        one.name: one.opts[0]
        for one in words.command.params
        if one.name and getattr(words.get_parameter_source(one.name), "name", "") == "COMMANDLINE"
    }
    if "step" in given and "steps" in given:
        raise typer.BadParameter("is one checkpoint: give one of --step and --steps")
    unread: tuple[str, ...] = ()
    if "tasks" not in given:
        unread, why = FOR_TASKS, "is for tasks, and --tasks names none"
    elif "data" not in given:
        unread, why = FOR_DATA, "is for perplexity, and --data names nothing to measure it on"
    for name in unread:
        if name in given:
            raise typer.BadParameter(why, param_hint=given[name])


def num_devices() -> int:
    """One rank per GPU; on a CPU one, which has all cores."""
    from overland.world.devices import may_have_accelerator

    if not may_have_accelerator():
        return 1
    import torch

    return torch.accelerator.device_count() or 1


def require_degree(tensor_parallel: int, num_ranks: int) -> None:
    from overland.errors import ClusterError

    if num_ranks % tensor_parallel:
        raise ClusterError(
            f"--tensor-parallel {tensor_parallel} does not divide the {num_ranks} ranks; --ranks "
            "or NGPU sets their number"
        )


def launch(num_ranks: int, printing: Sequence[int], path: Path, output: Path | None) -> int:
    """Starts the same command on so many ranks."""
    from overland.tools.evaluation.results import place_of
    from overland.world.launch import launch_local

    path = path.expanduser().absolute()
    around = [one for one in (path, *path.parents[:3]) if (one / CONFIG).is_file()]
    logs = (around[0] if around and not output else place_of(path, None, output)) / LOGS
    try:
        logs.mkdir(parents=True, exist_ok=True)
    except OSError:
        logs = Path(tempfile.mkdtemp(prefix="overland-eval-"))
    return launch_local(sys.argv[1:], num_ranks, printing, logs)
