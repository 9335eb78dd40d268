"""Which matrices get adapters, by their names, and what shapes these have. Imports no torch.

Names are matched by PEFT's rules, so that its configs mean the same here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TypeVar

from overland.config.schema import Lora

ALL_LINEAR = "all-linear"
LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")

Shapes = dict[str, tuple[int, ...]]
T = TypeVar("T")


def is_target(name: str, settings: Lora) -> bool:
    """Whether a module gets an adapter, if it is one that can have one."""
    layer = LAYER.search(name)
    in_layers = settings.layers is None or (layer is not None and int(layer[1]) in settings.layers)
    is_saved = any(is_named(module, settings.modules_to_save) for module in (name, *above(name)))
    is_out = is_named(name, settings.exclude) or is_saved
    return is_named(name, settings.targets) and not is_out and in_layers


def is_saved_whole(name: str, settings: Lora) -> bool:
    """Whether a parameter of the model is trained beside the adapters: one of a module whose name
    ends as is said, or of a module in it. PEFT asks for no dot before the end: `norm` is every
    norm."""
    return any(module.endswith(one) for module in above(name) for one in settings.modules_to_save)


def above(name: str) -> list[str]:
    """The names of the modules that a module or parameter is in."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]


def is_named(name: str, wanted: str | Sequence[str]) -> bool:
    """Whether a module is meant: a text is a regular expression for whole names, and those of a
    list are names or their ends."""
    if wanted == ALL_LINEAR:
        return True
    if isinstance(wanted, str):
        return re.fullmatch(wanted, name) is not None
    return any(name == one or name.endswith(f".{one}") for one in wanted)


def rank_and_alpha(name: str, settings: Lora) -> tuple[int, float]:
    return (
        by_pattern(name, settings.rank_pattern, settings.rank),
        by_pattern(name, settings.alpha_pattern, settings.alpha),
    )


def by_pattern(name: str, patterns: Mapping[str, T], otherwise: T) -> T:
    """The value of the first pattern that a name or its end matches; ^ begins one for whole
    names."""
    for pattern, value in patterns.items():
        if re.match(rf"(?:.*\.)?(?:{pattern})$", name):
            return value
    return otherwise


def trained_shapes(
    settings: Lora, shapes: Shapes, tables: Sequence[str] = (), looked_up: Sequence[str] = ()
) -> Shapes:
    """The shapes of what is trained of a model with these parameters: adapters, and modules beside
    them. `tables` are parameters that all-linear leaves out: embeddings, and the output matrix;
    `looked_up` are the embeddings."""
    trained = {name: shape for name, shape in shapes.items() if is_saved_whole(name, settings)}
    for name, shape in shapes.items():
        module = name.removesuffix(".weight")
        is_out = settings.targets == ALL_LINEAR and name in tables
        if len(shape) != 2 or is_out or not is_target(module, settings):
            continue
        rank, _ = rank_and_alpha(module, settings)
        if name in looked_up:
            trained[f"{module}.lora_embedding_A"] = (rank, shape[0])
            trained[f"{module}.lora_embedding_B"] = (shape[1], rank)
            continue
        trained[f"{module}.lora_A.weight"] = (rank, shape[1])
        trained[f"{module}.lora_B.weight"] = (shape[0], rank)
        if settings.dora:
            trained[f"{module}.lora_magnitude_vector"] = (shape[0],)
    return trained
