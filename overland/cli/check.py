"""`overland check`: everything that can be known about a run before it starts."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import TYPE_CHECKING, Annotated, Any

import typer

from overland.cli.common import Settings, split_settings, user_errors
from overland.words import any_of, number_of

if TYPE_CHECKING:
    from overland.config.load import Loaded
    from overland.config.schema import JobConfig

# Building the mesh and sharding take about 2 ms of CPU time per device: 30 s for this many.
LARGEST_FAKE_WORLD = 16_384

SLOW_SECONDS = 3.0

MEMORY = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "kept_for_backward": "activations kept for the backward pass",
}


@user_errors
def check(
    settings: Settings = None,
    world_size: Annotated[
        int | None,
        typer.Option(
            help="Number of devices to check for; by default NGPU, or else as many as `overland "
            "train` would use on this machine.",
            min=1,
            show_default=False,
        ),
    ] = None,
    step: Annotated[
        bool, typer.Option(help="Also take one step on fake tensors, which use no memory.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check a config without training: keys, parallel degrees, batch, files, and one fake step."""
    from overland.config.arguments import ngpu

    source, arguments = split_settings(settings)
    is_here = world_size is None
    world_size = world_size or ngpu(os.environ)
    raise typer.Exit(report(source, arguments, world_size, step, as_json, is_here))


def report(
    source: str | None,
    arguments: list[str],
    world_size: int | None,
    step: bool = True,
    as_json: bool = False,
    is_here: bool = True,
) -> int:
    """Prints a description of the run and returns the exit code: 0 also if files are still to be
    fetched, or if this machine lacks a backend or memory, since the run may be meant for another; 2
    if a path does not exist and no command is known to bring it. `is_here`: whether the run would
    be on this machine alone."""
    from overland.apps.check.rehearsal import require_start
    from overland.checks import load_checked
    from overland.config.errors import ConfigError
    from overland.config.load import in_order

    loaded, problems = load_checked(
        source, arguments, world_size=world_size, waive={"missing", "machine"}
    )
    missing = [problem for problem in problems if problem.kind == "missing"]
    try:
        with said_if_slow("opening data, tokenizer and weights"):
            problems += require_start(loaded)
    except ConfigError as error:
        raise ConfigError(in_order([*missing, *error.problems])) from None
    notes = loaded.notes + [str(problem) for problem in problems if problem.kind != "missing"]
    refused_here = [str(one) for one in problems if is_here and one.kind == "machine"]
    if world_size is None:
        world_size, devices, more = devices_here(loaded)
        notes += more
        refused_here += more
        is_here = not more
    else:
        devices = f"{world_size:,}"
    has_model = not any(problem.key in ("model.config", "model.from") for problem in missing)
    facts: dict[str, Any] = {}
    lines: dict[str, str] = {}
    if has_model and as_json:
        facts = describe_run(loaded.config, world_size)
    elif has_model:
        lines = run_lines(loaded.config, world_size, devices)
    if step and has_model:
        notes += order_notes(loaded.config, world_size) + left_out_notes(loaded.config)
    if step and has_model and world_size > LARGEST_FAKE_WORLD:
        notes.append(
            f"skipped the fake step, which supports {LARGEST_FAKE_WORLD:,} devices at most"
        )
    elif step and has_model:
        doing = f"taking a fake step of one rank of {world_size:,} (--no-step skips it)"
        with said_if_slow(doing):
            step_facts, step_lines = fake_step_facts(loaded.config, world_size, is_here)
        facts |= step_facts
        lines |= step_lines
    if has_model and is_here:
        more = lack_of_memory(loaded.config, world_size)
        notes += more
        refused_here += more
    code = 0 if all(problem.can_be_fetched for problem in missing) else 2
    if as_json:
        facts |= {"notes": notes, "to_fetch": [*map(str, missing)], "refused_here": refused_here}
        print(json.dumps(facts, indent=2))
        return code
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    if lines:
        from overland.apps.console.opening import run_in_words, table
        from overland.run_folder import RunFolder

        place = {"run": run_in_words(loaded.config, RunFolder(loaded.config))}
        print(table(lines | place), end="\n\n")
    if missing:
        print("Missing, and needed for training:")
        print(*(f"  {problem}" for problem in missing), sep="\n", end="\n\n")
    print(verdict(bool(missing), has_model, bool(refused_here)))
    return code


