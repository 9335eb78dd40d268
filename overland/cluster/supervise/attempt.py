"""One attempt at training: the ranks that srun started, their environment, what they and their
nodes report, which nodes are lost, whose stack is odd, and how ranks are ended.
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import secrets
import signal
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from overland.cluster.slurm_jobs import signal_step
from overland.cluster.supervise.faults import Findings
from overland.cluster.supervise.watchdog import GONE_SECONDS, Heard, Watchdog
from overland.cluster.wire import Message, Switchboard, Wire
from overland.slurm import ask
from overland.world.flight_recorder import FILES, NAME, recorder_settings
from overland.world.heartbeat import HEARTBEATS, MEMORY, Phase
from overland.world.rendezvous import SECRET, new_secret

END_SECONDS = 20.0
WORD_SECONDS = 10.0  # from the first rank's error report until all ranks are ended
HANG_UP_SECONDS = 5.0  # from the end of a node's agent until srun reports its tasks
FRAME = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>.+)$', re.MULTILINE)
INNERMOST = 4  # frames among which a rank that waits for others is inside torch.distributed


def rank_environment(
    env: Mapping[str, str], board: Switchboard, attempt: int, fault_folder: Path
) -> dict[str, str]:
    """Returns the environment of the ranks: where their agents connect, the secret by which ranks
    recognize each other, and where heartbeats and NCCL's flight recorder are written."""
    return {
        **recorder_settings(fault_folder.absolute() / NAME),
        **env,
        **board.environment(),
        SECRET: new_secret(),
        HEARTBEATS: heartbeat_prefix(job_id(env), attempt),
        FILES: str(fault_folder.absolute() / NAME),
    }


def heartbeat_prefix(job: str, attempt: int) -> str:
    """Returns the prefix of an attempt's heartbeat folders: in memory if there is such a folder,
    since a slow disk would slow down every step. A requeued job has the same number and attempts,
    so the name is random: leftovers must not be mistaken for live ranks."""
    place = MEMORY if MEMORY.is_dir() else Path(tempfile.gettempdir())
    return str(place / f"overland-{os.getuid()}-{job}-{attempt}-{secrets.token_hex(4)}")


def job_id(env: Mapping[str, str]) -> str:
    return env.get("SLURM_JOB_ID", str(os.getpid()))


class Attempt:
    """The ranks of one srun, and their output."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], num_nodes: int) -> None:
        self.findings = Findings(num_nodes)
        self.step_id = ""
        """Slurm's id of the job step, once a node has reported it."""
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._srun = subprocess.Popen(
            command,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            bufsize=1,
            start_new_session=True,  # signals to the job's shell must not reach the ranks
        )
        self._reader = threading.Thread(target=self._read, name="output", daemon=True)
        self._reader.start()

    def listen(self) -> None:
        """Reads new output of the ranks, and prints what belongs in the log."""
        while not self._lines.empty():
            line = self._lines.get()
            if not self.findings.read(line) and line.strip():
                with contextlib.suppress(OSError):  # the log may be on the disk that is full
                    print(line.rstrip("\n"), flush=True)

    def code(self) -> int | None:
        """Returns srun's exit code, once it has ended and all its output has been read."""
        code = self._srun.poll()
        if code is not None:
            self._reader.join(timeout=5)
            self.listen()
        return code

    def signal(self, number: int) -> bool:
        """Signals all ranks; returns whether any are known."""
        if self.step_id:
            signal_step(self.step_id, number)
        return bool(self.step_id)

    def end(self) -> None:
        """Ends the ranks on all nodes that can be reached. Does not wait for srun, which may wait a
        long time for a node that cannot."""
        if self.code() is not None:
            return
        if step := self.step_id or self._ask_for_step():
            signal_step(step, signal.SIGKILL)
        deadline = time.monotonic() + END_SECONDS
        while self._srun.poll() is None and time.monotonic() < deadline:
            self.listen()
            if self.findings.lost and step and time.monotonic() > deadline - 15:
                break
            time.sleep(0.1)
        if self._srun.poll() is None:
            self._srun.kill()
        self._srun.wait()
        self.code()

    def _read(self) -> None:
        assert self._srun.stdout is not None
        with contextlib.suppress(ValueError):
            for line in self._srun.stdout:
                self._lines.put(line)

    def _ask_for_step(self) -> str:
        """Returns the newest step of this job apart from its guards, which is ours if no node has
        connected yet."""
        job = os.environ.get("SLURM_JOB_ID", "")
        shown = ask("squeue", "--steps", "--noheader", f"--jobs={job}", "--format=%i %j")
        steps = [int(number) for number in re.findall(rf"{job}\.(\d+) (?!guard\b)", shown)]
        return f"{job}.{max(steps)}" if job and steps else ""


