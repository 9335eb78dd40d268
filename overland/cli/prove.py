"""`overland prove`: chooses the layouts to prove, refuses those that do not fit the devices, and
prints the verdicts; the proofs are in `apps/proofs/`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from contextlib import closing
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from overland.apps.progress import progress_bar
from overland.cli.common import print_notes, verb
from overland.words import any_of
from overland.world.devices import mps_note

if TYPE_CHECKING:
    from overland.apps.proofs.evidence import Evidence
    from overland.apps.proofs.layouts import ProofLayout
    from overland.config.errors import ConfigError

Device = Annotated[
    str, typer.Option(help="cpu, or cuda (over NCCL, with several ranks per GPU if needed).")
]

RanksPerDevice = Annotated[
    int | None,
    typer.Option(
        help="Maximum ranks that may share a GPU; default: as many as a layout needs.",
        min=1, show_default=False,
    ),
]  # fmt: skip

Table = Annotated[
    Path | None,
    typer.Option(help="Also write results to a Markdown table, and skip those already in it."),
]

ABOUT = "Verify that layouts, resumes, data and checkpoints are exact."

app = typer.Typer(help=ABOUT, no_args_is_help=True, rich_markup_mode=None)


@app.command()
@verb
def layout(
    config: Annotated[
        str | None, typer.Argument(help="Config to take model, recomputation and compile from.")
    ] = None,
    layouts: Annotated[
        str, typer.Option(help="Names such as 'pp2xtp2 cp2+documents', or short, all or five.")
    ] = "short",
    dtype: Annotated[str, typer.Option(help="float64, float32 or bfloat16.")] = "float64",
    steps: Annotated[int, typer.Option(help="Steps to compare.", min=1)] = 20,
    device: Device = "cpu",
    ranks_per_device: RanksPerDevice = None,
    table: Table = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per layout.")] = False,
) -> None:
    """Compare the losses of parallel layouts with one process. Trains a tiny model, or your own,
    under each layout on local ranks."""
    from overland.apps.proofs.evidence import Evidence, with_settings
    from overland.apps.proofs.job import STEPS, digest, left_out, settings_of
    from overland.apps.proofs.layout import HEAD, NORM_TOLERANCES, TOLERANCES, prove_layouts
    from overland.apps.proofs.layouts import FIVE_AXES, LAYOUTS, OWN, SHORT
    from overland.apps.proofs.pool import RankPool

    if dtype not in TOLERANCES:
        raise wrong_option(f"expected {any_of(list(TOLERANCES))}", "--dtype", dtype)
    chosen = parsed(layouts, {"short": SHORT, "all": LAYOUTS, "five": FIVE_AXES})
    settings = settings_of(config)
    if missing := left_out(config):
        print_notes(f"the proof leaves out {', '.join(missing)} of this config")
    is_own = settings is not None and "name" in settings["model"]
    if is_own and layouts == "short":
        chosen = parsed(OWN, {})
    check_device(device, chosen, ranks_per_device)
    others = [f"{config} ({digest(settings)})"] if settings is not None else []
    others += [f"--steps {steps}"] if steps != STEPS else []
    others += [f"--device {device}"] if device != "cpu" else []
    evidence = Evidence(table, with_settings(HEAD, others), keys=(0, 2))
    todo = [one for one in chosen if not evidence.holds(one.name, dtype)]
    with closing(RankPool(device)) as pool:
        head = f"{'layout':<44}{'ranks':>5}  {'loss':>8}  {'norm':>8}  {'held out':>8}  verdict"
        verdicts = prove_layouts(todo, pool, dtype, steps, settings)
        found = shown(verdicts, evidence, as_json, head)
    equal, refused = sum(one.is_equal for one in found), sum(one.is_refused for one in found)
    wrong = len(found) - equal - refused
    if not as_json and not todo:
        print(f"All {len(chosen)} are in {table} already.")
    elif not as_json:
        limits = f"{TOLERANCES[dtype]:g} (losses) and {NORM_TOLERANCES[dtype]:g} (gradient norm)"
        if device == "cuda":
            limits = "a few times what one rank differs from itself row by row"
        end = f" {refused} cannot be trained here, for the reasons shown." if refused else ""
        print(f"\n{equal} of {len(todo)} layouts equal one process within {limits}.{end}")
    if wrong:
        print(
            f"{wrong} of {len(todo)} layouts differ from one process, or failed.", file=sys.stderr
        )
    if wrong or (refused and not is_own):
        raise typer.Exit(1)


@app.command()
@verb
def resume(
    layouts: Annotated[
        str, typer.Option(help="Names of layouts, tried in all ordered pairs; or dozen.")
    ] = "shard2+tied tp2+tied pp2+tied",
    device: Device = "cpu",
    ranks_per_device: RanksPerDevice = None,
    table: Table = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per pair.")] = False,
) -> None:
    """Compare runs resumed under other layouts with an unbroken run. Saves a tiny run under each
    layout, and resumes it under each."""
    from overland.apps.proofs.evidence import Evidence, with_settings
    from overland.apps.proofs.pool import RankPool
    from overland.apps.proofs.resume import DOZEN, HEAD, TOLERANCE, prove_resumes

    chosen = parsed(layouts, {"dozen": DOZEN})
    if len({layout.kinds for layout in chosen}) > 1:
        message = "all layouts of one proof must have the same suffix after +"
        raise wrong_option(message, "--layouts", layouts)
    check_device(device, chosen, ranks_per_device)
    others = [f"--device {device}"] if device != "cpu" else []
    evidence = Evidence(table, with_settings(HEAD, others), keys=(0, 1))
    pairs = product(chosen, repeat=2)
    todo = [(a, b) for a, b in pairs if not evidence.holds(a.name, b.name)]
    with closing(RankPool(device)) as pool:
        head = f"{'saved by':<28}{'resumed by':<28}{'loss':>8}  {'norm':>8}  verdict"
        found = shown(prove_resumes(todo, pool), evidence, as_json, head)
    wrong = sum(not one.is_equal for one in found)
    if not as_json and not todo:
        print(f"All {len(chosen) ** 2} are in {table} already.")
    elif not as_json:
        print(f"\n{len(todo) - wrong} of {len(todo)} equal an unbroken run within {TOLERANCE:g}.")
    if wrong:
        print(f"{wrong} of {len(todo)} differ from an unbroken run, or failed.", file=sys.stderr)
        raise typer.Exit(1)


@app.command()
@verb
def checkpoint(
    path: Annotated[
        Path, typer.Argument(help="A checkpoint, or a run folder for all of its checkpoints.")
    ],
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object per checkpoint.")
    ] = False,
) -> None:
    """Verify every byte of a checkpoint against its checksums."""
    from overland.apps.proofs.checkpoint import find_checkpoints, total_bytes, verify

    damaged = 0
    for one in find_checkpoints(path.expanduser()):
        size = total_bytes(one)
        with progress_bar(one.name, "bytes", size) as bar:
            problems = verify(one, bar.advance)
        damaged += bool(problems)
        if as_json:
            print(json.dumps({"checkpoint": str(one), "bytes": size, "problems": problems}))
            continue
        print(f"{one}: " + ("damaged" if problems else f"intact, {size:,} bytes verified"))
        for problem in problems:
            print(f"  {problem}")
    if damaged:
        raise typer.Exit(1)


@app.command()
@verb
def data(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    first: Annotated[int | None, typer.Option("--from", help="First step.", min=1)] = None,
    last: Annotated[int | None, typer.Option("--to", help="Last step.", min=1)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Compare the data that a run consumed with its plan."""
    from overland.apps.proofs.data import prove_data

    with progress_bar("steps") as progress:
        verdict = prove_data(run.expanduser(), first, last, progress)
    if as_json:
        print(json.dumps(verdict.to_json()))
    else:
        print("\n".join(verdict.page()))
    if not verdict.holds:
        raise typer.Exit(1)


