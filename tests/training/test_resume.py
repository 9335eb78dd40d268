"""Stopped anywhere and resumed, a run computes what it would have computed unbroken."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from overland.apps.check.rehearsal import try_newest
from overland.apps.console.screen import Screen
from overland.apps.data.made_rows import RandomBlocks
from overland.apps.ledger import read_ledger
from overland.apps.proofs.pool import RankPool
from overland.checkpoint.folder import list_checkpoints
from overland.checkpoint.read import open_checkpoint
from overland.config.schema import JobConfig
from overland.data.batch import load_batch
from overland.data.lanes import Rows
from overland.errors import CheckpointError, DataError, MismatchError, NotSavedError
from overland.files import Disk
from overland.training import saving
from overland.training.build import build_run
from overland.training.callbacks import Callback
from overland.training.loop import train
from overland.training.run import Run
from overland.world import World
from overland.world.heartbeat import Heartbeat, Transfer, read_signs
from tests.jobs import TINY_MODEL, Recorder, run_job, tiny_job, write_model

STEPS = 8


def job(folder: Path, steps: int = STEPS, num_ranks: int = 1, **sections: Any) -> JobConfig:
    checkpoint = {"enable": True, "interval": 3, **sections.pop("checkpoint", {})}
    return tiny_job(
        folder,
        training={"steps": steps, "local_batch_size": 8 // num_ranks},
        lr_scheduler={"total_steps": STEPS},
        checkpoint=checkpoint,
        **sections,
    )


class Dice(Callback):
    """Draws from every random stream at each step, differently on each rank, and adds noise to the
    weights: a model with dropout."""

    def __init__(self, run: Run) -> None:
        self.drawn: list[tuple[float, ...]] = []

    def on_start(self, run: Run) -> None:
        if run.progress.step == 0:
            for _ in range(run.world.rank):
                self._draw()

    def on_step(self, run: Run) -> None:
        self.drawn.append(self._draw())
        with torch.no_grad():
            for parameter in run.model.parts[0].parameters():
                shard = parameter.to_local() if hasattr(parameter, "to_local") else parameter
                shard += 1e-3 * torch.randn(shard.shape, dtype=shard.dtype)

    def _draw(self) -> tuple[float, ...]:
        return (
            random.random(), random.gauss(0, 1), float(np.random.rand()),
            float(np.random.standard_normal()), float(torch.rand(())),
        )  # fmt: skip


Story = tuple[list[float], list[tuple[float, ...]], list[str]]


def story(world: World, config: JobConfig) -> Story:
    """(losses, random numbers, messages) of a run with dice."""
    run = build_run(config, world, torch.device("cpu"), log_ranks=())
    recorder, dice = Recorder(run), Dice(run)
    run.callbacks += [recorder, dice]
    train(run)
    return recorder.losses, dice.drawn, recorder.messages


def weights(folder: Path, step: int) -> dict[str, torch.Tensor]:
    with open_checkpoint(folder / "checkpoint" / f"step_{step}") as checkpoint:
        return {name: checkpoint.read(name) for name in checkpoint.tensors}


HALVES = {
    "dtype": "float32",
    "mixed_precision_param": "bfloat16",
    "mixed_precision_reduce": "float32",
}


@pytest.mark.parametrize("mode", ["async", pytest.param("disabled", marks=pytest.mark.long)])
def test_parameters_in_halves_go_on_with_the_same_bits(
    ranks: RankPool, tmp_path: Path, mode: str
) -> None:
    """One device, default precision: a bfloat16 number and what rounding left over."""

    def halves(name: str, steps: int) -> JobConfig:
        config = job(tmp_path / name, steps=steps, checkpoint={"async_mode": mode})
        training = config.training.model_copy(update=HALVES)
        return config.model_copy(update={"training": training})

    (unbroken,) = ranks.run(1, plain_story, halves("a", STEPS))
    (first,) = ranks.run(1, plain_story, halves("b", 5))
    (second,) = ranks.run(1, plain_story, halves("b", STEPS))
    assert first + second == unbroken
    a, b = weights(tmp_path / "a", STEPS), weights(tmp_path / "b", STEPS)
    assert {tensor.dtype for name, tensor in a.items() if name.startswith("model.")} == {
        torch.float32
    }
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("num_ranks", [pytest.param(1, marks=pytest.mark.long), 2])
def test_narrow_moments_go_on_with_the_same_bits(
    ranks: RankPool, tmp_path: Path, num_ranks: int
) -> None:
    """In halves on one rank, sharded on two: chance is the same in a second session."""

    def narrow(name: str, steps: int) -> JobConfig:
        config = job(
            tmp_path / name, steps=steps, num_ranks=num_ranks, optimizer={"bf16_moments": True}
        )
        training = config.training.model_copy(update=HALVES)
        return config.model_copy(update={"training": training})

    unbroken = ranks.run(num_ranks, plain_story, narrow("a", STEPS))
    first = ranks.run(num_ranks, plain_story, narrow("b", 5))
    second = ranks.run(num_ranks, plain_story, narrow("b", STEPS))
    assert first[0] + second[0] == unbroken[0]
    a, b = weights(tmp_path / "a", STEPS), weights(tmp_path / "b", STEPS)
    moments = {name for name in a if name.startswith("optimizer.") and "exp_avg" in name}
    assert {a[name].dtype for name in moments} == {torch.bfloat16}
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_moments_may_become_narrow_and_wide_again(ranks: RankPool, tmp_path: Path) -> None:
    def narrow(on: bool, steps: int) -> JobConfig:
        config = job(tmp_path / "run", steps=steps, optimizer={"bf16_moments": on})
        training = config.training.model_copy(update=HALVES)
        return config.model_copy(update={"training": training})

    ranks.run(1, plain_story, narrow(False, 3))
    _, said = ranks.run(1, start, narrow(True, 5))[0]
    assert "optimizer.bf16_moments is true; it was false when" in "\n".join(said)
    ranks.run(1, plain_story, narrow(True, 5))
    ranks.run(1, plain_story, narrow(False, STEPS))
    before, after = weights(tmp_path / "run", 5), weights(tmp_path / "run", STEPS)
    name = next(name for name in after if name.endswith("exp_avg"))
    assert (before[name].dtype, after[name].dtype) == (torch.bfloat16, torch.float32)


def plain_story(world: World, config: JobConfig) -> list[float]:
    run = build_run(config, world, torch.device("cpu"), log_ranks=())
    recorder = Recorder(run)
    run.callbacks.append(recorder)
    train(run)
    assert not recorder.messages
    return recorder.losses


@pytest.mark.parametrize(
    ("kind", "num_ranks"), [("shard", 2), ("full", 2), ("four files", 1), ("local", 2)]
)
def test_the_same_ranks_go_on_with_the_same_bits(
    ranks: RankPool, tmp_path: Path, kind: str, num_ranks: int
) -> None:
    how = {"four files": {"type": "full", "full_format": "torch"}}.get(kind, {"type": kind})
    unbroken = ranks.run(num_ranks, story, job(tmp_path / "a", num_ranks=num_ranks))
    before = job(tmp_path / "b", steps=5, num_ranks=num_ranks, checkpoint=how)
    first = ranks.run(num_ranks, story, before)
    second = ranks.run(num_ranks, story, job(tmp_path / "b", num_ranks=num_ranks, checkpoint=how))
    for one, two, whole in zip(first, second, unbroken, strict=True):
        assert one[0] + two[0] == whole[0]  # losses
        assert one[1] + two[1] == whole[1]  # every random stream of every rank
    if num_ranks > 1:
        assert unbroken[0][1] != unbroken[1][1]
    if kind != "local":
        a, b = weights(tmp_path / "a", STEPS), weights(tmp_path / "b", STEPS)
        assert a.keys() == b.keys()
        for name in a:
            assert torch.equal(a[name], b[name]), name


def test_the_four_files_load_with_torch(ranks: RankPool, tmp_path: Path) -> None:
    how = {"type": "full", "full_format": "torch"}
    ranks.run(2, story, job(tmp_path, steps=3, num_ranks=2, checkpoint=how))
    folder = tmp_path / "checkpoint" / "step_3"
    loaded = {
        name: torch.load(folder / f"{name}_state_dict.pt", weights_only=True)
        for name in ("model", "optim", "lr", "iter")
    }
    assert loaded["iter"]["step"] == 3
    assert loaded["lr"]["last_epoch"] == 3
    with open_checkpoint(folder) as checkpoint:
        for name, tensor in loaded["model"].items():
            assert torch.equal(tensor, checkpoint.read(f"model.{name}"))
        group = loaded["optim"]["param_groups"][0]
        number, name = group["params"][0], group["param_names"][0]
        moment = loaded["optim"]["state"][number]["exp_avg"]
        assert torch.equal(moment, checkpoint.read(f"optimizer.{name}.exp_avg"))


def test_a_local_checkpoint_wants_its_own_ranks(ranks: RankPool, tmp_path: Path) -> None:
    how = {"type": "local"}
    ranks.run(2, story, job(tmp_path, steps=3, num_ranks=2, checkpoint=how))
    error = ranks.run(1, refusal, job(tmp_path, checkpoint={**how, "resume": "auto"}))[0]
    assert "by 2 ranks, but this run has 1" in error
    path = str(tmp_path / "checkpoint" / "step_3")
    error = ranks.run(1, refusal, job(tmp_path, checkpoint={**how, "resume": path}))[0]
    assert "by 2 ranks, but this run has 1: it can only be read in the same" in error


def refusal(world: World, config: JobConfig) -> str:
    try:
        build_run(config, world, torch.device("cpu"), log_ranks=())
    except (CheckpointError, DataError) as error:
        return str(error)
    return ""


def start(world: World, config: JobConfig) -> tuple[int, list[str]]:
    """The step that a run resumes at, and what is said about it."""
    said: list[str] = []
    screen = Screen(is_shown=world.is_first)
    with patch.object(screen, "print", lambda text: said.append(str(text))):
        run = build_run(config, world, torch.device("cpu"), log_ranks=(0,), screen=screen)
    return run.progress.step, said


def index_files_opened(world: World, config: JobConfig) -> tuple[int, list[str]]:
    """The step that a run resumes at, and each time that this rank opens an index on its way."""
    opened: list[str] = []
    is_open = True

    def note(event: str, arguments: tuple[Any, ...]) -> None:  # there to stay, so it is turned off
        if is_open and event == "open" and str(arguments[0]).endswith("index.json"):
            opened.append(str(arguments[0]))

    sys.addaudithook(note)
    step, _ = start(world, config)
    is_open = False
    return step, opened


@pytest.mark.parametrize("resume", ["auto", pytest.param("path", marks=pytest.mark.long)])
def test_one_rank_reads_the_index_for_all(ranks: RankPool, tmp_path: Path, resume: str) -> None:
    ranks.run(2, story, job(tmp_path / "a", steps=3, num_ranks=2))
    how = {"resume": "auto" if resume == "auto" else str(tmp_path / "a")}
    again = job(tmp_path / ("a" if resume == "auto" else "b"), num_ranks=4, checkpoint=how)
    results = ranks.run(4, index_files_opened, again)
    assert [step for step, _ in results] == [3] * 4
    assert [len(opened) for _, opened in results] == [1, 0, 0, 0]


def test_a_damaged_index_is_named_by_all_ranks(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, story, job(tmp_path, steps=3, num_ranks=2))
    path = tmp_path / "checkpoint" / "step_3"
    data = (path / "index.json").read_bytes()
    for damaged in (data[:-1], data.replace(b"1", b"2", 1), None):
        (path / "index.json").unlink()
        if damaged is not None:
            (path / "index.json").write_bytes(damaged)
        again = job(tmp_path / "b", num_ranks=2, checkpoint={"resume": str(path)})
        first, second = ranks.run(2, refusal, again)
        assert first == second
        assert "index.json is damaged" in first or "index.json is missing" in first


@pytest.mark.parametrize("on_rank", [0, 1])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(
    ranks: RankPool, tmp_path: Path, on_rank: int
) -> None:
    ranks.run(2, story, job(tmp_path, steps=6, num_ranks=2))
    file = tmp_path / "checkpoint" / "step_6" / f"rank_{on_rank:05d}.safetensors"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)
    (step, said), (other_step, _) = ranks.run(2, start, job(tmp_path, num_ranks=2))
    assert (step, other_step) == (3, 3)
    text = "\n".join(said)
    assert f"{file} is damaged" in text
    assert f"resumed {tmp_path}/checkpoint/step_3 at step 3" in text
    assert (tmp_path / "checkpoint" / "step_6.set-aside").is_dir()
    whole = ranks.run(1, story, job(tmp_path / "unbroken"))[0][0]
    rest = ranks.run(1, story, job(tmp_path))[0][0]
    assert len(rest) == len(whole) - 3


def test_nothing_is_trained_when_every_checkpoint_is_damaged(
    ranks: RankPool, tmp_path: Path
) -> None:
    ranks.run(1, story, job(tmp_path, steps=6))
    for found in list_checkpoints(tmp_path / "checkpoint"):
        (found.path / "index.json").unlink()
    assert "none of the 2 checkpoints" in ranks.run(1, refusal, job(tmp_path))[0]


def test_a_copy_under_another_steps_name_is_passed_over(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(1, story, job(tmp_path, steps=6))
    folder = tmp_path / "checkpoint"
    shutil.copytree(folder / "step_3", folder / "step_30")
    step, said = ranks.run(1, start, job(tmp_path))[0]
    assert step == 6
    assert any("step_30 holds step 3, which its name contradicts" in line for line in said)


def test_a_folder_that_was_never_committed_is_named(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(1, story, job(tmp_path, steps=6))
    (tmp_path / "checkpoint" / "step_6" / "COMMITTED").unlink()
    step, said = ranks.run(1, start, job(tmp_path))[0]
    assert step == 3
    assert any("step_6 was never committed" in line for line in said)


def test_a_marker_that_is_damaged_is_no_reason_to_start_anew(
    ranks: RankPool, tmp_path: Path
) -> None:
    ranks.run(1, story, job(tmp_path, steps=3))
    marker = tmp_path / "checkpoint" / "step_3" / "COMMITTED"
    marker.write_bytes(marker.read_bytes().replace(b"index_bytes", b"index_bytez"))
    assert "none of the 1 checkpoints" in ranks.run(1, refusal, job(tmp_path))[0]


def test_going_on_from_another_run_keeps_what_comes_out_of_it(
    ranks: RankPool, tmp_path: Path
) -> None:
    ranks.run(1, story, job(tmp_path / "other", steps=2))
    ranks.run(1, story, job(tmp_path / "own", steps=8, checkpoint={"keep_latest_k": 2}))
    path = str(tmp_path / "other" / "checkpoint" / "step_2")
    again = job(tmp_path / "own", steps=4, checkpoint={"resume": path, "keep_latest_k": 2})
    ranks.run(1, story, again)
    folder = tmp_path / "own" / "checkpoint"
    assert [found.step for found in list_checkpoints(folder)] == [3, 4]
    assert (folder / "latest").resolve() == (folder / "step_4").resolve()
    assert (folder / "step_8.set-aside").is_dir()


def test_a_run_folder_stands_for_its_newest_checkpoint(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(1, story, job(tmp_path / "a", steps=5))
    for path in (tmp_path / "a", tmp_path / "a" / "checkpoint", tmp_path / "a/checkpoint/latest"):
        config = job(tmp_path / "b", checkpoint={"resume": str(path)})
        assert ranks.run(1, start, config)[0][0] == 5


@pytest.mark.parametrize("size", [4, 5])
def test_another_batch_size_goes_on_with_the_next_row(
    ranks: RankPool, tmp_path: Path, size: int
) -> None:
    ranks.run(1, story, job(tmp_path, steps=3))  # 24 rows
    other = job(tmp_path)
    sizes = {"global_batch_size": size, "local_batch_size": size}
    other = other.model_copy(update={"training": other.training.model_copy(update=sizes)})
    expected, rows = [], RandomBlocks(TINY_MODEL["vocab_size"], seq_len=other.training.seq_len)
    for number in range(24, 24 + size):
        room = Rows.empty(1, rows.seq_len + 1, {})
        rows.read(np.array([number]), np.array([0]), room)
        expected.append(room.tokens[0, :-1].tolist())
    assert ranks.run(1, next_rows, other) == [expected]


def next_rows(world: World, config: JobConfig) -> list[list[int]]:
    run = build_run(config, world, torch.device("cpu"), log_ranks=())
    rows: list[list[int]] = load_batch(run.dataset.rows, run.progress.batch)["tokens_BS"].tolist()
    return rows


def test_a_loss_scale_is_not_taken_from_a_run_without_one(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(1, story, job(tmp_path, steps=3))
    config = job(tmp_path)
    half = config.training.model_copy(
        update={"mixed_precision_param": "float16", "dtype": "float32"}
    )
    config = config.model_copy(update={"training": half})
    assert ranks.run(1, loss_scale, config) == [2.0**16]


def loss_scale(world: World, config: JobConfig) -> float:
    run = build_run(config, world, torch.device("cpu"), log_ranks=())
    return float(run.scaler.scale)


def test_what_changed_since_the_save_is_told(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(1, story, job(tmp_path, steps=3))
    other = job(tmp_path, optimizer={"lr": 5e-3}, data={"document_mask": True})
    _, said = ranks.run(1, start, other)[0]
    text = "\n".join(said)
    assert "optimizer.lr is 0.005; it was 0.01 when the checkpoint was saved" in text
    assert "the schedule has changed with optimizer.lr (0.01 → 0.005): the learning rate" in text
    assert "from batch 3 on, the data changes: document_mask False → True" in text


def test_another_seed_would_be_another_run(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(1, story, job(tmp_path, steps=3))
    assert (
        "debug.seed is 9, but this run began with 0"
        in ranks.run(1, refusal, job(tmp_path, debug={"seed": 9}))[0]
    )


def test_the_spike_guard_remembers(ranks: RankPool, tmp_path: Path) -> None:
    guard = {"spike_guard": "skip", "spike_window": 16}
    ranks.run(1, story, job(tmp_path, steps=6, health=guard))
    assert ranks.run(1, remembered, job(tmp_path, health=guard))[0] == 6


def remembered(world: World, config: JobConfig) -> int:
    run = build_run(config, world, torch.device("cpu"), log_ranks=())
    assert run.guard is not None
    return len(run.guard.to_json())


def test_the_best_by_validation_is_saved_and_kept(ranks: RankPool, tmp_path: Path) -> None:
    config = job(
        tmp_path,
        checkpoint={"interval": 100, "keep_latest_k": 1, "keep_best": 1},
        validation={"enable": True, "freq": 2, "steps": 1, "dataset": "random"},
    )
    losses = ranks.run(1, validation_losses, config)[0]
    best = min(losses, key=lambda step: losses[step])
    found = list_checkpoints(tmp_path / "checkpoint")
    assert {one.step for one in found} == {best, STEPS}
    assert found[0].validation_loss == losses[found[0].step]


def validation_losses(world: World, config: JobConfig) -> dict[int, float]:
    run = build_run(config, world, torch.device("cpu"), log_ranks=())
    recorder = Recorder(run)
    run.callbacks.append(recorder)
    train(run)
    return {record["step"]: record["validation_loss"] for record in recorder.validations}


@pytest.mark.parametrize(
    "form",
    [pytest.param("dcp", marks=pytest.mark.long), "torch", "meta", "safetensors", "overland", "hf"],
)
def test_a_run_starts_from_weights_in_any_format(
    ranks: RankPool, tmp_path: Path, data_folder: Path, form: str
) -> None:
    from overland.apps.convert import convert

    float32 = {"dtype": "float32", "mixed_precision_param": "float32",
               "mixed_precision_reduce": "float32"}  # fmt: skip
    source = job(tmp_path / "source", steps=2)
    source = source.model_copy(
        update={"training": source.training.model_copy(update={**float32, "dataset": "stdlib"})}
    )
    source = source.model_copy(
        update={"data": source.data.model_copy(
            update={"folder": str(data_folder), "vocab_size": 512})}
    )  # fmt: skip
    ranks.run(1, story, source)
    target = tmp_path / ("weights.safetensors" if form == "safetensors" else "weights")
    convert(tmp_path / "source", target, form)
    start_here = job(
        tmp_path / "new", steps=1, num_ranks=2, debug={"seed": 5},
        checkpoint={"enable": False, "initial_load_path": str(target)},
    )  # fmt: skip
    start_here = start_here.model_copy(
        update={"training": start_here.training.model_copy(update=float32)}
    )
    for got, num_bytes in ranks.run(2, first_weights, start_here):
        # A rank reads its own slices, or with some formats whole tensors.
        assert num_bytes >= sum(tensor.nbytes for tensor in got.values()) / 2
        with open_checkpoint(tmp_path / "source" / "checkpoint" / "step_2") as checkpoint:
            for name, tensor in got.items():
                assert torch.equal(tensor, checkpoint.read(f"model.{name}")), name
    shutil.rmtree(tmp_path / "source")


def first_weights(world: World, config: JobConfig) -> tuple[dict[str, torch.Tensor], int]:
    """Of all parameters, and how many bytes this rank has said that it read."""
    from overland.parallel.sharding import named_parameters

    beats = Path(config.job.dump_folder) / f"beats{world.rank}"
    beats.mkdir(parents=True)
    beat = Heartbeat(world.rank, beats)
    run = build_run(config, world, torch.device("cpu"), log_ranks=(), beat=beat)
    [sign] = read_signs(beats)
    assert sign.transfer is Transfer.NONE
    return {
        name: parameter.detach().full_tensor()  # type: ignore[attr-defined]
        for name, parameter in named_parameters(run.model.parts).items()
    }, sign.num_bytes


class FullForAWhile(Disk):
    """Refuses so many saves for want of room, and takes those in `elsewhere`."""

    def __init__(self, refusals: int, elsewhere: Path) -> None:
        self.refusals, self.elsewhere = refusals, elsewhere

    def create(self, path: Path) -> int:
        if self.refusals and self.elsewhere not in path.parents:
            self.refusals -= 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return super().create(path)


def save_on_a_full_disk(world: World, config: JobConfig, refusals: int) -> tuple[list[str], str]:
    saving.RETRY_SECONDS, saving.RETRY_FOR_SECONDS = 0.01, 60.0 if refusals == 2 else 0.3
    run = build_run(config, world, torch.device("cpu"), log_ranks=())
    assert run.folder.fallback is not None
    run.store.disk = FullForAWhile(refusals, run.folder.fallback.parent)
    recorder = Recorder(run)
    run.callbacks.append(recorder)
    train(run)
    try:
        saving.check_last_save(run)
    except NotSavedError as error:
        return recorder.messages, str(error)
    again = build_run(config, world, torch.device("cpu"), log_ranks=())
    assert again.progress.step == config.training.steps
    return recorder.messages, ""


@pytest.mark.parametrize("where", ["there after all", "elsewhere", "nowhere"])
def test_a_last_save_is_tried_again_and_then_elsewhere(
    ranks: RankPool, tmp_path: Path, where: str
) -> None:
    elsewhere = tmp_path / "elsewhere"
    if where == "nowhere":
        elsewhere.write_text("a file where the folder should be")
    config = job(
        tmp_path / "run", 3, checkpoint={"interval": 100, "fallback_folder": str(elsewhere)}
    )
    refusals = 2 if where == "there after all" else 10**6
    ((messages, error),) = ranks.run(1, save_on_a_full_disk, config, refusals)
    assert any("No space left on device" in message for message in messages)
    assert any(message.startswith("retrying the save") for message in messages)
    if where == "nowhere":
        assert error.startswith("the last save failed")
        return
    folder = tmp_path / "run" / "checkpoint" if refusals == 2 else elsewhere / "run"
    assert error == ""
    assert [one.path.name for one in list_checkpoints(folder)] == ["step_3"]


class TerminatedAt(Callback):
    """Sends this process SIGTERM at its first message that begins so, or after step 3."""

    def __init__(self, words: str) -> None:
        self.words = words

    def on_message(self, run: Run, message: str) -> None:
        if self.words and message.startswith(self.words):
            os.kill(os.getpid(), signal.SIGTERM)

    def on_step(self, run: Run) -> None:
        if not self.words and run.progress.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)


def terminate_on_a_full_disk(world: World, config: JobConfig, at: str) -> tuple[list[str], str]:
    saving.RETRY_SECONDS, saving.RETRY_FOR_SECONDS = 30.0, 31.0
    saving.RETRY_AFTER_SIGNAL_SECONDS = 1.0
    run = build_run(config, world, torch.device("cpu"), log_ranks=())
    if config.training.steps > 2:
        run.store.disk = FullForAWhile(10**6, Path("/nowhere"))
    recorder = Recorder(run)
    run.callbacks.append(recorder)
    if config.training.steps > 2 and world.rank == world.size - 1:
        run.callbacks.append(TerminatedAt(at))
    train(run)
    try:
        saving.check_last_save(run)
    except NotSavedError as error:
        return recorder.messages, str(error)
    return recorder.messages, ""


@pytest.mark.parametrize(("at", "adapters"), [("retrying the save", False), ("", True)])
def test_a_signal_ends_a_run_that_cannot_save(
    ranks: RankPool, tmp_path: Path, at: str, adapters: bool
) -> None:
    lora = {"rank": 4} if adapters else {}
    changes = {"checkpoint": {"interval": 100}, "lora": lora}
    config = job(tmp_path / "run", 2, **changes)
    assert [error for _, error in ranks.run(2, terminate_on_a_full_disk, config, at)] == ["", ""]
    config = job(tmp_path / "run", 3 if at else 100, **changes)
    for messages, error in ranks.run(2, terminate_on_a_full_disk, config, at):
        told = [message for message in messages if message.startswith("retrying the save for")]
        assert told
        assert all(("end it with SIGTERM" in message) == bool(at) for message in told)
        assert ("the save is not retried" in messages[-1]) == bool(at)
        assert "the last save failed, so there is no" in error
        assert "step_2, and the same command resumes it" in error


class RoomAfter(Callback):
    """Makes room for the ledger after a step."""

    def __init__(self, run: Run, step: int) -> None:
        self.step = step

    def on_step(self, run: Run) -> None:
        if run.progress.step == self.step:
            run.folder.ledger.unlink()


def train_without_room_for_the_ledger(
    world: World, config: JobConfig, room_after: int
) -> tuple[list[str], str]:
    saving.RETRY_SECONDS, saving.RETRY_FOR_SECONDS = 0.01, 0.05
    run = build_run(config, world, torch.device("cpu"), log_ranks=())
    if world.is_first:
        run.folder.ledger.parent.mkdir(exist_ok=True)
        run.folder.ledger.symlink_to("/dev/full")
        run.callbacks.append(RoomAfter(run, room_after))
    recorder = Recorder(run)
    run.callbacks.append(recorder)
    train(run)
    try:
        saving.check_last_save(run)
    except NotSavedError as error:
        return recorder.messages, str(error)
    return recorder.messages, ""


def test_no_checkpoint_is_newer_than_the_ledger(ranks: RankPool, tmp_path: Path) -> None:
    """The disk has room for checkpoints, but takes no row of the ledger until step 3."""
    config = job(tmp_path / "run", 4, checkpoint={"interval": 2, "keep_latest_k": 0})
    (messages, error), _ = ranks.run(2, train_without_room_for_the_ledger, config, 3)
    assert error == ""
    assert [message for message in messages if "the run continues, but cannot save" in message]
    assert [message for message in messages if "step_2 was not saved: " in message]
    assert [one.path.name for one in list_checkpoints(tmp_path / "run/checkpoint")] == ["step_4"]
    assert list(read_ledger(tmp_path / "run/data/ledger.bin").fed) == [1, 2, 3, 4]


def test_a_run_whose_ledger_is_not_written_is_not_saved(ranks: RankPool, tmp_path: Path) -> None:
    config = job(tmp_path / "run", 2, checkpoint={"interval": 100})
    ((messages, error),) = ranks.run(1, train_without_room_for_the_ledger, config, 100)
    assert "the last save failed" in error
    assert "ledger.bin cannot be written: No space left on device" in error
    assert any("`overland prove data` will miss some steps" in message for message in messages)
    assert not list_checkpoints(tmp_path / "run" / "checkpoint")


def test_the_ledger_goes_elsewhere_with_the_last_save(ranks: RankPool, tmp_path: Path) -> None:
    settings = {"interval": 100, "fallback_folder": str(tmp_path / "elsewhere")}
    config = job(tmp_path / "run", 2, checkpoint=settings)
    ((_, error),) = ranks.run(1, train_without_room_for_the_ledger, config, 100)
    assert error == ""
    assert [one.path.name for one in list_checkpoints(tmp_path / "elsewhere/run")] == ["step_2"]
    (tmp_path / "run" / "data" / "ledger.bin").unlink()
    ranks.run(1, run_job, job(tmp_path / "run", 3, checkpoint=settings))
    assert list(read_ledger(tmp_path / "run/data/ledger.bin").fed) == [1, 2, 3]
    assert not (tmp_path / "elsewhere" / "run" / "ledger.bin").exists()


ADAPTERS = {"rank": 4, "alpha": 8.0, "targets": ["q_proj", "v_proj"]}
CHANGES: list[tuple[str, str, Any]] = [
    ("lora", "alpha", 16.0),
    ("lora", "rslora", True),
    ("lora", "dropout", 0.1),
    ("lora", "rank", 8),
    ("lora", "targets", ["q_proj"]),
    ("model", "overrides", {**TINY_MODEL, "rms_norm_eps": 1e-3}),
    ("model", "overrides", {**TINY_MODEL, "intermediate_size": 96}),
    ("training", "z_loss", 1e-3),
    ("optimizer", "name", "Adam"),
    ("checkpoint", "initial_load_path", "elsewhere"),
]


def test_what_would_train_something_else_is_refused_by_key(ranks: RankPool, tmp_path: Path) -> None:
    """At once, before an older checkpoint is tried, and by `overland check` too."""
    first = job(tmp_path, steps=2, lora=ADAPTERS, checkpoint={"interval": 1})
    ranks.run(1, story, first)
    for section, name, value in CHANGES:
        changed = getattr(first, section).model_copy(update={name: value})
        other = first.model_copy(update={section: changed})
        (told,) = ranks.run(1, refusal, other)
        assert f"{section}.{name}" in told, told
        assert "step_2 was trained with" in told
        assert "checkpoint.allow_changes" in told
        with pytest.raises(MismatchError, match=f"{section}.{name}"):
            try_newest(list_of(tmp_path), other, None)
    assert "model.overrides.rms_norm_eps" in ranks.run(
        1, refusal, job(tmp_path, lora=ADAPTERS, model={"overrides": CHANGES[5][2]})
    )[0]  # fmt: skip

    allow = first.checkpoint.model_copy(update={"allow_changes": ["lora.alpha"]})
    lora = first.lora.model_copy(update={"alpha": 16.0})
    other = first.model_copy(update={"lora": lora, "checkpoint": allow})
    _, said = ranks.run(1, start, other)[0]
    assert any("lora.alpha is 16.0; it was 8.0" in line for line in said)
    assert "allow_changes = []" in (tmp_path / "config.toml").read_text()  # it applies once


def test_frozen_weights_may_move_but_not_change(ranks: RankPool, tmp_path: Path) -> None:
    """Of two folders with files of the same size, the contents decide."""
    base = write_model(tmp_path / "base")

    def adapted(folder: Path) -> JobConfig:
        given = {"interval": 1, "initial_load_path": str(folder)}
        return job(tmp_path / "run", steps=2, lora=ADAPTERS, checkpoint=given,
                   model={"config": str(folder), "overrides": {}})  # fmt: skip

    ranks.run(1, story, adapted(base))
    assert ranks.run(1, start, adapted(Path(shutil.copytree(base, tmp_path / "moved"))))[0][0] == 2
    without = adapted(base)
    without.checkpoint.initial_load_path = None
    assert "checkpoint.initial_load_path" in ranks.run(1, refusal, without)[0]
    with safe_open(base / "model.safetensors", "pt") as file:
        tensors = {name: 2 * file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    other = Path(shutil.copytree(base, tmp_path / "other"))
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    (told,) = ranks.run(1, refusal, adapted(other))
    assert "model.from or checkpoint.initial_load_path" in told
    with pytest.raises(MismatchError, match=r"checkpoint\.initial_load_path"):
        try_newest(list_of(tmp_path / "run"), adapted(other), None)


def list_of(folder: Path) -> list[Path]:
    return [one.path for one in list_checkpoints(folder / "checkpoint")]
