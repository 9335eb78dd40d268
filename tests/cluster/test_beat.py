"""Signs of life: what one process writes, another reads whole."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from overland.cluster.agent import PIPES, dump, state_of, under_watch
from overland.cluster.beat import BEATS, Beat, Phase, beats_folder, beats_prefix, read_signs
from overland.cluster.world import World

WRITER = """
import sys
from pathlib import Path
from overland.cluster.beat import Beat, Phase
beat = Beat(3, Path(sys.argv[1]))
print("ready", flush=True)
while True:
    for step in range(1, 10**6):
        beat.enter(Phase.COMPUTING, step)
"""
STUCK = """
import sys, time
from overland.cluster.beat import beating
with beating(0):
    print("ready", flush=True)
    time.sleep(1000)
"""


def test_a_sign_is_read_as_it_was_written(tmp_path: Path) -> None:
    beat = Beat(7, tmp_path)
    beat.probe_seconds = 0.5
    beat.enter(Phase.SAVING, 12)
    [sign] = read_signs(tmp_path)
    assert (sign.rank, sign.step, sign.phase, sign.probe_seconds) == (7, 12, Phase.SAVING, 0.5)
    assert state_of(sign.pid) == "R"


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
    folder = beats_folder(env)
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
    assert beats_prefix("12", 1) != beats_prefix("12", 1)


def test_a_rank_that_leaves_by_itself_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With exit code 0 srun has nothing to say, and the others would blame the network."""
    monkeypatch.setenv(PIPES, "")  # to have it as it was afterwards
    world = World(rank=3, size=4, local_rank=1, local_size=2)
    with pytest.raises(SystemExit), under_watch(world, {BEATS: str(tmp_path / "beats")}):
        raise SystemExit(0)
    assert '"kind": "code error", "what": "it left, by SystemExit(0)"' in capsys.readouterr().out


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
    with pytest.raises(SystemExit), under_watch(world, {BEATS: str(tmp_path / "beats")}):
        leave()
    assert '"kind": "network", "what": "it left, by SystemExit(1), for' in capsys.readouterr().out
