"""`overland eval`: starts the ranks that evaluate a model, and prints tables of perplexities and
scores; `overland submit --eval`: checks and submits that as a job of one node.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from overland.apps.evaluation.main import LIMITS, checked, evaluate_here
from overland.apps.evaluation.main import evaluate as evaluate_in_process
from overland.cli.common import Json, verb, with_options_of
from overland.cluster.job import BatchJob, JobRequest, RunPlace, job_name, plan_job
from overland.cluster.submit import next_files
from overland.errors import ClusterError
from overland.run_folder import CONFIG, LOGS
from overland.words import command
from overland.world import World
from overland.world.devices import num_local_ranks
from overland.world.launchers import export_world, find_world
from overland.world.signals import end_at_signal

if TYPE_CHECKING:
    from overland.cluster.site import NamedSite

STOPPED_WORDS = "stopped; finished parts are saved, and the same command resumes"
Result = dict[str, Any]
PERPLEXITY = {
    "data": "name",
    "documents": "documents",
    "tokens": "tokens",
    "loss": "loss",
    "perplexity": "perplexity",
    "bits/byte": "bits_per_byte",
    "perplexity/byte": "byte_perplexity",
    "perplexity/word": "word_perplexity",
}
TASKS = {
    "task": "alias",
    "documents": "documents",
    "shots": "shots",
    "filter": "filter",
    "metric": "metric",
    "value": "value",
    "±": "stderr",
}
FINE = ("loss", "bits/byte", "perplexity/byte", "value", "±")
CARRIED = ("SCRATCH_ROOT", "HF_DATASETS_CACHE")  # into a job: where the tasks' datasets are
MOST_COLUMNS = 6  # of a curve, not counting the step


@verb
@with_options_of(evaluate_in_process, LIMITS, without=["quiet"])
def evaluate(
    path: Path,
    *,
    ranks: Annotated[int | None, typer.Option(min=1)] = None,
    shard: bool = False,
    tensor_parallel: Annotated[int, typer.Option(min=1)] = 1,
    as_json: Json = False,
    **options: Any,
) -> None:
    """Measure perplexity and task scores.

    With neither --data nor --tasks, a run is evaluated on its own validation data. Results are
    saved next to the checkpoint; run the same command again to resume an evaluation that was
    stopped.

    Args:
        path: A run, a checkpoint of any format, or a Hugging Face folder.
        ranks: Processes to start here; default: NGPU, or one per GPU.
        shard: Shard the parameters over the ranks.
        tensor_parallel: Number of ranks that split each matrix.
        as_json: Print JSON.
    """
    end_at_signal(STOPPED_WORDS)
    given = checked({"path": path, **options})
    from overland.config.arguments import log_ranks, ngpu

    world = find_world()
    if world is not None:
        export_world(world)
    # On a CPU a single one, which uses all cores.
    num_ranks = world.size if world else ranks or ngpu(os.environ) or num_local_ranks(on_cpu=1)
    require_degree(tensor_parallel, num_ranks)
    if world is None and num_ranks > 1:
        printing = log_ranks(os.environ)
        raise typer.Exit(launch(num_ranks, printing, given["path"], given["output"]))

    given |= {"shard": shard, "tensor_parallel": tensor_parallel}
    results = evaluate_here(given, world or World())
    if world is None or world.is_first:
        if as_json:
            print(json.dumps(results, indent=2))
            return
        advises = given["prefix"] == "auto"
        shown = tables(results, is_sweep=given["steps"] is not None, advises=advises)
        print(*shown, sep="\n\n")


def require_degree(tensor_parallel: int, num_ranks: int) -> None:
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


def tables(results: Sequence[Result], is_sweep: bool, advises: bool = True) -> Iterator[str]:
    """Yields a table of perplexities and one of scores; for a sweep, one table of all
    checkpoints. `advises`: whether to advise a prefix, which the user has not chosen yet."""
    if is_sweep:
        yield curve(results)
        return
    if perplexities := [one for one in results if one["kind"] != "tasks"]:
        cells = [[one.get(key) for key in PERPLEXITY.values()] for one in perplexities]
        yield aligned(list(PERPLEXITY), cells)
        yield "\n".join(line for one in perplexities for line in about_perplexity(one, advises))
    for one in results:
        if one["kind"] == "tasks":
            cells = [[score.get(key) for key in TASKS.values()] for score in one["scores"]]
            yield aligned(list(TASKS), cells)
            yield "\n".join(about_tasks(one))


def curve(results: Sequence[Result]) -> str:
    """Returns a table with a row per checkpoint and a column per measure; columns that do not fit
    go into further tables below."""
    by_step: dict[int, dict[str, Any]] = {}
    for one in results:
        by_step.setdefault(one["step"], {}).update(measures(one))
    names = list(dict.fromkeys(name for some in by_step.values() for name in some))
    blocks = []
    for start in range(0, len(names), MOST_COLUMNS):
        some = names[start : start + MOST_COLUMNS]
        cells = [[step, *(found.get(name) for name in some)] for step, found in by_step.items()]
        blocks.append(aligned(["step", *some], cells, fine=some))
    return "\n\n".join(blocks)


def measures(result: Result) -> dict[str, Any]:
    """Returns the numbers of a result, by name."""
    if result["kind"] != "tasks":
        return {f"{result['name']} perplexity": result["perplexity"]}
    several = len({score["filter"] for score in result["scores"]}) > 1
    return {
        f"{score['task']} {score['metric']}" + (f" {score['filter']}" if several else ""): score[
            "value"
        ]
        for score in result["scores"]
    }


def aligned(
    headers: Sequence[str], rows: Sequence[Sequence[Any]], fine: Sequence[str] = FINE
) -> str:
    cells = [list(headers)]
    cells += [
        [_cell(value, name in fine) for name, value in zip(headers, row, strict=True)]
        for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    is_words = [all(isinstance(row[i], str) for row in rows) for i in range(len(headers))]
    return "\n".join(
        "  ".join(
            text.ljust(width) if words else text.rjust(width)
            for text, width, words in zip(line, widths, is_words, strict=True)
        ).rstrip()
        for line in cells
    )


def _cell(value: object, is_fine: bool) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:,.4f}" if is_fine else f"{value:,.2f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def about_perplexity(one: Result, advises: bool) -> Iterator[str]:
    """Yields how the numbers were measured, and what they leave out."""
    settings = one["settings"]
    how = "all documents joined" if settings["joined"] else "each document separately"
    yield (
        f"{one['name']}: {how}, windows of {settings['context']:,} tokens every "
        f"{settings['stride']:,}, in {settings['dtype']}"
    )
    if one["unscored"]:
        may_prefix = advises and settings["prefix"] is None and one.get("takes_prefix", True)
        yield (
            f"  {one['unscored']:,} first tokens are not scored, because nothing precedes them"
            + (" (--prefix eos scores them)" if may_prefix else "")
        )
    if one["skipped_documents"]:
        yield f"  {one['skipped_documents']:,} documents could not be read"
    if one["kept"]:
        yield f"  kept in {one['kept']}"


def about_tasks(one: Result) -> Iterator[str]:
    settings = one["settings"]
    parts = [f"prompts of up to {settings['context']:,} tokens", f"in {settings['dtype']}"]
    if settings["chat_template"]:
        parts.insert(0, "as conversations")
    if settings["limit"] is not None:
        parts.append(f"at most {settings['limit']:,} documents of each")
    yield f"{one['name']}: {', '.join(parts)}, by lm_eval {one['versions']['lm_eval']}"
    if one["cut_prompts"]:
        yield f"  {one['cut_prompts']:,} prompts were longer and were truncated on the left"
    if one["kept"]:
        yield f"  kept in {one['kept']}"


def plan_evaluation(
    words: list[str], site: NamedSite, wanted: JobRequest, dry_run: bool
) -> tuple[BatchJob, dict[Path, str]]:
    """Checks the options of `overland eval`; returns the job and its script."""
    from overland.cluster.script import render_evaluation

    options = check_words(words, wanted)
    if not dry_run:
        check_data(options)
        check_tasks(options)
    place = place_for(options)
    name = wanted.name or f"eval-{job_name(place.run)}"
    job = plan_job(site, replace(wanted, name=name), place)
    require_degree(options["tensor_parallel"], options["ranks"] or job.num_ranks)
    script, _ = next_files(place.run)
    words = [str(place.config) if word == str(options["path"]) else word for word in words]
    return job, {script: render_evaluation(job, words)}


def check_words(words: list[str], wanted: JobRequest) -> dict[str, Any]:
    """Returns the options that `overland eval` would parse from these words."""
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

    run = find_run(options["path"])[0]
    config = None if run is None else load_config(str(run / CONFIG), env={}).config
    sets_of(options["data"], config, DataSource())


def check_tasks(options: dict[str, Any]) -> None:
    """Refuses tasks whose datasets are missing, before the job waits for a node."""
    if not options["tasks"]:
        return
    from overland.apps.evaluation.task_data import task_names, tasks_root
    from overland.apps.evaluation.task_run import needs_of, no_network

    no_network()
    names = task_names(options["tasks"])
    needs = needs_of(names, options["include_path"])
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
        evaluates=True,
    )
