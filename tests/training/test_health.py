"""Steps that go wrong are skipped, reported, and never learned from."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from overland.apps.proofs.pool import RankPool
from overland.apps.watch.status import read_checkpoints
from overland.checkpoint.folder import list_checkpoints
from overland.config.schema import Health, JobConfig
from overland.data.batch import Batch
from overland.errors import TrainingError
from overland.parallel.sharding import shard_of
from overland.training import loop as loop_module
from overland.training import step as step_module
from overland.training.build import build_run
from overland.training.callbacks import Callback
from overland.training.health import (
    GROWTH_INTERVAL,
    INITIAL_SCALE,
    BadSteps,
    LossScaler,
    SpikeGuard,
)
from overland.training.loop import train
from overland.training.resume import resume_newest
from overland.training.run import Run
from overland.training.saving import check_last_save
from overland.training.state import run_facts, saved_state
from overland.world import World
from tests.jobs import Recorder, losses, run_job, tiny_job


def run_with_losses_changed(
    world: World, config: JobConfig, factor_of: Callable[[int], float], on_ranks: set[int]
) -> tuple[list[float], list[str], str]:
    """Trains with the loss of some global batches multiplied; returns losses, messages, error."""
    recorder = None
    try:
        run = build_run(config, world, torch.device("cpu"), log_ranks=())
        original = run.model.loss

        def changed(batch: Batch) -> torch.Tensor:
            factor = factor_of(run.progress.batch) if world.rank in on_ranks else 1.0
            return original(batch) * factor

        run.model.loss = changed
        recorder = Recorder(run)
        run.callbacks.append(recorder)
        train(run)
        return recorder.losses, recorder.messages, ""
    except Exception as error:
        assert recorder is not None
        return recorder.losses, recorder.messages, f"{type(error).__name__}: {error}"


def nan_at_batch_2(batch: int) -> float:
    return float("nan") if batch == 2 else 1.0


def nan_from_batch_2(batch: int) -> float:
    return float("nan") if batch >= 2 else 1.0


def spike_at_batch_12(batch: int) -> float:
    return 50.0 if batch == 12 else 1.0


def test_a_step_that_is_not_finite_on_one_rank_is_skipped_on_all(
    ranks: RankPool, tmp_path: Path
) -> None:
    config = tiny_job(tmp_path, training={"local_batch_size": 4})
    for seen, messages, error in ranks.run(2, run_with_losses_changed, config, nan_at_batch_2, {1}):
        assert not error
        assert [loss == loss for loss in seen] == [True, True, False, True, True, True]
        assert messages == ["skipped because not finite: step 3"]


def parameters_around_a_bad_step(world: World, config: JobConfig) -> bool:
    run = build_run(config, world, torch.device("cpu"), log_ranks=())
    before = [shard_of(p).clone() for p in run.model.parts[0].parameters()]
    batch = Batch({"tokens_BS": torch.zeros(8, 32).long(), "labels_BS": torch.ones(8, 32).long()})
    with torch.no_grad():
        shard_of(next(run.model.parts[0].parameters()))[0] = float("inf")
        before[0][0] = float("inf")
    result = step_module.train_step(run, batch)
    after = [shard_of(p).clone() for p in run.model.parts[0].parameters()]
    assert result.not_finite.item()
    return all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_a_skipped_step_leaves_every_weight_as_it_was(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(1, parameters_around_a_bad_step, tiny_job(tmp_path)) == [True]


def test_many_bad_steps_in_a_row_stop_the_run_with_a_message(
    ranks: RankPool, tmp_path: Path
) -> None:
    config = tiny_job(tmp_path, training={"steps": 50}, health={"max_bad_steps": 3},
                      metrics={"log_freq": 20})  # fmt: skip
    _, _, error = ranks.run(1, run_with_losses_changed, config, nan_from_batch_2, {0})[0]
    assert error.startswith(
        "TrainingError: the loss or a gradient was not finite in 3 steps in a row, up to step 5"
    )


class Weights(Callback):
    """Adds up this rank's parameters after every step."""

    def __init__(self) -> None:
        self.sums: list[float] = []

    def on_step(self, run: Run) -> None:
        self.sums.append(sum(shard_of(p).sum().item() for p in run.model.parts[0].parameters()))


