"""The dense decoder of every family: its layers (attention, MLP, norms), embedding and head; their
options are in config.py.

The module tree and the parameter names are Hugging Face's. Parts may be missing, so that a pipeline
stage is the same class with fewer modules: without `embed_tokens` the input is hidden states, and
without `norm` and `lm_head` the output is. Layers keep their numbers as names whatever is removed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from overland.models.attention import Attention, Mask, Masks, check_backend
from overland.models.config import DecoderConfig
from overland.models.draws import EmbeddingNoise
from overland.models.hf_config import LAYERNORM
from overland.models.init import Rule, decoder_rule
from overland.models.loss import OutputMatrix
from overland.models.rope import Rotary, rotate
from overland.models.structure import Structure, tie


class HeadLoss(Protocol):
    """The loss that a head computes (see overland/objectives)."""

    def sums(self, head: OutputMatrix, hidden_BSD: Tensor, fields: Mapping[str, Tensor]) -> Tensor:
        """Returns the summed loss as a scalar, or as a vector followed by sums of other metrics."""


class Decoder(nn.Module):
    """A causal language model. `attention` names the backend (see attention.py)."""

    def __init__(self, config: DecoderConfig, attention: str = "auto") -> None:
        super().__init__()
        self.config = config
        self.model = DecoderModel(config, check_backend(attention))
        self.lm_head: Head | None = Head(config.hidden_size, config.vocab_size, bias=False)
        # Computes the loss from hidden states and labels; the trainer replaces it.
        self.objective: HeadLoss = SummedCrossEntropy()
        tie(self)

    def forward(
        self,
        tokens_BS: Tensor,
        positions_BS: Tensor | None = None,
        documents_BS: Tensor | None = None,
        labels_BS: Tensor | None = None,
        draws_BS: Tensor | None = None,
        noise_BS: Tensor | None = None,
        **others: Tensor,
    ) -> Tensor:
        """Returns logits, or with labels what the objective computes: by default, the sum of the
        cross-entropy over labels other than -100.

        `labels_BS[b, s]` is the token that should follow `tokens_BS[b, s]` (already shifted).
        `positions_BS` are rotary positions (default 0, 1, 2 ...); `documents_BS` numbers the
        document of each token, and tokens see only their own document. `draws_BS` seeds dropout
        and `noise_BS` seeds noise on embeddings; without them there is none. `others` are batch
        fields that the objective may use. `tokens_BS` holds hidden states [B, S, D] if this stage
        has no embedding; the hidden states are returned if it has no head.
        """
        hidden_BSD = self.model(tokens_BS, positions_BS, documents_BS, draws_BS, noise_BS)
        if self.lm_head is None:
            return hidden_BSD
        if labels_BS is None:
            return self.lm_head(hidden_BSD)
        fields = {"labels_BS": labels_BS, **others}
        if documents_BS is not None:
            fields["documents_BS"] = documents_BS
        return self.lm_head(hidden_BSD, self.objective, fields)

    def structure(self) -> Structure:
        return self.config.structure()

    def init_rule(self, name: str) -> Rule:
        """Returns how a parameter is initialized (see init.py)."""
        return decoder_rule(self.config, name)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Decoder:
        # to_empty() from the meta device creates a new parameter per module, which unties them.
        super()._apply(fn, recurse)
        tie(self)
        return self


class DecoderModel(nn.Module):
    """Maps tokens (or the hidden states of an earlier stage) to hidden states."""

    def __init__(self, config: DecoderConfig, attention: str) -> None:
        super().__init__()
        layers = range(config.num_hidden_layers)
        # From existing weights: random initialization on the meta device would import the compiler.
        self.embed_tokens: nn.Embedding | None = nn.Embedding.from_pretrained(
            torch.empty(config.vocab_size, config.hidden_size), freeze=False
        )
        self.layers = nn.ModuleDict({str(i): Layer(config, config.window_of(i)) for i in layers})
        self.norm: nn.Module | None = build_norm(config)
        self.rotary = Rotary(config.rope, config.head_dim, config.max_position_embeddings)
        windows = dict.fromkeys(config.window_of(i) for i in layers)
        self.masks = Masks(attention, list(windows))
        self.noise: EmbeddingNoise | None = None

    def forward(
        self,
        tokens_BS: Tensor,
        positions_BS: Tensor | None = None,
        documents_BS: Tensor | None = None,
        draws_BS: Tensor | None = None,
        noise_BS: Tensor | None = None,
    ) -> Tensor:
        x_BSD = tokens_BS if self.embed_tokens is None else self.embed_tokens(tokens_BS)
        if self.noise is not None and self.embed_tokens is not None and noise_BS is not None:
            x_BSD = self.noise(x_BSD, noise_BS)
        if positions_BS is None:
            positions_BS = torch.arange(x_BSD.shape[1], device=x_BSD.device)[None]
        seq_len = positions_BS.shape[1]  # x may hold only a part of it between layers
        rotation = self.rotary(positions_BS, seq_len, x_BSD.dtype)
        masks = self.masks(x_BSD, seq_len, documents_BS)
        # Only blocks with dropout, which a transform has added, accept its seeds.
        draws = {} if draws_BS is None else {"draws_BS": draws_BS}
        for layer in self.layers.values():
            x_BSD = layer(x_BSD, *rotation, masks[layer.window], **draws)
        return x_BSD if self.norm is None else self.norm(x_BSD)


class Layer(nn.Module):
    def __init__(self, config: DecoderConfig, window: int | None) -> None:
        super().__init__()
        self.window = window
        self.input_layernorm = build_norm(config)
        self.self_attn = SelfAttention(config)
        self.post_attention_layernorm = build_norm(config)
        self.mlp = MLP(config)

    def forward(self, x_BSD: Tensor, cos_BSd: Tensor, sin_BSd: Tensor, mask: Mask) -> Tensor:
        x_BSD = x_BSD + self.self_attn(self.input_layernorm(x_BSD), cos_BSd, sin_BSd, mask)
        return x_BSD + self.mlp(self.post_attention_layernorm(x_BSD))


class SelfAttention(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.q_proj = build_linear(config, "self_attn.q_proj")
        self.k_proj = build_linear(config, "self_attn.k_proj")
        self.v_proj = build_linear(config, "self_attn.v_proj")
        self.o_proj = build_linear(config, "self_attn.o_proj")
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.core = Attention()

    def forward(self, x_BSD: Tensor, cos_BSd: Tensor, sin_BSd: Tensor, mask: Mask) -> Tensor:
        # The number of heads follows from the projections: tensor parallelism reduces it.
        q_BSHd = self.q_proj(x_BSD).unflatten(-1, (-1, self.head_dim))
        k_BSKd = self.k_proj(x_BSD).unflatten(-1, (-1, self.head_dim))
        v_BSKd = self.v_proj(x_BSD).unflatten(-1, (-1, self.head_dim))
        if self.q_norm is not None and self.k_norm is not None:
            q_BSHd, k_BSKd = self.q_norm(q_BSHd), self.k_norm(k_BSKd)
        turns_B1Sd = cos_BSd[:, None], sin_BSd[:, None]
        q_BHSd = rotate(q_BSHd.transpose(1, 2), *turns_B1Sd)
        k_BKSd = rotate(k_BSKd.transpose(1, 2), *turns_B1Sd)
        out_BHSd = self.core(q_BHSd, k_BKSd, v_BSKd.transpose(1, 2), mask)
        return self.o_proj(out_BHSd.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    recomputes = False
    """Whether the backward pass recomputes down_proj's input, a third of what an MLP keeps."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate_proj = build_linear(config, "mlp.gate_proj")
        self.up_proj = build_linear(config, "mlp.up_proj")
        self.down_proj = build_linear(config, "mlp.down_proj")

    def forward(self, x_BSD: Tensor) -> Tensor:
        gate_BSI, up_BSI = self.gate_proj(x_BSD), self.up_proj(x_BSD)
        if not self.recomputes or not torch.is_grad_enabled():
            return self._down(gate_BSI, up_BSI)
        # The product is an elementwise kernel away from what is kept; down_proj is not run again.
        out_BSD: Tensor = checkpoint(
            self._down, gate_BSI, up_BSI, use_reentrant=False, preserve_rng_state=False
        )
        return out_BSD

    def _down(self, gate_BSI: Tensor, up_BSI: Tensor) -> Tensor:
        out_BSD: Tensor = self.down_proj(F.silu(gate_BSI) * up_BSI)
        return out_BSD


