"""Ensures that only one run at a time trains in a run folder.

`owner.json` names the process of rank 0, which renews the file while it lives. File locks are not
used, since Lustre and NFS may have none. A hard link can be created only once, so of two runs that
start at the same instant, exactly one gets the folder. A dead owner has one heir, again by a hard
link (`.owner.ID.heir`): of two runs that find the same dead owner, one takes over, and the other
finds that one alive.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overland.errors import TakenError
from overland.files import naming, publish
from overland.processes import is_running, this_process
from overland.run_folder import OWNER
from overland.slurm import squeue
from overland.world.signals import leave

RENEW_SECONDS = 15.0
STALE_SECONDS = 300.0  # for an owner unknown to both this machine and Slurm
LEAVING_SECONDS = 60.0  # a job that Slurm is ending missed four renewals: its rank 0 is gone
PATIENCE_SECONDS = 120.0  # for an owner that is exiting; the other ranks wait for us meanwhile
SQUEUE_SECONDS = 20.0
BUSY = {"RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "RESIZING", "SIGNALING", "STAGE_OUT"}
NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)

Owner = dict[str, Any]


@contextlib.contextmanager
def owned(folder: Path, is_first: bool) -> Iterator[None]:
    """Has rank 0 take the folder and release it at the end; if the folder is taken, raises the
    reason on every rank."""
    from overland.parallel.comm import from_first_rank  # torch, which a launcher does not need

    mine, problem, words = None, None, ""
    if is_first:
        try:
            mine = take(folder)
        except OSError as error:
            words = f"{error.filename or folder}: {error.strerror}"
        except TakenError as error:
            words = str(error)
        except Exception as error:  # a bug of ours; the others must not wait for this rank
            problem, words = error, f"{type(error).__name__}: {error}"
    words = from_first_rank(words)
    if words:
        raise problem or TakenError(words)
    try:
        yield
    finally:
        if mine is not None:
            mine.release()


@dataclass(frozen=True)
class OwnerRecord:
    """An owner as described by its file."""

    owner: Owner
    id: str
    renewed: float
    """When it was last renewed, by the clock of the file system, which all nodes share."""


class Ownership:
    """A folder that this process holds, and the thread that renews it."""

    def __init__(self, path: Path, owner: Owner) -> None:
        self.path, self.owner = path, owner
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="owner", daemon=True)
        self._thread.start()

    def release(self) -> None:
        self._over.set()
        self._thread.join()
        held = read_owner(self.path)
        if held is not None and held.id == self.owner["id"]:
            self.path.unlink(missing_ok=True)

    def renew(self) -> OwnerRecord | None:
        """Renews the file to show that we are alive; returns the new owner if we have lost the
        folder."""
        held = read_owner(self.path)
        if held is None:  # removed by hand by someone who thought we were dead
            with _written_beside(self.path, self.owner) as beside:
                _link(beside, self.path)
        elif held.id != self.owner["id"]:
            return held
        else:
            os.utime(self.path)
        return None

    def _keep(self) -> None:
        while not self._over.wait(RENEW_SECONDS):
            with contextlib.suppress(OSError):  # try again next time
                if (other := self.renew()) is not None:
                    # We were taken for dead, as when a machine freezes for minutes. Continuing
                    # would mean two writers.
                    leave(2, f"{self.path.parent} was taken over by {_who(other.owner)}")


def take(folder: Path, env: Mapping[str, str] = os.environ) -> Ownership:
    """Takes the folder, or raises a TakenError that names its owner."""
    folder.mkdir(parents=True, exist_ok=True)
    path, mine = folder / OWNER, this_owner(env)
    deadline = time.monotonic() + PATIENCE_SECONDS
    with _written_beside(path, mine) as beside:
        while not _link(beside, path):
            line = succession(path)
            if not line:  # just released
                continue
            held = line[-1]
            os.utime(beside)
            now = beside.stat().st_mtime
            found = verdict(held, mine, now)
            if found == "alive" or (found == "leaving" and time.monotonic() > deadline):
                raise TakenError(refusal(folder, held, now))
            if found == "leaving":
                time.sleep(1.0)
            elif _inherit(path, held, beside):
                break
    return Ownership(path, mine)


def require_free(folder: Path, env: Mapping[str, str] = os.environ) -> None:
    """Raises a TakenError if a live process of this machine has the folder, which nothing has
    touched yet. Of other machines, rank 0 judges, by the file system's clock."""
    mine, now = this_owner(env), time.time()
    line = succession(folder / OWNER)
    is_here = bool(line) and line[-1].owner.get("host") == mine["host"]
    if is_here and verdict(line[-1], mine, now) == "alive":
        raise TakenError(refusal(folder, line[-1], now))


