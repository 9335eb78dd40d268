"""One small process per node: tells the first node how the ranks here are, once a second.

The node's first rank starts it. It needs no torch and takes part in no collective, so that it goes
on when ranks hang, and sees what they cannot tell: that a process was stopped, or is gone.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from overland.cluster.beat import (
    BEATS,
    Beat,
    Sign,
    beating,
    beats_folder,
    node_name,
    read_signs,
    stacks_signal,
)
from overland.cluster.last_words import Kind, kind_of, place_of, say
from overland.cluster.signals import SIGNALS
from overland.cluster.wire import Wire
from overland.cluster.world import World

BEAT_SECONDS = 1.0
DUMP_SECONDS = 1.0
CALL_AGAIN_SECONDS = (1, 2, 4, 8)
RECORD_SECONDS = 10.0  # torch 2.11 on an H200 took 4 s
PIPES, RECORDS = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE", "TORCH_FR_DUMP_TEMP_FILE"


@contextlib.contextmanager
def under_watch(world: World, env: Mapping[str, str] = os.environ) -> Iterator[Beat]:
    """Where a supervisor started this rank: its signs of life are read, and it has last words."""
    if BEATS not in env:
        yield Beat()
        return
    if world.local_rank == 0:
        start_agent(env)
    os.environ[PIPES] = f"{beats_folder(env)}/nccl_"  # read when the ranks meet
    with beating(world.rank, env) as beat:
        try:
            yield beat
        except Exception as error:
            if not hasattr(error, "exit_code"):  # a command that ends, as typer has it
                what = f"{type(error).__name__}: {error}"
                say(world.rank, kind_of(error), what, beat.step, place_of(error))
            raise
        except SystemExit as error:  # of the user's own code: we end otherwise
            cause = error.__context__  # it may have left for what another rank had done
            kind = kind_of(cause) if isinstance(cause, Exception) else Kind.CODE
            why = f", for {type(cause).__name__}: {cause}" if cause else ""
            what = f"it left, by SystemExit({error.code}){why}"
            say(world.rank, kind, what, beat.step, place_of(cause or error))
            raise


def start_agent(env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """By the first rank of each node, before anything heavy is imported."""
    return subprocess.Popen(
        [sys.executable, "-m", "overland.cluster.agent"],
        env=dict(env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,  # srun would wait for whoever still holds a rank's output
        stderr=subprocess.DEVNULL,
        preexec_fn=_leave_signals_to_ranks,
    )


def _leave_signals_to_ranks() -> None:
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def main() -> None:
    folder = beats_folder()
    assert folder is not None
    _remove_abandoned(folder)
    try:
        wire = _call_first_node()
        job, step = os.environ.get("SLURM_JOB_ID", ""), os.environ.get("SLURM_STEP_ID", "")
        wire.send({"node": node_name(), "step": f"{job}.{step}" if step else ""})
        watch(wire, folder)
    except OSError:  # the first node was not to be reached, or hung up without a word
        pass
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _call_first_node() -> Wire:
    """Thousands of nodes may call at once."""
    for seconds in CALL_AGAIN_SECONDS:
        try:
            return Wire.to_first_node()
        except OSError:
            time.sleep(seconds)
    return Wire.to_first_node()


def watch(wire: Wire, folder: Path) -> None:
    """Until the first node hangs up, or the ranks and who started them are gone."""
    parent = os.getppid()
    while True:
        signs = read_signs(folder)
        is_over = os.getppid() != parent and not any(state_of(sign.pid) for sign in signs)
        wire.send({"beats": [_heard(sign) for sign in signs]})  # also that they are gone
        if is_over:
            return
        orders = wire.receive(BEAT_SECONDS)
        if orders is None or any("bye" in order for order in orders):
            return
        if any("kill" in order for order in orders):
            for sign in signs:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(sign.pid, signal.SIGKILL)
        if any("dump" in order for order in orders):
            wire.send({"stacks": dump(folder, signs)})


def _heard(sign: Sign) -> list[object]:
    now = time.monotonic()
    age, quiet = max(0.0, now - sign.since), max(0.0, now - sign.moved)
    said = [sign.rank, sign.step, int(sign.phase), age, sign.probe_seconds, sign.data_wait]
    disk = [int(sign.transfer), quiet, sign.num_bytes, sign.total_bytes]
    return [*said, state_of(sign.pid), *disk]


def dump(folder: Path, signs: list[Sign]) -> dict[str, str]:
    """The stacks of each rank, or why there are none. NCCL's flight recorder is asked too; it
    writes a file of its own, after some seconds."""
    awaited = []
    for sign in signs:
        with contextlib.suppress(ProcessLookupError):
            os.kill(sign.pid, stacks_signal())
        if _poke(folder / f"nccl_{sign.rank}.pipe"):
            awaited.append(Path(f"{os.environ.get(RECORDS, '')}{sign.rank}"))
    deadline = time.monotonic() + RECORD_SECONDS
    time.sleep(DUMP_SECONDS)
    while not all(path.exists() for path in awaited) and time.monotonic() < deadline:
        time.sleep(1.0)  # they are on the shared file system, which all nodes ask
    stacks = {}
    for sign in signs:
        state = state_of(sign.pid)
        text = (folder / f"{sign.rank}.stacks").read_text(errors="replace")
        stacks[str(sign.rank)] = {
            "": f"process {sign.pid} is gone",
            "T": f"process {sign.pid} is stopped, as by SIGSTOP",
            "t": f"process {sign.pid} is held by a debugger",
        }.get(state, text or f"process {sign.pid} did not answer (state {state})")
    return stacks


def state_of(pid: int) -> str:
    """R, S, D, T, … as the kernel has it; empty if there is no such process any more."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
    return "" if state in "ZX" else state


def _poke(pipe: Path) -> bool:
    """Whether a recorder listens there."""
    try:
        handle = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return False
    os.write(handle, b"1\n")
    os.close(handle)
    return True


def _remove_abandoned(own: Path) -> None:
    """What was left here by ranks that were killed before anyone could tidy up."""
    for other in own.parent.glob(f"overland-{os.getuid()}-*-{node_name()}"):
        signs = read_signs(other) if other != own else []
        if signs and not any(state_of(sign.pid) for sign in signs):
            shutil.rmtree(other, ignore_errors=True)


if __name__ == "__main__":
    main()
