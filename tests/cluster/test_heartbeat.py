"""Heartbeats: what one process writes, another never reads half-written."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from overland.cluster.agent import PIPES, dump, heartbeat_folder, kept_agent, under_watch
from overland.cluster.supervise.attempt import Watched, heartbeat_prefix
from overland.cluster.supervise.faults import Findings
from overland.cluster.supervise.watchdog import Watchdog
from overland.cluster.wire import Switchboard
from overland.errors import ClusterError, DataError, Kind, OutOfMemoryError
from overland.processes import state_of
from overland.world import World
from overland.world.heartbeat import (
    HEARTBEATS,
    Heartbeat,
    Phase,
    Transfer,
    behind,
    read_signs,
    reporting,
    waited_for,
)
from overland.world.signals import SAYS
from tests.waiting import wait_until

WRITER = """
import sys
from pathlib import Path
from overland.world.heartbeat import Heartbeat, Phase
beat = Heartbeat(3, Path(sys.argv[1]))
print("ready", flush=True)
while True:
    for step in range(1, 10**6):
        beat.enter(Phase.COMPUTING, step)
"""
STUCK = """
import sys, time
from overland.cluster.agent import under_watch
from overland.world import World
with under_watch(World(0, 2, local_rank=1, local_size=2)):
    print("ready", flush=True)
    time.sleep(1000)
"""


def test_a_sign_is_read_as_it_was_written(tmp_path: Path) -> None:
    beat = Heartbeat(7, tmp_path)
    beat.probe_seconds = 0.5
    beat.enter(Phase.SAVING, 12)
    [sign] = read_signs(tmp_path)
    assert (sign.rank, sign.step, sign.phase, sign.probe_seconds) == (7, 12, Phase.SAVING, 0.5)
    assert state_of(sign.pid) == "R"


@pytest.mark.parametrize(
    ("places", "named"),
    [
        ([(5, Phase.COMPUTING), (5, Phase.ENDING)], [0]),
        ([(6, Phase.DATA), (5, Phase.REPORTING)], [1]),
        ([(5, Phase.COMPUTING), (5, Phase.COMPUTING)], []),
        ([(0, Phase.BUILDING), (0, Phase.LOADING)], []),  # it may have loaded before the other
        ([(0, Phase.VALIDATING), (0, Phase.BUILDING)], []),
        ([(3, Phase.DATA), (5, Phase.SAVING)], []),  # it may have returned to an earlier step
        ([(5, Phase.DATA)], []),
        ([(5, Phase.DATA), (5, Phase.ENDING), (5, Phase.ENDING)], [0]),
        ([(5, Phase.DATA), (5, Phase.DATA), (5, Phase.ENDING)], []),  # one may wait for the other
    ],
)
def test_the_rank_that_is_surely_behind_is_named(
    places: list[tuple[int, Phase]], named: list[int]
) -> None:
    assert behind(dict(enumerate(places))) == named


def test_nobody_is_named_while_a_rank_without_a_heartbeat_may_be_further_behind(
    tmp_path: Path,
) -> None:
    Heartbeat(0, tmp_path).enter(Phase.BUILDING)
    Heartbeat(1, tmp_path).enter(Phase.JOINING)
    signs = read_signs(tmp_path)
    assert waited_for(signs, 2).startswith("the others waited for rank 1, which was behind them")
    assert waited_for(signs, 3) == ""


def test_no_reader_sees_half_a_sign(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        try:
            for _ in range(3000):
                for sign in read_signs(tmp_path):
                    assert sign.pid == writer.pid
                    assert sign.since > 0
                    assert sign.phase is (Phase.COMPUTING if sign.step else Phase.STARTING)
        finally:
            writer.kill()


def test_the_stacks_of_a_rank_are_to_be_had_whatever_it_does(tmp_path: Path) -> None:
    env = {"OVERLAND_BEATS": str(tmp_path / "beats"), "SLURMD_NODENAME": "n1"}
    folder = heartbeat_folder(env)
    assert folder is not None
    assert folder.stat().st_mode & 0o777 == 0o700
    with subprocess.Popen([sys.executable, "-c", STUCK], env=env, stdout=subprocess.PIPE) as rank:
        assert rank.stdout is not None
        rank.stdout.readline()
        try:
            [text] = dump(folder, read_signs(folder)).values()
        finally:
            rank.kill()
    assert "most recent call first" in text
    assert "<module>" in text


def test_two_starts_of_one_job_never_share_a_folder() -> None:
    assert heartbeat_prefix("12", 1) != heartbeat_prefix("12", 1)


def test_a_rank_that_leaves_by_itself_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With exit code 0 srun has nothing to say, and the others would blame the network."""
    monkeypatch.setenv(PIPES, "")  # to have it as it was afterwards
    world = World(rank=3, size=4, local_rank=1, local_size=2)
    with pytest.raises(SystemExit), under_watch(world, {HEARTBEATS: str(tmp_path / "beats")}):
        raise SystemExit(0)
    assert '"kind": "code error", "what": "exited with SystemExit(0)"' in capsys.readouterr().out


def test_leaving_for_what_another_rank_did_is_no_mistake_in_the_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(PIPES, "")

    def leave() -> None:
        try:
            raise ConnectionError("Connection closed by peer")
        except ConnectionError:
            sys.exit(1)

    world = World(rank=1, size=2, local_rank=1, local_size=2)
    with pytest.raises(SystemExit), under_watch(world, {HEARTBEATS: str(tmp_path / "beats")}):
        leave()
    assert (
        '"kind": "network", "what": "exited with SystemExit(1), caused' in capsys.readouterr().out
    )


