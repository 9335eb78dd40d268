"""Determines the status of a run from its folder alone: its state (training, silent, failed, …),
when it counts as silent, its time left, and the command that resumes it. Anyone who can read the
folder can watch it.

Reads config.toml, metrics.jsonl, the names of checkpoints and the marker `done`; with a supervisor
also attempts.jsonl, live.json and `stopped`; and asks Slurm if squeue is available. Any of these
may be missing. Nothing here imports torch, so it is quick even on a busy login node.
"""

from __future__ import annotations

import re
import shlex
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from overland.apps.evaluation.results import read_results
from overland.apps.watch.files import (
    modified,
    number,
    read_json,
    read_last_line,
    read_text,
    read_toml,
    table_in,
)
from overland.apps.watch.history import History, Points, Record, is_step, thinned
from overland.cluster.supervise.events import LARGEST, Event, Events
from overland.config.schema import NO_DESCRIPTION
from overland.errors import NoRun
from overland.processes import host, is_running
from overland.run_folder import (
    ATTEMPTS,
    CHECKPOINT,
    CHECKPOINTS,
    COMMITTED,
    CONFIG,
    DONE,
    EVALUATIONS,
    LIVE,
    METRICS,
    OWNER,
    PLAN,
    SESSIONS,
    STOPPED,
    SUBMITTED,
    steps_in,
)
from overland.slurm import squeue
from overland.words import command, duration

STATES = {
    "training": "training",
    "starting": "starting",
    "restarting": "restarting after a fault",
    "stopping": "stopping",
    "waiting": "waiting in the queue",
    "finished": "finished",
    "stopped": "stopped",
    "failed": "failed",
    "silent": "no sign of life",
}
SIGNS = (CONFIG, METRICS, ATTEMPTS, LIVE, OWNER, SUBMITTED)
AT_DISK = ("saving", "loading a checkpoint", "ending")  # phases that may wait for the disk
LATE_STEP_SECONDS, LATE_STEPS = 10.0, 5
QUIET_SECONDS = 10.0  # a pause without any bytes moved is shown from here on
SILENT_SECONDS = 60.0
SILENT_STEPS = 20
OWNER_SECONDS = 120.0  # renewed every 15 s, but NFS may show it a minute late
CURVE_POINTS = 2000
NOT_FINITE = re.compile(rf"{CHECKPOINT.pattern}\.nonfinite")
SAVING = re.compile(rf"\.{CHECKPOINT.pattern}\.tmp")
ASK_EVERY_SECONDS = 20.0  # controllers of large clusters are busy
ANSWER_SECONDS = 15.0


@dataclass
class Checkpoints:
    count: int = 0
    step: int = 0
    newest: str | None = None
    saved_at: float | None = None
    saving: str | None = None
    """The checkpoint being written."""
    not_finite: str | None = None
    """A later checkpoint that was set aside because it contains non-finite values."""


@dataclass
class RunStatus:
    run: str
    time: float
    state: str = "silent"
    """One of STATES."""
    because: str = ""
    resume: str = ""
    """The command that resumes a run whose chain of jobs has ended before the last step."""
    last_sign: float | None = None
    description: str = ""
    step: int = 0
    steps: int | None = None
    seconds_left: float | None = None
    """Remaining training time at the current pace."""
    step_seconds: float | None = None
    phase: str | None = None
    stepped: float | None = None
    """When the last step was completed, as far as is known."""
    transfer: dict[str, Any] | None = None
    """Progress of a save or load: bytes, total_bytes, and seconds since the last byte."""
    newest: Record = field(default_factory=dict)
    """The newest line of metrics.jsonl: loss, tokens_per_second, mfu, memory_gib, …"""
    losses: Points = field(default_factory=list)
    held_out: dict[str, Points] = field(default_factory=dict)
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    evaluations: list[Record] = field(default_factory=list)
    """The newest result of each evaluation: its kind, name and step, and the perplexity."""
    job: str | None = None
    session: int | None = None
    session_ends: float | None = None
    attempt: int | None = None
    ranks: int | None = None
    nodes: list[str] = field(default_factory=list)
    slowest: dict[str, Any] | None = None
    late: list[dict[str, Any]] = field(default_factory=list)
    faults: list[Event] = field(default_factory=list)
    queue: list[QueuedJob] | None = None
    """None if Slurm is not available."""