@dataclass
class Watched:
    """An attempt in progress: its ranks, and what the agents of its nodes report about them."""

    attempt: Attempt
    dog: Watchdog
    board: Switchboard
    here: str = ""
    """The node that this process runs on."""
    wires: dict[Wire, str] = field(default_factory=dict)
    hung_up: dict[str, float] = field(default_factory=dict)
    stacks: dict[int, str] = field(default_factory=dict)

    def hear(self) -> None:
        self.attempt.listen()
        now = time.monotonic()
        while not self.board.inbox.empty():
            wire, message = self.board.inbox.get()
            if message is None:
                node = self.wires.pop(wire, "")
                if node:
                    self.hung_up[node] = now
            elif "node" in message:
                node = message["node"]
                # It may reconnect before the end of its last connection is noticed.
                self.wires = {w: other for w, other in self.wires.items() if other != node}
                self.wires[wire] = node
                self.hung_up.pop(node, None)
                self.attempt.step_id = self.attempt.step_id or message["step"]
                self.dog.call(node, now)
            elif "beats" in message and wire in self.wires:
                self.dog.hear(self.wires[wire], message["beats"], now)
            elif "stacks" in message:
                self.stacks.update({int(rank): text for rank, text in message["stacks"].items()})

    def silent_nodes(self) -> list[str]:
        """Returns nodes whose agents are silent, that srun has not reported on, and whose ranks had
        not ended."""
        now = time.monotonic()
        hung_up = [n for n, since in self.hung_up.items() if now - since > HANG_UP_SECONDS]
        ended = self._nodes_that_ended()
        silent = dict.fromkeys([*hung_up, *self.dog.silent_nodes(now)])
        return [node for node in silent if node not in ended]

    def lost_nodes(self) -> list[str]:
        """Returns silent nodes that show no other sign of life. Ranks wait for one another, so a
        completed step means that every node is alive, and so is the node of this process."""
        if self.dog.is_advancing(time.monotonic()):
            return []
        return [node for node in self.silent_nodes() if node != self.here]

    def undecided_nodes(self, since: float) -> list[str]:
        """Returns nodes that have been silent since then and may or may not be lost."""
        decided = {*self.attempt.findings.lost, *self._nodes_that_ended(), self.here}
        return [node for node in self.dog.quiet_nodes(since) if node not in decided]

    def _nodes_that_ended(self) -> set[str]:
        """Returns nodes whose ranks have ended, or where srun reports that one has."""
        findings, ranks = self.attempt.findings, self.dog.ranks.values()
        ended = {node for end in findings.ends for node in end.nodes}
        ended |= {said.node for said in findings.said}
        ended |= {rank.node for rank in ranks if rank.is_over or not rank.state}
        return ended | {node for node, _ in findings.ended.values()}

    def gone_ranks(self) -> dict[int, float]:
        """Returns ranks that ended during training before any error was reported, with the time
        that this was noticed. A rank that fails brings down others, and so does srun; those end
        after the first report."""
        findings = self.attempt.findings
        gone = dict(self.dog.gone_ranks(time.monotonic()))
        for rank, (_, since) in findings.ended.items():
            known = self.dog.ranks.get(rank)
            if known is None or known.phase < Phase.ENDING:
                gone.setdefault(rank, since)
        spoke = {said.rank for said in findings.said}
        word = findings.first_word
        return {
            rank: since
            for rank, since in gone.items()
            if rank not in spoke and (word is None or since < word)
        }

    def is_to_end(self) -> bool:
        """Whether a rank has failed and the others must be ended. srun should do that, but it
        depends on Slurm's controller, which may be slow; until then they would seem to hang."""
        now, word = time.monotonic(), self.attempt.findings.first_word
        if word is not None and now - word > WORD_SECONDS:
            return True
        gone = self.gone_ranks()
        is_known = any(now - since > GONE_SECONDS for since in gone.values())
        return is_known and self.dog.any_rank_waits_for(gone)

    def close(self) -> None:
        """Marks the attempt as over: what happens to its ranks from now on is not a cause."""
        findings = self.attempt.findings
        for rank in self.gone_ranks():
            known = self.dog.ranks.get(rank)
            findings.gone[rank] = known.node if known else findings.ended[rank][0]
        findings.is_closed = True

    def forgive(self) -> None:
        """Resets the clocks of silent nodes after this process itself was paused."""
        now = time.monotonic()
        self.dog.forgive(now)
        self.hung_up = dict.fromkeys(self.hung_up, now)

    def ask_all(self, order: Message) -> None:
        for wire in list(self.wires):
            try:
                wire.send(order)
            except OSError:
                continue  # the inbox reports its end


def keep_stacks(folder: Path, stacks: Mapping[int, str], ranks: Iterable[Heard]) -> Path:
    """Writes all stacks into one file, starting with the ranks that are behind."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "stacks.txt"
    with path.open("w") as file:
        for heard in sorted(ranks, key=lambda heard: (heard.place, heard.rank)):
            text = stacks.get(heard.rank, "its node did not respond")
            file.write(
                f"rank {heard.rank} on {heard.node}: step {heard.step}, {heard.phase.words} for "
                f"{heard.age:.1f} s, process state {heard.state or 'gone'}\n{text}\n\n"
            )
    return path


def odd_ranks(stacks: Mapping[int, str]) -> list[int]:
    """Returns the ranks that do not wait for others while most do; otherwise those at a different
    place in the code than most; none if there is no clear minority."""
    waiting = {rank: _is_waiting(text) for rank, text in stacks.items()}
    own_way = sorted(rank for rank, waits in waiting.items() if not waits)
    if own_way and 2 * len(own_way) < len(stacks):
        return own_way
    places = {rank: _place(text) for rank, text in stacks.items()}
    common = Counter(places.values()).most_common(1)
    if not common or 2 * common[0][1] <= len(stacks):
        return []
    return sorted(rank for rank, place in places.items() if place != common[0][0])


def _main_thread(text: str) -> list[re.Match[str]]:
    """Returns the frames of the training thread, innermost first."""
    threads = re.split(r"^(?:Current thread|Thread) .*$", text, flags=re.MULTILINE)
    ours = [thread for thread in threads if "in train_rank" in thread] or threads[-1:]
    return list(FRAME.finditer(ours[-1])) if ours else []


def _is_waiting(text: str) -> bool:
    inner = _main_thread(text)[:INNERMOST]
    return any(
        re.search(r"torch/(distributed|_ops|autograd/graph)", frame["file"]) for frame in inner
    )


def _place(text: str) -> str:
    """Returns where the rank is in our own code or the user's."""
    for frame in _main_thread(text):
        if "site-packages" not in frame["file"] and "/torch/" not in frame["file"]:
            return f"{frame['file']}:{frame['line']}"
    return ""
