"""`overland convert`: parses the options of a conversion and prints its result;
`apps/convert/convert.py` converts.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated

import typer

from overland.apps.progress import progress_bar
from overland.cli.common import user_errors


@user_errors
def convert(
    source: Annotated[Path, typer.Argument(help="A run folder, or a checkpoint of any format.")],
    target: Annotated[
        Path, typer.Argument(help="New folder to write (for safetensors: new file).")
    ],
    to: Annotated[
        str,
        typer.Option(help="Target format: hf, peft, dcp, meta, torch, safetensors or overland."),
    ],
    dtype: Annotated[
        str | None, typer.Option(help="Type of the weights: float32, bfloat16 or float16.")
    ] = None,
    exclude: Annotated[
        list[str] | None, typer.Option(help="Tensors to leave out, e.g. 'lm_head.*'; repeatable.")
    ] = None,
    weights_only: Annotated[
        bool, typer.Option("--weights-only", help="Leave out the optimizer.")
    ] = False,
    config: Annotated[
        Path | None,
        typer.Option(
            help="A config.json, or a folder with it and a tokenizer, if SOURCE has none."
        ),
    ] = None,
    max_shard_size: Annotated[str, typer.Option(help="Largest file size, e.g. 500MB.")] = "5GB",
    names: Annotated[str, typer.Option(help="Key names in a DCP folder: hf or torchtitan.")] = "hf",
    key_prefix: Annotated[
        str | None,
        typer.Option(help="Prefix of the weights in a DCP folder; default: model. or none."),
    ] = None,
    verify: Annotated[
        str, typer.Option(help="Afterwards compare hash (of every tensor), logits, or none.")
    ] = "hash",
    adapter: Annotated[
        Path | None,
        typer.Option(help="Adapters for SOURCE: a PEFT folder, or any checkpoint that has them."),
    ] = None,
    merge_lora: Annotated[
        bool, typer.Option("--merge-lora", help="Merge adapters into the weights.")
    ] = False,
    custom_import: Annotated[
        str,
        typer.Option("--import", help="Module to import first; it may register formats."),
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON summary.")] = False,
) -> None:
    """Convert a checkpoint, tensor by tensor, to any format. The format of SOURCE is detected."""
    from overland.apps.convert import convert as convert_checkpoint
    from overland.apps.convert.formats import Options
    from overland.cli.data_build import import_sources
    from overland.errors import CheckpointError

    if names not in ("hf", "torchtitan"):
        raise CheckpointError(f"--names {names}: expected hf or torchtitan")
    import_sources(custom_import)
    options = Options(size_in_bytes(max_shard_size), names, key_prefix)
    with progress_bar("reading", "bytes") as bar:
        summary = convert_checkpoint(
            source,
            target,
            to,
            dtype=dtype,
            exclude=exclude or (),
            weights_only=weights_only,
            config=config,
            options=options,
            verify=verify,
            advance=lambda what, done, total: bar(done, total, what),
            adapter=adapter,
            merge_lora=merge_lora,
        )
    if as_json:
        print(json.dumps(summary.to_json(), indent=2))
        return
    print(
        f"{summary.target}: {summary.num_tensors} tensors, {summary.num_bytes / 1e6:,.1f} MB, "
        f"{summary.source_format} to {summary.target_format}"
    )
    if summary.verified:
        print(f"verified: {summary.verified} tensors read back unchanged")
    if summary.products_difference is not None:
        print(
            f"merged: {summary.merged} matrices, each compared with base + adapter on random "
            f"vectors; largest difference {summary.products_difference:.2g}"
        )
    if summary.logits_difference is not None:
        what = "logits of base + adapter and of the merged model" if summary.merged else "outputs"
        print(f"{what} differ by {summary.logits_difference:.2g} at most")
    elif summary.note:
        print(f"logits were not compared, only weights: {summary.note}")
    print(
        f"peak memory {summary.peak_memory / 1e6:,.0f} MB above the start, "
        f"of {summary.allowed_memory / 1e6:,.0f} MB allowed (2 x largest tensor + 256 MiB)"
    )


def size_in_bytes(text: str) -> int:
    from overland.errors import CheckpointError

    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", text.strip(), flags=re.IGNORECASE)
    number = 0.0
    if match is not None:
        power = " KMGT".index(match[2].upper() or " ")
        number = float(match[1]) * (1024 if match[3] else 1000) ** power
    if number < 1:
        raise CheckpointError(f"--max-shard-size {text} is not a size; write e.g. 500MB or 5GB")
    return int(number)
