"""Rows for new tokens in a model's embedding and output matrix.

They start as the mean of the trained rows, so that a new token is initially as likely as the
average one. (With random values it could be more likely than all others.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from overland.models.structure import Role, walk_roles

ROWS_AT_ONCE = 4096  # in any layout, so that the mean has the same bits everywhere


@dataclass(frozen=True)
class NewRows:
    """The ids of new tokens. Rows before them were trained; rows that are only padding stay
    unchanged."""

    start: int
    stop: int

    def fits(self, stored: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
        """Whether a stored matrix is the wanted one without its last rows."""
        return stored[1:] == wanted[1:] and stored[0] <= wanted[0]

    def fill(
        self, shard: Tensor, first: int, num_stored: int, read: Callable[[int, int], Tensor]
    ) -> None:
        """Fills the new rows of a shard that begins at row `first`. `read` returns a range of the
        `num_stored` stored rows."""
        rows = torch.arange(first, first + len(shard), device=shard.device)
        is_new = ((rows >= self.start) & (rows < self.stop)) | (rows >= num_stored)
        if not is_new.any():
            return
        trained = min(self.start, num_stored)
        total = torch.zeros(shard.shape[1:], dtype=torch.float64)
        for begin in range(0, trained, ROWS_AT_ONCE):
            total += read(begin, min(begin + ROWS_AT_ONCE, trained)).double().sum(dim=0)
        shard[is_new] = (total / max(trained, 1)).to(shard)


def vocabulary_matrices(model: nn.Module) -> set[str]:
    """Returns the names of the parameters that have a row for each token."""
    return {f"{path}.weight" for path, role in walk_roles(model) if role is Role.VOCABULARY}
