"""What a step does for losses, statistics and state inside the model (see models/inner.py)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from overland.models.inner import InnerLoss, Statistic
from overland.parallel.comm import sum_over
from overland.parallel.mesh import Mesh


class InnerState:
    """All that notes or changes something in the middle of the model; for most models, nothing."""

    def __init__(self, parts: Sequence[nn.Module], mesh: Mesh) -> None:
        modules = [module for part in parts for module in part.modules()]
        self._mesh = mesh
        self._statistics = [one for one in modules if isinstance(one, Statistic)]
        self._losses = [one for one in modules if isinstance(one, InnerLoss)]
        self._changing = [
            one for one in modules if callable(getattr(type(one), "after_step", None))
        ]
        self._reduced = {  # each once, though several modules around it may read it
            inside: None
            for one in self._changing
            for inside in one.modules()
            if isinstance(inside, Statistic) and not isinstance(inside, InnerLoss)
        }
        self._names = self._names_of_all_stages()

    def begin_step(self, scale: Tensor) -> None:
        """`scale`: the loss scale, divided by the number of rows of the global batch."""
        for statistic in self._statistics:
            statistic.total.zero_()
        for loss in self._losses:
            loss.scale.copy_(scale * loss.weight)

    def after_step(self, skip: Tensor) -> None:
        """Calls every `after_step()` with statistics that are summed over the global batch; a step
        that is skipped leaves buffers as they were."""
        for statistic in self._reduced:
            sum_over(statistic.total, self._mesh.token_group)
        with torch.no_grad():
            for module in self._changing:
                before = {name: buffer.clone() for name, buffer in module.named_buffers()}
                module.after_step()  # type: ignore[operator]
                for name, buffer in module.named_buffers():
                    buffer.copy_(torch.where(skip, before[name], buffer))

    def logged(self, num_rows: int) -> dict[str, float]:
        """Means of the losses inside the model in the last step. All ranks together."""
        if not self._names:
            return {}
        device = torch.device(self._mesh.device_type)
        sums = torch.zeros(len(self._names), dtype=torch.float64, device=device)
        for loss in self._losses:
            sums[self._names.index(loss.name)] += loss.total
        mesh = self._mesh
        sums = sum_over(sum_over(sums, mesh.token_group), mesh.axis("pp").get_group())
        return dict(zip(self._names, (sums / num_rows).tolist(), strict=True))

    def _names_of_all_stages(self) -> list[str]:
        mine = sorted({loss.name for loss in self._losses})
        if self._mesh.degrees.pp == 1:
            return mine
        found: list[list[str]] = [[] for _ in range(self._mesh.degrees.pp)]
        dist.all_gather_object(found, mine, group=self._mesh.axis("pp").get_group())
        return sorted(set().union(*found))
