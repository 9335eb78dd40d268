"""Losses, statistics and state inside the model (see models/inner.py), over all ranks."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from overland.models.inner import InnerLoss, Statistic
from overland.parallel.comm import sum_over, total_sums
from overland.parallel.mesh import Mesh
from overland.world.exchange import all_gather


class InnerState:
    """Handles losses, statistics and state inside the model (see models/inner.py); most models have
    none."""

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
        self._names = self._names_of_all_stages()

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
        """Returns the mean of each loss inside the model in the last step. Called by all ranks
        together."""
        if not self._names:
            return {}
        device = torch.device(self._mesh.device_type)
        sums = torch.zeros(len(self._names), dtype=torch.float64, device=device)
        for loss in self._losses:
            sums[self._names.index(loss.name)] += loss.total
        means = total_sums(sums, self._mesh) / num_rows
        return dict(zip(self._names, means.tolist(), strict=True))

    def _names_of_all_stages(self) -> list[str]:
        mine = sorted({loss.name for loss in self._losses})
        if self._mesh.degrees.pp == 1:
            return mine
        return sorted(set().union(*all_gather(mine, self._mesh.axis("pp").get_group())))
