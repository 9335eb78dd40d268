"""Objectives and transforms that do not exist, or do not fit, are detected before anything runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from overland.checks import check_config
from overland.config.load import load_config
from overland.errors import ObjectiveError
from overland.models import transform
from overland.objectives import registry

OBJECTIVES, TRANSFORMS = dict(registry._OBJECTIVES), dict(transform._TRANSFORMS)
EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


def problems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, *arguments: str
) -> list[str]:
    monkeypatch.setattr(transform, "_TRANSFORMS", dict(TRANSFORMS))
    monkeypatch.setattr(registry, "_OBJECTIVES", dict(OBJECTIVES))
    monkeypatch.setattr(sys, "path", [str(EXAMPLES), *sys.path])
    for name in ("low_rank", "preference"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    path = tmp_path / "run.toml"
    path.write_text(text)
    found = check_config(load_config(str(path), list(arguments)), 1)
    return [f"{one.key}: {one.message}" for one in found if one.kind != "note"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('[training]\nobjective = "next_tokn"', "training.objective: there is no objective"),
        ('[training]\nobjective = "next_tokn"', "did you mean 'next_token'"),
        ('[training]\nobjective = "per_sample"\nz_loss = 1e-4', "z_loss is part of next_token"),
        ("[training]\nobjective_options = {beta = 1}", "next_token' cannot be created"),
        ("[training]\nobjective_options = {beta = 1}", "training.objective_options: "),
        ("[model.transforms.low_rnk]\nrank = 4", "there is no transform 'low_rnk'"),
    ],
)
def test_names_and_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, says: str
) -> None:
    (found,) = problems(tmp_path, monkeypatch, text)
    assert says in found


def test_a_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = """
        [job]
        custom_import = "low_rank"
        [model.transforms.low_rank]
        rank = 4
        """
    assert problems(tmp_path, monkeypatch, text) == []
    (found,) = problems(tmp_path, monkeypatch, text + "ranks = 4\n")
    assert "the transform 'low_rank' cannot be created" in found
    assert "ranks" in found


def test_what_a_transform_adds_cannot_be_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = """
        [job]
        custom_import = "low_rank"
        [model.transforms.low_rank]
        rank = 4
        [checkpoint]
        last_save_in_hf = true
        """
    (found,) = problems(tmp_path, monkeypatch, text)
    assert "checkpoint.last_save_in_hf: a transform adds model.layers.0.self_attn.q_proj" in found


def test_patterns_may_name_what_a_transform_adds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = """
        [job]
        custom_import = "low_rank"
        [model]
        freeze = ["*.layers.0.*.down.weight"]
        [model.transforms.low_rank]
        rank = 4
        [[optimizer.groups]]
        pattern = "*.up.weight"
        lr_factor = 2.0
        """
    assert problems(tmp_path, monkeypatch, text) == []


def test_an_objective_that_a_model_would_not_ask_is_refused() -> None:
    from torch import nn

    from overland.objectives.objective import Objective

    class Halved(Objective):
        def loss(self, terms_Bk, fields):
            return terms_Bk[:, 0] / 2, {}

    registry.give_objective([nn.Linear(1, 1)], Objective())  # the model computes its own
    with pytest.raises(ObjectiveError, match="Linear computes its loss itself"):
        registry.give_objective([nn.Linear(1, 1)], Halved())


def test_pairs_stay_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = """
        [job]
        custom_import = "preference"
        [training]
        objective = "preference"
        local_batch_size = 3
        """
    (found,) = problems(tmp_path, monkeypatch, text)
    assert "training.local_batch_size: preference takes 2 rows together" in found
    split: Any = ("training.local_batch_size=4", "parallelism.pipeline_parallel_degree=2")
    assert any("microbatch_size" in one for one in problems(tmp_path, monkeypatch, text, *split))
