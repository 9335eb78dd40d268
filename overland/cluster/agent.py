"""The node agent: one small process per node, which sends its ranks' heartbeats to the first node
every second, and their stacks when asked.

The node's first rank starts it, and starts another one if it is killed or stopped. It does not need
torch and takes part in no collective, so it keeps running when ranks hang, and can report what they
cannot: that a process was stopped or is gone. If its connection breaks, it reconnects.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from overland.cluster.error_kinds import error_kind, error_place
from overland.cluster.wire import Wire
from overland.errors import Kind
from overland.processes import PYTHON, STOPPED_STATES, start_unheard, state_of
from overland.world import World
from overland.world.flight_recorder import FILES
from overland.world.heartbeat import (
    HEARTBEATS,
    LAUNCHER_HEARTBEATS,
    Heartbeat,
    Sign,
    node_name,
    read_signs,
    reporting,
)
from overland.world.signals import SIGNALS, say

BEAT_SECONDS = 1.0
DUMP_SECONDS = 1.0
CALL_AGAIN_SECONDS = (1, 2, 4, 8)
LOOK_SECONDS = 1.0  # between checks of the agent
STOPPED_LOOKS = 3  # an agent found stopped this many times in a row is replaced
RECORD_SECONDS = 6.0  # torch 2.11 on an H200 took 4 s to write one
PIPES = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"


@contextlib.contextmanager
def under_watch(world: World, env: Mapping[str, str] = os.environ) -> Iterator[Heartbeat]:
    """Yields the heartbeat of this rank, and reports the error that ends it to the supervisor or
    launcher that started it. Under a supervisor, a signal writes the stacks of its threads."""
    rank, folder = world.rank, heartbeat_folder(env)
    if folder is None:
        beat = _heartbeat_for_launcher(rank, env)
        with reporting(beat):
            yield beat
        return
    os.environ[PIPES] = f"{folder}/nccl_"  # read when process groups are created
    # Kept open to the end: without a handler the signal would kill the process.
    stacks = (folder / f"{rank}.stacks").open("w")
    with kept_agent(env) if world.local_rank == 0 else contextlib.nullcontext():
        faulthandler.register(stacks_signal(), file=stacks, all_threads=True)
        beat = Heartbeat(rank, folder, is_supervised=True)
        beat.on_error = lambda error: say(
            rank, error_kind(error), in_words(error), beat.step, error_place(error)
        )
        try:
            with reporting(beat):
                yield beat
        except SystemExit as error:  # raised by the user's code; ours never does
            cause = error.__context__  # another rank's failure may have caused it
            kind = error_kind(cause) if isinstance(cause, Exception) else Kind.CODE
            why = f", caused by {in_words(cause)}" if cause else ""
            what = f"exited with SystemExit({error.code}){why}"
            say(rank, kind, what, beat.step, error_place(cause or error))
            raise


def _heartbeat_for_launcher(rank: int, env: Mapping[str, str]) -> Heartbeat:
    if LAUNCHER_HEARTBEATS not in env:
        return Heartbeat(rank)
    folder = Path(env[LAUNCHER_HEARTBEATS])
    try:
        beat = Heartbeat(rank, folder)
    except OSError:  # no room: the launcher learns less, and the rank trains
        beat = Heartbeat(rank)
    beat.on_error = lambda error: (folder / f"{rank}.error").write_text(str(error))
    return beat


def heartbeat_folder(env: Mapping[str, str] = os.environ) -> Path | None:
    """Creates and returns the folder of this node, readable only by this user; None if nobody
    watches."""
    if HEARTBEATS not in env:
        return None
    folder = Path(f"{env[HEARTBEATS]}-{node_name(env)}")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def stacks_signal() -> int:
    """Returns a signal that no library and no scheduler uses."""
    return signal.SIGRTMIN + 5


def in_words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


@contextlib.contextmanager
def kept_agent(env: Mapping[str, str]) -> Iterator[None]:
    """Starts the node's agent before anything heavy is imported, and keeps it alive. The agent
    outlives this process and ends when the supervisor tells it to."""
    over = threading.Event()
    arguments = (start_agent(env), env, over)
    threading.Thread(target=_keep, args=arguments, name="agent-keeper", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def start_agent(env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Starts the agent through a shell that ignores the signals meant for ranks. `preexec_fn` could
    do the same, but is not safe in a process with several threads."""
    names = " ".join(signal.Signals(number).name.removeprefix("SIG") for number in SIGNALS)
    ignore = f'trap "" {names}; exec "$@"'
    agent = ["/bin/sh", "-c", ignore, "agent", *PYTHON, "-m", "overland.cluster.agent"]
    return start_unheard(agent, env)  # srun would wait for whoever still holds a rank's output


