"""What a step is given: rows of tokens, what follows each token, and where documents begin."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from overland.data.blocks import Rows
from overland.data.fields import IGNORED, tokens_and_labels, with_borders

__all__ = ["IGNORED", "Batch", "make_batch"]


@dataclass(frozen=True)
class Batch:
    """Rows of token ids and what follows them; documents and positions where borders count."""

    tokens_BS: torch.Tensor
    labels_BS: torch.Tensor
    positions_BS: torch.Tensor | None = None
    documents_BS: torch.Tensor | None = None

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        parts = {name: value for name, value in vars(self).items() if value is not None}
        return replace(self, **{name: change(value) for name, value in parts.items()})

    def with_positions(self) -> Batch:
        if self.positions_BS is not None:
            return self
        places_S = torch.arange(self.tokens_BS.shape[1], device=self.tokens_BS.device)
        return replace(self, positions_BS=places_S.expand_as(self.tokens_BS))

    def to(self, device: torch.device) -> Batch:
        if device.type != "cuda":
            return self.map(torch.Tensor.contiguous)
        return self.map(lambda x: x.pin_memory().to(device, non_blocking=True))

    def split(self, rows: int) -> Iterator[Batch]:
        for start in range(0, len(self.tokens_BS), rows):
            yield self.map(lambda x, start=start: x[start : start + rows])  # type: ignore[misc]


def make_batch(rows: Rows, document_mask: bool = False) -> Batch:
    """With a document mask, the model is told where documents begin."""
    if not document_mask:
        return Batch(*map(torch.from_numpy, tokens_and_labels(rows)))
    tokens, labels, positions, documents = map(torch.from_numpy, with_borders(rows))
    return Batch(tokens, labels, positions, documents)
