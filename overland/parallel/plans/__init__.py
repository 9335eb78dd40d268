"""How tensor and context parallelism split a kind of model: one plan per kind.

A model that describes its blocks can be sharded, recomputed, compiled and split into stages without
a plan (see models/structure.py). Whether its matrices can be split over `tp`, and its rows over
`cp`, depends on what it computes with them, which a plan defines. Does not import torch: plans are
imported when needed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from overland.errors import ModelError
from overland.models.config import DecoderConfig
from overland.models.vit_mae_config import ViTMAEConfig

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from overland.config.derived import Degrees


class ParallelPlan(Protocol):
    @property
    def axes(self) -> tuple[str, ...]:
        """Which of `tp` and `cp` the plan can split a model over."""

    def uneven(self, config: Any, tp: int) -> list[str]:
        """Returns descriptions of the sizes in the model's config that `tp` does not divide."""

    def check(self, model: nn.Module, degrees: Degrees) -> None:
        """Raises a ModelError if the plan is not for this model."""

    def split_tensors(self, model: nn.Module, tp: DeviceMesh, overlap: bool) -> None:
        """Splits the matrices of a model, or of one stage of it, on the meta device."""

    def split_context(self, model: nn.Module, cp: DeviceMesh) -> None:
        """Makes a model work on this rank's share of each row."""


def register_plan(config_class: type, open_plan: Callable[[], ParallelPlan]) -> None:
    """Registers the plan for models of a config class, and of its subclasses without their own
    plan."""
    if config_class in _PLANS:
        raise ModelError(f"{config_class.__name__} already has a plan")
    _PLANS[config_class] = open_plan


def plan_for(config: Any) -> ParallelPlan | None:
    for kind in type(config).__mro__:
        if kind in _PLANS:
            return _PLANS[kind]()
    return None


def without_plan(config: Any, name: str, **degrees: int) -> dict[str, str]:
    """Returns, by axis, that a model of this config and name lacks a plan to be split over it."""
    plan = plan_for(config)
    axes = plan.axes if plan is not None else ()
    return {
        axis: f"{name} has no plan for {axis} = {degree} (register_plan, see docs/extending.md); "
        "it can be sharded and replicated"
        for axis, degree in degrees.items()
        if degree > 1 and axis not in axes
    }


def _decoder() -> ParallelPlan:
    from overland.parallel.plans.decoder import DecoderPlan

    return DecoderPlan()


def _vit_mae() -> ParallelPlan:
    from overland.parallel.plans.vit_mae import ViTMAEPlan

    return ViTMAEPlan()


_PLANS: dict[type, Callable[[], ParallelPlan]] = {DecoderConfig: _decoder, ViTMAEConfig: _vit_mae}