class Evaluations:
    """Follows the results of evaluations, and reads them again when there are new ones."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self._seen: list[tuple[str, int]] = []
        self._newest: list[Record] = []

    def look(self) -> list[Record]:
        with suppress(OSError):  # a folder may be deleted meanwhile
            folders = sorted((self.run / EVALUATIONS).glob("*/"))
            seen = [(one.name, one.stat().st_mtime_ns) for one in folders]
            if seen != self._seen:
                newest = {(one.get("kind"), one.get("name")): one for one in read_results(self.run)}
                keys = ("kind", "name", "step", "perplexity", "time")
                self._newest = [{key: one.get(key) for key in keys} for one in newest.values()]
                self._seen = seen
        return self._newest


class Watch:
    """Polls a run, reading only what is new."""

    def __init__(self, run: Path, history: History | None = None) -> None:
        """`history`: given by a caller that reads metrics.jsonl anyway."""
        if not run.is_dir():
            what = "is a file" if run.exists() else "does not exist (yet)"
            raise NoRun(f"{run} {what}: expected a run folder, as set by job.dump_folder")
        if not any((run / name).exists() for name in SIGNS):
            raise NoRun(f"{run} is not a run folder: it contains none of {', '.join(SIGNS)}")
        if (run / METRICS).is_dir():
            raise NoRun(f"{run / METRICS} is a folder: expected the file that a run writes")
        self.run = run
        self.history = history or History(run / METRICS)
        self.events = Events(run)
        self.queue = Queue()
        self.evaluations = Evaluations(run)

    def look(self, patience: float = 0.0) -> RunStatus:
        """Returns the current status; waits for Slurm's answer for at most `patience` seconds."""
        self.history.read_on()
        self.events.read_on()
        live, owner = read_json(self.run / LIVE), _read_owner(self.run / OWNER)
        session, attempt = self.events.last("session"), self.events.last("attempt")
        job = live.get("job") or session.get("job") or owner.get("job") or None
        if which := jobs_to_ask_for(self.run, job):
            self.queue.ask(which, patience)
        config = _read_config(self.run)
        newest = self.history.newest
        newest_step = int(newest.get("step", 0))
        is_live_newer = number(live.get("time")) > number(newest.get("time"))
        # If the config counts epochs, the number of steps is only known once training starts.
        steps = table_in(config, "training").get("steps")
        steps = steps or read_json(self.run / PLAN).get("steps")
        seen = RunStatus(
            run=str(self.run),
            time=time.time(),
            description=_description(config),
            step=live["step"] if is_live_newer and is_step(live.get("step")) else newest_step,
            steps=steps if isinstance(steps, int) and steps < LARGEST else None,
            step_seconds=self.history.step_seconds or live.get("step_seconds"),
            phase=live.get("phase"),
            stepped=max(number(live.get("stepped")), number(newest.get("time"))) or None,
            newest=newest,
            losses=thinned(self.history.losses, CURVE_POINTS),
            held_out=dict(self.history.held_out),
            checkpoints=read_checkpoints(
                self.run / str(table_in(config, "checkpoint").get("folder", CHECKPOINTS))
            ),
            evaluations=self.evaluations.look(),
            job=job,
            session=len(self.events.of("session")) or None,
            session_ends=session.get("ends"),
            attempt=live.get("attempt") or attempt.get("attempt"),
            ranks=live.get("ranks"),
            nodes=_names(live.get("nodes")) or _names(attempt.get("nodes")),
            slowest=live.get("slowest"),
            late=live.get("late") or [],
            faults=self.events.faults(),
            queue=self.queue.jobs,
        )
        if seen.checkpoints.newest:  # what is logged may be some steps behind
            seen.step = max(seen.step, seen.checkpoints.step)
        seen.last_sign = last_sign(live, owner, newest, self.events)
        seen.state, seen.because = judge_state(self.run, seen, live, owner, self.events)
        if not config and (self.run / CONFIG).is_file():
            seen.because = seen.because or f"{CONFIG} cannot be read"
        if seen.state in ("finished", "stopped", "failed", "silent", "waiting"):
            seen.slowest, seen.late, seen.checkpoints.saving = None, [], None
        elif isinstance(live.get("transfer"), dict):
            seen.transfer = live["transfer"]
        if seen.state == "stopped" and not seen.queue:
            seen.resume = command_to_resume(self.run)
        pace = self.history.pace or live.get("step_seconds")
        if pace and seen.steps and seen.state != "finished":
            seen.seconds_left = max(0, seen.steps - seen.step) * pace
        return seen


