"""`overland submit --eval`: runs an evaluation as a one-node job."""

from __future__ import annotations

import json
import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

CARRIED = ("SCRATCH_ROOT", "HF_DATASETS_CACHE")  # where the tasks' datasets are

if TYPE_CHECKING:
    from overland.cluster.job import BatchJob, JobRequest, RunPlace
    from overland.cluster.site import NamedSite


def submit_evaluation(
    words: list[str], site: NamedSite, wanted: JobRequest, dry_run: bool, as_json: bool
) -> None:
    """Checks the options of `overland eval`, writes the script and submits it."""
    from overland.cli.eval import require_degree
    from overland.cluster.job import plan_job
    from overland.cluster.script import refuse_secret_values, render_evaluation
    from overland.cluster.submit import next_files, require_sbatch, write_private
    from overland.cluster.submit import submit as hand_in

    options = check_words(words, wanted)
    if not dry_run:
        check_data(options)
        check_tasks(options)
    place = place_for(options)
    job = plan_job(site, replace(wanted, name=wanted.name or name_of(place.run)), place)
    require_degree(options["tensor_parallel"], options["ranks"] or job.num_ranks)
    script, _ = next_files(place.run)
    text = render_evaluation(job, absolute(words, options["path"]))
    refuse_secret_values(text)
    if dry_run:
        shown = json.dumps({**facts(job), "script": text}, indent=2) + "\n"
        print(shown if as_json else text, end="")
        return
    require_sbatch(job)
    write_private(script, text)
    ids = hand_in(job, script)
    if as_json:
        print(json.dumps({**facts(job), "script": str(script), "jobs": ids}, indent=2))
        return
    print(f"Submitted {', '.join(ids)} as {job.name}, with {script}. To follow it:\n")
    print(*(f"  {line}" for line in how_to_follow(job, ids)), sep="\n")


def check_words(words: list[str], wanted: JobRequest) -> dict[str, Any]:
    """Returns the options that `overland eval` would parse from these words."""
    from overland.apps.evaluation.main import checked
    from overland.cli.eval import evaluate
    from overland.errors import ClusterError

    if wanted.nodes + wanted.spares > 1:
        raise ClusterError("--nodes, --spares: an evaluation runs on one node; leave these out")
    app = typer.Typer(add_completion=False)
    app.command()(evaluate)
    verb = typer.main.get_command(app)
    given = verb.make_context("overland eval", list(words)).params
    options = checked(given)
    if not options["path"].exists():
        raise ClusterError(f"--eval: {options['path']} does not exist")
    return options


def check_data(options: dict[str, Any]) -> None:
    """Refuses data that does not exist."""
    from overland.apps.evaluation.documents import sets_of
    from overland.apps.evaluation.model import find_run
    from overland.config.load import load_config
    from overland.config.schema import DataSource
    from overland.run_folder import CONFIG

    run = find_run(options["path"])[0]
    config = None if run is None else load_config(str(run / CONFIG), env={}).config
    sets_of(options["data"], config, DataSource())


def check_tasks(options: dict[str, Any]) -> None:
    """Refuses tasks whose datasets are missing, before the job waits for a node."""
    if not options["tasks"]:
        return
    from overland.apps.evaluation.task_data import needs_of, task_names, tasks_root
    from overland.apps.evaluation.task_index import matching, open_manager
    from overland.apps.evaluation.task_run import no_network
    from overland.errors import ClusterError
    from overland.words import command

    no_network()
    names = task_names(options["tasks"])
    manager = open_manager(names, options["include_path"])
    needs = needs_of(manager, matching(manager, names))
    root = options["datasets"] or tasks_root()
    missing = [tasks for one, tasks in needs.datasets.items() if not one.is_here(root)]
    if missing:
        some = [task for tasks in missing for task in tasks][:5]
        raise ClusterError(
            f"{len(missing)} of {len(needs.datasets)} datasets are missing from {root}; first run "
            f"`{command('overland', 'fetch', 'tasks', *options['tasks'])}` (needed by "
            f"{', '.join(some)})"
        )


def place_for(options: dict[str, Any]) -> RunPlace:
    """Returns where scripts and logs go: the run folder, or next to the weights."""
    from overland.apps.evaluation.model import find_run
    from overland.apps.evaluation.results import place_of
    from overland.cluster.job import RunPlace
    from overland.cluster.script import session_file

    path = options["path"].absolute()
    folder = (find_run(path)[0] or place_of(path, None, options["output"])).absolute()
    return RunPlace(
        run=folder,
        workdir=Path.cwd(),
        config=path,
        done=folder / "evaluated",
        stopped=folder / "evaluation-stopped",
        logs=folder / "logs",
        python=sys.executable,
        steps=1,
        margin_minutes=0,
        variables={name: os.environ[name] for name in CARRIED if name in os.environ},
        setup=session_file(),
    )


def name_of(folder: Path) -> str:
    from overland.cluster.job import job_name

    return f"eval-{job_name(folder)}"


def absolute(words: list[str], path: Path) -> list[str]:
    """Returns the same words with the checkpoint as an absolute path."""
    where = str(path.expanduser().absolute())
    return [where if word == str(path) else word for word in words]


def facts(job: BatchJob) -> dict[str, object]:
    left_out = ("spares", "config", "run")
    found = {name: value for name, value in job.to_json().items() if name not in left_out}
    return {**found, "checkpoint": str(job.place.config)}


def how_to_follow(job: BatchJob, ids: list[str]) -> list[str]:
    from overland.cluster.submit import with_comments

    logs = shlex.quote(str(job.place.logs))
    if job.site.facts.scheduler == "none":
        return with_comments({f"tail -f {logs}/job.log": "its log"})
    return with_comments(
        {
            f"squeue --me --name={job.name}": "its state",
            f"tail -f {logs}/job-{ids[0]}.log": "its log, with the table at the end",
            f"scancel --me --name={job.name}": "cancel it; submit again to resume",
        }
    )
