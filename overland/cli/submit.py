"""`overland submit`: checks the config for a chain of Slurm jobs, decides which variables and
packed Python the jobs get, and submits or prints their script.

Also here: `overland env`, which prints the one-time setup script for a cluster, and `overland
supervise`, which job scripts use to start and watch the ranks.
"""

from __future__ import annotations

import json
import os
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

import overland
from overland.cli.common import (
    Json,
    Settings,
    complete_site,
    print_notes,
    split_settings,
    verb,
    with_options_of,
)
from overland.cluster.job import (
    LEAST,
    BatchJob,
    JobRequest,
    RunPlace,
    num_devices_per_node,
    plan_job,
)
from overland.cluster.submit import check_scheduler, finds_overland, how_to_follow, next_files
from overland.errors import ClusterError
from overland.run_folder import STOPPED, RunFolder, remove_old_stop
from overland.words import command, in_columns

if TYPE_CHECKING:
    from overland.cluster.site import NamedSite
    from overland.config.errors import ProblemKind
    from overland.config.load import Loaded
    from overland.config.schema import JobConfig


class Submit(TyperCommand):
    """Makes `--site` without a name list the sites."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        pairs = zip(args, [*args[1:], "--"], strict=False)
        args = ["--sites" if a == "--site" and b.startswith("--") else a for a, b in pairs]
        return super().parse_args(ctx, args)


@verb
@with_options_of(JobRequest, LEAST)
def submit(
    settings: Settings = None,
    site: Annotated[str | None, typer.Option(autocompletion=complete_site)] = None,
    *,
    account: Annotated[str | None, typer.Option(envvar="SBATCH_ACCOUNT")] = None,
    partition: Annotated[str | None, typer.Option(envvar="SBATCH_PARTITION")] = None,
    qos: Annotated[str | None, typer.Option(envvar="SBATCH_QOS")] = None,
    dry_run: bool = False,
    as_json: Json = False,
    sites: bool = False,
    evaluation: Annotated[bool, typer.Option("--eval")] = False,
    **options: Any,
) -> None:
    """Submit a run to Slurm as a chain of jobs.

    The config is checked first and saved with the script in the run folder. Each job resumes where
    the previous one stopped; jobs that are no longer needed end at once. With --eval, other
    options are those of `overland eval`: overland submit CHECKPOINT --eval --tasks hellaswag --site
    NAME

    Args:
        site: Site name or file; with no value, lists sites.
        dry_run: Print the script without submitting it.
        as_json: Print JSON.
        sites: List the sites.
        evaluation: CONFIG is a checkpoint, evaluated in a one-node job.
    """
    from overland.cluster.script import render_job
    from overland.cluster.site import load_site, site_files
    from overland.config.write import to_toml

    if sites or (site is None and not settings):
        print(list_sites())
        return
    if site is None:
        raise ClusterError(
            f"no cluster given; set --site to one of {', '.join(sorted(site_files()))}; "
            "--site NAME --dry-run shows what else is needed"
        )
    wanted = JobRequest(account=account, partition=partition, qos=qos, **options)
    wanted = replace(wanted, env=options["env"] or ())
    if wanted.container and wanted.container.endswith(".sif"):  # others are the runtime's
        way_out = "build it from the definition in containers/"
        wanted = replace(wanted, container=existing("--container", wanted.container, way_out))
    for variable in wanted.env:
        if "=" not in variable and variable not in os.environ:
            raise ClusterError(
                f"--env {variable}: this variable is not set here, so it cannot be passed on"
            )
    chosen = load_site(site)
    wanted = with_packed_python(chosen, wanted)
    if evaluation:
        from overland.cli.eval import plan_evaluation

        finish(*plan_evaluation(settings or [], chosen, wanted, dry_run), dry_run, as_json)
        return
    world_size = wanted.nodes * num_devices_per_node(chosen, wanted)
    loaded = load_for_chain(settings, world_size, wanted, waive_missing=dry_run)
    place = run_place(loaded.config)
    script, frozen = next_files(place.run)
    variables = variables_to_carry(loaded)
    job = plan_job(chosen, wanted, replace(place, config=frozen, variables=variables))
    config = to_toml(loaded.config, full=True, written=loaded.written)
    finish(job, {script: render_job(job), frozen: config}, dry_run, as_json)


def finish(job: BatchJob, texts: dict[Path, str], dry_run: bool, as_json: bool) -> None:
    """Submits a job with these files, of which the first is its script, or prints that."""
    from overland.cluster.script import refuse_secret_values
    from overland.cluster.submit import submit as hand_in

    script, text = next(iter(texts.items()))
    refuse_secret_values("".join(texts.values()))
    if not finds_overland(job):
        checkout = Path(overland.__file__).parent.parent
        print_notes(
            "Python finds Overland here only through PYTHONPATH or the current folder, which jobs "
            'do not have: they would fail with "No module named overland"; run `pip install -e '
            f"{checkout}` first"
        )
    if dry_run:
        shown = json.dumps({**job.to_json(), "script": text}, indent=2) + "\n"
        print(shown if as_json else text, end="")
        return
    check_scheduler(job)
    if not job.place.evaluates and (note := remove_old_stop(job.place.run)):
        print_notes(note)
    ids = hand_in(job, texts)
    if as_json:
        print(json.dumps({**job.to_json(), "script": str(script), "jobs": ids}, indent=2))
        return
    print(f"Submitted {', '.join(ids)} as {job.name}, with {script}. To follow it:\n")
    print(*(f"  {line}" for line in how_to_follow(job, ids)), sep="\n")


def list_sites() -> str:
    from overland.cluster.site import load_site, site_files

    sites = {name: load_site(str(path)) for name, path in sorted(site_files().items())}
    lines = in_columns({name: site.facts.description for name, site in sites.items()})
    words = ("submit", "CONFIG", "--site", "NAME", "--nodes", "N", "--dry-run")
    return f"{lines}\n\n`{command('overland', *words)}` prints a job script."


def load_for_chain(
    settings: list[str] | None, world_size: int, wanted: JobRequest, waive_missing: bool
) -> Loaded:
    """Returns the config, checked for a chain of jobs. Only a dry run allows missing files."""
    from overland.apps.check.rehearsal import require_start
    from overland.checks import load_checked
    from overland.training.main import with_fresh_folder

    source, arguments = split_settings(settings)
    waive: set[ProblemKind] = {"machine", "missing"} if waive_missing else {"machine"}
    loaded, problems = load_checked(source, arguments, world_size=world_size, waive=waive)
    refuse_sharing(loaded.config)
    problems += require_start(loaded)
    print_notes(*loaded.notes_at_start(), *(p for p in problems if p.kind != "machine"))
    loaded = replace(loaded, config=with_fresh_folder(loaded.config))
    checkpoint = loaded.config.checkpoint
    if wanted.sessions > 1 and not checkpoint.enable:
        raise ClusterError(
            "--sessions: a chain of jobs resumes from checkpoints; set checkpoint.enable = true"
        )
    if wanted.sessions > 1 and not can_be_repeated(loaded.config):
        raise ClusterError(
            f'--sessions: every job of the chain would apply checkpoint.resume = "'
            f'{checkpoint.resume}" and checkpoint.skip_optimizer again; submit one job with them, '
            "then the chain without them"
        )
    return loaded


def refuse_sharing(config: JobConfig) -> None:
    """Raises if ranks are to share devices: jobs start one rank per device."""
    from overland.world.devices import refusal_to_share

    if config.comm.ranks_per_device > 1:
        why = (
            "a job starts one rank per GPU, and sharing is for trying a layout on one machine with "
            "`overland train`"
        )
        raise ClusterError(refusal_to_share(config.comm.ranks_per_device, why))


JOBS_OWN = {"HOME", "USER", "LOGNAME", "PATH", "PWD", "SHELL", "TMPDIR"}


def variables_to_carry(loaded: Loaded) -> dict[str, str]:
    """Returns the variables in the config's paths, except those that every job sets itself."""
    for name in loaded.variables:
        if name.startswith(("SLURM_", "SBATCH_")):
            raise ClusterError(
                f"the config uses ${name}, which here belongs to the job that `submit` runs in, "
                "not to the submitted one; write the path without it"
            )
    return {name: value for name, value in loaded.variables.items() if name not in JOBS_OWN}


