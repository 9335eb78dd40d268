"""Who trains in a run folder: one at a time, whoever starts it.

`owner.json` names the process of rank 0, which renews it while it lives. Locks are not relied on:
Lustre and NFS may have none. A hard link is made once, so of two that start at the same instant
exactly one gets the folder. A dead owner has one heir, again by a link (`.owner.ID.heir`): of two
that find the same dead owner, one follows it, and the other finds that one alive.
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
from overland.files import publish
from overland.parallel.comm import from_first_rank
from overland.processes import is_running, this_process
from overland.run_folder import OWNER
from overland.slurm import squeue
from overland.world.signals import leave

RENEW_SECONDS = 15.0
STALE_SECONDS = 300.0  # for an owner that neither this machine nor Slurm knows about
LEAVING_SECONDS = 60.0  # a job that Slurm is ending has missed four renewals: its rank 0 is gone
PATIENCE_SECONDS = 120.0  # for one that is on its way out; ranks wait for us all the while
SQUEUE_SECONDS = 20.0
BUSY = {"RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "RESIZING", "SIGNALING", "STAGE_OUT"}
NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)

Owner = dict[str, Any]


@contextlib.contextmanager
def owned(folder: Path, is_first: bool) -> Iterator[None]:
    """Rank 0 takes the folder, and gives it back at the end; if it is refused, every rank learns
    why."""
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
    """An owner as its file names it."""

    owner: Owner
    id: str
    renewed: float
    """By the clock of the file system, which all nodes share."""


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
        """Shows that we live; returns who has the folder if it is not us any more."""
        held = read_owner(self.path)
        if held is None:  # removed by hand, as if we were dead
            with _written_beside(self.path, self.owner) as beside:
                _link(beside, self.path)
        elif held.id != self.owner["id"]:
            return held
        else:
            os.utime(self.path)
        return None

    def _keep(self) -> None:
        while not self._over.wait(RENEW_SECONDS):
            with contextlib.suppress(OSError):  # the next time may go better
                if (other := self.renew()) is not None:
                    # We were taken for dead, as after minutes of a frozen machine. From now on
                    # two would write.
                    leave(2, f"{self.path.parent} was taken over by {_who(other.owner)}")


def take(folder: Path, env: Mapping[str, str] = os.environ) -> Ownership:
    """Makes the folder ours, or raises a TakenError that says whose it is."""
    folder.mkdir(parents=True, exist_ok=True)
    path, mine = folder / OWNER, this_owner(env)
    deadline = time.monotonic() + PATIENCE_SECONDS
    with _written_beside(path, mine) as beside:
        while not _link(beside, path):
            line = succession(path)
            if not line:  # given back just now
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


def this_owner(env: Mapping[str, str]) -> Owner:
    """Describes this process, and what started it."""
    return {
        "id": uuid.uuid4().hex,
        **this_process(),
        "machine": socket.gethostname(),
        "since": time.time(),
        "job": env.get("SLURM_JOB_ID", ""),
        # Each attempt of a job has its own: srun counts steps, and Slurm what it queued again.
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
        return "dead"  # whoever starts a job's next attempt has ended the one before
    if owner.get("host") == mine["host"]:
        return "alive" if is_running(owner) else "dead"
    same_torchrun = owner.get("torchrun", "none") == mine["torchrun"] != "none"
    if same_torchrun and mine["torchrun_restart"] > owner.get("torchrun_restart", 0):
        return "dead"  # all workers are ended before any is started again
    clusters = {owner.get("cluster", ""), mine["cluster"]} - {""}  # two may share the disk
    state = slurm_state(job) if job.isdecimal() and len(clusters) < 2 else None
    if state == "COMPLETING":
        return "leaving" if now - held.renewed < LEAVING_SECONDS else "dead"
    if state is not None:
        return "alive" if state in BUSY else "dead"
    return "alive" if now - held.renewed < STALE_SECONDS else "dead"


def slurm_state(job: str) -> str | None:
    """Returns Slurm's word for a job; empty if it is gone; None if Slurm cannot be asked."""
    found = squeue("--jobs", job, form="%T", timeout=SQUEUE_SECONDS)
    return "\n".join(found) if found is not None else None


def refusal(folder: Path, held: OwnerRecord, now: float) -> str:
    job = str(held.owner.get("job", ""))
    stops = f"`touch {folder}/STOP`" + (f" or `scancel {job}`" if job else "")
    return (
        f"{folder} is in use by {_who(held.owner)}, whose last sign of life is "
        f"{max(0, round(now - held.renewed))} s old; stop it with {stops}, give this run another "
        f"job.dump_folder, or, if it is certainly dead, remove {folder / OWNER}"
    )


def _who(owner: Owner) -> str:
    if "process" not in owner:
        return f"a process that {OWNER} does not name"
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(float(owner.get("since", 0))))
    job = f"job {owner['job']}, " if owner.get("job") else ""
    return f"{job}process {owner['process']} on {owner.get('machine')} (since {since})"


def read_owner(path: Path) -> OwnerRecord | None:
    """Returns None if nobody is there. A file that cannot be parsed may be just being written: it
    has an owner, judged by its age alone."""
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
    """Returns the owner; its heir, where one was about to take its place; that one's heir, and so
    on."""
    line = []
    held = read_owner(path)
    while held is not None:
        line.append(held)
        held = read_owner(_heir(path, held))
    return line


def _inherit(path: Path, dead: OwnerRecord, beside: Path) -> bool:
    """Takes the place of a dead owner, unless another one does."""
    heir = _heir(path, dead)
    if not _link(beside, heir):
        return False
    line, mine = succession(path), read_owner(beside)
    if mine is None or not line or line[-1].id != mine.id:
        # Somebody followed and tidied up since we looked, so that nothing leads to us.
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
        beside.write_text(json.dumps(owner, indent=1) + "\n")
        yield beside
    finally:
        beside.unlink(missing_ok=True)


def _link(source: Path, target: Path) -> bool:
    """Gives a file a second name, complete from the first moment, unless that name is taken."""
    try:
        os.link(source, target)
    except FileExistsError:  # NFS may lose the answer to a link that it has made
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