def shown(verdicts: Iterable[Any], evidence: Evidence, as_json: bool, head: str) -> list[Any]:
    """Prints each verdict when it is known, adds it to the table of evidence, and returns all."""
    if not as_json:
        print(head)
    found = []
    for verdict in verdicts:
        found.append(verdict)
        evidence.add(*verdict.cells())
        print(json.dumps(verdict.to_json()) if as_json else verdict.line(), flush=True)
    return found


def parsed(layouts: str, named: Mapping[str, list[ProofLayout]]) -> list[ProofLayout]:
    """Returns the layouts of a group, or those with these names."""
    from overland.apps.proofs.layouts import parse_all

    try:
        found = named[layouts] if layouts in named else parse_all(layouts)
    except ValueError as error:
        raise wrong_option(str(error), "--layouts") from None
    if not found:
        raise wrong_option(f"expected names of layouts, or {any_of(list(named))}", "--layouts")
    return found


def wrong_option(message: str, option: str, value: str | None = None) -> ConfigError:
    from overland.config.errors import NO_VALUE, ConfigError, Problem

    given = NO_VALUE if value is None else value
    return ConfigError([Problem(message, "command line", option, given)])


def check_device(device: str, layouts: list[ProofLayout], ranks_per_device: int | None) -> None:
    """Refuses a device that is not here, and layouts that need more ranks than may share the GPUs;
    says if ranks share any."""
    if device not in ("cpu", "cuda"):
        raise wrong_option("expected cpu or cuda", "--device", device)
    if device == "cpu":
        if ranks_per_device is not None:
            message = "only GPUs are shared; add --device cuda"
            raise wrong_option(message, "--ranks-per-device", str(ranks_per_device))
        return
    import torch

    gpus = torch.cuda.device_count()
    if not gpus:
        message = "this machine has no GPU visible; leave it out to prove on CPU ranks"
        raise wrong_option(message, "--device", device)
    largest = max(layouts, key=lambda layout: layout.num_ranks)
    each = -(-largest.num_ranks // gpus)
    if ranks_per_device is not None and each > ranks_per_device:
        message = f"{largest.name} has {largest.num_ranks} ranks, {each} for each GPU here"
        raise wrong_option(message, "--ranks-per-device", str(ranks_per_device))
    if each > 1:
        note = mps_note()
        print_notes(f"up to {each} ranks share a GPU" + (f"; {note}" if note else ""))
