"""A custom model trains on arrays: sessions on different numbers of ranks, and a short last
batch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from overland.apps.ledger import read_ledger
from overland.apps.proofs.data import prove_data
from overland.apps.proofs.pool import RankPool
from overland.config.schema import JobConfig
from overland.data import registry as sources
from overland.models import register_model
from overland.models import registry as models
from overland.models.init import Normal
from overland.objectives import registry as objectives
from overland.objectives.objective import Objective
from overland.objectives.registry import register_objective
from overland.world import World
from tests.data import test_arrays
from tests.data.test_arrays import Pictures
from tests.jobs import run_job, tiny_job

COUNT = len(Pictures().numbers)  # 53 samples: six batches of 8 and five rows


@dataclass(frozen=True)
class GuessConfig:
    size: int = 60

    def sample_fields(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        return {"pixels": ("float32", (3, 4, 5)), "label": ("int64", ())}


class Guess(nn.Module):
    """Guesses the label of a picture from its pixels, with noise that depends on the epoch."""

    def __init__(self, config: GuessConfig) -> None:
        super().__init__()
        self.weight = nn.Linear(config.size, 1)

    def init_rule(self, name: str) -> Normal:
        return Normal(0.02, name)

    def forward(
        self, pixels: Tensor, label: Tensor, epoch_B: Tensor, weight_B: Tensor | None = None
    ) -> Tensor:
        noisy = pixels.flatten(1).to(self.weight.weight.dtype) / 100 + epoch_B[:, None]
        errors = (self.weight(noisy)[:, 0] - label / 100).square()
        return (errors if weight_B is None else errors * weight_B).sum()


def register() -> None:
    if "guess" not in models._MODELS:
        test_arrays.register()
        build = lambda config, attention: Guess(config)
        flavors = {"tiny": GuessConfig()}
        register_model("guess", flavors=flavors, config_class=GuessConfig, build=build)
        register_objective("guess", Objective)


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """For one test: others list what there is."""
    monkeypatch.setattr(sources, "_sources", dict(sources._sources))
    monkeypatch.setattr(models, "_MODELS", dict(models._MODELS))
    monkeypatch.setattr(objectives, "_OBJECTIVES", dict(objectives._OBJECTIVES))
    register()


def job(folder: Path, ranks: int, **training: Any) -> JobConfig:
    return tiny_job(
        folder / "run",
        model={"name": "guess", "flavor": "tiny", "overrides": {}},
        training={
            "dataset": "pictures",
            "objective": "guess",
            "local_batch_size": 8 // ranks,
            "steps": 10_000,
            "epochs": 2.0,
            **training,
        },
        data={"folder": str(folder / "data"), "window_documents": 20, "tokenise_processes": 0},
        checkpoint={"enable": True, "interval": 100},
    )


def train(world: World, config: JobConfig) -> list[float]:
    register()
    return run_job(world, config).losses


def test_sessions_on_other_ranks_train_as_one_does(ranks: RankPool, tmp_path: Path) -> None:
    one, many = tmp_path / "one", tmp_path / "many"
    unbroken = ranks.run(1, train, job(one, 1))[0]
    assert len(unbroken) == -(-2 * COUNT // 8)
    found = []
    for count in (1, 4, 2):
        (many / "run").mkdir(parents=True, exist_ok=True)
        if count != 2:
            (many / "run" / "STOP").touch()  # ends the session after a step
        found += ranks.run(count, train, job(many, count))[0]
    assert found == pytest.approx(unbroken, rel=1e-12)
    ours, theirs = (read_ledger(path / "run/data/ledger.bin").fed for path in (one, many))
    for step, expected in theirs.items():
        assert torch.equal(*map(torch.from_numpy, (ours[step].digests, expected.digests)))
    verdict = prove_data(many / "run")
    assert verdict.holds
    assert [count.planned for count in verdict.sources.values()] == [2 * COUNT]
