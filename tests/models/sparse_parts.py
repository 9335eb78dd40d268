"""What tests of sparse layers register: a masked dense twin, and custom methods."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from overland.models.sparse import register_mask
from overland.models.structure import blocks_of
from overland.models.transform import Transform, register_transform


def sorted_mask(weight_OD: Tensor, kept: int, group: int) -> Tensor:
    """The definition: the first `kept` of each group by size."""
    parts = weight_OD.abs().unflatten(1, (-1, group))
    order = parts.argsort(dim=-1, descending=True, stable=True)
    return torch.zeros_like(parts, dtype=torch.bool).scatter(-1, order[..., :kept], True).flatten(1)


class Twin(Transform):
    """Straight-through masks by their definition, made again in every pass."""

    def apply(self, model: nn.Module) -> None:
        for block in blocks_of(model).values():
            for module in block.modules():
                if type(module) is nn.Linear:
                    module.__class__ = TwinLinear


class TwinLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        used = sorted_mask(self.weight, 2, 4)
        return F.linear(x, self.weight + (self.weight * used - self.weight).detach(), self.bias)


register_transform("twin", Twin)
register_mask("all", lambda weight, kept, group: torch.ones_like(weight).bool())
