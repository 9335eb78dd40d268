"""What `tests/cli` does not show: ranks do not outlive their launcher."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from overland.world.flight_recorder import NAME
from overland.world.launch import TIMED_OUT, _show_end_of, free_port, launch_local
from tests.cli.processes import TINY, environment, start_overland, wait_for_step
from tests.cluster.supervised import parent_of
from tests.cluster.test_flight_recorder import entry, record, write_records
from tests.waiting import wait_until

LAUNCHER = """
import subprocess, time
from overland.world.launch import _end_with_launcher

rank = subprocess.Popen(["sleep", "60"], preexec_fn=_end_with_launcher())
print(rank.pid, flush=True)
time.sleep(60)
"""

HANGING = """
import signal
from overland.training.callbacks import Callback, register_callback

@register_callback
class Hanging(Callback):
    def on_step(self, run):
        if run.world.rank == 1 and run.progress.step == 3:
            signal.pause()
"""


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.skipif(sys.platform != "linux", reason="the system call is Linux's")
def test_a_rank_ends_when_its_launcher_is_killed() -> None:
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER], env=environment(), stdout=subprocess.PIPE, text=True
    )
    assert launcher.stdout is not None
    rank = int(launcher.stdout.readline())
    assert is_alive(rank)
    launcher.send_signal(signal.SIGKILL)
    launcher.wait()
    wait_until(lambda: not is_alive(rank))


@pytest.fixture
def folder_of_namesakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with files that are named like modules of Python's own."""
    for name in ("random", "queue", "tempfile"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('a file of the user')")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_users_file_named_like_a_module_of_python_is_not_imported_by_ranks(
    folder_of_namesakes: Path,
) -> None:
    (folder_of_namesakes / "types.py").write_text("raise ImportError('a file of the user')")
    assert launch_local(["train", "--help"], 2, [], folder_of_namesakes / "logs") == 0


def test_nor_by_ranks_that_torchrun_started(folder_of_namesakes: Path) -> None:
    rank = [sys.executable, "-m", "overland", "train", "--help"]
    done = subprocess.run(rank, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_ranks_import_a_users_own_module_from_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_parts.py").write_text("open('imported', 'a').close()")
    monkeypatch.chdir(tmp_path)
    words = ["check", "quickstart", "job.custom_import=my_parts"]
    assert launch_local(words, 1, [], tmp_path / "logs") == 0, (tmp_path / "logs").read_text()
    assert (tmp_path / "imported").exists()


def test_a_free_port_can_be_bound() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", free_port()))


def test_an_error_that_all_ranks_find_is_printed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    logs = tmp_path / "logs"
    assert launch_local(["check", "not_here.toml"], 1, [0], logs) == 2
    printed = capfd.readouterr().err.strip()
    assert "not_here.toml" in printed
    assert list(logs.iterdir()) == []
    log = logs / "rank_1.log"
    log.write_text(f"a warning\n{printed}\n")
    _show_end_of(log, 1, 0, printed)
    assert capfd.readouterr().err == ""
    assert launch_local(["check", "not_here.toml"], 2, [0], logs) != 0
    assert capfd.readouterr().err.count(printed) == 1


def test_the_end_of_a_log_is_of_this_session(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "rank_1.log"
    log.write_text("an earlier error\n")
    before = log.stat().st_size
    with log.open("a") as file:
        file.write("this error\n")
    _show_end_of(log, 1, before, "another error")
    said = capsys.readouterr().err
    assert "this error" in said
    assert "an earlier error" not in said


def test_the_rank_that_the_others_waited_for_is_named(tmp_path: Path) -> None:
    words = [*TINY, "training.dataset=random", "training.steps=100000", "checkpoint.enable=false",
             "comm.train_timeout_seconds=4", "validation.enable=false"]  # fmt: skip
    started = start_overland("train", "quickstart", *words, cwd=tmp_path, NGPU="3")
    wait_for_step(tmp_path / "runs/quickstart/metrics.jsonl", 3)
    stopped = ranks_of(started.pid)[1]
    os.kill(stopped, signal.SIGSTOP)
    assert started.wait() != 0
    assert "the others waited for rank 1, which was stopped (SIGSTOP): at step" in started.stdout
    assert not is_alive(stopped)


def test_a_rank_that_hangs_in_code_of_its_own_is_named(tmp_path: Path) -> None:
    (tmp_path / "hanging.py").write_text(HANGING)
    words = [*TINY, "training.dataset=random", "training.steps=1000", "checkpoint.enable=false",
             "comm.train_timeout_seconds=4", "validation.enable=false",
             "job.custom_import=hanging", "metrics.log_freq=1000"]  # fmt: skip
    started = start_overland("train", "quickstart", *words, cwd=tmp_path, NGPU="2")
    assert started.wait() != 0
    assert "the others waited for rank 1, which was behind them: at step" in started.stdout


def test_the_launcher_says_who_was_waited_for_before_it_removes_the_records(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    waiting = record(entry("world", 5, False), world="[0, 1, 2]")
    write_records(tmp_path, {0: waiting, 1: waiting})
    assert launch_local(["--help"], 1, [0], tmp_path) == 0
    assert (
        "note: when this run last ended, rank 2 did not join ranks 0, 1" in capfd.readouterr().err
    )
    assert not list(tmp_path.glob(f"{NAME}*"))


def test_only_collectives_count_as_waiting_for_a_rank() -> None:
    gloo = "[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting"
    assert TIMED_OUT.search(gloo)
    assert not TIMED_OUT.search("data.example.org: Read timed out. (read timeout=10)")


def ranks_of(launcher: int) -> list[int]:
    """The processes of the ranks, in order."""
    found = [int(path.parent.name) for path in Path("/proc").glob("[0-9]*/stat")]
    return sorted(pid for pid in found if parent_of(pid) == launcher)
