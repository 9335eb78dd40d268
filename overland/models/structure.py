"""How a model describes itself to parallelism: its blocks and stages in the order of the forward
pass, the roles of its matrices, and tied parameters.

A model with a method `structure()` can be sharded, recomputed and compiled block by block, and
split into pipeline stages. It says nothing about ranks. A pipeline stage is the same model with
modules removed: those of `first_stage` and `last_stage` are None on the others, and blocks of other
stages are gone. So without those of `first_stage` a model receives the output of the last block of
the previous stage, and without those of `last_stage` it returns the output of its own last
block.

Does not import torch, so that a config can describe its model as well.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from overland.errors import ModelError

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True)
class Normal:
    std: float
    name: str  # of the random stream


@dataclass(frozen=True)
class Uniform:
    """Uniform from -bound to bound; None means 1 / √n, for a matrix with n inputs."""

    bound: float | None
    name: str  # of the random stream


@dataclass(frozen=True)
class Constant:
    value: float


Rule = Normal | Uniform | Constant
"""How a parameter starts, which the model's method `init_rule(name)` says (see init.py)."""


class Role(StrEnum):
    """What a matrix does, which decides how tensor parallelism may split it."""

    COLUMN = "column"  # produces the inner width: its output can be split
    ROW = "row"  # consumes the inner width: its input can be split
    VOCABULARY = "vocabulary"  # a row for each token id
    REPLICATED = "replicated"  # whole everywhere


@dataclass(frozen=True)
class Structure:
    """Modules are named by their dotted paths in the model."""

    blocks: tuple[str, ...] = ()
    """Lists of blocks (ModuleList or ModuleDict), in the order of the forward pass."""
    first_stage: tuple[str, ...] = ()
    """Modules with parameters that only the first stage of a pipeline has."""
    last_stage: tuple[str, ...] = ()
    """Modules with parameters that only the last stage has."""
    ties: Mapping[str, str] = field(default_factory=dict)
    """Parameters that are shared with another one, such as the head's weight with the
    embedding's."""
    between: Callable[[int], tuple[int, ...]] | None = None
    """For a row of a given number of tokens, the shape of what passes from block to block. None:
    the model cannot be split into stages."""
    roles: Mapping[str, Role] = field(default_factory=dict)
    """Role of each matrix, by the path of its module within its block, or within the model if it is
    outside blocks."""
    compiled: tuple[str, ...] = ()
    """Modules outside blocks that are worth compiling."""
    random: bool = True
    """Whether blocks may draw random numbers, such as for dropout."""
    recordable: bool = False
    """Whether a pass never waits for the device, so that it can be recorded as a CUDA graph."""


@dataclass(frozen=True)
class PassShape:
    """One micro-batch on one device, and how it is computed."""

    tokens: int
    size: int  # bytes of a number
    tp: int = 1
    cp: int = 1
    recompute: str = "none"  # or selective (by operator), or full
    compiled: bool = False
    float8: bool = False
    kernels: bool = True  # our own kernels are used, as on NVIDIA GPUs
    trains_head: bool = True


@dataclass(frozen=True)
class Activations:
    """Memory of activations: bytes on one device. A config with a method `activations(PassShape)`
    lets a run choose how much to recompute so that it fits the device; for any other model there is
    no estimate, and nothing is recomputed unless configured."""

    kept: float  # by one block, from its forward to its backward pass
    block: float  # temporaries of the backward pass of one block
    head: float  # temporaries of the modules after the blocks, and the output matrix's gradient


def structure_of(model: nn.Module) -> Structure:
    """Returns the model's own description; an empty one if it does not describe itself."""
    describe = getattr(model, "structure", None) or Structure
    structure = describe()
    if not isinstance(structure, Structure):
        raise ModelError(
            f"structure() of {type(model).__name__} returned {structure!r:.60}, expected a "
            "Structure of overland.models.structure (docs/extending.md)"
        )
    return structure