def this_owner(env: Mapping[str, str]) -> Owner:
    """Describes this process, and what started it."""
    return {
        "id": uuid.uuid4().hex,
        **this_process(),
        "machine": socket.gethostname(),
        "since": time.time(),
        "job": env.get("SLURM_JOB_ID", ""),
        # Unique to each attempt of a job: srun counts steps, and Slurm counts requeues.
        "attempt": f"{env.get('SLURM_RESTART_COUNT', '0')}.{env.get('SLURM_STEP_ID', '')}",
        "cluster": env.get("SLURM_CLUSTER_NAME", ""),
        "torchrun": env.get("TORCHELASTIC_RUN_ID", "none"),
        "torchrun_restart": int(env.get("TORCHELASTIC_RESTART_COUNT", "0") or 0),
    }


def verdict(held: OwnerRecord, mine: Owner, now: float) -> str:
    """Whether an owner is "alive", "leaving" or "dead"."""
    owner = held.owner
    job = str(owner.get("job", ""))
    if job and job == mine["job"] and owner.get("attempt") != mine["attempt"]:
        return "dead"  # a job's next attempt starts only after the previous one has ended
    if owner.get("host") == mine["host"]:
        return "alive" if is_running(owner) else "dead"
    same_torchrun = owner.get("torchrun", "none") == mine["torchrun"] != "none"
    if same_torchrun and mine["torchrun_restart"] > owner.get("torchrun_restart", 0):
        return "dead"  # torchrun stops all workers before it restarts any
    clusters = {owner.get("cluster", ""), mine["cluster"]} - {""}  # two clusters may share the disk
    state = slurm_state(job) if job.isdecimal() and len(clusters) < 2 else None
    if state == "COMPLETING":
        return "leaving" if now - held.renewed < LEAVING_SECONDS else "dead"
    if state is not None:
        return "alive" if state in BUSY else "dead"
    return "alive" if now - held.renewed < STALE_SECONDS else "dead"


def slurm_state(job: str) -> str | None:
    """Returns the state of a job in Slurm's words; empty if it is gone; None if Slurm is
    unavailable."""
    found = squeue("--jobs", job, form="%T", timeout=SQUEUE_SECONDS)
    return "\n".join(found) if found is not None else None


def refusal(folder: Path, held: OwnerRecord, now: float) -> str:
    job = str(held.owner.get("job", ""))
    stops = f"`touch {folder}/STOP`" + (f" or `scancel {job}`" if job else "")
    return (
        f"{folder} is in use by {_who(held.owner)}, last seen alive "
        f"{max(0, round(now - held.renewed))} s ago; stop it with {stops}, give this run another "
        f"job.dump_folder, or, if it is certainly dead, remove {folder / OWNER}"
    )


def _who(owner: Owner) -> str:
    if "process" not in owner:
        return f"an unknown process ({OWNER} cannot be read)"
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(float(owner.get("since", 0))))
    job = f"job {owner['job']}, " if owner.get("job") else ""
    return f"{job}process {owner['process']} on {owner.get('machine')} (since {since})"


def read_owner(path: Path) -> OwnerRecord | None:
    """Reads who owns the folder; None if nobody does. A file that cannot be parsed may be in the
    middle of being written: it counts as an owner, judged by its age alone."""
    try:
        with path.open("rb") as file:
            stat = os.fstat(file.fileno())
            owner = json.loads(file.read())
    except FileNotFoundError:
        return None
    except ValueError:
        owner = {}
    owner = owner if isinstance(owner, dict) else {}
    return OwnerRecord(
        owner, str(owner.get("id") or f"{stat.st_ino}-{stat.st_mtime_ns}"), stat.st_mtime
    )


def succession(path: Path) -> list[OwnerRecord]:
    """Returns the owner, its heir if one was about to take over, that one's heir, and so on."""
    line = []
    held = read_owner(path)
    while held is not None:
        line.append(held)
        held = read_owner(_heir(path, held))
    return line


def _inherit(path: Path, dead: OwnerRecord, beside: Path) -> bool:
    """Takes over from a dead owner, unless another process does; returns whether it did."""
    heir = _heir(path, dead)
    if not _link(beside, heir):
        return False
    line, mine = succession(path), read_owner(beside)
    if mine is None or not line or line[-1].id != mine.id:
        # Another process took over and cleaned up since we looked, so nothing leads to us.
        heir.unlink(missing_ok=True)
        return False
    publish(beside, path, durable=False)
    for held in line[:-1]:
        _heir(path, held).unlink(missing_ok=True)
    return True


def _heir(path: Path, held: OwnerRecord) -> Path:
    return path.with_name(f".owner.{held.id}.heir")


@contextlib.contextmanager
def _written_beside(path: Path, owner: Owner) -> Iterator[Path]:
    beside = path.with_name(f".owner.{owner['id']}")
    try:
        with naming(beside):
            beside.write_text(json.dumps(owner, indent=1) + "\n")
        yield beside
    finally:
        beside.unlink(missing_ok=True)


def _link(source: Path, target: Path) -> bool:
    """Hard-links a file to a second name, which is complete from the start; returns False if that
    name is taken."""
    try:
        os.link(source, target)
    except FileExistsError:  # NFS may lose the reply to a link that succeeded
        made, wanted = read_owner(target), read_owner(source)
        return made is not None and wanted is not None and made.id == wanted.id
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        try:
            with target.open("x") as file:
                file.write(source.read_text())
        except FileExistsError:
            return False
    return True
