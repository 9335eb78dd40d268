"""`overland eval`: how good a model is, in numbers."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from overland.cli.common import user_errors
from overland.run_folder import CONFIG, LOGS
from overland.world.signals import end_at_signal

if TYPE_CHECKING:
    from overland.tools.evaluation.evaluate import Asked
    from overland.world import World

STOPPED_WORDS = "stopped; what is done is kept, and the same command continues"
COLUMNS = {
    "data": "name",
    "documents": "documents",
    "tokens": "tokens",
    "loss": "loss",
    "perplexity": "perplexity",
    "bits/byte": "bits_per_byte",
    "per byte": "byte_perplexity",
    "per word": "word_perplexity",
}


@user_errors
def evaluate(
    path: Annotated[
        Path,
        typer.Argument(help="A run, a checkpoint of any format, or a folder of Hugging Face."),
    ],
    data: Annotated[
        list[str] | None,
        typer.Option(help="PATH, NAME or NAME=PATH to measure perplexity on; repeatable."),
    ] = None,
    context: Annotated[
        int | None, typer.Option(help="Tokens of a window; default: as trained, 4096 at most.")
    ] = None,
    stride: Annotated[
        int | None, typer.Option(help="Tokens between windows; default: half of the context.")
    ] = None,
    joined: Annotated[
        bool, typer.Option("--joined", help="All documents as one text, as C4 is measured.")
    ] = False,
    prefix: Annotated[
        str, typer.Option(help="What a document's first token follows: auto, bos, eos or none.")
    ] = "auto",
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
        str | None, typer.Option(help="float32, bfloat16 or float16; default: by the device.")
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
    """Measure perplexity on documents: overland eval PATH --data c4=/scratch/c4 --data stdlib

    A run is evaluated on what it validates on if no data is named. Run it again to continue one
    that was stopped. Results are kept beside the checkpoint.
    """
    end_at_signal(STOPPED_WORDS)
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
    from overland.words import any_of

    for option, value, known in (("--dtype", dtype, DTYPES), ("--prefix", prefix, PREFIXES)):
        if value is not None and value not in known:
            raise typer.BadParameter(f"expected {any_of(list(known))}", param_hint=option)
    asked = Asked(
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
    results = evaluate_here(asked, world or World())
    if world is None or world.is_first:
        print(json.dumps(results, indent=2) if as_json else table(results))


PREFIXES = ("auto", "bos", "eos", "none")


def evaluate_here(asked: Asked, world: World) -> list[dict[str, Any]]:
    """What every rank does; the first one's results are all."""
    from overland.config.schema import Comm
    from overland.parallel.comm import process_group
    from overland.tools.evaluation.evaluate import (
        evaluate_set,
        open_session,
        sets_for,
        settings_of,
        wait_long,
    )
    from overland.world.devices import device_type

    def report(message: str) -> None:
        if world.is_first:
            print(message, file=sys.stderr, flush=True)

    import torch

    if world.size == 1:
        device = torch.device(device_type())
        session = open_session(asked, world, device, report)
        settings = settings_of(session)
        return [evaluate_set(session, one, settings) for one in sets_for(session)]
    comm = Comm.model_validate({"backend": os.environ.get("COMM_BACKEND") or "auto"})
    with process_group(comm, world, device_type()) as device:
        session = open_session(asked, world, device, report)
        wait_long()
        settings = settings_of(session)
        return [evaluate_set(session, one, settings) for one in sets_for(session)]


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


def table(results: Sequence[dict[str, Any]]) -> str:
    """The results as people read them."""
    cells = [list(COLUMNS)]
    for one in results:
        cells.append([_cell(name, one.get(key)) for name, key in COLUMNS.items()])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "  ".join(
            text.ljust(width) if number == 0 else text.rjust(width)
            for number, (text, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in cells
    ]
    return "\n".join([*lines, "", *_about(results)])


def _cell(name: str, value: object) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:,.4f}" if name in ("loss", "bits/byte", "per byte") else f"{value:,.2f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _about(results: Sequence[dict[str, Any]]) -> list[str]:
    """How the numbers were measured, and what is not in them."""
    lines = []
    for one in results:
        settings = one["settings"]
        how = "all documents as one text" if settings["joined"] else "each document by itself"
        lines.append(
            f"{one['name']}: {how}, windows of {settings['context']:,} tokens every "
            f"{settings['stride']:,}, in {settings['dtype']}"
        )
        if one["unscored"]:
            lines.append(
                f"  {one['unscored']:,} first tokens are not scored, as no BOS is before them "
                "(--prefix eos)"
            )
        if one["skipped_documents"]:
            lines.append(f"  {one['skipped_documents']:,} documents could not be read")
        if one["kept"]:
            lines.append(f"  kept in {one['kept']}")
    return lines
