"""Context parallelism: which tokens of each row a rank of `cp` has (a head and a tail piece, so
that work is balanced), and attention over the whole row.

A row is split into 2·cp pieces; rank i takes piece i and piece 2·cp − 1 − i, the head and the tail.
A causal query sees what comes before it, so this gives every rank the same amount of work.
Everything but attention works on single tokens. For attention each rank gathers the keys and values
of the whole row (in the backward pass, their gradients are summed and scattered), restores the
order of the row, and computes its own queries with the mask of their true positions.

Gathering moves 2·S·d_kv elements per layer; with grouped heads that is little compared with the
queries, and unlike a ring it works with every mask and attention kernel (Llama 3 405B was trained
this way).
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from overland.data.batch import Batch
from overland.models.attention import Mask
from overland.parallel.comm import gather_with_gradient
from overland.parallel.mesh import Mesh


def share_of_rows(batch: Batch, mesh: Mesh) -> Batch:
    """Returns this rank's tokens of each row, with their true positions if ranks share a row."""
    if mesh.degrees.tp * mesh.degrees.cp * mesh.degrees.pp == 1:
        return batch
    whole, cp = batch.with_positions(), mesh.axis("cp")
    if cp.size() == 1:
        return whole
    return whole.at_places(lambda seq_len: places_of_rank(seq_len, cp.get_local_rank(), cp.size()))


def pieces_of_rank(seq_len: int, rank: int, size: int) -> list[tuple[int, int]]:
    """Returns start and stop of the pieces of the row that a rank holds: its head, then its
    tail."""
    piece = seq_len // (2 * size)
    return [(number * piece, (number + 1) * piece) for number in (rank, 2 * size - 1 - rank)]


def places_of_rank(seq_len: int, rank: int, size: int) -> Tensor:
    """Returns the positions in the row that a rank holds."""
    return torch.cat([torch.arange(*piece) for piece in pieces_of_rank(seq_len, rank, size)])


def in_row_order(shares_BKSd: Tensor, size: int) -> Tensor:
    """Puts the shares of all ranks, one after the other in dim 2, into the order of the row: all
    heads, then all tails, the last rank's first."""
    head_BKnsd, tail_BKnsd = shares_BKSd.unflatten(2, (size, 2, -1)).unbind(3)
    return torch.cat((head_BKnsd, tail_BKnsd.flip(2)), dim=2).flatten(2, 3)


class ContextAttention(nn.Module):
    def __init__(self, core: nn.Module, cp: DeviceMesh) -> None:
        super().__init__()
        self.core, self.cp = core, cp

    def forward(self, q_BHSd: Tensor, k_BKSd: Tensor, v_BKSd: Tensor, mask: Mask) -> Tensor:
        kv_BKSe = torch.cat((k_BKSd, v_BKSd), dim=-1)  # one collective for both
        k_BKLd, v_BKLd = gather_row(kv_BKSe, self.cp).chunk(2, dim=-1)
        out_BHSd: Tensor = self.core(q_BHSd, k_BKLd, v_BKLd, mask)
        return out_BHSd


def gather_row(x_BKSd: Tensor, cp: DeviceMesh) -> Tensor:
    """Returns the shares of all ranks (dim 2) in the order of the row."""
    group: dist.ProcessGroup = cp.get_group()
    return in_row_order(gather_with_gradient(x_BKSd.contiguous(), 2, group), cp.size())