def _keep(agent: subprocess.Popen[bytes], env: Mapping[str, str], over: threading.Event) -> None:
    """Restarts the agent if it is gone: nothing else reports on the ranks of this node."""
    waits, looks_stopped = calling_again(), 0
    while not over.wait(LOOK_SECONDS):
        looks_stopped = looks_stopped + 1 if state_of(agent.pid) in STOPPED_STATES else 0
        if looks_stopped >= STOPPED_LOOKS:
            agent.kill()
            agent.wait()
        if (code := agent.poll()) == 0:  # the supervisor told it to end
            return
        if code is not None:
            try:
                agent, looks_stopped = start_agent(env), 0
            except OSError:  # out of memory, for example
                over.wait(next(waits))


def calling_again() -> Iterator[int]:
    """Returns increasing numbers of seconds to wait before reconnecting."""
    return itertools.chain(CALL_AGAIN_SECONDS, itertools.repeat(CALL_AGAIN_SECONDS[-1]))


def main() -> None:
    """Connects to the first node, and reconnects whenever the connection breaks, until the agent is
    told to end or all ranks it watches are gone."""
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
        except OSError:  # thousands of nodes may connect at once
            pass
        if _are_gone(read_signs(folder), parent):
            break
        time.sleep(next(waits))
    shutil.rmtree(folder, ignore_errors=True)


def report_signs(wire: Wire, folder: Path, parent: int) -> bool:
    """Returns True when the first node says goodbye, or when the ranks and their parent are gone;
    False when the connection is lost."""
    while True:
        signs = read_signs(folder)
        are_gone = _are_gone(signs, parent)  # before sending, so that the end is reported too
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
    """Returns the stacks of each rank, or why there are none. Also triggers NCCL's flight recorder,
    which writes a file of its own after a few seconds."""
    awaited = []
    for sign in signs:
        with contextlib.suppress(ProcessLookupError):
            os.kill(sign.pid, stacks_signal())
        is_stopped = state_of(sign.pid) in STOPPED_STATES  # its pipe then listens in vain
        if not is_stopped and _poke(folder / f"nccl_{sign.rank}.pipe"):
            awaited.append(Path(f"{os.environ.get(FILES, '')}{sign.rank}"))
    deadline = time.monotonic() + RECORD_SECONDS
    time.sleep(DUMP_SECONDS)
    while not all(path.exists() for path in awaited) and time.monotonic() < deadline:
        time.sleep(1.0)  # the files are on a shared file system that all nodes poll
    stacks = {}
    for sign in signs:
        state = state_of(sign.pid)
        text = (folder / f"{sign.rank}.stacks").read_text(errors="replace")
        stacks[str(sign.rank)] = {
            "": f"process {sign.pid} is gone",
            "T": f"process {sign.pid} is stopped (SIGSTOP)",
            "t": f"process {sign.pid} is held by a debugger",
        }.get(state, text or f"process {sign.pid} did not answer (state {state})")
    return stacks


def _poke(pipe: Path) -> bool:
    """Triggers the flight recorder behind this pipe; returns whether one is listening."""
    try:
        handle = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return False
    os.write(handle, b"1\n")
    os.close(handle)
    return True


def _remove_abandoned(own: Path) -> None:
    """Removes files left on this node by ranks that were killed before they could clean up."""
    for other in own.parent.glob(f"overland-{os.getuid()}-*-{node_name()}"):
        signs = read_signs(other) if other != own else []
        if signs and not any(state_of(sign.pid) for sign in signs):
            shutil.rmtree(other, ignore_errors=True)


if __name__ == "__main__":
    main()
