"""Parameter groups: which rates a parameter has, by its name."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

from overland.config.schema import Optimizer


@dataclass(frozen=True)
class Group:
    lr_factor: float
    weight_decay: float


def group_of(name: str, num_dims: int, settings: Optimizer) -> Group:
    """The rates of the first group whose pattern matches. Unless a group says otherwise, matrices
    and embeddings decay; norms and biases (anything with one dimension) do not."""
    decay = settings.weight_decay if num_dims >= 2 else 0.0
    for group in settings.groups:
        if fnmatchcase(name, group.pattern):
            given = group.weight_decay
            return Group(group.lr_factor, decay if given is None else given)
    return Group(1.0, decay)
