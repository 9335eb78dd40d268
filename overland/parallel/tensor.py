"""Tensor parallelism: each matrix split over `tp` (Shoeybi et al. 2019), with sequence parallelism
between the matrices (Korthikanti et al. 2022).

    between blocks    rows of the sequence are split            norms and residuals work on 1/tp
    into attention    gathered; heads are split                 q, k, v by columns; o by rows
    into the MLP      gathered; inner width is split            gate, up by columns; down by rows
    embedding, head   the vocabulary is split                   the loss never sees whole logits

What leaves a block is scattered back to rows, so each block gathers twice and scatters twice.
Query and key norms work on a rank's own heads; their weight is shared, its gradient summed.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from overland.models.decoder import Decoder, Head
from overland.models.errors import ModelError
from overland.models.float8 import Float8Linear, linear8
from overland.models.loss import CHUNK_TOKENS, IGNORED, chunked_cross_entropy
from overland.parallel.comm import gather, sum_and_scatter

SPLIT_OUTSIDE_BLOCKS = ("model.embed_tokens", "model.norm", "lm_head")
ROWS = Shard(1)  # of x_BSD: each rank holds some rows of the sequence


def split_tensors(model: Decoder, tp: DeviceMesh, overlap: bool = False) -> None:
    """Splits every matrix of a decoder, or of one pipeline stage of it."""
    if tp.size() == 1:
        return
    plan = block_plan(model.config.qk_norm)
    require_plan(model, plan)
    if overlap:
        overlap_communication(tp)
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    embedding, head = model.model.embed_tokens, model.lm_head
    if embedding is not None:
        split = RowwiseParallel(input_layouts=Replicate(), output_layouts=ROWS)
        parallelize_module(embedding, tp, split)
        # Copied to a plain tensor: given the collective's unfinished result, a compiled block drops
        # the gradient of its input (torch 2.13, found by the proof `tp2:compile`).
        embedding.register_forward_hook(lambda module, args, out: out.clone())
    for layer in model.model.layers.values():
        parallelize_module(layer, tp, plan)
        for module in layer.modules():
            if isinstance(module, Float8Linear):
                module.__class__ = SplitFloat8Linear
    if model.model.norm is not None:
        parallelize_module(model.model.norm, tp, SequenceParallel(use_local_output=True))
    if head is not None:
        tied = embedding is not None and model.config.tie_word_embeddings
        split_head(head, embedding.weight if tied and embedding is not None else None, tp)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)  # torch's styles make norms trainable again


def require_plan(model: Decoder, plan: dict[str, Any]) -> None:
    """Every parameter has a place in the plan. Torch only warns of one that has none, and would
    compute something else with it."""
    for name, _ in model.named_parameters():
        owner = name.rpartition(".")[0]
        in_block = re.fullmatch(r"model\.layers\.\d+\.(.+)", owner)
        if (in_block and in_block[1] in plan) or owner in SPLIT_OUTSIDE_BLOCKS:
            continue
        raise ModelError(
            f"tensor parallelism does not know how to split {name}; it splits the projections of "
            "a Decoder's attention and MLP by their names, so train this model without it"
        )


def require_plain_head(model: Decoder) -> None:
    """Head and loss are replaced by ones that never see whole logits."""
    head = model.lm_head
    own_head = head is not None and (
        type(head).forward is not Head.forward or "forward" in vars(head)
    )
    if own_head or model.loss is not chunked_cross_entropy:
        what = f"head, {type(head).__name__}," if own_head else "loss"
        raise ModelError(
            f"tensor parallelism computes logits and loss on parts of the vocabulary by itself, so "
            f"this model's own {what} would be left out; train it without tensor parallelism"
        )


def overlap_communication(tp: DeviceMesh) -> None:
    """Lets the compiler cut gathered matrix products into pieces that start as their rows arrive.
    Experimental: it has not run on several GPUs yet."""
    from torch._inductor import config as compiler
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    compiler._micro_pipeline_tp = True
    enable_symm_mem_for_group(tp.get_group().group_name)


def block_plan(qk_norm: bool) -> dict[str, Any]:
    # Of q and k, [B, S, heads, d], the heads are what is split.
    own_heads = SequenceParallel(sequence_dim=2, use_local_output=True)
    norms = {"self_attn.q_norm": own_heads, "self_attn.k_norm": own_heads} if qk_norm else {}
    gathered = PrepareModuleInput(
        input_layouts=(ROWS, None, None, None),
        desired_input_layouts=(Replicate(), None, None, None),
    )
    return {
        "input_layernorm": SequenceParallel(),
        "self_attn": gathered,
        "self_attn.q_proj": ColwiseParallel(),
        "self_attn.k_proj": ColwiseParallel(),
        "self_attn.v_proj": ColwiseParallel(),
        **norms,
        "self_attn.o_proj": RowwiseParallel(output_layouts=ROWS),
        "post_attention_layernorm": SequenceParallel(),
        "mlp": PrepareModuleInput(input_layouts=(ROWS,), desired_input_layouts=(Replicate(),)),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(output_layouts=ROWS),
    }


class SplitFloat8Linear(Float8Linear):
    """A rank's part of a product in 8 bits. Each rank finds the scales of what it holds."""

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(x, DTensor)
        assert isinstance(self.weight, DTensor)
        by_columns = self.weight.placements[0].is_shard(0)
        # By columns every rank has all of x, and its gradient is a sum over the ranks.
        x_here = x.to_local(grad_placements=[Partial()] if by_columns else None)
        out_here = linear8(x_here, self.weight.to_local())
        placement = Shard(out_here.ndim - 1) if by_columns else Partial()
        out = DTensor.from_local(out_here, x.device_mesh, [placement], run_check=False)
        return out if self.bias is None else out + self.bias


