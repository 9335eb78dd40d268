"""`overland check`: everything that can be known about a run before it starts."""

from __future__ import annotations

import json
import os
import sys
from math import prod
from typing import Annotated, Any

import typer

from overland.cli.common import Settings, split_settings, user_errors

# Building the mesh and sharding take about 2 ms of CPU time per device: 30 s for this many.
LARGEST_FAKE_WORLD = 16_384


@user_errors
def check(
    settings: Settings = None,
    world_size: Annotated[
        int | None, typer.Option(help="Number of devices to check for.", min=1)
    ] = None,
    step: Annotated[
        bool, typer.Option(help="Also take one step on fake tensors, which use no memory.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check a config without training: keys, parallel degrees, batch, files, and one fake step."""
    from overland.config.arguments import ngpu

    source, arguments = split_settings(settings)
    raise typer.Exit(report(source, arguments, world_size or ngpu(os.environ), step, as_json))


def report(
    source: str | None,
    arguments: list[str],
    world_size: int | None,
    step: bool = True,
    as_json: bool = False,
) -> int:
    """Prints a description of the run and returns the exit code. Files that are still to be fetched
    are not errors, nor is a backend that this machine lacks: the run may be meant for another."""
    from overland.checks import load_checked
    from overland.config.derived import smallest_world
    from overland.config.errors import ConfigError
    from overland.config.load import in_order
    from overland.training.rehearsal import require_start

    loaded, problems = load_checked(
        source, arguments, world_size=world_size, waive={"missing", "machine"}
    )
    try:
        problems += require_start(loaded)
    except ConfigError as error:
        to_fetch = [problem for problem in problems if problem.kind == "missing"]
        raise ConfigError(in_order([*to_fetch, *error.problems])) from None
    world_size = world_size or smallest_world(loaded.config.parallelism)
    has_model = not any(
        problem.kind == "missing" and problem.key in ("model.config", "model.from")
        for problem in problems
    )
    facts = describe_run(loaded.config, world_size) if has_model else {}
    notes = loaded.notes + [str(problem) for problem in problems if problem.kind != "missing"]
    if step and has_model:
        notes += order_notes(loaded.config, world_size)
    if step and has_model and world_size > LARGEST_FAKE_WORLD:
        notes.append(
            f"skipped the fake step, which supports {LARGEST_FAKE_WORLD:,} devices at most"
        )
    elif step and has_model:
        facts |= fake_step_facts(loaded.config, world_size)
    missing = [str(problem) for problem in problems if problem.kind == "missing"]
    if as_json:
        print(json.dumps({**facts, "notes": notes, "to_fetch": missing}, indent=2))
        return 0
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    width = max(map(len, facts), default=0)
    for name, value in facts.items():
        shown = value if isinstance(value, str) else f"{value:,}"
        print(f"{name.replace('_', ' '):<{width}} {shown}")
    if missing:
        print("\nStill to fetch before training:")
        print(*(f"  {line}" for line in missing), sep="\n")
    if has_model:
        print("\nThe config is valid.")
    else:
        print("\nThe rest of the config is valid; the model itself was not checked.")
    return 0


def order_notes(config: Any, world_size: int) -> list[str]:
    """Refuses a custom model whose blocks do not run in the order that it declares."""
    from overland.config.derived import resolve_degrees
    from overland.models.registry import model_config

    degrees = resolve_degrees(config.parallelism, world_size)
    if degrees.pp == 1:  # before importing torch, which takes seconds
        return []
    from overland.checks.block_order import require_order

    note = require_order(model_config(config.model), config, degrees)
    return [note] if note else []


def fake_step_facts(config: Any, world_size: int) -> dict[str, Any]:
    """Returns the memory and collectives of rank 0; with a pipeline, of whichever of its two ends
    needs more memory."""
    import warnings

    from overland.checks.fake_step import NOT_FOR_FAKES, fake_steps

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about fake tensors
        try:
            steps = fake_steps(config, world_size)
        except NOT_FOR_FAKES as error:
            return {
                "fake_step": f"none: the model reads values, and fake tensors have none ({error})"
            }
    worst = max(steps, key=lambda one: one.total_bytes)
    gib = {
        "parameters": worst.parameter_bytes,
        "gradients": worst.gradient_bytes,
        "optimizer": worst.optimizer_bytes,
        "kept_for_backward": worst.activation_bytes,
        "in_all": worst.total_bytes,
    }
    return {
        "parameters_per_device": worst.parameters,
        **{f"gib_per_device_{name}": round(size / 2**30, 3) for name, size in gib.items()},
        **{f"{name}s_per_pass": count for name, count in worst.collectives.items() if count},
        "fake_step_seconds": round(sum(one.seconds for one in steps), 1),
    }


def describe_run(config: Any, world_size: int) -> dict[str, Any]:
    from overland.config.derived import resolve_degrees
    from overland.models.flops import (
        causal_flops_per_token,
        count_parameters,
        measure_of,
        trained_parameters,
    )
    from overland.models.registry import model_config
    from overland.training.readme import model_name, strategy_in_words
    from overland.training.schedule import known_steps

    training = config.training
    degrees = resolve_degrees(config.parallelism, world_size)
    architecture = model_config(config.model)
    per_pass = training.local_batch_size * degrees.dp
    rows = per_pass if training.global_batch_size == -1 else training.global_batch_size
    steps = known_steps(config, rows)
    measure = measure_of(architecture, training.seq_len, config.lora)
    unit = measure.unit
    num_trained = sum(map(prod, trained_parameters(architecture, config.lora).values()))
    flops = {} if measure.flops is None else {f"flops_per_{unit[:-1]}": int(measure.flops)}
    if unit == "tokens":
        causal = causal_flops_per_token(architecture, training.seq_len, config.lora)
        flops["flops_per_token_causal"] = int(causal)
    return {
        "model": model_name(config),
        "parameters": count_parameters(architecture).total,
        **({"trained_parameters": num_trained} if config.lora.rank else {}),
        **flops,
        "devices": world_size,
        "layout": strategy_in_words(degrees),
        **({"sequences_per_step": rows} if unit == "tokens" else {}),
        f"{unit}_per_step": rows * measure.per_row,
        "accumulated_passes": rows // per_pass,
        "steps": "counted when training starts" if steps is None else steps,
        **({} if steps is None else {f"{unit}_in_all": rows * measure.per_row * steps}),
        "run_folder": config.job.dump_folder,
    }
