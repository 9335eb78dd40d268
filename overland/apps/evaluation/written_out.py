"""A decoder for inference on a GPU: its layers run as a few fused kernels, and the step that adds a
token to each row is recorded as a CUDA graph.

A step has to read all weights, and little else should take time. So a layer is seven kernels
(kernels/layers.py) instead of about fifty, matrices with the same
input are merged, and the host launches everything at once. The decoder's own parameters become
views of the merged matrices, so nothing is stored twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from overland.apps.evaluation.kernels import Heads
from overland.apps.evaluation.kernels.layers import add_norm, attend, begin, gated, linear
from overland.kernels import runs_triton
from overland.models.attention import Attention, Mask, build_mask
from overland.models.decoder import Decoder, Layer, RMSNorm

Step = Callable[[Tensor], Tensor]


def can_write_out(model: Decoder) -> bool:
    """Whether the fused kernels support this model: plain 16-bit matrices and RMS norms."""
    weight = model.lm_head.weight if model.lm_head is not None else torch.empty(0)
    return (
        runs_triton(weight)
        and weight.dtype in (torch.bfloat16, torch.float16)
        and isinstance(model.model.norm, RMSNorm)
        and all(_is_plain(layer) for layer in model.model.layers.values())
    )


def _is_plain(layer: nn.Module) -> bool:
    if not isinstance(layer, Layer):
        return False
    attention, mlp = layer.self_attn, layer.mlp
    norms = (layer.input_layernorm, layer.post_attention_layernorm)
    matrices = (
        *(attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj),
        *(mlp.gate_proj, mlp.up_proj, mlp.down_proj),
    )
    return all(type(one) is RMSNorm for one in norms) and all(
        type(one) is nn.Linear for one in matrices
    )


class Block:
    """A layer. Its inputs and outputs are hidden states and a residual still to be added to
    them."""

    def __init__(self, layer: Layer, cos_Td: Tensor, sin_Td: Tensor) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        q_norm, k_norm = attention.q_norm, attention.k_norm
        self.norm: Any = layer.input_layernorm
        self.qkv_ED, self.qkv_bias_E = merged(
            [attention.q_proj, attention.k_proj, attention.v_proj]
        )
        self.heads = Heads(
            cos_Td,
            sin_Td,
            None if q_norm is None else q_norm.weight,
            None if k_norm is None else k_norm.weight,
            0.0 if q_norm is None else q_norm.eps,
            layer.window,
        )
        self.cache: Any = attention.core  # k_BKTd and v_BKTd
        self.attention = Attention()
        self.o_proj = attention.o_proj
        self.mlp_norm: Any = layer.post_attention_layernorm
        self.gate_up_2FD, self.gate_up_bias_2F = merged([mlp.gate_proj, mlp.up_proj])
        self.down_proj = mlp.down_proj

    def project(self, x_RD: Tensor, more_RD: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns the hidden states, and queries, keys and values."""
        x_RD, normed_RD = add_norm(x_RD, more_RD, self.norm.weight, self.norm.eps)
        return x_RD, linear(normed_RD, self.qkv_ED, self.qkv_bias_E)

    def finish(self, x_RD: Tensor, seen_RE: Tensor) -> tuple[Tensor, Tensor]:
        more_RD = linear(seen_RE, self.o_proj.weight, self.o_proj.bias)
        x_RD, normed_RD = add_norm(x_RD, more_RD, self.mlp_norm.weight, self.mlp_norm.eps)
        wide_RF = gated(normed_RD, self.gate_up_2FD, self.gate_up_bias_2F)
        return x_RD, linear(wide_RF, self.down_proj.weight, self.down_proj.bias)


