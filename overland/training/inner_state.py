"""Losses, statistics and state inside the model (see models/inner.py), and the sparsity of its
weights (see models/sparse.py), over all ranks."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from overland.models.init import plain_name
from overland.models.inner import InnerLoss, Statistic
from overland.models.sparse import SparseLinear
from overland.models.structure import blocks_of
from overland.parallel.comm import sum_of_model, sum_over, total_sums
from overland.parallel.mesh import Mesh
from overland.world.exchange import all_gather

SPARSITY = "train/sparsity"


class InnerState:
    """Most models have none of these."""

    def __init__(self, parts: Sequence[nn.Module], mesh: Mesh) -> None:
        modules = [module for part in parts for module in part.modules()]
        self._mesh = mesh
        self._statistics = [one for one in modules if isinstance(one, Statistic)]
        self._losses = [one for one in modules if isinstance(one, InnerLoss)]
        self._changing = [
            one for one in modules if callable(getattr(type(one), "after_step", None))
        ]
        self._counting = {
            one
            for one in self._changing
            if inspect.signature(one.after_step).parameters  # type: ignore[arg-type]
        }
        self._reduced = {  # each once, though several enclosing modules may read it
            inside: None
            for one in self._changing
            for inside in one.modules()
            if isinstance(inside, Statistic) and not isinstance(inside, InnerLoss)
        }
        self._names = sorted(of_all_stages([loss.name for loss in self._losses], mesh))
        self._sparse = {
            plain_name(name): layers
            for part in parts
            for name, block in blocks_of(part).items()
            if (layers := [one for one in block.modules() if isinstance(one, SparseLinear)])
        }
        self._sparse_names = of_all_stages(list(self._sparse), mesh)

    def begin_step(self, scale: Tensor) -> None:
        """Resets what a step accumulates; `scale` is the loss scale divided by the number of rows
        in the global batch."""
        for statistic in self._statistics:
            statistic.total.zero_()
        for loss in self._losses:
            loss.scale.copy_(scale * loss.weight)

    def after_step(self, skip: Tensor, step: int) -> None:
        """Calls every `after_step()` with statistics summed over the global batch, and with the
        step number if it accepts one; a skipped step leaves buffers unchanged."""
        for statistic in self._reduced:
            sum_over(statistic.total, self._mesh.token_group)
        with torch.no_grad():
            for module in self._changing:
                before = {name: buffer.clone() for name, buffer in module.named_buffers()}
                module.after_step(*([step] if module in self._counting else []))  # type: ignore[operator]
                for name, buffer in module.named_buffers():
                    buffer.copy_(torch.where(skip, before[name], buffer))

    def logged(self, num_rows: int) -> dict[str, float]:
        """Returns the mean of each loss inside the model in the last step, and the sparsity. Called
        by all ranks together."""
        if not self._names:
            return self._sparsity()
        sums = torch.zeros(len(self._names), dtype=torch.float64, device=self._mesh.device_type)
        for loss in self._losses:
            sums[self._names.index(loss.name)] += loss.total
        means = total_sums(sums, self._mesh) / num_rows
        return {**dict(zip(self._names, means.tolist(), strict=True)), **self._sparsity()}

    @torch.no_grad()
    def _sparsity(self) -> dict[str, float]:
        """Returns the share of weights that are zero, over all sparse layers and per block."""
        names = self._sparse_names
        if not names:
            return {}
        counts_N2 = torch.zeros(len(names), 2, dtype=torch.int64, device=self._mesh.device_type)
        for name, layers in self._sparse.items():
            counts_N2[names.index(name)] = sum(layer.num_unused() for layer in layers)
        sum_of_model(counts_N2, self._mesh)
        shares_N = (counts_N2[:, 0] / counts_N2[:, 1]).tolist()
        unused, total = counts_N2.sum(0).tolist()
        shares = {f"{SPARSITY}/{name}": share for name, share in zip(names, shares_N, strict=True)}
        return {SPARSITY: unused / total, **shares}


def of_all_stages(names: list[str], mesh: Mesh) -> list[str]:
    """Returns the names that any stage of a pipeline has, each once, in the order of the stages."""
    found = [names]
    if mesh.degrees.pp > 1:
        found = all_gather(names, mesh.axis("pp").get_group())
    return list(dict.fromkeys(name for of_stage in found for name in of_stage))