def check_structure(model: nn.Module) -> None:
    """Raises if the description names modules or parameters that the model does not have."""
    if getattr(model, "structure", None) is None:
        return
    structure = structure_of(model)
    name = type(model).__name__
    for key in ("blocks", "first_stage", "last_stage", "compiled"):
        if isinstance(paths := getattr(structure, key), str):
            raise ModelError(
                f"structure() of {name} has {key} = {paths!r}, expected a tuple: ({paths!r},)"
            )
    placed = (*structure.blocks, *structure.first_stage, *structure.last_stage)
    for path in (*placed, *structure.compiled):
        if find_module(model, path) is None:
            raise ModelError(f"structure() of {name} names {path}, which it does not have")
    for number, path in enumerate(placed):
        if inside(path, (*placed[:number], *placed[number + 1 :])):
            raise ModelError(
                f"structure() of {name} names {path} twice, or inside another module: each module "
                "must be in only one of blocks, first_stage and last_stage"
            )
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for tied, owner in structure.ties.items():
        for path in (tied, owner):
            if path not in parameters:
                raise ModelError(f"structure() of {name} ties {path}, which it does not have")
    if not blocks_of(model):
        raise ModelError(f"structure() of {name} names no blocks that hold parameters")


def blocks_of(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the local blocks, by full name and in order; none if the model names none."""
    found: dict[str, nn.Module] = {}
    for path in structure_of(model).blocks:
        blocks = find_module(model, path)
        if blocks is not None:
            found |= {f"{path}.{name}": block for name, block in blocks.named_children()}
    return found


def find_module(model: nn.Module, path: str) -> nn.Module | None:
    """Returns the module at a path; None if it, or an enclosing one, does not exist."""
    module: nn.Module | None = model
    for name in path.split("."):
        module = getattr(module, name, None)
    return module


def remove_module(model: nn.Module, path: str) -> None:
    """Removes a module: its attribute becomes None; a block is removed from its list."""
    around, _, name = path.rpartition(".")
    owner = find_module(model, around) if around else model
    assert owner is not None
    if around in structure_of(model).blocks:
        del owner._modules[name]  # the others keep their numbers
    else:
        setattr(owner, name, None)


def ties_of(model: nn.Module) -> Mapping[str, str]:
    return structure_of(model).ties


def tie(model: nn.Module) -> None:
    """Ties parameters again if both are local: allocating a model creates a new parameter for each
    module."""
    for tied, owner in ties_of(model).items():
        from_path, _, from_name = owner.rpartition(".")
        to_path, _, to_name = tied.rpartition(".")
        source, target = find_module(model, from_path), find_module(model, to_path)
        if source is not None and target is not None:
            setattr(target, to_name, getattr(source, from_name))


def inside(path: str, modules: tuple[str, ...]) -> bool:
    """Returns whether a parameter or module lies in one of these modules."""
    return any(path == module or path.startswith(f"{module}.") for module in modules)


def walk_roles(model: nn.Module) -> Iterator[tuple[str, Role]]:
    """Yields every matrix that has a role, by the full name of its module."""
    blocks = blocks_of(model)
    for path, role in structure_of(model).roles.items():
        if find_module(model, path) is not None:
            yield path, role
        for name, block in blocks.items():
            if find_module(block, path) is not None:
                yield f"{name}.{path}", role


class Inputs:
    """The fields of a batch that a model receives: those that its forward() names.

    The first parameter of forward() is the main input; in a later pipeline stage, it is the output
    of the previous stage. Others are passed by name if the batch has them; `**fields` accepts all.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = type(model).__name__
        parameters = inspect.signature(model.forward).parameters.values()
        self.takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters)
        named = [one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD,
                                                                one.KEYWORD_ONLY)]  # fmt: skip
        self.first, self.others = named[0], named[1:]

    def of(self, fields: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the main input, and all other fields by name."""
        if self.first not in fields:
            raise ModelError(
                f"{self.model} needs {self.first} first, which the data does not have: it has "
                f"{', '.join(fields)}"
            )
        others = {
            name: value
            for name, value in fields.items()
            if name != self.first and (self.takes_all or name in self.others)
        }
        return fields[self.first], others
