"""`overland check`: prints a run's description and problems before it starts, and decides the exit
code; the checks are in `checks/` and `apps/check/`.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from overland.cli.common import Json, Settings, print_notes, split_settings, verb
from overland.words import in_columns, number_of

if TYPE_CHECKING:
    from overland.config.load import Loaded

SLOW_SECONDS = 3.0


@verb
def check(
    settings: Settings = None,
    world_size: Annotated[int | None, typer.Option(min=1, show_default=False)] = None,
    step: bool = True,
    as_json: Json = False,
) -> None:
    """Describe a run and report every problem, without training. Checks keys, parallel degrees,
    batch and files, and takes one fake step.

    Args:
        world_size: Number of devices to check for; by default NGPU, or else as many as `overland
            train` would use on this machine.
        step: Also take one step on fake tensors, which use no memory.
        as_json: Print JSON.
    """
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
    if a path does not exist and no command is known to provide it. `is_here`: whether the run would
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
        shared = loaded.config.comm.ranks_per_device
        devices = f"{world_size:,}"
        devices += f" ranks, up to {shared} on each GPU" if shared > 1 else ""
    has_model = not any(problem.key in ("model.config", "model.from") for problem in missing)
    facts: dict[str, Any] = {}
    lines: dict[str, str] = {}
    if has_model:
        from overland.apps.check.planned import LARGEST_FAKE_WORLD, PlannedRun

        planned = PlannedRun(loaded.config, world_size)
        if as_json:
            facts = planned.to_json()
        else:
            lines = planned.lines(devices)
        if step:
            notes += planned.notes()
        if step and world_size > LARGEST_FAKE_WORLD:
            limit = f"{LARGEST_FAKE_WORLD:,} devices at most"
            notes.append(f"skipped the fake step, which supports {limit}")
        elif step:
            doing = f"taking a fake step of one rank of {world_size:,} (--no-step skips it)"
            with said_if_slow(doing):
                step_facts, step_lines = planned.fake_step(is_here)
            facts |= step_facts
            lines |= step_lines
        if is_here:
            more = planned.lack_of_memory()
            notes += more
            refused_here += more
        lines |= planned.run_line()
    code = 0 if all(problem.can_be_fetched for problem in missing) else 2
    if as_json:
        facts |= {"notes": notes, "to_fetch": [*map(str, missing)], "refused_here": refused_here}
        print(json.dumps(facts, indent=2))
        return code
    print_notes(*notes)
    if lines:
        print(in_columns(lines), end="\n\n")
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
    from overland.world import World
    from overland.world.devices import devices_in_words, num_local_ranks

    number, problem = devices_for(loaded)
    shared = loaded.config.comm.ranks_per_device
    if problem is None:
        how = "as `overland train` would use here; --world-size checks another number"
        world = World(0, number, 0, number)
        words = devices_in_words(world, loaded.config.training.device, shared)
        return number, f"{words} ({how})", []
    here = number_of(num_local_ranks(shared), "device" if shared == 1 else "rank")
    note = (
        f"`overland train` would refuse this config on the {here} of this machine ({problem}); "
        f"checked for {number:,} instead (--world-size)"
    )
    return number, f"{number:,}", [note]
