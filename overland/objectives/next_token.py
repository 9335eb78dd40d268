"""Next-token prediction: cross-entropy, and if asked for z-loss, z · log²Z per token, which keeps
the logits from drifting (Chowdhery et al. 2022).

It is a weighted sum of token losses, so the head makes its gradient in the forward pass. A field
`weights_BS` says how much each token counts.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from overland.models.loss import OutputMatrix
from overland.objectives.objective import Objective, weights_of


class NextToken(Objective):
    counts = "tokens"

    def __init__(self, z_loss: float = 0.0) -> None:
        self.z_loss = z_loss
        self.metrics = ("cross_entropy", "z_loss") if z_loss else ()

    def sums(self, head: OutputMatrix, hidden_BSD: Tensor, fields: Mapping[str, Tensor]) -> Tensor:
        # Validation reports the cross-entropy alone.
        z_loss = self.z_loss if torch.is_grad_enabled() else 0.0
        total, z_part = head.weighted_sum(
            hidden_BSD, fields["labels_BS"], weights_of(fields), z_loss
        )
        if not self.metrics:
            return total
        return torch.stack([total, total.detach() - z_part, z_part])
