"""Linear layers with N:M sparse weights: which layers, which N of every M weights in a row are used
(the others are zero), and when masks are recomputed. The pattern is that of Mishra et al. 2021,
trained from the start as in Zhou et al. 2021.

All weights are kept and trained: the product uses those that the mask selects, and the gradient
reaches all of them (straight-through), so that a masked weight can come back. The mask is
recomputed every `refresh` steps. It is state, saved and resumed like weights: a byte for each group
of M, whose bits say which of its weights are used. Groups lie along rows, so that neither sharding,
which splits between rows, nor tensor parallelism, which splits between groups, changes a mask.

You can register your own method for masks:

    # my_parts.py, named in [job] custom_import; the config: [model.sparse] method = "mine"
    register_mask("mine", lambda weight_OD, kept, group: ...)     # bools, where weights are used
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from overland.config.schema import Sparse
from overland.errors import ModelError
from overland.models.init import Constant, Rule
from overland.models.linear import ChangedLinear, LinearTransform, here
from overland.models.lora_targets import ALL_LINEAR, is_named
from overland.words import did_you_mean

MASK = "sparse_mask"
Method = Callable[[Tensor, int, int], Tensor]
"""Returns which weights are used, given a weight, N and M. It may be given only some rows or
columns of a matrix, always with whole groups."""


class SparseWeights(LinearTransform):
    """Makes linear layers of the blocks sparse; their weights keep their names."""

    key = "model.sparse"

    def __init__(self, settings: Sparse) -> None:
        self.settings = settings

    def change(self, name: str, module: nn.Linear) -> bool:
        settings = self.settings
        is_wanted = is_named(name, settings.modules) and not is_named(name, settings.exclude)
        if type(module) is not nn.Linear or not is_wanted:
            return False
        make_sparse(module, name, settings)
        return True

    def expects(self, name: str) -> bool:
        """Whether the layer is one of all; otherwise those that were named are changed."""
        is_left_out = is_named(name.removesuffix(".weight"), self.settings.exclude)
        return self.settings.modules == ALL_LINEAR and not is_left_out

    def has_changed(self, module: nn.Module, matrix: Tensor) -> bool:
        return isinstance(module, SparseLinear)

    def init_rule(self, name: str) -> Rule | None:
        return Constant(0.0) if name.endswith(f".{MASK}") else None

    def start(self, model: nn.Module) -> None:
        renew_masks([model])


def is_mask(name: str) -> bool:
    """Whether this is the name of a mask, which dense checkpoints do not have."""
    return name.endswith(f".{MASK}")


@torch.no_grad()
def renew_masks(models: Iterable[nn.Module]) -> None:
    for model in models:
        for module in model.modules():
            if isinstance(module, SparseLinear):
                module.renew()


class SparseLinear(ChangedLinear):
    """`sparse_mask` holds a byte for each group of `group` weights, of which `kept` are used."""

    sparse_mask: nn.Parameter
    kept: int
    group: int
    refresh: int
    method: Method

    def multiply(self, x: Tensor, weight_OD: Tensor, first: int = 0) -> Tensor:
        out: Tensor = SparseProduct.apply(x, weight_OD, here(self.sparse_mask), self.group)
        return out

    def after_step(self, step: int) -> None:
        if step % self.refresh == 0:
            self.renew()

    def renew(self) -> None:
        """Recomputes the mask of the local weights."""
        weight_OD, mask_OG = here(self.weight), here(self.sparse_mask)
        used_OD = self.method(weight_OD, self.kept, self.group)
        if used_OD.shape != weight_OD.shape or used_OD.dtype != torch.bool:
            raise ModelError(
                f"the mask of model.sparse.method is {used_OD.dtype} {list(used_OD.shape)}, "
                f"expected a bool for each weight, {list(weight_OD.shape)}"
            )
        mask_OG.copy_(pack(used_OD, self.group))

    def num_unused(self) -> Tensor:
        """Returns the number of local weights that are masked, and the number of all local
        weights."""
        used_OD = unpack(here(self.sparse_mask), self.group)
        unused = (~used_OD).sum()
        return torch.stack((unused, torch.full_like(unused, used_OD.numel())))


class SparseProduct(torch.autograd.Function):
    """Computes x · (mask ⊙ W)ᵀ; the gradient reaches all weights. Masked weights exist only while
    they are needed for a product: they are not kept for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_OD: Tensor, mask_OG: Tensor, group: int) -> Tensor:
        ctx.save_for_backward(x, weight_OD, mask_OG)
        ctx.group = group
        return F.linear(x, masked(weight_OD, mask_OG, group))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight_OD, mask_OG = ctx.saved_tensors
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = grad @ masked(weight_OD, mask_OG, ctx.group)
        if ctx.needs_input_grad[1]:
            grad_weight = grad.flatten(0, -2).t() @ x.flatten(0, -2)
        return grad_x, grad_weight, None, None


def masked(weight_OD: Tensor, mask_OG: Tensor, group: int) -> Tensor:
    return weight_OD * unpack(mask_OG, group)


def unpack(mask_OG: Tensor, group: int) -> Tensor:
    """Returns a bool for each weight."""
    bits_g = torch.arange(group, dtype=torch.uint8, device=mask_OG.device)
    return ((mask_OG[..., None] >> bits_g) & 1).flatten(1).bool()


def pack(used_OD: Tensor, group: int) -> Tensor:
    bits_g = 1 << torch.arange(group, dtype=torch.uint8, device=used_OD.device)
    return (used_OD.unflatten(1, (-1, group)) * bits_g).sum(-1, dtype=torch.uint8)


def largest(weight_OD: Tensor, kept: int, group: int) -> Tensor:
    """Selects the largest weights of each group; of equal ones, the first."""
    size_OGg = weight_OD.abs().unflatten(1, (-1, group))
    used = []
    for i in range(group):
        mine_OG = size_OGg[..., i]
        better = [
            size_OGg[..., j] >= mine_OG if j < i else size_OGg[..., j] > mine_OG
            for j in range(group)
            if j != i
        ]
        used.append(torch.stack(better).sum(0) < kept)
    return torch.stack(used, dim=-1).flatten(1)


def make_sparse(module: nn.Linear, name: str, settings: Sparse) -> None:
    """Turns a linear layer into a sparse one, in place."""
    kept, group = settings.ratio
    if module.in_features % group:
        raise ModelError(
            f"model.sparse.pattern = {settings.pattern} needs rows of a multiple of {group} "
            f"weights, but {name} has rows of {module.in_features}: leave it out with "
            "model.sparse.exclude"
        )
    module.__class__ = SparseLinear
    assert isinstance(module, SparseLinear)
    shape = (module.out_features, module.in_features // group)
    mask = torch.empty(shape, dtype=torch.uint8, device=module.weight.device)
    module.register_parameter(MASK, nn.Parameter(mask, requires_grad=False))
    module.kept, module.group, module.method = kept, group, method_of(settings.method)
    module.refresh = settings.refresh


def register_mask(name: str, method: Method) -> None:
    """Makes `model.sparse.method = NAME` select the weights to keep with `method`."""
    if name in _METHODS:
        raise ModelError(f"a method of model.sparse named '{name}' is already registered")
    _METHODS[name] = method


def method_of(name: str) -> Method:
    if name not in _METHODS:
        raise ModelError(
            f"model.sparse.method = {name} does not exist{did_you_mean(name, _METHODS)}"
        )
    return _METHODS[name]


_METHODS: dict[str, Method] = {"magnitude": largest}