@pytest.fixture
def board() -> Iterator[Switchboard]:
    board = Switchboard(others=[], env={})
    yield board
    board.close()


class Ended:
    """Of an attempt, what `Watched` asks for; nothing has ended."""

    def __init__(self) -> None:
        self.findings, self.step_id = Findings(2), ""

    def listen(self) -> None:
        pass


def watching(board: Switchboard, *nodes: str) -> Watched:
    dog = Watchdog(60.0, nodes, started=time.monotonic())
    return Watched(Ended(), dog, board)  # type: ignore[arg-type]


def agents_of(folder: Path) -> list[int]:
    """Processes of agents whose beats lie there."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            command = (entry / "cmdline").read_bytes()
            environ = (entry / "environ").read_bytes()
        except OSError:
            continue
        if command.endswith(b"-m\0overland.cluster.agent\0") and str(folder).encode() in environ:
            found.append(int(entry.name))
    return found


def test_an_agent_that_is_killed_stopped_or_cut_off_is_there_again(
    board: Switchboard, tmp_path: Path
) -> None:
    prefix = str(tmp_path / "beats")
    env = {**os.environ, **board.environment(), HEARTBEATS: prefix, "SLURMD_NODENAME": "n1"}
    watched = watching(board, "n1", "n2")
    folder = heartbeat_folder(env)
    assert folder is not None
    beat = Heartbeat(0, folder)

    def wait_for_step(step: int) -> None:
        beat.enter(Phase.COMPUTING, step)

        def is_heard_of() -> bool:
            watched.hear()
            return watched.dog.step >= step and "n1" in watched.wires.values()

        wait_until(is_heard_of, f"step {step} is heard of")
        assert "n1" not in watched.hung_up

    with kept_agent(env):
        wait_for_step(1)
        [agent] = agents_of(tmp_path)
        os.kill(agent, signal.SIGTERM)  # which is for ranks
        wait_for_step(2)
        assert agents_of(tmp_path) == [agent]
        for step, number in ((3, signal.SIGKILL), (4, signal.SIGSTOP)):
            [agent] = agents_of(tmp_path)
            os.kill(agent, number)
            wait_until(lambda agent=agent: agents_of(tmp_path) != [agent])
            wait_for_step(step)
        for wire in list(watched.wires):  # the network loses the connection
            wire.socket.shutdown(socket.SHUT_RDWR)
        beat.enter(Phase.COMPUTING, 5)
        while not watched.hung_up:
            watched.hear()
        wait_for_step(5)
        watched.ask_all({"bye": True})
        wait_until(lambda: not agents_of(tmp_path))
    assert not folder.exists(), "an agent that was told to go tidies up"


def test_a_node_is_not_lost_while_steps_are_done(board: Switchboard) -> None:
    watched, now = watching(board, "n1", "n2"), time.monotonic()
    beats = [0, 7, Phase.COMPUTING, 0.1, 0.0, 0.0, "S", Transfer.NONE, 0.0, 0, 0]
    for node in ("n1", "n2"):
        watched.dog.call(node, now - 300)
    watched.hung_up["n2"] = now - 300
    watched.dog.hear("n1", [beats], now - 200)
    assert watched.lost_nodes() == ["n2", "n1"]
    beats[1] = 8
    watched.dog.hear("n1", [beats], time.monotonic())
    assert watched.lost_nodes() == []
    assert watched.silent_nodes() == ["n2"], "which is told"


def test_the_node_of_the_supervisor_is_not_lost(board: Switchboard) -> None:
    watched = watching(board, "n1", "n2")
    watched.here = "n1"
    for node in ("n1", "n2"):
        watched.dog.call(node, time.monotonic() - 300)
    assert watched.lost_nodes() == ["n2"]


def said_by(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    lines = capsys.readouterr().out.splitlines()
    return [json.loads(line.removeprefix(SAYS)) for line in lines if line.startswith(SAYS)]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (OutOfMemoryError("out of this GPU's memory"), Kind.MEMORY),
        (ClusterError("rank 2 of 4 did not join within 40 s"), Kind.NETWORK),
        (DataError("a document is no text"), Kind.DATA),
        (IndexError("index 99"), Kind.CODE),
    ],
)
def test_the_error_that_ends_a_rank_is_said_once_and_before_it_leaves_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], error: Exception, kind: Kind
) -> None:
    """Our own errors have an exit code as well, and are no less an error for it."""
    env = {HEARTBEATS: str(tmp_path / "beats")}
    heard_inside = []

    def train() -> None:
        with under_watch(World(3, 4, 1, 2), env) as beat:
            with contextlib.suppress(type(error)), reporting(beat):
                raise error
            heard_inside.extend(said_by(capsys))
            raise error

    with pytest.raises(type(error)):
        train()
    assert [(said["rank"], said["kind"]) for said in heard_inside] == [(3, kind)]
    assert said_by(capsys) == []


def test_the_end_of_a_command_is_no_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    env = {HEARTBEATS: str(tmp_path / "beats")}
    with pytest.raises(typer.Exit), under_watch(World(3, 4, 1, 2), env):
        raise typer.Exit(75)
    assert said_by(capsys) == []
