"""Counts a model's parameters and training FLOP (for MFU, and to balance pipeline stages), and
decides whether training is counted in tokens or samples. All of this follows from the description
in its config or its module.

The main figure is the one that papers and torchtitan report, so that MFU can be compared:
FLOP/token = 6 (N - N_input_embedding) + 12 L H d S. A tied embedding is included, since it is also
the output matrix. It counts attention as if every token saw every other; the causal figure counts
what is really computed: half of that, and less with a sliding window.

What a config class says about its cost counts only if the class itself says it: a method that it
inherits describes another model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from overland.config.schema import Lora
from overland.errors import ModelError
from overland.models.lora_targets import trained_shapes
from overland.models.registry import build_model
from overland.models.structure import Role, Structure, inside, structure_of

if TYPE_CHECKING:
    from torch import nn

Shapes = dict[str, tuple[int, ...]]
T = TypeVar("T", int, float)
SampleFields = Mapping[str, tuple[str, tuple[int, ...]]]


@dataclass(frozen=True)
class ParameterCount:
    total: int  # a tied embedding counts once
    input_embedding: int  # a table used only for lookup: 0 if it is also the output matrix
    head: int  # the output matrix, shared or not
    blocks: tuple[int, ...]  # of each block

    @property
    def in_matmuls(self) -> int:
        return self.total - self.input_embedding


@dataclass(frozen=True)
class StageCosts:
    """Multiplications per token in the matrices of each block, and in those after the last
    block."""

    blocks: tuple[float, ...]
    after: float


@dataclass(frozen=True)
class Measure:
    """The unit of training: tokens, or samples that are named arrays."""

    unit: Literal["tokens", "samples"]
    per_row: int
    flops: float | None
    """Training FLOP per unit; None if the model does not define it."""


def count_parameters(config: Any) -> ParameterCount:
    """Counts parameters by part; for a model that does not describe itself, only the total."""
    structure, shapes = outline_of(config)
    sizes = {name: prod(shape) for name, shape in shapes.items()}
    tables = _tables(structure)
    head = [structure.ties.get(name, name) for name in tables if inside(name, structure.last_stage)]
    return ParameterCount(
        total=sum(sizes.values()),
        input_embedding=sum(sizes[name] for name in _looked_up(structure)),
        head=sum(sizes[name] for name in head),
        blocks=sum_by_block(structure, sizes),
    )


def stage_costs(config: Any) -> StageCosts:
    """Returns the costs used to balance pipeline stages; raises if a model cannot be split."""
    structure, shapes = outline_of(config)
    if structure.between is None:
        raise ModelError(
            f"the model of {type(config).__name__} does not say what passes between its blocks "
            "(structure(), see docs/extending.md), so it cannot be split into pipeline stages; it "
            "can be sharded and replicated"
        )
    sizes = {name: float(prod(shape)) * (len(shape) > 1) for name, shape in shapes.items()}
    after = [name for name in shapes if inside(name, structure.last_stage)]
    after += [owner for tied, owner in structure.ties.items() if inside(tied, structure.last_stage)]
    return StageCosts(sum_by_block(structure, sizes), sum(sizes.get(name, 0.0) for name in after))


def trained_parameters(config: Any, lora: Lora, freeze: Sequence[str] = ()) -> Shapes:
    """Returns the shapes of the trained parameters: all of them but those that `model.freeze` names
    or that are built frozen, or adapters and whatever else is trained alongside."""
    structure, shapes = outline_of(config)
    if not lora.rank:
        frozen = _frozen(config, structure, shapes, freeze)
        return {name: shape for name, shape in shapes.items() if name not in frozen}
    tables = _tables(structure)
    looked_up = [name for name in tables if inside(name, structure.first_stage)]
    outputs = [name for name in shapes if inside(name, structure.last_stage)]
    return trained_shapes(lora, shapes, [*looked_up, *outputs], looked_up)


def flops_per_token(
    config: Any,
    seq_len: int,
    lora: Lora | None = None,
    causal: bool = False,
    freeze: Sequence[str] = (),
) -> float:
    """Returns the training FLOP per token by the reporting convention (attention not halved), or
    with attention counted only for visible keys (`causal`). If the config has no
    `attention_flops(seq_len, causal)`, only the parameters count. Frozen matrices have no weight
    gradient: 4 FLOP per parameter instead of 6."""
    number = count_parameters(config).in_matmuls
    structure, shapes = outline_of(config)
    frozen = _frozen(config, structure, shapes, freeze) - _looked_up(structure)
    products = 6.0 * number - 2.0 * sum(prod(shapes[name]) for name in frozen)
    if lora is not None and lora.rank:
        trained = trained_parameters(config, lora)
        whole = sum(prod(shape) for name, shape in trained.items() if ".lora_" not in name)
        products = 4.0 * (number - whole) + 6.0 * sum(map(prod, trained.values()))
    count = own_method(config, "attention_flops")
    return products + (float(count(seq_len, causal)) if count is not None else 0.0)


def causal_flops_per_token(
    config: Any, seq_len: int, lora: Lora | None = None, freeze: Sequence[str] = ()
) -> float:
    return flops_per_token(config, seq_len, lora, causal=True, freeze=freeze)


def outline_of(config: Any) -> tuple[Structure, Shapes]:
    """Returns structure and parameter shapes. They come from the config if its own class defines
    both (inherited methods describe another model); otherwise the model is built on the meta
    device, and the structure of one that does not describe itself is empty."""
    if describes_itself(config):
        return config.structure(), config.parameter_shapes()
    model = built_on_meta(config)
    return structure_of(model), {name: tuple(p.shape) for name, p in model.named_parameters()}


def describes_itself(config: Any) -> bool:
    return all(own_method(config, name) for name in ("structure", "parameter_shapes"))


def own_method(config: Any, name: str) -> Callable[..., Any] | None:
    """Returns a method of a config if its own class defines it."""
    return getattr(config, name) if name in vars(type(config)) else None


def sample_fields(config: Any) -> SampleFields | None:
    """Returns dtype and shape of each array that the model takes, by name; None if it takes
    tokens."""
    describe = getattr(config, "sample_fields", None)
    return None if describe is None else describe()


def casts_samples(config: Any) -> bool:
    """Whether the model accepts those arrays in any dtype."""
    return bool(getattr(config, "casts_samples", False))


def measure_of(config: Any, seq_len: int, lora: Lora, freeze: Sequence[str]) -> Measure:
    if sample_fields(config) is None:
        return Measure("tokens", seq_len, flops_per_token(config, seq_len, lora, freeze=freeze))
    count = own_method(config, "flops_per_sample")
    return Measure("samples", 1, None if count is None else float(count()))


def sum_by_block(structure: Structure, sizes: Mapping[str, T]) -> tuple[T, ...]:
    """Returns the sum of the parameters' sizes in each block, in the order of the blocks."""
    found: dict[str, T] = {}
    for path in structure.blocks:
        for name, size in sizes.items():
            if name.startswith(f"{path}."):
                block = f"{path}.{name.removeprefix(f'{path}.').partition('.')[0]}"
                found[block] = found.get(block, 0) + size
    return tuple(found.values())


def _tables(structure: Structure) -> list[str]:
    """Returns the matrices with a row for each token."""
    return [f"{path}.weight" for path, role in structure.roles.items() if role is Role.VOCABULARY]


def _looked_up(structure: Structure) -> set[str]:
    """Returns the tables that are not output matrices as well."""
    shared = set(structure.ties.values())
    tables = _tables(structure)
    return {name for name in tables if inside(name, structure.first_stage) and name not in shared}


def _frozen(config: Any, structure: Structure, shapes: Shapes, patterns: Sequence[str]) -> set[str]:
    """Returns the parameters that patterns freeze, a shared one by either name, or that a custom
    model builds frozen."""
    known = {name: [name] for name in shapes}
    for tied, owner in structure.ties.items():
        known.get(owner, []).append(tied)
    found = {
        name
        for name, names in known.items()
        if any(fnmatchcase(one, pattern) for one in names for pattern in patterns)
    }
    if not describes_itself(config):
        found |= {
            name for name, p in built_on_meta(config).named_parameters() if not p.requires_grad
        }
    return found


def built_on_meta(config: Any) -> nn.Module:
    import torch

    with torch.device("meta"):
        return build_model(config)
