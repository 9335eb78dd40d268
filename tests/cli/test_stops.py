"""Sessions that end early, as a cluster ends them: every way saves, exits with 75, and resumes with
the bits of an unbroken run."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import random
import signal
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path

import pytest

from overland.apps.proofs.checkpoint import verify
from overland.checkpoint.folder import latest_checkpoint, list_checkpoints
from tests.cli.processes import (
    TINY,
    environment,
    interrupt,
    losses,
    overland,
    start_overland,
    wait_for_step,
)
from tests.cli.warm import Command
from tests.waiting import LIMIT_SECONDS, wait_until

STOPPED = 75
RUN = Path("runs/quickstart")
WORDS = [
    "train", "quickstart", *TINY, "debug.deterministic=true", "validation.enable=false",
    "training.dataset=random", "metrics.enable_tensorboard=false", "metrics.sample_prompt=",
]  # fmt: skip

ENDLESS = """\
import pathlib, time
import torch
from overland.training.callbacks import Callback, register_callback

@register_callback
class Endless(Callback):
    def on_step(self, run):
        pathlib.Path(f"endless.{run.world.rank}").touch()
        if run.world.rank == 0 < run.world.size - 1:
            torch.distributed.barrier()  # where no signal is seen
        time.sleep(600)
"""

LATE = """\
import os, signal
from overland.apps.convert import exports

def export_hf(run, export=exports.export_hf):
    os.kill(os.getpid(), signal.SIGUSR1)
    export(run)

exports.export_hf = export_hf

class Late:
    def __del__(self, kill=os.kill, process=os.getpid(), number=signal.SIGUSR1):
        kill(process, number)  # when Python has given back its handlers

late = Late()
"""


MANY = 300  # no test stops a run so late
LONG = pytest.mark.long


def steps(count: int) -> list[str]:
    return [f"training.steps={count}", "lr_scheduler.total_steps=2000"]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Losses of a run that never stopped."""
    folder = tmp_path_factory.mktemp("unbroken")
    overland(*WORDS, *steps(MANY), "checkpoint.enable=false", cwd=folder, NGPU="1")
    return losses(folder / RUN / "metrics.jsonl")


def goes_on(folder: Path, unbroken: dict[int, float], stopped: int) -> None:
    """From where it stopped, with the same bits."""
    end = stopped + 3
    overland("train", str(RUN / "config.toml"), *steps(end), cwd=folder, NGPU="1")
    got = losses(folder / RUN / "metrics.jsonl")
    assert got == {step: loss for step, loss in unbroken.items() if step <= end}


def newest(folder: Path) -> Path:
    path = latest_checkpoint(folder / RUN / "checkpoint")
    assert path is not None
    assert verify(path) == []
    return path


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGUSR1,
        pytest.param(signal.SIGUSR2, marks=LONG),
        pytest.param(signal.SIGTERM, marks=LONG),
    ],
)
def test_a_signal_saves_and_stops(
    tmp_path: Path, unbroken: dict[int, float], number: signal.Signals
) -> None:
    process = start_overland(*WORDS, *steps(MANY), cwd=tmp_path, NGPU="1")
    wait_for_step(tmp_path / RUN / "metrics.jsonl", 4)
    code, output = interrupt(process, number)
    assert code == STOPPED, output
    stopped = max(losses(tmp_path / RUN / "metrics.jsonl"))
    assert f"stopping after step {stopped}: received a signal ({number.name})" in output
    assert newest(tmp_path).name == f"step_{stopped}.preempt"
    goes_on(tmp_path, unbroken, stopped)


@pytest.mark.parametrize("num_ranks", ["1", pytest.param("2", marks=LONG)])
def test_a_terminal_that_is_closed_saves_and_stops(tmp_path: Path, num_ranks: str) -> None:
    """As when an ssh connection breaks: SIGHUP, and whatever is printed from then on fails."""
    terminal, theirs = pty.openpty()

    def own_terminal() -> None:
        fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)

    def read_all() -> None:
        with contextlib.suppress(OSError):
            while os.read(terminal, 65536):
                pass

    process = subprocess.Popen(
        [sys.executable, "-m", "overland", *WORDS, *steps(MANY)],
        cwd=tmp_path,
        env=environment(NGPU=num_ranks),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=own_terminal,
    )
    os.close(theirs)
    reader = threading.Thread(target=read_all, daemon=True)
    reader.start()
    wait_for_step(tmp_path / RUN / "metrics.jsonl", 4)
    os.close(terminal)
    assert process.wait(LIMIT_SECONDS) == STOPPED
    stopped = max(losses(tmp_path / RUN / "metrics.jsonl"))
    assert newest(tmp_path).name == f"step_{stopped}.preempt"


