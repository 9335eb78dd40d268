"""Changes to a model: multiplying in 8 bits, adapters beside frozen weights.

A transform changes the undivided model on the meta device, once, before anything is frozen, split
or sharded, and the same way for a whole model and for every stage of a pipeline. It may replace
modules, but parameters that stay keep their names, so that weights still load and export. Your own:

    # my_parts.py, named in [job] custom_import; the config: [model.transforms.low_rank] rank = 4
    register_transform("low_rank", LowRank)     # called as LowRank(**options), here rank=4
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from overland.errors import ModelError
from overland.words import did_you_mean

if TYPE_CHECKING:
    from torch import nn

    from overland.models.init import Rule


class Transform(ABC):
    """Base of all transforms. A module that a transform puts in the place of a matrix, and that has
    matrices of its own, says what those do (`roles(role)`, given the role of the one in whose place
    it stands), so that tensor parallelism can split them."""

    only_new = False
    """Whether only the parameters that it adds are trained."""

    @abstractmethod
    def apply(self, model: nn.Module) -> None:
        """Changes the model in place. It is on the meta device: no tensor has values."""

    def also_trains(self, name: str) -> bool:
        """Where only new parameters are trained: whether this one of the model is, too."""
        return False

    def init_rule(self, name: str) -> Rule | None:
        """Returns how a parameter starts that this transform adds: it is asked about no other."""
        return None

    def start(self, model: nn.Module) -> None:  # noqa: B027 (most have nothing to do)
        """Sets parameters that start by values of the model's own. Called once these are there,
        on a whole model or a part of it; not for a run that resumes."""


def register_transform(name: str, make: Callable[..., Transform]) -> None:
    """Makes `[model.transforms.NAME]` apply what `make` returns for its options."""
    if name in _TRANSFORMS:
        raise ModelError(f"a transform named '{name}' is already registered")
    _TRANSFORMS[name] = make


def make_transforms(wanted: Mapping[str, Mapping[str, Any]]) -> list[Transform]:
    """Makes the transforms of `[model.transforms.NAME]`, in the order of the config."""
    return [_make(name, options) for name, options in wanted.items()]


def apply_transforms(model: nn.Module, transforms: Sequence[Transform]) -> None:
    added: dict[str, Rule] = {}
    for transform in transforms:
        before = {name for name, _ in model.named_parameters()}
        transform.apply(model)
        for name, _ in model.named_parameters():
            if name in before:
                continue
            rule = transform.init_rule(name)
            if rule is None:
                raise ModelError(
                    f"{type(transform).__name__} adds the parameter {name}, and its init_rule() "
                    "does not say how that starts; a parameter that the model has already must "
                    "keep its name"
                )
            added[name] = rule
    model._transforms, model._added = tuple(transforms), added  # type: ignore[assignment]


def transforms_of(model: nn.Module) -> tuple[Transform, ...]:
    found: tuple[Transform, ...] = getattr(model, "_transforms", ())
    return found


def added_rule(model: nn.Module, name: str) -> Rule | None:
    """Returns how a parameter starts that a transform has added; None for those of the model
    itself."""
    added: dict[str, Rule] = getattr(model, "_added", {})
    return added.get(name)


def _make(name: str, options: Mapping[str, Any]) -> Transform:
    if name not in _TRANSFORMS:
        raise ModelError(f"no transform is named '{name}'{did_you_mean(name, _TRANSFORMS)}")
    try:
        made = _TRANSFORMS[name](**options)
    except TypeError as error:
        raise ModelError(f"the transform '{name}' cannot be made: {error}") from None
    if not isinstance(made, Transform):
        raise ModelError(f"the transform '{name}' is a {type(made).__name__}, no Transform")
    return made


_TRANSFORMS: dict[str, Callable[..., Transform]] = {}
