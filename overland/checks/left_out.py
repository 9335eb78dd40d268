"""Reports the matrices that a setting does not reach: fp8, adapters, 4 bits and sparse weights
change linear layers, and whole-matrix optimizers take parameters of two dimensions. A custom model
may have others."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from overland.config.derived import optimizer_settings, resolve_dtype
from overland.config.schema import JobConfig
from overland.models.build import build_undivided, transforms_for
from overland.models.transform import transforms_of
from overland.optimizers.registry import rule_for, rules_of
from overland.optimizers.rule import WholeMatrix
from overland.words import any_of

MOST_NAMED = 6


def left_out(architecture: Any, config: JobConfig) -> list[str]:
    """Returns a sentence for each transform and for the optimizer, if it leaves something out."""
    rules = rules_of(optimizer_settings(config))
    if not transforms_for(config) and not isinstance(rules[0], WholeMatrix):
        return []
    training = resolve_dtype(config.training, "cuda")  # any will do
    config = config.model_copy(update={"training": training})
    with torch.device("meta"):
        model = build_undivided(architecture, config)
    notes = []
    for transform in transforms_of(model):
        if names := transform.left_out(model):
            key = transform.key or type(transform).__name__
            notes.append(f"{key} leaves out {in_short(names)}, which it cannot change")
    if isinstance(rules[0], WholeMatrix):
        others = [
            name
            for name, one in model.named_parameters()
            if one.requires_grad
            and one.ndim > 1
            and rule_for(rules, name, tuple(one.shape)) is not rules[0]
        ]
        if others:
            name, second = config.optimizer.name, rules[0].others
            notes.append(f"{name} leaves {in_short(others)} to {second}")
    return notes


def in_short(names: Sequence[str]) -> str:
    """Returns names, with those that differ only in numbers as one."""
    counts = Counter(re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in names)
    words = [name if count == 1 else f"{name} ({count})" for name, count in counts.items()]
    more = [f"{len(words) - MOST_NAMED} more"] if len(words) > MOST_NAMED else []
    return any_of([*words[:MOST_NAMED], *more], "and")