@pytest.mark.parametrize("num_ranks", [pytest.param("1", marks=LONG), "2"])
def test_a_reader_that_goes_away_first_keeps_no_run_from_saving(
    tmp_path: Path, num_ranks: str
) -> None:
    """As `tee` does in `overland train … | tee log`, when Ctrl-C reaches both."""
    reads, writes = os.pipe()
    process = Command([*WORDS, *steps(MANY)], tmp_path, environment(NGPU=num_ranks), into=writes)
    os.close(writes)
    wait_for_step(tmp_path / RUN / "metrics.jsonl", 4)
    os.close(reads)
    wait_for_step(
        tmp_path / RUN / "metrics.jsonl", 1 + max(losses(tmp_path / RUN / "metrics.jsonl"))
    )
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait() == STOPPED
    stopped = max(losses(tmp_path / RUN / "metrics.jsonl"))
    assert newest(tmp_path).name == f"step_{stopped}.preempt"


def test_nohup_keeps_a_run_from_stopping_when_the_terminal_is_closed() -> None:
    program = "import signal, overland.world.signals as s; print(signal.SIGHUP in s.SIGNALS)"
    for words, answers in ([], "True"), (["nohup"], "False"):
        done = subprocess.run(
            [*words, sys.executable, "-c", program],
            env=environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT_SECONDS,
        )
        assert done.stdout.strip() == answers, done.stderr


def test_a_signal_to_one_rank_stops_all(tmp_path: Path) -> None:
    process = start_overland(*WORDS, *steps(MANY), cwd=tmp_path, NGPU="2")
    wait_for_step(tmp_path / RUN / "metrics.jsonl", 4)
    children = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True, check=True
    ).stdout.split()
    os.kill(int(children[-1]), signal.SIGUSR1)
    output, _ = process.communicate(timeout=LIMIT_SECONDS)
    assert process.returncode == STOPPED, output
    assert newest(tmp_path).name.endswith(".preempt")


def test_a_signal_during_the_start_is_a_stop(tmp_path: Path) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        process = start_overland(*WORDS, *steps(100_000), cwd=tmp_path, NGPU="1")
        wait_until(lambda process=process: catches(process.pid, signal.SIGTERM))
        code, output = interrupt(process, number)
        assert code == STOPPED, output


def test_a_warning_after_the_last_step_neither_ends_the_export_nor_kills(tmp_path: Path) -> None:
    """Slurm's warning of the time limit may come when the run is finished anyway."""
    (tmp_path / "late.py").write_text(LATE)
    more = [*steps(2), "job.custom_import=late", "checkpoint.last_save_in_hf=true"]
    done = subprocess.run(
        [sys.executable, "-m", "overland", *WORDS, *more],
        cwd=tmp_path, env=environment(NGPU="1"), capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert list((tmp_path / RUN).glob("**/model.safetensors"))


def catches(pid: int, number: signal.Signals) -> bool:
    """Whether a process has a handler of its own for a signal."""
    status = Path(f"/proc/{pid}/status").read_text()
    mask = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt"))
    return bool(int(mask, 16) >> (number - 1) & 1)


def test_an_interrupt_of_the_launcher_alone_reaches_the_ranks(tmp_path: Path) -> None:
    process = start_overland(*WORDS, *steps(100_000), cwd=tmp_path, NGPU="2")
    wait_for_step(tmp_path / RUN / "metrics.jsonl", 4)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=LIMIT_SECONDS)
    assert process.returncode == STOPPED, output
    assert newest(tmp_path).name.endswith(".preempt")


@pytest.mark.parametrize("num_ranks", [pytest.param("1", marks=LONG), "2"])
def test_a_second_ctrl_c_ends_at_once_with_one_sentence(tmp_path: Path, num_ranks: str) -> None:
    """The first one asks for a stop after the step, which here is not over for long."""
    (tmp_path / "endless.py").write_text(ENDLESS)
    words = [*WORDS, *steps(100_000), "job.custom_import=endless"]
    process = start_overland(*words, cwd=tmp_path, NGPU=num_ranks)
    wait_until(lambda: len(list(tmp_path.glob("endless.[01]"))) == int(num_ranks) or process.poll())
    os.killpg(process.pid, signal.SIGINT)
    time.sleep(1.5)  # Ctrl-C again within a second is the same one
    code, output = interrupt(process, signal.SIGINT)
    assert code == 130, output
    assert "Traceback" not in output
    assert "ended at once; the last checkpoint is kept" in output


def test_a_stop_file_saves_stops_and_is_gone(tmp_path: Path) -> None:
    process = start_overland(*WORDS, *steps(MANY), cwd=tmp_path, NGPU="1")
    wait_for_step(tmp_path / RUN / "metrics.jsonl", 4)
    (tmp_path / RUN / "STOP").touch()
    output, _ = process.communicate(timeout=LIMIT_SECONDS)
    assert process.returncode == STOPPED, output
    assert "found a file STOP in the run folder" in output
    assert not (tmp_path / RUN / "STOP").exists()
    assert newest(tmp_path).name.endswith(".preempt")


