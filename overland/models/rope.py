"""Rotary embeddings: every type is a set of inverse frequencies and a factor on cos and sin.

Nothing is kept in buffers: the frequencies are a handful of numbers, computed from the config on
the device in each forward pass, so a model built on the meta device needs no extra initialization.
Rotation is Hugging Face's: dimension i is rotated together with dimension i + head_dim / 2.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from overland.models.hf_config import RopeConfig


class Rotary(nn.Module):
    """Maps positions to cos and sin. `seq_len` matters only to the dynamic type.

    The dynamic type stretches with the length of the sequence. transformers uses the largest
    position of the batch, and remembers it; we use the row's length, so that the result depends
    neither on which rows share a micro-batch nor on what the model saw before.
    """

    def __init__(self, rope: RopeConfig, head_dim: int, max_position_embeddings: int) -> None:
        super().__init__()
        self.rope = rope
        self.head_dim = head_dim
        self.max_position_embeddings = max_position_embeddings

    def forward(
        self, positions_BS: Tensor, seq_len: int, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        # At least float32: a bfloat16 angle is off by whole turns beyond position 256.
        wide = torch.promote_types(dtype, torch.float32)
        frequencies_F, scaling = inverse_frequencies(
            self.rope,
            self.head_dim,
            self.max_position_embeddings,
            seq_len,
            device=positions_BS.device,
            dtype=wide,
        )
        angles_BSF = positions_BS[..., None].to(wide) * frequencies_F
        angles_BSd = torch.cat((angles_BSF, angles_BSF), dim=-1)
        return (angles_BSd.cos() * scaling).to(dtype), (angles_BSd.sin() * scaling).to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates queries or keys by their positions, whose cos and sin broadcast to the heads."""
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


def inverse_frequencies(
    rope: RopeConfig,
    head_dim: int,
    max_position_embeddings: int,
    seq_len: int,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, float]:
    """Returns the angle per position for each half dimension, and the factor on cos and sin."""
    theta = rope.rope_theta
    if rope.rope_type == "dynamic":
        theta *= _dynamic_stretch(rope, head_dim, max_position_embeddings, seq_len)
    exponents_F = torch.arange(0, head_dim, 2, device=device, dtype=dtype) / head_dim
    frequencies_F = 1.0 / theta**exponents_F

    if rope.rope_type == "linear":
        return frequencies_F / _number(rope.factor), 1.0
    if rope.rope_type == "llama3":
        return _llama3(rope, frequencies_F), 1.0
    if rope.rope_type == "yarn":
        return _yarn(rope, head_dim, frequencies_F), _yarn_scaling(rope)
    return frequencies_F, 1.0


def _dynamic_stretch(rope: RopeConfig, head_dim: int, trained: int, seq_len: int) -> float:
    """Returns the NTK-aware growth of theta; exactly 1 up to the trained length."""
    factor = _number(rope.factor)
    ratio = factor * max(seq_len, trained) / trained - (factor - 1)
    return ratio ** (head_dim / (head_dim - 2))


def _llama3(rope: RopeConfig, frequencies_F: Tensor) -> Tensor:
    """Slows long waves by `factor`, keeps short ones and blends those between."""
    factor, trained = _number(rope.factor), _number(rope.original_max_position_embeddings)
    low, high = _number(rope.low_freq_factor), _number(rope.high_freq_factor)
    # Turns of this wave within the trained context, mapped from low (0) to high (1): clamping makes
    # the three cases one formula.
    turns_F = trained * frequencies_F / (2 * math.pi)
    keep_F = ((turns_F - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies_F * (keep_F + (1.0 - keep_F) / factor)


def _yarn(rope: RopeConfig, head_dim: int, frequencies_F: Tensor) -> Tensor:
    factor, trained = _number(rope.factor), _number(rope.original_max_position_embeddings)

    def dim_of(turns: float) -> float:
        """Returns the (fractional) dimension that turns this often within the trained context."""
        return (
            head_dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(rope.rope_theta))
        )

    first, last = dim_of(rope.beta_fast or 32.0), dim_of(rope.beta_slow or 1.0)
    if rope.truncate is not False:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    if first == last:
        last += 0.001
    dims_F = torch.arange(head_dim // 2, device=frequencies_F.device, dtype=frequencies_F.dtype)
    slow_F = ((dims_F - first) / (last - first)).clamp(0.0, 1.0)
    return frequencies_F * (slow_F / factor + (1.0 - slow_F))


def _yarn_scaling(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    factor = _number(rope.factor)

    def temperature(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return temperature(rope.mscale) / temperature(rope.mscale_all_dim)
    return temperature(1.0)


def _number(value: float | None) -> float:
    assert value is not None  # RopeConfig has checked that its type has this number
    return value
