"""Noise on embeddings while training (NEFTune, Jain et al. 2023, arXiv:2310.05914).

    x  +  alpha / √(S · D) · u        u: uniform from -1 to 1, for each element of a row of S tokens

Its seeds come with the batch (see draws.py), and only in training: so layouts, accumulation and
restarts do not change it, and validation has none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from overland.errors import ModelError
from overland.models.decoder import Decoder
from overland.models.draws import keys_of, uniform
from overland.models.transform import Transform


@dataclass(frozen=True)
class Neftune(Transform):
    """Adds noise to the embeddings of a decoder."""

    alpha: float

    def apply(self, model: nn.Module) -> None:
        if not isinstance(model, Decoder):
            raise ModelError(
                f"sft.neftune_alpha requires a Decoder, but the model is {type(model).__name__}: "
                "set it to 0"
            )
        model.model.noise = EmbeddingNoise(self.alpha)


class EmbeddingNoise(nn.Module):
    def __init__(self, alpha: float) -> None:
        super().__init__()
        self.alpha = alpha
        self.keys = keys_of("neftune")
        self.num_shares, self.part = 1, 0

    def forward(self, x_BRD: Tensor, noise_BS: Tensor) -> Tensor:
        """Adds noise to the embeddings of all or some of the S local tokens of each row."""
        num_places, width = x_BRD.shape[1:]
        draws_BR = noise_BS[:, self.part * num_places :][:, :num_places]
        # Row by row: a row of 2048 × 4096 takes 64 MB for each of a few 64-bit temporaries.
        u_BRD = torch.stack([uniform(draws_R, self.keys, width) for draws_R in draws_BR])
        scale = self.alpha / math.sqrt(noise_BS.shape[1] * self.num_shares * width)
        wide = torch.promote_types(x_BRD.dtype, torch.float32)
        return x_BRD + (scale * (2 * u_BRD.to(wide) - 1)).to(x_BRD.dtype)