def can_be_repeated(config: JobConfig) -> bool:
    """Returns whether running the same command again resumes from the newest checkpoint."""
    return config.checkpoint.resume == "auto" and not config.checkpoint.skip_optimizer


def run_place(config: JobConfig) -> RunPlace:
    from overland.cluster.script import session_file

    folder, training = RunFolder(config), config.training
    steps, length = training.steps, f"{training.steps} steps"
    if training.epochs is not None:
        # Epochs become steps only when training starts. If more epochs are asked for than before,
        # at least one more step is due.
        steps = 1 + folder.steps_done() * (folder.kept_epochs() < training.epochs)
        length = f"{training.epochs:g} epochs"
    if folder.steps_done() >= steps and can_be_repeated(config):
        raise ClusterError(
            f"{folder.root} has finished its {length}; raise training.{length.split()[1]}, or set "
            "another job.dump_folder"
        )
    return RunPlace(
        run=folder.root.absolute(),
        workdir=Path.cwd(),
        config=folder.config.absolute(),
        done=folder.done.absolute(),
        stopped=folder.root.absolute() / STOPPED,
        logs=folder.logs.absolute(),
        python=sys.executable,
        steps=steps,
        margin_minutes=config.checkpoint.walltime_margin_minutes,
        repeatable=can_be_repeated(config),
        setup=session_file(),
    )


