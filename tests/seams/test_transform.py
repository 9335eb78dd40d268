"""What a transform adds is what the model did not have before it, whatever its rules say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from overland.apps.check.fake_step import fake_steps
from overland.models import ModelError, build_model, resolve_config
from overland.models import transform as transforms
from overland.models.init import Constant, Rule
from overland.models.transform import Transform, added_rule, apply_transforms
from tests.jobs import TINY_MODEL, tiny_job


class Shift(Transform):
    """Adds a vector to what each attention returns; its rule covers every parameter."""

    only_new = True

    def apply(self, model: nn.Module) -> None:
        for block in model.model.layers.values():  # type: ignore[union-attr, operator]
            block.self_attn.shift = nn.Parameter(torch.empty(32))
            block.self_attn.register_forward_hook(lambda module, args, out: out + module.shift)

    def init_rule(self, name: str) -> Rule | None:
        return Constant(0.0)


class Silent(Shift):
    def init_rule(self, name: str) -> Rule | None:
        return None


class Renamed(Silent):
    def apply(self, model: nn.Module) -> None:
        model.model.normal = model.model.norm  # type: ignore[union-attr]
        model.model.norm = None  # type: ignore[union-attr]


class Nothing(Silent):
    def apply(self, model: nn.Module) -> None:
        pass


def test_parameters_of_the_model_stay_its_own() -> None:
    with torch.device("meta"):
        model = build_model(resolve_config("llama3", "debug", overrides=TINY_MODEL))
    before = [name for name, _ in model.named_parameters()]
    apply_transforms(model, [Shift()])
    assert all(added_rule(model, name) is None for name in before)
    assert added_rule(model, "model.layers.0.self_attn.shift") == Constant(0.0)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (
            Silent,
            r"Silent adds the parameter model\.layers\.0\.self_attn\.shift, but its init_rule",
        ),
        (Renamed, r"Renamed adds the parameter model\.normal\.weight.*must keep its name"),
        (Nothing, "nothing would be trained"),
    ],
)
def test_a_transform_that_trains_nothing_of_its_own_is_refused(
    make: Callable[[], Transform], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transforms, "_TRANSFORMS", {"mine": make})  # gone after the test
    with pytest.raises(ModelError, match=says):
        fake_steps(tiny_job(tmp_path, model={"transforms": {"mine": {}}}), 1)


def test_a_model_may_have_transforms_of_its_own() -> None:
    """A module by that name: what is noted about a model does not collide with it."""
    model = nn.Module()
    model.transforms = nn.ModuleList([nn.Linear(2, 2)])
    apply_transforms(model, [])
    assert isinstance(model.transforms, nn.ModuleList)