def judge_state(
    run: Path, seen: RunStatus, live: Event, owner: Event, events: Events
) -> tuple[str, str]:
    """Returns the state and a short explanation. Signs of a live run take precedence over records
    of how it ended."""
    if not run.is_dir():
        return "silent", "its folder no longer exists"
    limit = max(SILENT_SECONDS, SILENT_STEPS * (seen.step_seconds or 0))
    age = seen.time - (seen.last_sign or 0)
    supervised = supervisors_word(live)
    signalled = events.all[-1] if events.all and events.all[-1]["event"] == "signal" else {}
    is_gone = seen.queue is not None and not any(job.runs for job in seen.queue)
    if signalled and not is_gone and age < limit:
        return "stopping", str(signalled.get("what", ""))
    if supervised and not signalled and seen.time - number(live.get("time")) < limit:
        state, words = supervised
        return state, words or waits_for_disk(seen, live)
    if owner and not signalled and owner_lives(owner, seen.time):
        has_stepped = number(seen.newest.get("time")) >= number(owner.get("since"))
        return "training" if has_stepped else "starting", ""
    done = read_text(run / DONE)
    if steps_in(done) >= max(1, seen.steps or 0):
        return "finished", done.partition("\n")[2].strip()
    end = events.all[-1] if events.all and events.all[-1]["event"] in ("end", "signal") else {}
    if reason := read_text(run / STOPPED):
        return "failed" if end.get("how") == "failed" else "stopped", reason
    running = [job for job in seen.queue or [] if job.runs]
    waiting = [job for job in seen.queue or [] if not job.runs]
    # A requeued job keeps its id, so the recorded end may belong to its earlier start.
    has_ended = end and not any(started_after(job, number(end.get("time"))) for job in running)
    if running and not (has_ended and end.get("job") == running[0].id):
        words = f"job {running[0].id} is running"
        if seen.last_sign is None or started_after(running[0], seen.last_sign):
            return "starting", words
        state, _ = supervised or ("training", "")
        return state, f"{words}, but silent for {duration(age)}"
    if waiting:
        return "waiting", waiting[0].reason
    if end:
        how = str(end.get("how", "stopped"))
        return how if how in STATES else "stopped", str(end.get("what", ""))
    if not owner and not live and not events.all and seen.newest:
        # A run removes its owner.json when it ends.
        if failure := last_failure(run):
            return "failed", failure
        return "stopped", f"`{command('overland', 'train', run / CONFIG)}` resumes it"
    return "silent", ""


def last_failure(run: Path) -> str:
    """Returns why the last session failed; "" if it did not, or if that is not known."""
    end = read_last_line(run / SESSIONS)
    if end.get("event") != "end" or end.get("how") != "failed":
        return ""
    return str(end.get("what") or "the last session failed")


def supervisors_word(live: Event) -> tuple[str, str] | None:
    """Returns the state that the supervisor reports, unless it has ended."""
    state = str(live.get("state", "ended"))
    if state == "ended":
        return None
    if state == "preflight":
        return "starting", "testing the nodes"
    return (state, "") if state in STATES else ("starting", state)


def waits_for_disk(seen: RunStatus, live: Event) -> str:
    """Describes the save or load that training is waiting for, or returns "" if it is not."""
    late = max(LATE_STEP_SECONDS, LATE_STEPS * (seen.step_seconds or 0))
    if live.get("phase") not in AT_DISK or seen.time - (seen.stepped or 0) < late:
        return ""
    how_far = transferred(live["transfer"]) if isinstance(live.get("transfer"), dict) else ""
    what = "loading a checkpoint" if live["phase"] == AT_DISK[1] else "waiting for a save"
    return f"{what}, {how_far}" if how_far else what


def transferred(transfer: Event) -> str:
    """Returns the progress of a transfer, such as `12.0 of 40.0 GB, no progress for 45 s`."""
    done, total = number(transfer.get("bytes")), number(transfer.get("total_bytes"))
    words = f"{done / 1e9:.1f} of {total / 1e9:.1f} GB" if total else f"{done / 1e9:.1f} GB"
    quiet = number(transfer.get("quiet_seconds"))
    return words + (f", no progress for {duration(quiet)}" if quiet > QUIET_SECONDS else "")


def last_sign(live: Event, owner: Event, newest: Record, events: Events) -> float | None:
    signs = [number(live.get("time")), number(owner.get("renewed")), number(newest.get("time"))]
    signs += [number(event.get("time")) for event in events.all[-1:]]
    return max(signs) or None


def owner_lives(owner: Event, now: float) -> bool:
    if owner.get("host") == host():
        return is_running(owner)
    return now - number(owner.get("renewed")) < OWNER_SECONDS


