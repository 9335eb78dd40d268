"""`overland train` from the outside: real processes, real signals."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from overland.cli import train
from overland.training import main
from overland.world import World, signals
from overland.world.heartbeat import Heartbeat
from overland.world.signals import LAUNCHED
from tests.cli.processes import (
    ROOT,
    TINY,
    environment,
    interrupt,
    losses,
    overland,
    read_metrics,
    start_overland,
    wait_for_step,
)
from tests.waiting import LIMIT_SECONDS


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The quickstart in miniature on two ranks: (folder it ran in, what it printed)."""
    folder = tmp_path_factory.mktemp("quickstart")
    words = [*TINY, "training.steps=8", "checkpoint.interval=4", "validation.freq=4"]
    return folder, overland("train", "quickstart", *words, cwd=folder, NGPU="2").stdout


def test_help_does_not_import_torch() -> None:
    code = "import sys, overland.cli.main; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], env=environment(), check=True)


def test_quickstart_fills_its_run_folder(quickstart: tuple[Path, str]) -> None:
    run = quickstart[0] / "runs" / "quickstart"
    records = [r for r in read_metrics(run / "metrics.jsonl") if "loss" in r]
    assert [r["step"] for r in records] == list(range(1, 9))
    assert min(r["loss"] for r in records[4:]) < records[0]["loss"]
    expected = {"grad_norm", "lr", "tokens", "tokens_per_second", "mfu", "tflops", "memory_gib"}
    assert expected | {"data_wait"} <= set(records[0])
    assert (run / "loss.svg").read_text().startswith("<svg")
    assert (run / "checkpoint" / "step_8").is_dir()
    assert (run / "config.toml").is_file()
    assert (run / "logs" / "rank_1.log").is_file()