def run_with_empty_batches(
    world: World, config: JobConfig, empty: set[int]
) -> tuple[list[float], list[float], list[str]]:
    """Trains with some global batches in which no label counts; returns losses, sums of the
    parameters, messages."""
    run = build_run(config, world, torch.device("cpu"), log_ranks=())
    recorder, weights = Recorder(run), Weights()
    run.callbacks += [recorder, weights]
    original = loop_module.next_batch

    def emptied(*args: Any) -> Batch:
        batch = original(*args)
        return batch.padded_from(0) if run.progress.batch in empty else batch

    loop_module.next_batch = emptied
    try:
        train(run)
    finally:
        loop_module.next_batch = original
    assert [record["skipped_steps"] for record in recorder.records] == [0] * 6
    assert [record["empty_steps"] for record in recorder.records] == [0, 0, 1, 1, 1, 0]
    return recorder.losses, weights.sums, recorder.messages


def test_a_batch_in_which_nothing_counts_changes_nothing_and_is_no_bad_step(
    ranks: RankPool, tmp_path: Path
) -> None:
    inside = {"spike_guard": "skip", "max_bad_steps": 2}  # each an answer to other kinds of steps
    alone = tiny_job(tmp_path / "alone", health=inside)
    shared = tiny_job(tmp_path / "shared", health=inside, training={"local_batch_size": 4})
    (expected, *_), *_ = ranks.run(1, run_with_empty_batches, alone, {2, 3, 4})
    assert [loss == loss for loss in expected] == [True, True, False, False, False, True]
    for seen, sums, messages in ranks.run(2, run_with_empty_batches, shared, {2, 3, 4}):
        assert seen == pytest.approx(expected, rel=1e-9, nan_ok=True)
        assert sums[1] == sums[2] == sums[3] == sums[4] != sums[5]
        said = "skipped because nothing in the batch has a loss weight: step"
        assert messages == [f"{said} {step}" for step in (3, 4, 5)]


