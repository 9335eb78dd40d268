"""Whether tensors hold values that are not finite: infinities, or NaN.

The largest absolute value of a tensor is not finite if one of its values is not. Finding it takes
one pass at the speed of the memory and no extra memory worth mentioning. On a GPU the pass is
queued when `Largest` is made; only `not_finite` waits for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor


class Largest:
    """The largest absolute values of tensors, each with the name it is reported by. Tensors of
    integers and empty ones are always finite."""

    def __init__(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        groups: dict[tuple[torch.device, torch.dtype], list[tuple[str, Tensor]]] = {}
        for name, tensor in tensors:
            if tensor.is_floating_point() and tensor.numel():
                groups.setdefault((tensor.device, tensor.dtype), []).append((name, tensor))
        self.names = {name for group in groups.values() for name, _ in group}
        self._values: list[tuple[list[str], Tensor]] = []
        for group in groups.values():
            names, some = [name for name, _ in group], [tensor for _, tensor in group]
            self._values.append((names, torch.stack(torch._foreach_norm(some, math.inf))))

    def not_finite(self) -> list[str]:
        """Names of the tensors with a value that is not finite; waits for the device."""
        found: list[str] = []
        for names, values in self._values:
            bad = (~values.isfinite()).tolist()
            found += [name for name, is_bad in zip(names, bad, strict=True) if is_bad]
        return list(dict.fromkeys(found))


def in_words(names: list[str]) -> str:
    """`a`, or `a and 3 other tensors`."""
    others = len(names) - 1
    if not others:
        return names[0]
    return f"{names[0]} and {others} other tensor{'s' if others > 1 else ''}"