def test_a_stop_file_from_before_does_not_stop_a_new_session(tmp_path: Path) -> None:
    (tmp_path / RUN).mkdir(parents=True)
    (tmp_path / RUN / "STOP").touch()
    done = overland(*WORDS, *steps(3), cwd=tmp_path, NGPU="1")
    assert f"note: removed {RUN}/STOP, left from before; it would have stopped" in done.stderr
    assert not (tmp_path / RUN / "STOP").exists()


def test_a_session_ends_when_its_time_is_over(tmp_path: Path) -> None:
    words = [*WORDS, *steps(100_000), "checkpoint.stop_after_minutes=0.02"]
    done = overland(*words, cwd=tmp_path, NGPU="1", code=STOPPED)
    assert "checkpoint.stop_after_minutes has passed" in done.stdout
    assert newest(tmp_path).name.endswith(".preempt")


def test_a_slurm_job_saves_before_its_end(tmp_path: Path) -> None:
    words = [*WORDS, *steps(100_000), "checkpoint.walltime_margin_minutes=9.9"]
    end = str(int(time.time()) + 600)
    done = overland(*words, cwd=tmp_path, NGPU="1", code=STOPPED, SLURM_JOB_END_TIME=end)
    assert "the job's time limit is near" in done.stdout
    assert newest(tmp_path).name.endswith(".preempt")


def test_saves_by_the_clock(tmp_path: Path) -> None:
    words = [*WORDS, *steps(100), "checkpoint.interval_minutes=0.001", "checkpoint.interval=100000"]
    overland(*words, "checkpoint.keep_latest_k=0", cwd=tmp_path, NGPU="1")
    found = [one.step for one in list_checkpoints(tmp_path / RUN / "checkpoint")]
    assert len(found) > 2
    assert found[-1] == 100


@pytest.mark.parametrize("attempt", [0, *(pytest.param(i, marks=pytest.mark.long) for i in (1, 2))])
def test_killed_at_random_moments_a_run_ends_with_the_right_bits(
    tmp_path: Path, unbroken: dict[int, float], attempt: int
) -> None:
    """SIGKILL, again and again, while every step is being saved."""
    chance = random.Random(attempt)
    words = [*steps(60), "checkpoint.interval=1", "checkpoint.keep_latest_k=2"]
    metrics = tmp_path / RUN / "metrics.jsonl"
    reached = 0
    for _ in range(3):
        process = start_overland(*WORDS, *words, cwd=tmp_path, NGPU="1")
        wait_for_step(metrics, min(reached + 3, 58))
        time.sleep(chance.random() * 0.2)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        reached = list_checkpoints(tmp_path / RUN / "checkpoint")[-1].step
        newest(tmp_path)
    overland(*WORDS, *words, cwd=tmp_path, NGPU="1")
    assert losses(metrics) == {step: loss for step, loss in unbroken.items() if step <= 60}


@pytest.mark.long
def test_a_save_that_fails_is_told_and_training_goes_on(tmp_path: Path) -> None:
    """The folder of checkpoints cannot be written to for a while."""
    words = [*WORDS, *steps(MANY), "checkpoint.interval=10"]
    process = start_overland(*words, cwd=tmp_path, NGPU="1")
    folder = tmp_path / RUN / "checkpoint"
    wait_for_step(tmp_path / RUN / "metrics.jsonl", 15)
    folder.rename(folder.with_name("elsewhere"))
    folder.write_text("a file where the folder should be")
    reached = max(losses(tmp_path / RUN / "metrics.jsonl"))
    wait_for_step(tmp_path / RUN / "metrics.jsonl", reached + 30)
    folder.unlink()
    folder.with_name("elsewhere").rename(folder)
    output, _ = process.communicate(timeout=LIMIT_SECONDS)
    assert process.returncode == 0, output
    assert "was not saved" in output
    assert newest(tmp_path).name == f"step_{MANY}"


def test_a_last_save_that_fails_is_an_error(tmp_path: Path) -> None:
    words = [*WORDS, *steps(300), "checkpoint.interval=1000"]
    process = start_overland(*words, cwd=tmp_path, NGPU="1")
    wait_for_step(tmp_path / RUN / "metrics.jsonl", 3)
    folder = tmp_path / RUN / "checkpoint"
    folder.rename(folder.with_name("elsewhere"))
    folder.write_text("a file where the folder should be")
    output, _ = process.communicate(timeout=LIMIT_SECONDS)
    assert process.returncode == 74, output  # the code says that weights were not saved
    assert "the last save failed" in output
