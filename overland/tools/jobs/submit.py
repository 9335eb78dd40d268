"""A job's files, written and handed to the scheduler."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from overland.errors import ClusterError
from overland.run_folder import SUBMITTED
from overland.slurm import ask
from overland.tools.jobs.job import BatchJob
from overland.words import command


def next_files(run: Path) -> tuple[Path, Path]:
    """(script, config) of a submission that is the run's next: those of links that still wait are
    never changed under them."""
    folder = run / SUBMITTED
    used = [int(path.stem) for path in folder.glob("*.sh") if path.stem.isdecimal()]
    number = max(used, default=0) + 1
    return folder / f"{number}.sh", folder / f"{number}.toml"


def write_private(path: Path, text: str) -> None:
    """Writes a file that only this user can read, from the first byte on."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(handle, "w", encoding="utf-8") as file:
        os.fchmod(handle, 0o600)  # it may have been there, with another mode
        file.write(text)


def check_scheduler(job: BatchJob) -> None:
    """Refuses, before anything is written, where nothing can be submitted."""
    require_sbatch(job)
    if job.site.facts.scheduler == "slurm" and not job.wanted.here:
        check_folder_is_free(job)


def require_sbatch(job: BatchJob) -> None:
    if job.wanted.here:
        require_job(job)
        return
    if job.site.facts.scheduler == "slurm" and shutil.which("sbatch") is None:
        raise ClusterError(
            f"there is no sbatch here: submit from a login node of {job.site.name}, or look at the "
            "script with --dry-run"
        )


def require_job(job: BatchJob, env: Mapping[str, str] = os.environ) -> None:
    """`--here` is for a batch script of the user's own."""
    if job.site.facts.scheduler != "slurm" or "SLURM_JOB_ID" not in env:
        raise ClusterError("--here trains in the Slurm job that calls it, and this is none")
    wanted, there = job.wanted.nodes + job.wanted.spares, int(env.get("SLURM_JOB_NUM_NODES", 1))
    if wanted > there:
        raise ClusterError(f"--nodes, --spares: this job has {there} nodes, and {wanted} are asked")
    if job.wanted.sessions > 1:
        raise ClusterError("--here is one session; leave it out to submit a chain")


def check_folder_is_free(job: BatchJob) -> None:
    """Jobs of one name wait for each other, where a site lets them. Others would meet in the run
    folder: the second would wait for nodes only to be turned away there."""
    for name in names_before(job.place.run) - ({job.name} if job.chained else set()):
        if ids := ask("squeue", "--me", "--noheader", f"--name={name}", "--format=%i").split():
            after = f"with --name {name} this one goes on after it; " if job.chained else ""
            raise ClusterError(
                f"{job.place.run} is the folder of job {ids[0]}, {name}, which is not over: {after}"
                f"`scancel --me --name={name}` ends it"
            )


def names_before(run: Path) -> set[str]:
    """Returns the names of the jobs that were submitted for a run."""
    names = set()
    for script in (run / SUBMITTED).glob("*.sh"):
        with contextlib.suppress(OSError):  # another user's
            found = re.search(r"^#SBATCH --job-name=(\S+)", script.read_text(), re.MULTILINE)
            names |= {found[1]} if found else set()
    return names


def submit(job: BatchJob, script: Path) -> list[str]:
    """Job ids, one per session; on a machine without a scheduler, that of the process. `--here`
    becomes the script, and does not return."""
    job.place.logs.mkdir(parents=True, exist_ok=True)
    job.place.stopped.unlink(missing_ok=True)  # whoever submits it anew has seen why
    if job.wanted.here:
        os.execvp("bash", ["bash", "-l", str(script)])
    if job.site.facts.scheduler == "none":
        return [_start_here(job, script)]
    ids: list[str] = []
    for _ in range(job.wanted.sessions):
        try:
            ids.append(_sbatch(script))
        except ClusterError as error:  # a limit on jobs per user, say: what is queued stays so
            if not ids:
                script.unlink(missing_ok=True)
                job.place.config.unlink(missing_ok=True)
            queued = f"; queued before it: {', '.join(ids)}" if ids else ""
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
    """SBATCH_TIMELIMIT and its like would overrule the script, and SLURM_* of a job that we may be
    in would come along; only where Slurm is and who asks must stay."""
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
    """Commands, with what they do."""
    run, logs = shlex.quote(str(job.place.run)), shlex.quote(str(job.place.logs))
    if job.site.facts.scheduler == "none":
        return [
            f"{command('overland', 'watch', job.place.run)}    # all of it, live",
            f"tail -f {logs}/job.log    # what it says",
            f"touch {run}/STOP    # save and stop",
        ]
    return [
        f"{command('overland', 'watch', job.place.run)}    # all of it, live",
        f"squeue --me --name={job.name}    # where the jobs stand",
        f"tail -f {logs}/job-{ids[0]}.log    # what the first one says",
        f"touch {run}/STOP    # save and stop; the next link goes on",
        f"scancel --me --name={job.name}    # give up the whole chain",
    ]
