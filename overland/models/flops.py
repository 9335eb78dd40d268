"""Parameter and FLOP counts, of a decoder from its config alone (no torch).

The headline figure is the one that papers and torchtitan report, so that MFU can be compared:
FLOP/token = 6 (N - N_input_embedding) + 12 L H d S. A tied embedding is kept, since it is also the
output matrix. It counts attention as if every token saw every other; the causal figure counts what
is really computed: half of it, and less under a sliding window.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from overland.models.config import DecoderConfig
from overland.models.parameters import EMBEDDING, HEAD


@dataclass(frozen=True)
class ParameterCount:
    total: int  # a tied embedding counts once
    input_embedding: int  # a table only looked up: 0 when it is also the output matrix
    head: int  # the output matrix, shared or not
    per_layer: int

    @property
    def in_matmuls(self) -> int:
        return self.total - self.input_embedding


def count_parameters(config: Any) -> ParameterCount:
    """Counts of a decoder; of a user's own model the total alone, built without memory."""
    if not isinstance(config, DecoderConfig):
        import torch

        from overland.models.registry import build_model

        with torch.device("meta"):
            total = sum(p.numel() for p in build_model(config).parameters())
        return ParameterCount(total, input_embedding=0, head=0, per_layer=0)
    sizes = {name: prod(shape) for name, shape in config.parameter_shapes().items()}
    return ParameterCount(
        total=sum(sizes.values()),
        input_embedding=0 if config.tie_word_embeddings else sizes[EMBEDDING],
        head=sizes.get(HEAD, sizes[EMBEDDING]),
        per_layer=sum(n for name, n in sizes.items() if name.startswith("model.layers.0.")),
    )


def flops_per_token(config: Any, seq_len: int) -> float:
    """Training FLOP per token by the reporting convention (attention not halved). Of a user's own
    model only the parameters count."""
    dense = 6 * count_parameters(config).in_matmuls
    if not isinstance(config, DecoderConfig):
        return float(dense)
    per_layer = 12 * config.num_attention_heads * config.head_dim * seq_len
    return float(dense + config.num_hidden_layers * per_layer)


def causal_flops_per_token(config: Any, seq_len: int) -> float:
    """Training FLOP per token with attention counted only where a key is visible."""
    dense = 6 * count_parameters(config).in_matmuls
    if not isinstance(config, DecoderConfig):
        return float(dense)
    visible = sum(
        _mean_visible_keys(seq_len, config.window_of(layer))
        for layer in range(config.num_hidden_layers)
    )
    return dense + 12 * config.num_attention_heads * config.head_dim * visible


def _mean_visible_keys(seq_len: int, window: int | None) -> float:
    width = seq_len if window is None else min(window, seq_len)
    # The first `width` queries see width / 2 keys on average, all later ones see `width`.
    return width - width * width / (2 * seq_len)