def test_tensorboard_reads_what_was_logged(quickstart: tuple[Path, str]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = quickstart[0] / "runs" / "quickstart"
    events = EventAccumulator(str(run / "tb"))
    events.Reload()
    by_step = {event.step: event.value for event in events.Scalars("loss")}
    assert by_step == pytest.approx(losses(run / "metrics.jsonl"), rel=1e-6)
    assert len(events.Scalars("validation_loss/stdlib_heldout")) == 2


def test_quickstart_says_what_it_trains_before_the_first_step(
    quickstart: tuple[Path, str],
) -> None:
    before, _, _ = quickstart[1].partition("step 1/8")
    table = dict(re.findall(r"^(\w+) +(.+)$", before, flags=re.MULTILINE))
    assert re.fullmatch(r"llama3 debug, [\d,]+ parameters", table["model"])
    assert table["data"] == "stdlib; held out: stdlib_heldout"
    assert table["batch"] == "4 × 32 = 128 tokens per step; 8 steps (1,024 tokens)"
    assert table["devices"].startswith("2 × ")
    assert "sharded over 2 devices (FSDP)" in table["layout"]
    assert "computation float32" in table["precision"]
    assert re.match(r"about [\d.]+ MiB per rank", table["memory"])
    assert table["run"] == "runs/quickstart"


def test_quickstart_ends_with_its_losses_and_places(quickstart: tuple[Path, str]) -> None:
    folder, output = quickstart
    ending = output.partition("Finished: ")[2]
    table = dict(re.findall(r"^  (\S+(?: \S+)?)  +(\S.*)$", ending, flags=re.MULTILINE))
    record = read_metrics(folder / "runs/quickstart/metrics.jsonl")[-1]
    assert table["held-out loss"].startswith(f"{record['validation_loss']:.4f} (perplexity ")
    assert table["held-out loss"].endswith(" on stdlib_heldout")
    for name in ("checkpoint", "metrics", "plot", "TensorBoard"):
        assert (folder / table[name]).exists()


def test_quickstart_ends_with_a_sample_and_three_commands_that_work(
    quickstart: tuple[Path, str], tmp_path: Path
) -> None:
    folder, output = quickstart
    assert "The model continues 'def ':" in output
    assert "  │ def " in output
    commands = [shlex.split(line) for line in re.findall(r"^  (\S*overland .+)$", output, re.M)]
    assert [words[1] for words in commands] == ["generate", "report", "train"]
    program = Path(commands[0][0])
    assert program.name == "overland"
    assert shutil.which(str(folder / program)) or shutil.which(program)
    shutil.copytree(folder / "runs", tmp_path / "runs")
    generated, _, trained = (overland(*words[1:], cwd=tmp_path, NGPU="1") for words in commands)
    assert generated.stdout.startswith("class Node:")
    assert (tmp_path / "runs/quickstart/report.html").is_file()
    assert "Finished: 16 steps" in trained.stdout
    assert "run        runs/quickstart, resuming from step_8\n" in trained.stdout


def test_the_run_readme_is_filled_in(quickstart: tuple[Path, str]) -> None:
    text = (quickstart[0] / "runs" / "quickstart" / "README.md").read_text()
    assert not re.search(r"\{[A-Z_]+\}", text)
    for words in ("parameters", "sharded over 2 devices", "Recompute: off", "Compile: off",
                  "Profiling: off", "overland train runs/quickstart/config.toml", "tensorboard",
                  "overland generate runs/quickstart"):  # fmt: skip
        assert words in text


def test_generate_continues_a_text(quickstart: tuple[Path, str]) -> None:
    words = ["generate", "runs/quickstart", "--prompt", "import os", "--num-tokens", "8"]
    first = overland(*words, cwd=quickstart[0]).stdout
    assert first.startswith("import os")
    assert overland(*words, cwd=quickstart[0]).stdout == first


def test_running_a_finished_run_again_says_so(quickstart: tuple[Path, str]) -> None:
    done = overland("train", "runs/quickstart/config.toml", cwd=quickstart[0], NGPU="1")
    assert "Nothing left to do: runs/quickstart is at step 8 of 8." in done.stdout


def test_a_runs_config_resumes_it_from_another_folder(
    quickstart: tuple[Path, str], tmp_path: Path
) -> None:
    shutil.copytree(quickstart[0], tmp_path / "there", symlinks=True)
    run = tmp_path / "there" / "runs" / "quickstart"
    done = overland("train", str(run / "config.toml"), cwd=tmp_path, NGPU="1")
    assert f"Nothing left to do: {run} is at step 8 of 8." in done.stdout
    assert f"note: {run}/config.toml: resumes the run in {run}" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_a_run_that_has_done_more_than_is_asked_for_says_so(quickstart: tuple[Path, str]) -> None:
    folder, _ = quickstart
    words = ["train", "runs/quickstart/config.toml", "training.steps=6"]
    done = overland(*words, "lr_scheduler.total_steps=8", cwd=folder, NGPU="1")
    told = "Nothing left to do: runs/quickstart has done 8 steps, and training.steps = 6; raise it"
    assert told in done.stdout


def test_more_steps_go_on_where_the_run_ended(quickstart: tuple[Path, str]) -> None:
    words = ["train", "runs/quickstart/config.toml", "training.steps=10"]
    done = overland(*words, cwd=quickstart[0], NGPU="1")  # on another number of ranks
    assert "resumed runs/quickstart/checkpoint/step_8 at step 8" in done.stdout
    assert set(losses(quickstart[0] / "runs/quickstart/metrics.jsonl")) == set(range(1, 11))


def test_resuming_an_earlier_step_sets_later_ones_aside_and_is_asked_for_once(
    quickstart: tuple[Path, str],
) -> None:
    run = quickstart[0] / "runs" / "quickstart"
    words = ["train", "runs/quickstart/config.toml", "training.steps=6", "--skip_optimizer"]
    done = overland(*words, "--resume", f"{run}/checkpoint/step_4", cwd=quickstart[0], NGPU="1")
    assert f"resumed {run}/checkpoint/step_4 at step 4" in done.stdout
    assert (run / "checkpoint" / "step_8.set-aside").is_dir()
    text = (run / "config.toml").read_text()
    assert 'resume = "auto"' in text
    assert "skip_optimizer = false" in text
    again = overland("train", "runs/quickstart", "--skip-optimizer", cwd=quickstart[0], NGPU="1")
    assert "is at step 6 of 6" in again.stdout


def test_a_folder_that_is_no_checkpoint_is_one_line(quickstart: tuple[Path, str]) -> None:
    (quickstart[0] / "letters").mkdir()
    words = ["train", "runs/quickstart/config.toml", "--resume", "letters"]
    done = overland(*words, cwd=quickstart[0], NGPU="1", code=2)
    lines = [line for line in done.stderr.splitlines() if "note:" not in line]
    assert len(lines) == 1, done.stderr
    assert "letters is not a committed checkpoint" in lines[0]


def test_resume_none_takes_a_folder_of_its_own(quickstart: tuple[Path, str]) -> None:
    words = ["train", "quickstart", *TINY, "training.steps=1", "validation.enable=false"]
    overland(*words, "--resume", "none", cwd=quickstart[0], NGPU="1")
    assert set(losses(quickstart[0] / "runs/quickstart-2/metrics.jsonl")) == {1}


@pytest.mark.parametrize("num_ranks", [pytest.param(1, marks=pytest.mark.long), 2])
def test_ctrl_c_saves_and_the_resumed_run_has_the_bits_of_an_unbroken_one(
    tmp_path: Path, num_ranks: int
) -> None:
    words = ["train", "quickstart", *TINY, "debug.deterministic=true", "validation.enable=false",
             "training.steps=300", "lr_scheduler.total_steps=300"]  # fmt: skip
    run, ranks = tmp_path / "runs" / "quickstart", str(num_ranks)
    process = start_overland(*words, cwd=tmp_path, NGPU=ranks)
    wait_for_step(run / "metrics.jsonl", 5)
    code, output = interrupt(process)
    stopped = max(losses(run / "metrics.jsonl"))
    assert code == 75, output
    assert (run / "checkpoint" / f"step_{stopped}.preempt" / "COMMITTED").is_file()
    assert f"Stopped after step {stopped} of 300; saved step {stopped}. To resume:" in output
    assert "overland train runs/quickstart/config.toml" in output
    assert stopped < 290

    steps = f"training.steps={stopped + 4}"
    overland("train", "runs/quickstart/config.toml", steps, cwd=tmp_path, NGPU=ranks)
    overland(*words, steps, "job.dump_folder=runs/unbroken", cwd=tmp_path, NGPU=ranks)
    unbroken = losses(tmp_path / "runs/unbroken/metrics.jsonl")
    assert losses(run / "metrics.jsonl") == unbroken
    assert len(unbroken) == stopped + 4


def test_a_rank_that_dies_ends_the_run_and_is_named(tmp_path: Path) -> None:
    words = ["train", "quickstart", *TINY, "training.steps=2000", "validation.enable=false"]
    process = start_overland(*words, cwd=tmp_path, NGPU="2")
    wait_for_step(tmp_path / "runs/quickstart/metrics.jsonl", 3)
    children = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True, check=True
    ).stdout.split()
    os.kill(int(children[-1]), signal.SIGKILL)
    output, _ = process.communicate(timeout=LIMIT_SECONDS)
    assert process.returncode == 128 + signal.SIGKILL
    assert "rank 1 was ended by SIGKILL" in output
    assert "a rank was killed" in output
    assert "the same command resumes the run" in output or "To use less" in output