def existing(option: str, name: str, way_out: str) -> str:
    """Returns the absolute path of a file that an option names."""
    path = Path(name).expanduser().absolute()
    if not path.is_file():
        raise ClusterError(f"{option} {name}: no such file; {way_out}")
    return str(path)


MANY_NODES = 8  # with so many, imports from Lustre took 51 s on Frontier, and 2 s from local disks


def with_packed_python(site: NamedSite, wanted: JobRequest) -> JobRequest:
    """Returns the request with the packed environment that is asked for, or the one that the site's
    setup script made, for a job of several nodes with disks of their own; reports what is used."""
    from overland.cluster.script import packed_by_setup

    if wanted.packed_env == "none":
        return replace(wanted, packed_env=None)
    if wanted.packed_env is not None:
        way_out = f"`{command('overland', 'env', 'SITE')}` shows how to make one"
        return replace(wanted, packed_env=existing("--packed-env", wanted.packed_env, way_out))
    num_nodes = wanted.nodes + wanted.spares
    if num_nodes == 1 or wanted.container or not site.facts.disk.node_local:
        return wanted
    packed = packed_by_setup()
    if packed is not None:
        words = f"Python is copied to each node's disk from {packed} (--packed-env)"
    elif num_nodes >= MANY_NODES:
        setup = f"{command('overland', 'env', site.name)} > setup.sh && bash setup.sh"
        how = (
            f"`{setup}` makes an environment that is packed and copied to each node's disk, or "
            "packs it again after a change"
            if site.facts.setup.python == "conda"
            else "--packed-env copies one that conda-pack has packed to each node's disk"
        )
        words = (
            f"{num_nodes} nodes import Python from {sys.prefix}, which is slow on a shared file "
            f"system: {how}"
        )
    else:
        return wanted
    print_notes(words)
    return replace(wanted, packed_env=str(packed) if packed else None)


@verb
def env(
    site: Annotated[
        str | None, typer.Argument(show_default=False, autocompletion=complete_site)
    ] = None,
    job: bool = False,
) -> None:
    """Print the one-time setup script for a cluster. It is commented.

    With --job, print the lines for a job script of your own. They install nothing:
    eval "$(overland env SITE --job)"

    Args:
        site: Site name or file.
        job: What a job needs instead: modules, network and caches.
    """
    from overland.cluster.script import render_session, render_setup
    from overland.cluster.site import load_site

    if site is None:
        print(list_sites())
        return
    print((render_session if job else render_setup)(load_site(site)), end="")


@verb
def supervise(
    config: Path,
    launch: list[str],
    nodes: Annotated[int, typer.Option(min=1)],
    tasks_per_node: Annotated[int, typer.Option(min=1)],
    steps: int | None = None,
    preflight: bool = True,
    requeue: bool = False,
) -> None:
    """Start, watch and restart the ranks of a job; used by the scripts of `overland submit`.

    Args:
        config: Config as saved by `overland submit`.
        launch: srun … python -P -m overland
        nodes: Nodes to train on; the others are spares.
        steps: Steps after which the run is done; default: from the config.
        preflight: Test all nodes first.
        requeue: Requeue the job when good nodes run out.
    """
    from overland.cluster.supervise.policy import MAX_FAILED_STARTS
    from overland.cluster.supervise.supervised import Supervised
    from overland.cluster.supervise.supervisor import supervise

    with config.open("rb") as file:
        settings = tomllib.load(file)
    job = Supervised(
        run=Path(settings["job"]["dump_folder"]).expanduser(),
        config=config,
        steps=steps or settings["training"]["steps"],
        launch=launch,
        num_nodes=nodes,
        tasks_per_node=tasks_per_node,
        hang_seconds=settings["health"]["hang_seconds"],
        max_failed_starts=settings["health"].get("max_failed_starts", MAX_FAILED_STARTS),
        margin_seconds=settings["checkpoint"]["walltime_margin_minutes"] * 60,
        checkpoint_folder=settings["checkpoint"]["folder"],
        preflight=preflight,
        requeue=requeue,
    )
    raise typer.Exit(supervise(job))
