"""Which matrices get adapters, by name, and the shapes of the adapters. Does not import torch.

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
    """Whether a module gets an adapter, if it can have one."""
    layer = LAYER.search(name)
    in_layers = settings.layers is None or (layer is not None and int(layer[1]) in settings.layers)
    is_saved = any(is_named(module, settings.modules_to_save) for module in (name, *above(name)))
    is_out = is_named(name, settings.exclude) or is_saved
    return is_named(name, settings.targets) and not is_out and in_layers


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name was added by an adapter."""
    return ".lora_" in name


def is_saved_whole(name: str, settings: Lora) -> bool:
    """Whether a parameter of the model is trained in full alongside the adapters: one in a module
    whose name ends as given in `modules_to_save`, or in a module inside it. As in PEFT, the ending
    need not follow a dot: `norm` means every norm."""
    return any(module.endswith(one) for module in above(name) for one in settings.modules_to_save)


def above(name: str) -> list[str]:
    """Returns the names of the modules that contain a module or parameter."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]


def is_named(name: str, wanted: str | Sequence[str]) -> bool:
    """Whether a module is meant: a string is a regular expression for full names, and the entries
    of a list are names or endings of names."""
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
    """Returns the value of the first pattern that matches a name or its ending; a pattern that
    begins with ^ matches only full names."""
    for pattern, value in patterns.items():
        if re.match(rf"(?:.*\.)?(?:{pattern})$", name):
            return value
    return otherwise


def trained_shapes(
    settings: Lora, shapes: Shapes, tables: Sequence[str] = (), looked_up: Sequence[str] = ()
) -> Shapes:
    """Returns the shapes of what is trained in a model with these parameters: adapters, and modules
    trained in full. `tables` are the parameters that all-linear leaves out: embeddings and the
    output matrix; `looked_up` are the embeddings."""
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