def split_head(head: Head, tied_weight: Tensor | None, tp: DeviceMesh) -> None:
    """Each rank keeps the output rows of its part of the vocabulary."""
    if isinstance(tied_weight, nn.Parameter):
        head.weight = tied_weight
    else:
        weight = distribute_tensor(head.weight, tp, [Shard(0)])
        head.weight = nn.Parameter(weight, requires_grad=head.weight.requires_grad)
    head.forward = partial(head_forward, head, tp)  # type: ignore[method-assign]


def head_forward(
    head: Head,
    tp: DeviceMesh,
    hidden_BRD: Tensor,
    labels_BS: Tensor | None = None,
    loss: Any = None,
) -> Tensor:
    """Logits of the whole vocabulary, or the summed loss; `hidden` holds this rank's rows."""
    assert isinstance(head.weight, DTensor)
    weight_vD = head.weight.to_local()
    if labels_BS is not None:
        return VocabularyParallelLoss.apply(hidden_BRD, weight_vD, labels_BS, tp.get_group())
    hidden_BSD = DTensor.from_local(hidden_BRD, tp, [ROWS]).redistribute(placements=[Replicate()])
    logits_BSv = hidden_BSD.to_local() @ weight_vD.t()
    return DTensor.from_local(logits_BSv, tp, [Shard(-1)]).full_tensor()


class VocabularyParallelLoss(torch.autograd.Function):
    """`chunked_cross_entropy` with v = V / tp logits per rank. Per chunk, two small sums over the
    ranks (largest logit; exponentials and the label's logit) take the place of whole logits."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_BRD: Tensor,
        weight_vD: Tensor,
        labels_BS: Tensor,
        group: dist.ProcessGroup,
        chunk_tokens: int = CHUNK_TOKENS,
    ) -> Tensor:
        hidden_BSD = gather(hidden_BRD.contiguous(), 1, group)
        hidden_ND, labels_N = hidden_BSD.flatten(0, 1), labels_BS.flatten()
        wide = torch.promote_types(hidden_ND.dtype, torch.float32)
        first = dist.get_rank(group) * weight_vD.shape[0]
        total = torch.zeros((), dtype=wide, device=hidden_ND.device)
        grad_hidden_ND = torch.empty_like(hidden_ND, dtype=wide)
        grad_weight_vD = torch.zeros_like(weight_vD, dtype=wide)

        for start in range(0, len(hidden_ND), chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            hidden_CD, labels_C = hidden_ND[rows], labels_N[rows]
            valid_C1 = (labels_C != IGNORED)[:, None]
            place_C = labels_C - first
            here_C1 = ((place_C >= 0) & (place_C < weight_vD.shape[0]))[:, None]
            place_C1 = place_C.clamp(0, weight_vD.shape[0] - 1)[:, None]

            logits_Cv = (hidden_CD @ weight_vD.t()).to(wide)
            largest_C1 = all_reduce(logits_Cv.amax(1, keepdim=True), "max", group)
            logits_Cv -= largest_C1
            label_C1 = logits_Cv.gather(1, place_C1) * here_C1
            exp_Cv = logits_Cv.exp_()
            sums_C2 = torch.cat((exp_Cv.sum(1, keepdim=True), label_C1), dim=1)
            sums_C2 = all_reduce(sums_C2, "sum", group)
            total += ((sums_C2[:, :1].log() - sums_C2[:, 1:]) * valid_C1).sum()

            grad_Cv = exp_Cv.div_(sums_C2[:, :1])
            grad_Cv.scatter_add_(1, place_C1, -here_C1.to(wide))
            grad_Cv = grad_Cv.to(hidden_CD.dtype)
            grad_hidden_ND[rows] = (grad_Cv @ weight_vD * valid_C1).to(wide)
            grad_weight_vD += grad_Cv.t() @ (hidden_CD * valid_C1)

        grad_hidden_BSD = grad_hidden_ND.unflatten(0, labels_BS.shape)
        grad_hidden_BRD = sum_and_scatter(grad_hidden_BSD, "sum", 1, group)
        ctx.save_for_backward(grad_hidden_BRD.to(hidden_BRD.dtype), grad_weight_vD)
        ctx.weight_dtype = weight_vD.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        grad_hidden_BRD, grad_weight_vD = ctx.saved_tensors
        scaled = (grad_hidden_BRD.to(grad.dtype) * grad).to(grad_hidden_BRD.dtype)
        return scaled, (grad_weight_vD * grad).to(ctx.weight_dtype), None, None