def jobs_to_ask_for(run: Path, job: str | None) -> str | None:
    """Returns the squeue option that selects this run's jobs; jobs of a chain share a name."""
    if script := newest_script(run):
        named = re.search(r"^#SBATCH --job-name=(\S+)$", read_text(script), flags=re.MULTILINE)
        if named:
            return f"--name={named[1]}"
    return f"--jobs={job}" if job else None


def command_to_resume(run: Path) -> str:
    """Returns the command that submits a run's newest script again; "" if there is none, or if the
    run has failed for good, which such a job would only report."""
    script = newest_script(run)
    if script is None or "#SBATCH" not in read_text(script) or (run / STOPPED).exists():
        return ""
    return f"sbatch {shlex.quote(str(script))}"


def newest_script(run: Path) -> Path | None:
    scripts = [path for path in (run / SUBMITTED).glob("*.sh") if path.stem.isdecimal()]
    return max(scripts, key=lambda path: int(path.stem), default=None)


def started_after(job: QueuedJob, sign: float) -> bool:
    try:
        return time.mktime(time.strptime(job.start, "%Y-%m-%dT%H:%M:%S")) > sign
    except ValueError:
        return False


def read_checkpoints(folder: Path) -> Checkpoints:
    """Finds the checkpoints by their names and markers, without opening them."""
    found, saving, broken = [], [], []
    try:
        children = list(folder.iterdir())
    except OSError:
        return Checkpoints()
    for path in children:
        if (named := CHECKPOINT.fullmatch(path.name)) and (saved := modified(path / COMMITTED)):
            found.append((int(named[1]), path.name, saved))
        elif named := SAVING.fullmatch(path.name):
            saving.append((int(named[1]), path.name.removeprefix(".").removesuffix(".tmp")))
        elif named := NOT_FINITE.fullmatch(path.name):
            broken.append((int(named[1]), path.name))
    step, newest, saved_at = max(found, default=(0, None, None))
    later = max((one for one in broken if one[0] > step), default=(0, None))[1]
    return Checkpoints(len(found), step, newest, saved_at, max(saving, default=(0, None))[1], later)


def _description(config: dict[str, Any]) -> str:
    """Returns what the user wrote, not the default."""
    words = str(table_in(config, "job").get("description", ""))
    return "" if words == NO_DESCRIPTION else words


def _read_config(run: Path) -> dict[str, Any]:
    """Reads the newer of the last session's config and any config submitted since."""
    submitted = [path for path in run.glob(f"{SUBMITTED}/*.toml") if path.stem.isdecimal()]
    paths = sorted([run / CONFIG, *submitted], key=modified, reverse=True)
    return next(filter(None, map(read_toml, paths)), {})


def _read_owner(path: Path) -> Event:
    owner = read_json(path)
    return {**owner, "renewed": modified(path)} if owner else {}


def _names(value: object) -> list[str]:
    return [str(name) for name in value] if isinstance(value, list) else []


@dataclass(frozen=True)
class QueuedJob:
    id: str
    state: str
    left: str
    """Remaining walltime, in Slurm's format."""
    reason: str
    """Why it is waiting."""
    start: str
    """When it started, or is expected to."""

    @property
    def runs(self) -> bool:
        return self.state not in ("PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT")


class Queue:
    def __init__(self) -> None:
        self.jobs: list[QueuedJob] | None = None
        """None until Slurm has answered, and if there is no Slurm."""
        self._thread: threading.Thread | None = None
        self._asked = -ASK_EVERY_SECONDS

    def ask(self, which: str, patience: float = 0.0) -> None:
        """Asks for the jobs selected by this squeue option, unless it was asked recently; waits for
        the answer for at most `patience` seconds."""
        is_busy = self._thread is not None and self._thread.is_alive()
        if not is_busy and time.monotonic() - self._asked >= ASK_EVERY_SECONDS:
            self._asked = time.monotonic()
            self._thread = threading.Thread(target=self._ask, args=(which,), daemon=True)
            self._thread.start()
        if self._thread is not None:
            self._thread.join(patience)

    def _ask(self, which: str) -> None:
        self.jobs = queued(which)


def queued(which: str) -> list[QueuedJob] | None:
    lines = squeue(which, form="%i|%T|%L|%r|%S", timeout=ANSWER_SECONDS)
    if lines is None:
        return None
    rows = [line.split("|") for line in lines]
    jobs = [QueuedJob(*row) for row in rows if len(row) == 5]
    return sorted(jobs, key=lambda job: (not job.runs, len(job.id), job.id))