@pytest.mark.parametrize("action", ["skip", "rewind"])
def test_a_loss_spike_is_answered(ranks: RankPool, tmp_path: Path, action: str) -> None:
    config = tiny_job(
        tmp_path,
        training={"steps": 16},
        health={"spike_guard": action, "spike_window": 8},
        checkpoint={"enable": True, "interval": 5},
    )
    seen, messages, error = ranks.run(1, run_with_losses_changed, config, spike_at_batch_12, {0})[0]
    assert not error
    if action == "skip":
        assert len(seen) == 16
        assert messages == [f"loss spike at step 13 ({seen[12]:.4f}): step skipped"]
    else:  # back to step 10; batches 10 to 12 are not seen again
        assert len(seen) == 16 + 3
        assert messages == [
            f"resumed {tmp_path}/checkpoint/step_10 at step 10",
            f"loss spike at step 13 ({seen[12]:.4f}): rewound to step 10, continuing with batch 13",
        ]
        undone = (tmp_path / "metrics.undone.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in undone] == [11, 12, 13]
        events = map(json.loads, (tmp_path / "sessions.jsonl").read_text().splitlines())
        (rewind,) = [one for one in events if one["event"] == "rewind"]
        assert (rewind["step"], rewind["undone"]) == (10, 3)


def test_a_slow_rise_is_no_spike() -> None:
    guard = SpikeGuard(Health(spike_guard="skip", spike_window=16))
    assert not any(guard.is_spike(3.0 + 0.02 * i) for i in range(100))
    assert guard.is_spike(20.0)


def scale_and_skipped(world: World, config: JobConfig) -> tuple[float, list[int]]:
    run = build_run(config, world, torch.device("cpu"), log_ranks=())
    recorder = Recorder(run)
    run.callbacks.append(recorder)
    run.scaler.scale.fill_(2.0**40)  # overflows until it has come down
    from overland.training.loop import train

    train(run)
    return run.scaler.scale.item(), [record["skipped_steps"] for record in recorder.records]


def test_float16_scales_the_loss_down_until_gradients_are_finite(
    ranks: RankPool, tmp_path: Path
) -> None:
    half = {
        "dtype": "float32",
        "mixed_precision_param": "float16",
        "mixed_precision_reduce": "float32",
        "steps": 40,
    }
    config = tiny_job(tmp_path, training=half, health={"max_bad_steps": 40})
    scale, skipped = ranks.run(1, scale_and_skipped, config)[0]
    assert 1 < scale < 2.0**40
    assert skipped[0] == 1
    assert sum(skipped) < 30


def test_float16_and_bfloat16_learn_as_float32_does(ranks: RankPool, tmp_path: Path) -> None:
    def job(compute: str) -> JobConfig:
        wide = {"dtype": "float32", "mixed_precision_reduce": "float32", "steps": 10}
        return tiny_job(tmp_path / compute, training={**wide, "mixed_precision_param": compute})

    expected = ranks.run(1, losses, job("float32"))[0]
    for narrow in ("float16", "bfloat16"):
        assert ranks.run(1, losses, job(narrow))[0] == pytest.approx(expected, rel=0.01)


class Breaks(Callback):
    """Makes a value of this rank's parameters or moments infinite after a step, as a finite step
    that overflows does."""

    def __init__(self, run: Run, what: str) -> None:
        self.what = what

    def on_step(self, run: Run) -> None:
        if run.progress.step == 3 and run.world.rank == run.world.size - 1:
            parameter = run.optimizer.parameters[-1]
            state = run.optimizer.state(parameter)
            broken = parameter.detach() if self.what == "weights" else state["exp_avg_sq"]
            shard_of(broken)[0] = float("inf")


def run_that_breaks(world: World, config: JobConfig, what: str) -> tuple[list[str], str]:
    run = build_run(config, world, torch.device("cpu"), log_ranks=())
    recorder = Recorder(run)
    run.callbacks += [recorder, Breaks(run, what)]
    try:
        train(run)
        check_last_save(run)
        return recorder.messages, ""
    except TrainingError as error:
        return recorder.messages, str(error)


@pytest.mark.parametrize(
    ("what", "steps", "axis"),
    [
        ("weights", 50, "pipeline_parallel_degree"),
        ("moments", 50, "data_parallel_shard_degree"),
        ("moments", 4, "tensor_parallel_degree"),  # found by the last save
    ],
)
def test_a_state_that_is_not_finite_ends_the_run_and_is_never_resumed(
    ranks: RankPool, tmp_path: Path, what: str, steps: int, axis: str
) -> None:
    config = tiny_job(
        tmp_path,
        training={"steps": steps, "local_batch_size": 8 if "data" not in axis else 4},
        parallelism={axis: 2},
        health={"max_bad_steps": 50},
        checkpoint={"enable": True, "interval": 2, "keep_latest_k": 1},
    )
    folder = tmp_path / "checkpoint"
    for messages, error in ranks.run(2, run_that_breaks, config, what):
        assert any(m.startswith("NOT FINITE: ") and "step_4.nonfinite" in m for m in messages)
        assert error.startswith("the state is no longer finite (")
        assert f"The newest good checkpoint is {folder / 'step_2'}" in error
    good = [one.path.name for one in list_checkpoints(folder)]
    assert good == ["step_2"]
    assert (folder / "latest").readlink() == Path("step_2")
    # Training may have come to another save before the first one was judged.
    assert read_checkpoints(folder).not_finite in ("step_4.nonfinite", "step_6.nonfinite")


def run_after_a_checkpoint_broke(world: World, config: JobConfig) -> list[str]:
    """Saves steps 2 and 4; the latter with NaN, as earlier versions did."""
    run_job(world, config)
    run = build_run(config, world, torch.device("cpu"), log_ranks=())
    with torch.no_grad():
        shard_of(run.optimizer.parameters[0])[0] = float("nan")
    run.store.save(4, saved_state(run), run_facts(run), tested=())
    run.store.close()
    messages: list[str] = []
    resume_newest(run, messages.append)
    return messages


def test_a_checkpoint_that_is_not_finite_is_passed_over(ranks: RankPool, tmp_path: Path) -> None:
    config = tiny_job(tmp_path, training={"steps": 4}, checkpoint={"enable": True, "interval": 2})
    (messages,) = ranks.run(1, run_after_a_checkpoint_broke, config)
    folder = tmp_path / "checkpoint"
    assert messages[:2] == [
        f"{folder}/step_4 holds values that are not finite, in model.model.embed_tokens.weight: "
        f"training cannot continue from there. Trying an older checkpoint",
        f"resumed {folder}/step_2 at step 2",
    ]


def test_an_empty_step_neither_ends_nor_lengthens_a_series_of_bad_ones() -> None:
    yes, no = torch.ones(()), torch.zeros(())
    bad_steps = BadSteps(limit=2)
    for step, (not_finite, is_empty) in enumerate([(yes, no), (no, yes), (yes, no)], start=1):
        bad_steps.note(step, not_finite, is_empty)
    with pytest.raises(TrainingError, match="in 2 steps in a row, up to step 3"):
        bad_steps.check()
    alone = BadSteps(limit=2)
    alone.note(1, yes, no)
    alone.note(2, no, yes)
    assert alone.check() == ([1], [2])


def test_a_resumed_loss_scale_doubles_when_it_would_have() -> None:
    before, after = (LossScaler(True, torch.device("cpu")) for _ in range(2))
    for _ in range(GROWTH_INTERVAL - 1):
        before.update(torch.zeros(()))
    for name, state in after.state_dict().items():
        state.copy_(before.state_dict()[name])
    after.update(torch.zeros(()))
    assert after.scale.item() == 2 * INITIAL_SCALE
