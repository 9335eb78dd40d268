"""Measures the sparsity of sparse layers (see models/sparse.py), for the logs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from overland.models.init import plain_name
from overland.models.sparse import SparseLinear
from overland.models.structure import blocks_of
from overland.parallel.comm import sum_over
from overland.parallel.mesh import Mesh
from overland.world.exchange import all_gather

NAME = "train/sparsity"


class Sparsity:
    """The share of weights that are zero, over all sparse layers and per block."""

    def __init__(self, parts: Sequence[nn.Module], mesh: Mesh) -> None:
        self._mesh = mesh
        self._layers = {
            plain_name(name): layers
            for part in parts
            for name, block in blocks_of(part).items()
            if (layers := [one for one in block.modules() if isinstance(one, SparseLinear)])
        }
        self._names = self._names_of_all_stages()

    @torch.no_grad()
    def logged(self) -> dict[str, float]:
        """Returns the shares by name. Called by all ranks together."""
        if not self._names:
            return {}
        device = torch.device(self._mesh.device_type)
        counts_N2 = torch.zeros(len(self._names), 2, dtype=torch.int64, device=device)
        for name, layers in self._layers.items():
            counts_N2[self._names.index(name)] = sum(layer.num_unused() for layer in layers)
        for axis in ("fsdp", "tp", "pp"):  # replicas hold the same
            sum_over(counts_N2, self._mesh.parameters.get_group(axis))
        shares_N = (counts_N2[:, 0] / counts_N2[:, 1]).tolist()
        unused, total = counts_N2.sum(0).tolist()
        blocks = {
            f"{NAME}/{name}": share for name, share in zip(self._names, shares_N, strict=True)
        }
        return {NAME: unused / total, **blocks}

    def _names_of_all_stages(self) -> list[str]:
        found: list[list[str]] = [list(self._layers)]
        if self._mesh.degrees.pp > 1:
            found = all_gather(found[0], self._mesh.axis("pp").get_group())
        return list(dict.fromkeys(name for names in found for name in names))