def test_log_rank_chooses_who_prints(tmp_path: Path) -> None:
    words = ["train", "quickstart", *TINY, "training.steps=2", "validation.enable=false"]
    both = overland(*words, cwd=tmp_path, NGPU="2", LOG_RANK="0,1").stdout
    assert "[rank 1] step 2/2" in both
    assert re.search(r"^step 2/2", both, flags=re.MULTILINE)


@pytest.mark.long
def test_resume_none_under_torchrun_takes_one_folder_for_all_ranks(tmp_path: Path) -> None:
    words = ["train", "quickstart", *TINY, "training.steps=1", "validation.enable=false"]
    overland(*words, cwd=tmp_path, NGPU="1")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    subprocess.run(
        [*torchrun, "--nproc_per_node=2", "-m", "overland", *words, "--resume", "none"],
        cwd=tmp_path, env=environment(), check=True, capture_output=True, timeout=LIMIT_SECONDS,
    )  # fmt: skip
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == [
        "quickstart",
        "quickstart-2",
    ]


@pytest.fixture(scope="module")
def held_out_loss(tmp_path_factory: pytest.TempPathFactory) -> float:
    return last_validation(tmp_path_factory.mktemp("one"), "1")[0]


def last_validation(folder: Path, num_ranks: str, *settings: str) -> tuple[float, str]:
    words = [
        *TINY,
        "training.steps=3",
        "training.global_batch_size=8",
        "validation.freq=3",
        "training.local_batch_size=4",
        "validation.steps=1",
    ]
    output = overland("train", "quickstart", *words, *settings, cwd=folder, NGPU=num_ranks).stdout
    records = read_metrics(folder / "runs/quickstart/metrics.jsonl")
    return next(r["validation_loss"] for r in records if "validation_loss" in r), output