@contextmanager
def said_if_slow(doing: str) -> Iterator[None]:
    """Prints what is being done if it takes seconds, and then from time to time how long it has
    taken."""
    ended, started = threading.Event(), time.monotonic()

    def say() -> None:
        pause = SLOW_SECONDS
        while not ended.wait(pause):
            print(f"{doing}: {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
            pause = 5 * SLOW_SECONDS

    thread = threading.Thread(target=say, name="said-if-slow", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def verdict(is_missing: bool, has_model: bool, is_refused_here: bool) -> str:
    here = ""
    if is_refused_here:
        here = " `overland train` would refuse to start on this machine: see the notes above."
    if not is_missing:
        return f"The config is valid.{here}"
    unchecked = "" if has_model else ", but the model itself was not checked"
    return f"The rest of the config is valid{unchecked}; `overland train` needs these first.{here}"


def devices_here(loaded: Loaded) -> tuple[int, str, list[str]]:
    """Returns the number of devices that `overland train` would use on this machine, in words too,
    and notes. A config that does not fit them is meant for another machine, and described for the
    fewest devices that its degrees fit on."""
    from overland.checks import devices_for
    from overland.world.devices import device_name, num_local_ranks

    number, problem = devices_for(loaded)
    if problem is None:
        how = "as `overland train` would use here; --world-size checks another number"
        return number, f"{number:,} × {device_name(loaded.config.training.device)} ({how})", []
    here = number_of(num_local_ranks(loaded.config.comm.ranks_per_device), "device")
    note = (
        f"`overland train` would refuse this config on the {here} of this machine ({problem}); "
        f"checked for {number:,} instead (--world-size)"
    )
    return number, f"{number:,}", [note]


def run_lines(config: JobConfig, world_size: int, devices: str) -> dict[str, str]:
    """Returns the lines that `overland train` would print first."""
    from overland.apps.check.rehearsal import known_steps
    from overland.apps.console.opening import (
        batch_in_words,
        data_in_words,
        layout_in_words,
        model_in_words,
        precision_in_words,
    )
    from overland.config.derived import resolve_degrees, rows_per_step
    from overland.models.registry import model_config

    degrees = resolve_degrees(config.parallelism, world_size)
    architecture = model_config(config.model)
    rows = rows_per_step(config.training, degrees.dp)
    batch = batch_in_words(config, degrees, architecture, known_steps(config, rows))
    passes = rows // (config.training.local_batch_size * degrees.dp)
    return {
        "model": model_in_words(config, architecture),
        "data": data_in_words(config),
        "batch": batch + (f"; accumulated over {passes:,} passes" if passes > 1 else ""),
        "devices": devices,
        "layout": layout_in_words(degrees),
        "precision": precision_in_words(config),
        **compute_line(config, architecture),
    }


def compute_line(config: JobConfig, architecture: Any) -> dict[str, str]:
    from overland.models.flops import causal_flops_per_token, measure_of

    measure = measure_of(architecture, config.training.seq_len, config.lora, config.model.freeze)
    if measure.flops is None:
        return {}
    words = f"{flop_in_words(measure.flops)} per {measure.unit[:-1]}"
    if measure.unit == "tokens":
        causal = causal_flops_per_token(
            architecture, config.training.seq_len, config.lora, config.model.freeze
        )
        words += f"; {flop_in_words(causal)} without the attention that the causal mask hides"
    return {"compute": words}


def flop_in_words(flop: float) -> str:
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if flop >= size:
            return f"{flop / size:,.1f} {unit}FLOP"
    return f"{flop:,.0f} FLOP"


def left_out_notes(config: JobConfig) -> list[str]:
    """Returns which matrices are left out of what the config asks for."""
    from overland.checks.own_model import left_out
    from overland.models.registry import model_config

    return left_out(model_config(config.model), config)


def order_notes(config: JobConfig, world_size: int) -> list[str]:
    """Refuses a custom model whose blocks do not run in the order that it declares."""
    from overland.config.derived import resolve_degrees
    from overland.models.registry import model_config

    degrees = resolve_degrees(config.parallelism, world_size)
    if degrees.pp == 1:  # before importing torch, which takes seconds
        return []
    from overland.checks.own_model import require_order

    note = require_order(model_config(config.model), config, degrees)
    return [note] if note else []


def fake_step_facts(
    config: JobConfig, world_size: int, is_here: bool
) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns the memory and collectives of rank 0, for scripts and as lines; with a pipeline, of
    whichever of its two ends needs more memory."""
    import warnings

    from overland.world.devices import device_type

    where = (
        device_type(config.training.device) if is_here else "cuda"
    )  # runs worth checking elsewhere use GPUs
    from overland.apps.check.fake_step import NOT_FOR_FAKES, fake_steps
    from overland.apps.console.opening import binary_size

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about fake tensors
        try:
            steps = fake_steps(config, world_size, device_type=where)
        except NOT_FOR_FAKES as error:
            none = f"none: the model reads values, and fake tensors have none ({error})"
            return {"fake_step": none}, {"fake step": none}
    worst = max(steps, key=lambda one: one.total_bytes)
    parts = {
        "parameters": worst.parameter_bytes,
        "gradients": worst.gradient_bytes,
        "optimizer": worst.optimizer_bytes,
        "kept_for_backward": worst.activation_bytes,
    }
    gib = {**parts, "in_all": worst.total_bytes}
    counts = {name: count for name, count in worst.collectives.items() if count}
    facts = {
        "parameters_per_device": worst.parameters,
        **{f"gib_per_device_{name}": round(size / 2**30, 3) for name, size in gib.items()},
        **{f"{name}s_per_pass": count for name, count in counts.items()},
        "fake_step_seconds": round(sum(one.seconds for one in steps), 1),
    }
    split = [f"{MEMORY[name]} {binary_size(size)}" for name, size in parts.items()]
    per = ("GPU" if where == "cuda" else "rank") if is_here else "device"
    lines = {"memory": f"{binary_size(worst.total_bytes)} per {per}: {any_of(split, 'and')}"}
    if counts:
        sent = [number_of(count, name) for name, count in counts.items()]
        lines["communication"] = f"{any_of(sent, 'and')} per pass"
    return facts, lines


def lack_of_memory(config: JobConfig, world_size: int) -> list[str]:
    """Returns a note if `overland train` would refuse to start on this machine. What ranks hold is
    the mean over them, which is known from a whole model on the meta device."""
    import torch

    from overland.apps.check.fake_step import fake_world
    from overland.config.derived import resolve_degrees, resolve_dtype
    from overland.config.schema import ActivationCheckpoint, Compile, Parallelism
    from overland.errors import TrainingError
    from overland.models.registry import model_config
    from overland.parallel.apply import build_parts
    from overland.parallel.mesh import build_mesh
    from overland.training.fit import held_bytes, require_memory
    from overland.world.devices import device_type

    device = torch.device(device_type(config.training.device))
    architecture = model_config(config.model)
    degrees = resolve_degrees(config.parallelism, world_size)
    config = config.model_copy(update={"training": resolve_dtype(config.training, device.type)})
    plain = {
        "parallelism": Parallelism(),
        "compile": Compile(enable=False),
        "activation_checkpoint": ActivationCheckpoint(mode="none"),
    }
    whole = config.model_copy(update=plain)
    with fake_world(0, 1):
        mesh = build_mesh(resolve_degrees(whole.parallelism, 1), "cpu")
        held = held_bytes(build_parts(architecture, mesh, whole), config)
    held *= degrees.dp_replicate / degrees.world_size
    try:
        require_memory(config, architecture, degrees, device, held, world_size)
    except TrainingError as error:
        return [f"`overland train` would refuse to start here: {error}"]
    return []


def describe_run(config: JobConfig, world_size: int) -> dict[str, Any]:
    from overland.apps.check.rehearsal import known_steps
    from overland.apps.console.readme import strategy_in_words
    from overland.config.derived import model_name, resolve_degrees, rows_per_step
    from overland.models.flops import (
        causal_flops_per_token,
        count_parameters,
        measure_of,
        trained_parameters,
    )
    from overland.models.registry import model_config

    training = config.training
    degrees = resolve_degrees(config.parallelism, world_size)
    architecture = model_config(config.model)
    per_pass = training.local_batch_size * degrees.dp
    rows = rows_per_step(training, degrees.dp)
    steps = known_steps(config, rows)
    measure = measure_of(architecture, training.seq_len, config.lora, config.model.freeze)
    unit = measure.unit
    num_parameters = count_parameters(architecture).total
    num_trained = sum(
        map(prod, trained_parameters(architecture, config.lora, config.model.freeze).values())
    )
    flops = {} if measure.flops is None else {f"flops_per_{unit[:-1]}": int(measure.flops)}
    if unit == "tokens":
        causal = causal_flops_per_token(
            architecture, training.seq_len, config.lora, config.model.freeze
        )
        flops["flops_per_token_causal"] = int(causal)
    return {
        "model": model_name(config),
        "parameters": num_parameters,
        **({"trained_parameters": num_trained} if num_trained != num_parameters else {}),
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