def build_linear(config: DecoderConfig, path: str) -> nn.Linear:
    outputs, inputs, has_bias = config.matrices()[path]
    return nn.Linear(inputs, outputs, has_bias)


def build_norm(config: DecoderConfig) -> nn.Module:
    """Returns the norm of the residual stream."""
    if config.norm_type == LAYERNORM:
        return nn.LayerNorm(config.hidden_size, config.rms_norm_eps, bias=False)
    return RMSNorm(config.hidden_size, config.rms_norm_eps)


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    # Hugging Face's order: normalize in high precision, round, then multiply by the weight.
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


class Head(nn.Linear):
    """The output matrix. The loss is computed inside its call, so that hooks on this module
    (FSDP's gathering of the weight) see every use of the weight."""

    def forward(
        self,
        hidden_BSD: Tensor,
        objective: HeadLoss | None = None,
        fields: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        if objective is None or fields is None:
            return super().forward(hidden_BSD)
        return objective.sums(OutputMatrix(self.weight), hidden_BSD, fields)


class SummedCrossEntropy:
    """The default loss of a decoder. It is summed, not averaged, because only the trainer knows the
    number of valid tokens in the global batch."""

    def sums(self, head: OutputMatrix, hidden_BSD: Tensor, fields: Mapping[str, Tensor]) -> Tensor:
        return head.weighted_sum(hidden_BSD, fields["labels_BS"])[0]
