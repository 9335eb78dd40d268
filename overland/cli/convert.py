"""`overland convert`: parses the options of a conversion and prints its result;
`apps/convert/convert.py` converts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from overland.apps.progress import progress_bar
from overland.cli.common import Json, verb
from overland.cli.data_build import import_sources
from overland.errors import CheckpointError


@verb
def convert(
    source: Path,
    target: Path,
    to: Annotated[str, typer.Option()],
    dtype: str | None = None,
    exclude: list[str] | None = None,
    weights_only: bool = False,
    config: Path | None = None,
    max_shard_size: str = "5GB",
    names: str = "hf",
    key_prefix: str | None = None,
    verify: str = "hash",
    adapter: Path | None = None,
    merge_lora: bool = False,
    custom_import: Annotated[str, typer.Option("--import")] = "",
    as_json: Json = False,
) -> None:
    """Convert a checkpoint, tensor by tensor, to any format. The format of SOURCE is detected.

    Args:
        source: A run folder, or a checkpoint of any format.
        target: New folder to write (for safetensors: new file).
        to: Target format: hf, peft, dcp, meta, torch, safetensors or overland.
        dtype: Type of the weights: float32, bfloat16 or float16.
        exclude: Tensors to leave out, e.g. 'lm_head.*'; repeatable.
        weights_only: Leave out the optimizer.
        config: A config.json, or a folder with it and a tokenizer, if SOURCE has none.
        max_shard_size: Largest file size, e.g. 500MB.
        names: Key names in a DCP folder: hf or torchtitan.
        key_prefix: Prefix of the weights in a DCP folder; default: model. or none.
        verify: What to compare afterwards: hash (of every tensor), logits, or none.
        adapter: Adapters for SOURCE: a PEFT folder, or any checkpoint that has them.
        merge_lora: Merge adapters into the weights.
        custom_import: Module to import first; it may register formats.
        as_json: Print a JSON summary.
    """
    from overland.apps.convert import convert as convert_checkpoint
    from overland.apps.convert.formats import Options

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
    from pydantic import ByteSize, Field, TypeAdapter, ValidationError

    try:
        return TypeAdapter(Annotated[ByteSize, Field(ge=1)]).validate_python(text)
    except ValidationError:
        problem = f"--max-shard-size {text} is not a size; write e.g. 500MB or 5GB"
        raise CheckpointError(problem) from None
