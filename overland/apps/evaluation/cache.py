"""The key-value cache of a decoder: prompts padded on the right, then one token per row and step;
and which models can have one. Each new token costs only one token of compute.

The decoder itself is unchanged: `CachedAttention` replaces each layer's attention core, and
`CachedMasks` replaces the module that builds masks. Rows are padded on the right, and each has its
own length. There are two kinds of forward pass:

- prefill starts rows with plain causal attention over the padded prompts. Padding after the end of
  a row is not visible to its tokens, and is overwritten later.
- decoding adds a token to each row, at its row's own length.

On GPUs shapes are static and lengths are values on the device, so a step is recorded as a CUDA
graph. If possible, the decoder is run with a few fused kernels there (written_out.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from overland.apps.evaluation.kernels.layers import cached_attention
from overland.apps.evaluation.written_out import Recorded, WrittenOut, can_write_out
from overland.errors import OutOfMemoryError
from overland.models.attention import Attention, Mask, Masks
from overland.models.decoder import MLP, Decoder, Layer, SelfAttention
from overland.words import size

CHUNK = 256  # tokens that the cache grows by
PREFILL_TOKENS = 16_384  # prompt tokens processed at once: more would need large activations


@dataclass
class CachedPass:
    """State shared by the layers during one forward pass."""

    is_start: bool
    rows: slice
    """Rows of the cache that take part in the pass."""
    lengths_B: Tensor
    """Length of each row before the pass."""
    seen: int
    """Upper bound on the length of any row after the pass."""
    plain: Mapping[int | None, Mask] = field(default_factory=dict)
    """The masks of a pass that starts rows, by the window of a layer."""


class CachedAttention(nn.Module):
    """An attention core with a cache of keys and values: [rows, KV heads, tokens, head_dim]."""

    k_BKTd: Tensor
    v_BKTd: Tensor

    def __init__(self, window: int | None) -> None:
        super().__init__()
        self.window = window
        self.plain = Attention()

    def forward(self, q_BHSd: Tensor, k_BKSd: Tensor, v_BKSd: Tensor, mask: CachedPass) -> Tensor:
        k_BKTd, v_BKTd = self.k_BKTd[mask.rows], self.v_BKTd[mask.rows]
        if mask.is_start:
            k_BKTd[:, :, : k_BKSd.shape[2]] = k_BKSd
            v_BKTd[:, :, : v_BKSd.shape[2]] = v_BKSd
            return self.plain(q_BHSd, k_BKSd, v_BKSd, mask.plain[self.window])
        rows_B = torch.arange(q_BHSd.shape[0], device=q_BHSd.device)
        k_BKTd[rows_B, :, mask.lengths_B] = k_BKSd[:, :, 0]
        v_BKTd[rows_B, :, mask.lengths_B] = v_BKSd[:, :, 0]
        k_BKTd, v_BKTd = k_BKTd[:, :, : mask.seen], v_BKTd[:, :, : mask.seen]
        seen_B = mask.lengths_B + 1
        out_BHd = cached_attention(q_BHSd[:, :, 0], k_BKTd, v_BKTd, seen_B, self.window)
        return out_BHd[:, :, None]


class CachedMasks(nn.Module):
    """Passes the current `CachedPass` to the layers instead of masks."""

    current: CachedPass

    def __init__(self, plain: Masks) -> None:
        super().__init__()
        self.plain = plain

    def forward(
        self, x_BSD: Tensor, seq_len: int, documents_BS: Tensor | None
    ) -> dict[int | None, CachedPass]:
        if self.current.is_start:
            self.current.plain = self.plain(x_BSD, seq_len, documents_BS)
        return dict.fromkeys(self.plain.windows, self.current)


class CachedDecoder:
    """A decoder with a cache: rows are started with `start` and continued with `step`.

    With `is_static` (GPUs) every step has the same shapes: all rows take part, over the whole
    cache.
    """

    def __init__(self, model: nn.Module, rows: int, is_static: bool = False) -> None:
        assert can_cache(model), "the model has modules that may mix tokens outside attention"
        self.model = cast(Decoder, model)
        self.rows, self.is_static = rows, is_static
        self.capacity = self.longest = 0
        self.written_out: WrittenOut | None = None
        self.recorded: Recorded | None = None
        # Until `release`, the model caches keys and values.
        self.model.model.masks = CachedMasks(self.model.model.masks)  # type: ignore[assignment]
        for layer in _layers(self.model):
            layer.self_attn.core = CachedAttention(layer.window)  # type: ignore[assignment]
        weight = self.model.lm_head.weight  # type: ignore[union-attr]
        self.device, self.dtype = weight.device, weight.dtype
        self.lengths_B = torch.zeros(rows, dtype=torch.int64, device=self.device)

    @property
    def cores(self) -> list[CachedAttention]:
        return cast(list[CachedAttention], [layer.self_attn.core for layer in _layers(self.model)])

    def reserve(self, tokens: int) -> None:
        """Reserves memory for rows of this many tokens; growing discards the cache's contents."""
        if tokens <= self.capacity:
            return
        tokens = -(-tokens // CHUNK) * CHUNK
        config = self.model.config
        shape = (self.rows, config.num_key_value_heads, tokens, config.head_dim)
        cores = self.cores
        try:
            for core in cores:
                core.k_BKTd = torch.zeros(shape, dtype=self.dtype, device=self.device)
                core.v_BKTd = torch.zeros(shape, dtype=self.dtype, device=self.device)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if not isinstance(error, torch.OutOfMemoryError) and "alloc" not in str(error):
                raise
            needed = 2 * len(cores) * torch.Size(shape).numel() * self.dtype.itemsize
            raise OutOfMemoryError(
                f"not enough memory for the key-value cache of {self.rows} rows of {tokens:,} "
                f"tokens, which takes {size(needed)}: lower --batch-size or --num-tokens"
            ) from None
        self.capacity, self.recorded = tokens, None
        if self.is_static and can_write_out(self.model):
            self.written_out = WrittenOut(self.model, tokens, self.lengths_B)

    def start(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Starts rows with these tokens; returns the logits after the last token of each."""
        self.reserve(max(map(len, rows)))
        lengths = torch.tensor([len(row) for row in rows])
        self.lengths_B[: len(rows)] = lengths.to(self.device)
        self.longest = int(lengths.max())
        found = []
        at_once = max(1, PREFILL_TOKENS // self.longest)
        for first in range(0, len(rows), at_once):
            some = rows[first : first + at_once]
            part = slice(first, first + len(some))
            longest = max(map(len, some))
            padded = [[*row, *[0] * (longest - len(row))] for row in some]
            tokens_BS = torch.tensor(padded, device=self.device)
            found.append(self._start(tokens_BS, part))
        return torch.cat(found)

    def _start(self, tokens_BS: Tensor, rows: slice) -> Tensor:
        lengths_B = self.lengths_B[rows]
        if self.written_out is not None:
            return self.written_out.start(tokens_BS, rows, lengths_B - 1)
        begun = CachedPass(True, rows, lengths_B, tokens_BS.shape[1])
        return self._logits(tokens_BS, None, begun, lengths_B - 1)

    def step(self, tokens_B: Tensor) -> Tensor:
        """Adds a token to each row; returns the logits of the next token. If steps are recorded,
        the next step overwrites them."""
        self.longest += 1
        if not self.is_static:
            return self._step(tokens_B)
        if self.recorded is None:
            before_B = self.lengths_B.clone()
            self.recorded = Recorded(self._step, tokens_B)
            self.lengths_B.copy_(before_B)  # what the trial wrote is overwritten
        return self.recorded(tokens_B)

    def _step(self, tokens_B: Tensor) -> Tensor:
        rows = slice(0, len(tokens_B))
        lengths_B = self.lengths_B[rows]
        if self.written_out is not None:
            logits_BV = self.written_out.step(tokens_B)
        else:
            seen = self.capacity if self.is_static else min(self.longest, self.capacity)
            one = CachedPass(False, rows, lengths_B, seen)
            logits_BV = self._logits(tokens_B[:, None], lengths_B[:, None], one, 0)
        # Rows that have ended are still computed but ignored: they must stay within the cache.
        lengths_B.add_(1).clamp_(max=self.capacity - 1)
        return logits_BV

    def _logits(
        self,
        tokens_BS: Tensor,
        positions_BS: Tensor | None,
        one: CachedPass,
        place_B: Tensor | int,
    ) -> Tensor:
        """Returns the logits after the token at this place of each row."""
        cast(CachedMasks, self.model.model.masks).current = one
        hidden_BSD = self.model.model(tokens_BS, positions_BS)
        rows_B = torch.arange(len(tokens_BS), device=self.device)
        return self.model.lm_head(hidden_BSD[rows_B, place_B])  # type: ignore[misc]


def release(model: Decoder) -> None:
    """Restores the original model and frees the cache."""
    model.model.masks = cast(CachedMasks, model.model.masks).plain
    for layer in _layers(model):
        layer.self_attn.core = Attention()


def can_cache(model: nn.Module) -> bool:
    """Whether tokens interact only in attention cores that can be replaced. That holds for our own
    decoder if all its modules come from this package or torch, unmodified: not sharded, not
    compiled, and without hooks."""
    if type(model) is not Decoder or model.lm_head is None or model.model.embed_tokens is None:
        return False
    kinds = {"self_attn": SelfAttention, "mlp": MLP, "core": Attention, "masks": Masks}
    for name, module in model.named_modules():
        kind = kinds.get(name.rpartition(".")[2])
        if kind is not None and type(module) is not kind:
            return False
        if type(module).__module__.partition(".")[0] not in ("overland", "torch"):
            return False
        if not _is_own_forward(module):
            return False
    return not any(isinstance(parameter, DTensor) for parameter in model.parameters())


def _layers(model: Decoder) -> list[Layer]:
    return cast(list[Layer], list(model.model.layers.values()))


def _is_own_forward(module: nn.Module) -> bool:
    """Whether calling a module runs its forward() and nothing else."""
    if module._forward_hooks or module._forward_pre_hooks or module._compiled_call_impl:
        return False
    given = module.__dict__.get("forward")
    if isinstance(given, partial):
        given = given.func
    return given is None or given.__module__.startswith("overland.")
