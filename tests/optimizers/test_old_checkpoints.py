"""Run folders that were written before optimizers became a package load bit for bit and resume."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from overland.apps.proofs.pool import RankPool
from overland.checkpoint.read import open_checkpoint
from overland.config.load import load_config
from overland.config.schema import JobConfig
from overland.training.build import build_run
from overland.training.state import run_tensors, saved_state
from overland.world import World
from tests.cli.processes import ROOT
from tests.jobs import losses

RUNS = ROOT / "tests" / "fixtures" / "runs_with_adamw"
# Losses of steps 4 to 6, computed by the code that wrote the checkpoints.
LOSSES = {
    "sharded": [3.4787676015260356, 3.460154555963446, 3.4635045712763626],
    "split": [3.4786806106567383, 3.460022449493408, 3.4633569717407227],
}


def job(kind: str, folder: Path, num_ranks: int) -> JobConfig:
    shutil.copytree(RUNS / kind, folder)
    overrides = [
        f"job.dump_folder={folder}",
        "training.steps=6",
        f"training.local_batch_size={4 // num_ranks}",
    ]
    return load_config(str(folder / "config.toml"), overrides, env={}).config


def differing(world: World, config: JobConfig, path: Path) -> list[str]:
    """Names of the tensors that are not what the checkpoint at `path` holds."""
    run = build_run(config, world, torch.device("cpu"), log_ranks=())
    assert run.progress.step == 3
    with open_checkpoint(path) as checkpoint, run.optimizer.whole():
        found = run_tensors(run)
        saved = {name for name in checkpoint.tensors if not name.startswith("rng.")}
        assert set(found) == saved
        assert {name for name in saved_state(run) if not name.startswith("rng.")} == saved
        wrong = []
        for name, tensor in found.items():
            whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            expected = checkpoint.read(name)
            if whole.dtype != expected.dtype or not torch.equal(whole, expected):
                wrong.append(name)
        return wrong


@pytest.mark.parametrize(("kind", "num_ranks"), [("sharded", 2), ("split", 1)])
def test_an_old_checkpoint_loads_to_the_bit(
    ranks: RankPool, tmp_path: Path, kind: str, num_ranks: int
) -> None:
    config = job(kind, tmp_path / "run", num_ranks)
    path = RUNS / kind / "checkpoint" / "step_3"
    assert ranks.run(num_ranks, differing, config, path) == [[]] * num_ranks


@pytest.mark.parametrize(
    ("kind", "num_ranks", "tolerance"),
    # The second in another layout than it was saved in. Bits depend on the processor, and bfloat16
    # rounds what it adds up in another order.
    [("sharded", 2, 1e-13), ("sharded", 1, 1e-12), ("split", 1, 1e-3)],
)
def test_an_old_run_resumes_where_it_left_off(
    ranks: RankPool, tmp_path: Path, kind: str, num_ranks: int, tolerance: float
) -> None:
    config = job(kind, tmp_path / "run", num_ranks)
    found = ranks.run(num_ranks, losses, config)[0]
    assert found == pytest.approx(LOSSES[kind], rel=tolerance)
