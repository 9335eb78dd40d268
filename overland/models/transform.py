"""What a transform is (a change to a model before it is split, such as 8 bits or adapters), and the
registry of your own.

A transform changes the unsharded model on the meta device, once, before anything is frozen, split
or sharded, and in the same way for a whole model and for every pipeline stage. It may replace
modules, but remaining parameters keep their names, so that weights still load and export. To add
your own:

    # my_parts.py, named in [job] custom_import; the config: [model.transforms.low_rank] rank = 4
    register_transform("low_rank", LowRank)     # called as LowRank(**options), here rank=4
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from overland.errors import ModelError
from overland.models.structure import Rule, blocks_of
from overland.words import did_you_mean

if TYPE_CHECKING:
    from torch import nn


class Transform(ABC):
    """Base class of transforms. A module that replaces a matrix and has matrices of its own defines
    their roles (`roles(role)`, given the role of the replaced matrix), so that tensor parallelism
    can split them."""

    key = ""
    """What asks for the transform, such as a key of the config, for messages."""
    only_new = False
    """Whether only the parameters that the transform adds are trained."""

    @abstractmethod
    def apply(self, model: nn.Module) -> None:
        """Changes the model in place. It is on the meta device, where no tensor has values."""

    def also_trains(self, name: str) -> bool:
        """If only new parameters are trained: whether this parameter of the model is also
        trained."""
        return False

    def init_rule(self, name: str) -> Rule | None:
        """Returns how a parameter added by this transform starts; it is called for no other."""
        return None

    def left_out(self, model: nn.Module) -> list[str]:
        """Returns the parameters of a transformed model that one would expect to be changed, but
        that the transform cannot change."""
        return []

    def start(self, model: nn.Module) -> None:  # noqa: B027 (most have nothing to do)
        """Initializes parameters from the model's own values. Called once these are loaded, on a
        whole model or a part of it; not when a run resumes."""


def register_transform(name: str, make: Callable[..., Transform] | None = None) -> Any:
    """Makes `[model.transforms.NAME]` apply the transform that `make` returns for its options.
    Usable as a decorator: `@register_transform(NAME)`."""
    if make is None:
        return partial(register_transform, name)
    if name in _TRANSFORMS:
        raise ModelError(f"a transform named '{name}' is already registered")
    _TRANSFORMS[name] = make
    return make


def make_transforms(wanted: Mapping[str, Mapping[str, Any]]) -> list[Transform]:
    """Makes the transforms of `[model.transforms.NAME]`, in the order of the config."""
    found = []
    for name, options in wanted.items():
        if name not in _TRANSFORMS:
            raise ModelError(f"there is no transform '{name}'{did_you_mean(name, _TRANSFORMS)}")
        try:
            made = _TRANSFORMS[name](**options)
        except TypeError as error:
            raise ModelError(f"the transform '{name}' cannot be created: {error}") from None
        if not isinstance(made, Transform):
            kind = type(made).__name__
            raise ModelError(f"the transform '{name}' is a {kind}, expected a Transform")
        found.append(made)
    return found


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
                    f"{type(transform).__name__} adds the parameter {name}, but its init_rule() "
                    "does not define how it starts; an existing parameter of the model must keep "
                    "its name"
                )
            added[name] = rule
    model._transforms, model._added = tuple(transforms), added  # type: ignore[assignment]


def matrices_of(model: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Parameter]]:
    """Yields the parameters of the blocks with two dimensions or more, with the modules that own
    them; not those that transforms have added."""
    for path, block in blocks_of(model).items():
        for name, parameter in block.named_parameters():
            whole = f"{path}.{name}"
            if parameter.ndim > 1 and added_rule(model, whole) is None:
                yield whole, model.get_submodule(whole.rpartition(".")[0]), parameter


def transforms_of(model: nn.Module) -> tuple[Transform, ...]:
    found: tuple[Transform, ...] = getattr(model, "_transforms", ())
    return found


def added_rule(model: nn.Module, name: str) -> Rule | None:
    """Returns how a parameter added by a transform starts; None for those of the model itself."""
    added: dict[str, Rule] = getattr(model, "_added", {})
    return added.get(name)


_TRANSFORMS: dict[str, Callable[..., Transform]] = {}
