"""One small process per node: tells the first node how the ranks here are, once a second.

The node's first rank starts it, and starts another one if it is killed or stopped. It needs no
torch and takes part in no collective, so that it goes on when ranks hang, and sees what they cannot
tell: that a process was stopped, or is gone. If its connection breaks, it calls again.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from overland.errors import Kind
from overland.processes import state_of
from overland.tools.wire import Wire
from overland.world import World
from overland.world.heartbeat import (
    HEARTBEATS,
    Heartbeat,
    Sign,
    heartbeat_folder,
    node_name,
    read_signs,
    stacks_signal,
    start_heartbeat,
)
from overland.world.last_words import error_kind, error_place, say
from overland.world.signals import SIGNALS

BEAT_SECONDS = 1.0
DUMP_SECONDS = 1.0
CALL_AGAIN_SECONDS = (1, 2, 4, 8)
LOOK_SECONDS = 1.0  # from one look at an agent to the next
STOPPED_LOOKS = 3  # an agent that is stopped at so many in a row is replaced
RECORD_SECONDS = 10.0  # torch 2.11 on an H200 took 4 s
PIPES, RECORDS = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE", "TORCH_FR_DUMP_TEMP_FILE"


@contextlib.contextmanager
def under_watch(world: World, env: Mapping[str, str] = os.environ) -> Iterator[Heartbeat]:
    """Where a supervisor started this rank: its signs of life are read, and it has last words."""
    if HEARTBEATS not in env:
        yield Heartbeat()
        return
    os.environ[PIPES] = f"{heartbeat_folder(env)}/nccl_"  # read when the ranks meet
    kept = kept_agent(env) if world.local_rank == 0 else contextlib.nullcontext()
    with kept, start_heartbeat(world.rank, env) as beat:
        try:
            yield beat
        except Exception as error:
            if not hasattr(error, "exit_code"):  # a command that ends, as typer has it
                what = f"{type(error).__name__}: {error}"
                say(world.rank, error_kind(error), what, beat.step, error_place(error))
            raise
        except SystemExit as error:  # of the user's own code: we end otherwise
            cause = error.__context__  # it may have left for what another rank had done
            kind = error_kind(cause) if isinstance(cause, Exception) else Kind.CODE
            why = f", for {type(cause).__name__}: {cause}" if cause else ""
            what = f"it left, by SystemExit({error.code}){why}"
            say(world.rank, kind, what, beat.step, error_place(cause or error))
            raise


@contextlib.contextmanager
def kept_agent(env: Mapping[str, str]) -> Iterator[None]:
    """The node's agent, started before anything heavy is imported, and kept alive until the end. It
    outlives this process: it is told when to go."""
    over = threading.Event()
    arguments = (start_agent(env), env, over)
    threading.Thread(target=_keep, args=arguments, name="agent-keeper", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def start_agent(env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Through a shell that ignores the signals that are meant for ranks. `preexec_fn` could do it
    too, but not from a thread of a process that has many."""
    names = " ".join(signal.Signals(number).name.removeprefix("SIG") for number in SIGNALS)
    ignore = f'trap "" {names}; exec "$@"'
    return subprocess.Popen(
        ["/bin/sh", "-c", ignore, "agent", sys.executable, "-m", "overland.tools.jobs.agent"],
        env=dict(env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,  # srun would wait for whoever still holds a rank's output
        stderr=subprocess.DEVNULL,
    )


def _keep(agent: subprocess.Popen[bytes], env: Mapping[str, str], over: threading.Event) -> None:
    """Starts another agent where one is gone: nobody else knows how the ranks here are."""
    waits, looks_stopped = calling_again(), 0
    while not over.wait(LOOK_SECONDS):
        looks_stopped = looks_stopped + 1 if state_of(agent.pid) in ("T", "t") else 0
        if looks_stopped >= STOPPED_LOOKS:
            agent.kill()
            agent.wait()
        if (code := agent.poll()) == 0:  # it was told to go
            return
        if code is not None:
            try:
                agent, looks_stopped = start_agent(env), 0
            except OSError:  # no memory for it, say
                over.wait(next(waits))


def calling_again() -> Iterator[int]:
    """Seconds to wait, longer and longer."""
    yield from CALL_AGAIN_SECONDS
    while True:
        yield CALL_AGAIN_SECONDS[-1]


def main() -> None:
    """Calls the first node, as often as the connection breaks, until it is told to go or all that
    it watches are gone."""
    folder, parent = heartbeat_folder(), os.getppid()
    assert folder is not None
    _remove_abandoned(folder)
    waits = calling_again()
    job, step = os.environ.get("SLURM_JOB_ID", ""), os.environ.get("SLURM_STEP_ID", "")
    while True:
        try:
            wire = Wire.to_first_node()
            wire.send({"node": node_name(), "step": f"{job}.{step}" if step else ""})
            waits = calling_again()
            if report_signs(wire, folder, parent):
                break
            wire.close()
        except OSError:  # thousands of nodes may call at once
            pass
        if _are_gone(read_signs(folder), parent):
            break
        time.sleep(next(waits))
    shutil.rmtree(folder, ignore_errors=True)


def report_signs(wire: Wire, folder: Path, parent: int) -> bool:
    """Returns True when the first node says goodbye, or when the ranks and who started them are
    gone; False when the connection is."""
    while True:
        signs = read_signs(folder)
        are_gone = _are_gone(signs, parent)  # before it is told, so that it is told
        wire.send({"beats": [_heard(sign) for sign in signs]})
        if are_gone:
            return True
        orders = wire.receive(BEAT_SECONDS)
        if orders is None:
            return False
        if any("bye" in order for order in orders):
            return True
        if any("kill" in order for order in orders):
            for sign in signs:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(sign.pid, signal.SIGKILL)
        if any("dump" in order for order in orders):
            wire.send({"stacks": dump(folder, signs)})


def _are_gone(signs: list[Sign], parent: int) -> bool:
    return os.getppid() != parent and not any(state_of(sign.pid) for sign in signs)


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