class WrittenOut:
    """A decoder with a cache. Rows are started with `start` and continued with `step`; keys and
    values are written at the row's length, which is also the token's position."""

    def __init__(self, model: Decoder, room: int, lengths_B: Tensor) -> None:
        assert model.lm_head is not None
        self.model, self.lengths_B = model, lengths_B
        self.embed: Any = model.model.embed_tokens
        self.norm: Any = model.model.norm
        self.head_VD = model.lm_head.weight
        positions_1T = torch.arange(room, device=lengths_B.device)[None]
        turns_1Td = model.model.rotary(positions_1T, 1, self.head_VD.dtype)
        cos_Td, sin_Td = (one[0].contiguous() for one in turns_1Td)
        layers: Any = model.model.layers.values()
        self.blocks = [Block(layer, cos_Td, sin_Td) for layer in layers]

    def step(self, tokens_B: Tensor) -> Tensor:
        """Adds a token to each row; returns the logits of the next token."""
        lengths_B = self.lengths_B[: len(tokens_B)]
        x_BD, more_BD = self.embed(tokens_B), None
        for block in self.blocks:
            x_BD, qkv_BE = block.project(x_BD, more_BD)
            cache = block.cache
            seen_BE = attend(qkv_BE, cache.k_BKTd, cache.v_BKTd, lengths_B, block.heads)
            x_BD, more_BD = block.finish(x_BD, seen_BE)
        return self._logits(x_BD, more_BD)

    def start(self, tokens_BS: Tensor, rows: slice, last_B: Tensor) -> Tensor:
        """Starts rows; returns the logits after the token `last_B` of each. After it there is only
        padding, which is computed but never seen."""
        batch, seq_len = tokens_BS.shape
        masks = self._masks(batch, seq_len)
        x_RD, more_RD = self.embed(tokens_BS.flatten()), None
        for block in self.blocks:
            x_RD, qkv_RE = block.project(x_RD, more_RD)
            keys_BKTd, values_BKTd = block.cache.k_BKTd[rows], block.cache.v_BKTd[rows]
            qkv_BSE = qkv_RE.unflatten(0, (batch, seq_len))
            q_BSHd = begin(qkv_BSE, keys_BKTd, values_BKTd, block.heads)
            seen_BHSd = block.attention(
                q_BSHd.transpose(1, 2),
                keys_BKTd[:, :, :seq_len],
                values_BKTd[:, :, :seq_len],
                masks[block.heads.window],
            )
            seen_RE = seen_BHSd.transpose(1, 2).flatten(2).flatten(0, 1)
            if block is self.blocks[-1]:  # only the last token's output is needed
                last_R = torch.arange(batch, device=last_B.device) * seq_len + last_B
                x_RD, seen_RE = x_RD[last_R], seen_RE[last_R]
            x_RD, more_RD = block.finish(x_RD, seen_RE)
        return self._logits(x_RD, more_RD)

    def _masks(self, batch: int, seq_len: int) -> dict[int | None, Mask]:
        device, dtype = self.head_VD.device, self.head_VD.dtype
        windows = {block.heads.window for block in self.blocks}
        return {w: build_mask("auto", batch, seq_len, device, dtype, w) for w in windows}

    def _logits(self, x_BD: Tensor, more_BD: Tensor | None) -> Tensor:
        _, normed_BD = add_norm(x_BD, more_BD, self.norm.weight, self.norm.eps)
        return linear(normed_BD, self.head_VD)


def merged(matrices: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """Returns the matrices stacked into one, and their biases; the originals become views."""
    weight = _merged([one.weight for one in matrices])
    if matrices[0].bias is None:
        return weight, None
    return weight, _merged([one.bias for one in matrices])


def _merged(parameters: Sequence[Tensor]) -> Tensor:
    whole = parameters[0].data
    sizes = [len(one) for one in parameters]
    if not _is_merged(parameters):
        whole = torch.cat([one.data for one in parameters])
        for parameter, part in zip(parameters, whole.split(sizes), strict=True):
            parameter.data = part
    return whole.as_strided((sum(sizes), *whole.shape[1:]), whole.stride())


def _is_merged(parameters: Sequence[Tensor]) -> bool:
    """Whether an earlier step has merged them: each begins where the one before it ends."""
    return all(
        before.data_ptr() + before.numel() * before.element_size() == after.data_ptr()
        and before.untyped_storage().data_ptr() == after.untyped_storage().data_ptr()
        for before, after in pairwise(parameters)
    )


class Recorded:
    """A step as a CUDA graph, which the device runs as a whole, independently of the host."""

    def __init__(self, step: Step, tokens_B: Tensor) -> None:
        self.tokens_B = tokens_B.clone()
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):  # kernels are compiled and workspaces allocated
            step(self.tokens_B)
        torch.cuda.current_stream().wait_stream(aside)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.logits_BV = step(self.tokens_B)

    def __call__(self, tokens_B: Tensor) -> Tensor:
        """Runs the step; the next one overwrites the logits."""
        self.tokens_B.copy_(tokens_B)
        self.graph.replay()
        return self.logits_BV