@pytest.mark.parametrize(
    ("axis", "samples"),
    [
        ("pipeline", False),
        pytest.param("tensor", True, marks=pytest.mark.long),
        pytest.param("context", False, marks=pytest.mark.long),
    ],
)
def test_every_axis_trains_validates_and_ends_well(
    tmp_path: Path, held_out_loss: float, axis: str, samples: bool
) -> None:
    loss, output = last_validation(tmp_path, "2", f"parallelism.{axis}_parallel_degree=2")
    assert loss == pytest.approx(held_out_loss, rel=1e-4)
    assert ("The model continues" in output) == samples
    assert "Finished: 3 steps" in output


def test_a_broken_config_ends_with_2_before_anything_starts(tmp_path: Path) -> None:
    done = overland("train", "quickstart", "training.stepz=3", cwd=tmp_path, code=2)
    expected = "command line: training.stepz = 3: unknown key; did you mean training.steps?"
    assert done.stderr.splitlines() == [expected]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("rank", "launcher", "num_notes"), [(0, "torchrun", 1), (1, "torchrun", 0), (0, "ours", 0)]
)
def test_the_first_rank_prints_the_notes_unless_its_launcher_has(
    rank: int, launcher: str, num_notes: int, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (tmp_path / "mine.txt").write_text("some text\n")
    monkeypatch.setattr(main, "train_rank", lambda *_: SimpleNamespace(finished=True))
    monkeypatch.delenv(LAUNCHED, raising=False)
    if launcher == "ours":
        monkeypatch.setenv(LAUNCHED, "1")
    monkeypatch.chdir(tmp_path)
    settings = ["training.dataset_path=mine.txt", "data.holdout=0", "validation.enable=true"]
    train.train_here("quickstart", settings, World(rank=rank, size=2), Heartbeat())
    said = capsys.readouterr().err
    assert said.count("validation reads stdlib_heldout, which is not held out of") == num_notes


def run_train_sh(cwd: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.run(
        [str(ROOT / "run_train.sh"), *words], cwd=cwd, env=environment(PATH=path, **env),
        capture_output=True, text=True, timeout=LIMIT_SECONDS,
    )  # fmt: skip


def test_a_signal_during_the_start_of_a_resumed_run_says_which_step_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(main, "train_rank", lambda *_: SimpleNamespace(finished=True))
    monkeypatch.setattr(signals, "_words", "nothing is saved")
    train.train_here("quickstart", [], World(), Heartbeat())
    assert signals._words == "nothing is saved"
    for name in ("step_5", "step_7.preempt"):
        (tmp_path / "runs" / "quickstart" / "checkpoint" / name).mkdir(parents=True)
        (tmp_path / "runs" / "quickstart" / "checkpoint" / name / "COMMITTED").touch()
    train.train_here("quickstart", [], World(), Heartbeat())
    assert signals._words == "stopped before the next step; step 7 is saved"


def test_run_train_sh_in_a_fresh_clone_says_how_to_install(tmp_path: Path) -> None:
    """The package's folder has the command's name."""
    (tmp_path / "overland").mkdir()
    script = tmp_path / "run_train.sh"
    script.write_text((ROOT / "run_train.sh").read_text())
    done = subprocess.run(
        ["bash", "run_train.sh"], cwd=tmp_path, env={"PATH": "/usr/bin:/bin"},
        capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert "install it, or activate its environment" in done.stderr


def test_run_train_sh_names_a_backend_that_is_not_there(tmp_path: Path) -> None:
    done = run_train_sh(tmp_path, CONFIG_FILE="quickstart", COMM_BACKEND="nvshmem")
    assert done.returncode == 2
    assert 'environment COMM_BACKEND: comm.backend = "nvshmem"' in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_profiling_writes_traces(tmp_path: Path) -> None:
    words = [*TINY, "training.steps=6", "validation.enable=false",
             "profiling.enable_profiling=true", "profiling.profile_freq=5"]  # fmt: skip
    overland("train", "quickstart", *words, cwd=tmp_path, NGPU="1")
    traces = list((tmp_path / "runs/quickstart/profile_trace").iterdir())
    assert [trace.name for trace in traces] == ["step_5_rank_0.json.gz"]


def test_weights_and_biases_gets_the_metrics_when_asked(tmp_path: Path) -> None:
    words = [*TINY, "training.steps=2", "validation.enable=false", "metrics.enable_wandb=true"]
    overland("train", "quickstart", *words, cwd=tmp_path, NGPU="1", WANDB_MODE="offline")
    (log,) = (tmp_path / "runs/quickstart/wandb").glob("offline-run-*/*.wandb")
    assert b"grad_norm" in log.read_bytes()
