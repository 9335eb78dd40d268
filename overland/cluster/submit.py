"""Submits a job's script, once per session of the chain, or runs it here without a scheduler;
refuses a run folder that another job uses.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from overland.cluster.job import BatchJob
from overland.errors import ClusterError
from overland.processes import PYTHON
from overland.run_folder import SUBMITTED
from overland.slurm import ask
from overland.words import command


def next_files(run: Path) -> tuple[Path, Path]:
    """Returns the (script, config) paths of the run's next submission. Files of jobs that are still
    queued are never overwritten."""
    folder = run / SUBMITTED
    used = [int(path.stem) for path in folder.glob("*.sh") if path.stem.isdecimal()]
    number = max(used, default=0) + 1
    return folder / f"{number}.sh", folder / f"{number}.toml"


def write_private(path: Path, text: str) -> None:
    """Writes a file that only this user can ever read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(handle, "w", encoding="utf-8") as file:
        os.fchmod(handle, 0o600)  # the file may already exist with another mode
        file.write(text)


def finds_overland(job: BatchJob) -> bool:
    """Returns whether the Python of the job can import Overland. `-P` leaves out the current
    folder, and a submitted job has no PYTHONPATH unless it is passed on."""
    wanted, facts = job.wanted, job.site.facts
    if wanted.container or wanted.packed_env:
        return True
    keeps = wanted.here or facts.scheduler == "none"
    keeps = keeps or "PYTHONPATH" in {*wanted.env, *facts.environment, *job.place.variables}
    env = {name: value for name, value in os.environ.items() if keeps or name != "PYTHONPATH"}
    tried = subprocess.run([*PYTHON, "-c", "import overland"], env=env, capture_output=True)
    return tried.returncode == 0


def check_scheduler(job: BatchJob) -> None:
    """Raises an error if the job cannot be submitted from here, before anything is written."""
    if job.wanted.here:
        require_job(job)
    elif job.site.facts.scheduler == "slurm":
        if shutil.which("sbatch") is None:
            raise ClusterError(
                f"sbatch was not found: submit from a login node of {job.site.name}, or print the "
                "script with --dry-run"
            )
        if not job.place.evaluates:
            check_folder_is_free(job)


def require_job(job: BatchJob, env: Mapping[str, str] = os.environ) -> None:
    """Checks that `--here` is used inside a Slurm job that is large enough."""
    if job.site.facts.scheduler != "slurm" or "SLURM_JOB_ID" not in env:
        raise ClusterError(
            "--here trains inside the current Slurm job, but this is not a Slurm job"
        )
    wanted, there = job.wanted.nodes + job.wanted.spares, int(env.get("SLURM_JOB_NUM_NODES", 1))
    if wanted > there:
        raise ClusterError(
            f"--nodes, --spares: {wanted} nodes are requested, but this job has {there}"
        )
    if job.wanted.sessions > 1:
        raise ClusterError("--here runs a single session; omit it to submit a chain of jobs")


def check_folder_is_free(job: BatchJob) -> None:
    """Raises an error if another job is queued or running in the run folder. Jobs with the same
    name wait for each other where the site allows it; a job with another name would wait for nodes
    only to find the folder in use."""
    for name in names_before(job.place.run) - ({job.name} if job.chained else set()):
        if ids := ask("squeue", "--me", "--noheader", f"--name={name}", "--format=%i").split():
            after = f"use --name {name} to continue after it, or " if job.chained else ""
            raise ClusterError(
                f"{job.place.run} is in use by job {ids[0]} ({name}), which has not ended: {after}"
                f"cancel it with `scancel --me --name={name}`"
            )


def names_before(run: Path) -> set[str]:
    """Returns the names of the jobs that were submitted for a run."""
    names = set()
    for script in (run / SUBMITTED).glob("*.sh"):
        with contextlib.suppress(OSError):  # another user's script
            found = re.search(r"^#SBATCH --job-name=(\S+)", script.read_text(), re.MULTILINE)
            names |= {found[1]} if found else set()
    return names


def submit(job: BatchJob, texts: Mapping[Path, str]) -> list[str]:
    """Writes these files, of which the first is the script, and submits it. Returns the job ids,
    one per session, or the process id on a machine without a scheduler. With `--here` this process
    becomes the script and does not return."""
    for path, text in texts.items():
        write_private(path, text)
    script = next(iter(texts))
    job.place.logs.mkdir(parents=True, exist_ok=True)
    job.place.stopped.unlink(missing_ok=True)  # whoever resubmits has seen why it stopped
    if job.wanted.here:
        os.execvp("bash", ["bash", "-l", str(script)])
    if job.site.facts.scheduler == "none":
        return [_start_here(job, script)]
    ids: list[str] = []
    for _ in range(job.wanted.sessions):
        try:
            ids.append(_sbatch(script))
        except ClusterError as error:  # such as a limit on jobs per user; queued jobs stay queued
            for path in () if ids else texts:
                path.unlink(missing_ok=True)
            queued = f"; already queued: {', '.join(ids)}" if ids else ""
            raise ClusterError(f"{error}{queued}") from None
    return ids


def _sbatch(script: Path) -> str:
    command = ["sbatch", "--parsable", str(script)]
    env = without_slurms_own(os.environ)
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    found = re.match(r"\d+", done.stdout.strip())  # "ID" or "ID;cluster"
    if done.returncode or found is None:
        words = " ".join((done.stderr or done.stdout).split()) or f"exit code {done.returncode}"
        raise ClusterError(f"sbatch {script}: {words}")
    return found.group()


def without_slurms_own(env: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment for sbatch. Variables like SBATCH_TIMELIMIT would override the
    script, and the SLURM_* variables of a surrounding job would leak into the new one, so only
    those that locate the cluster and authenticate the user are kept."""
    stays = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT", "SBATCH_CLUSTERS", "SBATCH_RESERVATION")
    return {
        name: value
        for name, value in env.items()
        if name in stays or not name.startswith(("SLURM_", "SBATCH_"))
    }


def _start_here(job: BatchJob, script: Path) -> str:
    with (job.place.logs / "job.log").open("ab") as log:
        process = subprocess.Popen(
            ["bash", str(script)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # it outlives the terminal
        )
    return str(process.pid)


def how_to_follow(job: BatchJob, ids: list[str]) -> list[str]:
    """Returns commands for following the job, each with a comment that says what it does."""
    run, logs = shlex.quote(str(job.place.run)), shlex.quote(str(job.place.logs))
    state, cancel = f"squeue --me --name={job.name}", f"scancel --me --name={job.name}"
    has_scheduler = job.site.facts.scheduler != "none"
    log = f"tail -f {logs}/" + (f"job-{ids[0]}.log" if has_scheduler else "job.log")
    lines = {command("overland", "watch", job.place.run): "live status"}
    if job.place.evaluates and has_scheduler:
        again = "cancel it; submit again to resume"
        lines = {state: "its state", log: "its log, with the table at the end", cancel: again}
    elif job.place.evaluates:
        lines = {log: "its log"}
    elif has_scheduler:
        lines |= {
            state: "the state of each job",
            log: "the log of the first job",
            f"touch {run}/STOP": "save and stop; the next job in the chain resumes",
            cancel: "save, and cancel the whole chain",
        }
    else:
        lines |= {log: "the log", f"touch {run}/STOP": "save and stop"}
    width = max(map(len, lines))
    return [f"{line:{width}}  # {what}" for line, what in lines.items()]
