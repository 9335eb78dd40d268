"""`overland eval`: measures perplexity and task scores of a model."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from overland.cli.common import user_errors
from overland.cli.eval_tables import tables
from overland.run_folder import CONFIG, LOGS
from overland.world.signals import end_at_signal

STOPPED_WORDS = "stopped; finished parts are saved, and the same command resumes"
FOR_TASKS = (
    "num_fewshot", "apply_chat_template", "chat_template", "fewshot_as_multiturn", "system",
    "gen_kwargs", "add_bos", "log_samples", "include_path", "datasets", "unsafe_code",
)  # fmt: skip
FOR_DATA = ("stride", "joined", "prefix", "column", "subset", "split", "skip_bad")


@user_errors
def evaluate(
    words: typer.Context,
    path: Annotated[
        Path,
        typer.Argument(help="A run, a checkpoint of any format, or a Hugging Face folder."),
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
        int | None, typer.Option(help="Examples before each question; default: the task's.", min=0)
    ] = None,
    apply_chat_template: Annotated[
        bool, typer.Option("--apply-chat-template", help="Format task prompts as conversations.")
    ] = False,
    chat_template: Annotated[
        str | None, typer.Option(help="Name of the template, if there are several.")
    ] = None,
    fewshot_as_multiturn: Annotated[
        bool, typer.Option(help="Format few-shot examples as turns of the conversation.")
    ] = True,
    system: Annotated[str | None, typer.Option(help="System message for tasks.")] = None,
    gen_kwargs: Annotated[
        str | None, typer.Option(help="Generation settings for tasks, such as max_gen_toks=64.")
    ] = None,
    add_bos: Annotated[
        bool | None,
        typer.Option(help="Begin task prompts with BOS; default: as the tokenizer does."),
    ] = None,
    log_samples: Annotated[
        bool, typer.Option("--log-samples", help="Save every prompt and answer of the tasks.")
    ] = False,
    include_path: Annotated[
        Path | None, typer.Option(help="Folder with your own task definitions.")
    ] = None,
    datasets: Annotated[
        Path | None, typer.Option(help="Folder that the tasks' datasets were fetched to.")
    ] = None,
    unsafe_code: Annotated[
        bool, typer.Option("--unsafe-code", help="Let tasks run code that the model writes.")
    ] = False,
    context: Annotated[
        int | None,
        typer.Option(help="Tokens per window; default: as trained, at most 4096.", min=2),
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option(help="Tokens between window starts; default: half the context.", min=1),
    ] = None,
    joined: Annotated[
        bool, typer.Option("--joined", help="Join all documents into one text, as is usual for C4.")
    ] = False,
    prefix: Annotated[
        Literal["auto", "bos", "eos", "none"],
        typer.Option(help="Token that a document's first token is predicted from."),
    ] = "auto",
    limit: Annotated[
        int | None, typer.Option(help="Use at most this many documents.", min=1)
    ] = None,
    column: Annotated[str | None, typer.Option(help="Column that holds the documents.")] = None,
    subset: Annotated[str | None, typer.Option(help="Subset of a dataset folder.")] = None,
    split: Annotated[
        str | None, typer.Option(help="Split of a dataset folder; default: validation or test.")
    ] = None,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Skip and count documents that cannot be read.")
    ] = False,
    batch_size: Annotated[int | None, typer.Option(help="Windows per forward pass.", min=1)] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option(help="Compute type; default: depends on the device."),
    ] = None,
    base: Annotated[
        Path | None, typer.Option(help="Base model of the adapters, if they do not name it.")
    ] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="Tokenizer, if PATH has none.")] = None,
    config: Annotated[Path | None, typer.Option(help="A config.json, if PATH has none.")] = None,
    step: Annotated[
        int | None, typer.Option(help="Checkpoint of a run; default: the newest.")
    ] = None,
    steps: Annotated[
        str | None, typer.Option(help="Checkpoints of a run to compare: all, or e.g. 1000,2000.")
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(help="Processes to start here; default: NGPU, or one per GPU.", min=1),
    ] = None,
    shard: Annotated[
        bool, typer.Option("--shard", help="Shard the parameters over the ranks.")
    ] = False,
    tensor_parallel: Annotated[
        int, typer.Option(help="Number of ranks that split each matrix.", min=1)
    ] = 1,
    output: Annotated[
        Path | None, typer.Option(help="Folder for results; default: next to the checkpoint.")
    ] = None,
    again: Annotated[
        bool, typer.Option("--again", help="Recompute results that already exist.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure perplexity and scores: overland eval PATH --data c4=/scratch/c4 --tasks hellaswag

    With neither option, a run is evaluated on its own validation data. Results are saved next to
    the checkpoint; run the same command again to resume an evaluation that was stopped.
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

    from overland.apps.convert.formats.files import given_dtype
    from overland.apps.evaluation.evaluate import EvaluationRequest
    from overland.apps.evaluation.main import asked_tasks, evaluate_here
    from overland.config.schema import DataSource

    asked = EvaluationRequest(
        path=path.expanduser(),
        data=tuple(data or ()),
        choices=DataSource(column=column, subset=subset, split=split),
        skip_bad=skip_bad,
        context=context,
        stride=stride,
        joined=joined,
        prefix=prefix,
        limit=limit,
        batch_size=batch_size,
        dtype=given_dtype(dtype),
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
        shown = tables(results, is_sweep=steps is not None, advises=prefix == "auto")
        print(*shown, sep="\n\n")


def check_together(words: Any) -> None:  # a Context of typer, or of the click that it bundles
    """Refuses options that contradict each other or would have no effect."""
    given = {
        one.name: one.opts[0]
        for one in words.command.params
        if one.name and getattr(words.get_parameter_source(one.name), "name", "") == "COMMANDLINE"
    }
    if "step" in given and "steps" in given:
        raise typer.BadParameter("give either --step or --steps, not both")
    unread: tuple[str, ...] = ()
    if "tasks" not in given:
        unread, why = FOR_TASKS, "applies only to tasks, and --tasks is not given"
    elif "data" not in given:
        unread, why = FOR_DATA, "applies only to perplexity, and --data is not given"
    for name in unread:
        if name in given:
            raise typer.BadParameter(why, param_hint=given[name])


def num_devices() -> int:
    """Returns one rank per GPU; on a CPU a single one, which uses all cores."""
    from overland.world.devices import may_have_accelerator

    if not may_have_accelerator():
        return 1
    import torch

    return torch.accelerator.device_count() or 1


def require_degree(tensor_parallel: int, num_ranks: int) -> None:
    from overland.errors import ClusterError

    if num_ranks % tensor_parallel:
        raise ClusterError(
            f"--tensor-parallel {tensor_parallel} does not divide the {num_ranks} ranks; set "
            "their number with --ranks or NGPU"
        )


def launch(num_ranks: int, printing: Sequence[int], path: Path, output: Path | None) -> int:
    """Starts the same command on this many ranks."""
    from overland.apps.evaluation.results import place_of
    from overland.world.launch import launch_local

    path = path.expanduser().absolute()
    around = [one for one in (path, *path.parents[:3]) if (one / CONFIG).is_file()]
    logs = (around[0] if around and not output else place_of(path, None, output)) / LOGS
    try:
        logs.mkdir(parents=True, exist_ok=True)
    except OSError:
        logs = Path(tempfile.mkdtemp(prefix="overland-eval-"))
    return launch_local(sys.argv[1:], num_ranks, printing, logs)
