"""The building blocks of tensor parallelism: linear layers, the embedding, the head and its loss,
split over `tp`; plans/ decides what is split in a model. Each matrix is split as in Shoeybi et al.
2019, with sequence parallelism between the matrices (Korthikanti et al. 2022)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed._functional_collectives import all_reduce, wait_tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement

from overland.kernels.gradients import scaled
from overland.models.config import CHUNK_TOKENS
from overland.models.decoder import Head, HeadLoss
from overland.models.linear import AddedMatrix, ChangedLinear
from overland.models.loss import IGNORED, OutputMatrix, TokenLosses, add_product, places_of
from overland.models.structure import Role
from overland.parallel.comm import gather, gather_with_gradient, sum_and_scatter

SUMMED = [Partial()]
ROWS = Shard(1)  # of x_BSD: each rank holds some rows of the sequence


def overlap_communication(tp: DeviceMesh) -> None:
    """Lets the compiler split gathered matrix products into pieces that start as their rows arrive.
    Experimental: it has not been run on several GPUs yet."""
    from torch._inductor import config as compiler
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    compiler._micro_pipeline_tp = True
    enable_symm_mem_for_group(tp.get_group().group_name)


class SplitLinear(ParallelStyle):
    """Splits a linear layer that a transform has changed, and the matrices that it has added,
    according to their roles. Torch's own styles support only plain layers."""

    def __init__(self, role: Role) -> None:
        self.role = role

    def _apply(self, module: nn.Module, tp: DeviceMesh) -> nn.Module:
        _split_parameters(module, self.role, tp)
        for name, role in module.roles(self.role).items():  # type: ignore[operator]
            added = module.get_submodule(name)
            _split_parameters(added, role, tp)
            if isinstance(added, AddedMatrix):
                added.part = _part_of(role)
        if isinstance(module, ChangedLinear):
            module.__class__ = split_class(type(module))  # type: ignore[arg-type]
            module.become_part()
        given, left = (Replicate(), Shard(-1)) if self.role is Role.COLUMN else (Shard(-1), ROWS)

        def take(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            x, *others = args
            x = x if isinstance(x, DTensor) else DTensor.from_local(x, tp, [given])
            return (x, *others)

        def leave(module: nn.Module, args: tuple[Any, ...], out: DTensor) -> Tensor:
            return out.redistribute(placements=[left]).to_local()

        module.register_forward_pre_hook(take)
        module.register_forward_hook(leave)
        return module


def _split_parameters(module: nn.Module, role: Role, tp: DeviceMesh) -> None:
    """Splits the parameters of the module itself, not of modules in it."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        placement: Placement = Replicate()
        if role is Role.COLUMN:
            placement = Shard(0)
        elif role is Role.ROW and parameter.ndim > 1:
            placement = Shard(1)
        split = distribute_tensor(parameter, tp, [placement])
        module.register_parameter(name, nn.Parameter(split, requires_grad=parameter.requires_grad))


def _part_of(role: Role) -> Callable[[Tensor], Tensor]:
    """Returns how a matrix of this role becomes its local part. The gradient of a matrix that every
    rank has is a sum over the ranks."""
    placements = SUMMED if role is Role.REPLICATED else None

    def local(tensor: Tensor) -> Tensor:
        assert isinstance(tensor, DTensor)
        return tensor.to_local(grad_placements=placements)

    return local


class SplitProduct(ChangedLinear):
    """A rank's part of such a layer. Its products are summed over the ranks, or their columns
    concatenated, at once."""

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(x, DTensor)
        assert isinstance(self.weight, DTensor)
        by_columns = self.weight.placements[0].is_shard(0)
        # By columns every rank has all of x, and its gradient is a sum over the ranks.
        x_here = x.to_local(grad_placements=SUMMED if by_columns else None)
        first = 0 if by_columns else x.device_mesh.get_local_rank() * x_here.shape[-1]
        out_here = self.multiply(x_here, self.weight.to_local(), first)
        placement = Shard(out_here.ndim - 1) if by_columns else Partial()
        out = DTensor.from_local(out_here, x.device_mesh, [placement], run_check=False)
        return out if self.bias is None else out + self.bias


@cache
def split_class(kind: type[ChangedLinear]) -> type[ChangedLinear]:
    return type(f"Split{kind.__name__}", (SplitProduct, kind), {})


def split_embedding(embedding: nn.Embedding, tp: DeviceMesh) -> None:
    """Makes each rank keep only the rows of its part of the vocabulary; it receives all tokens and
    returns its rows of the sequence. Torch's own style computes the gradient of the whole table on
    every rank."""
    weight = distribute_tensor(embedding.weight, tp, [Shard(0)])
    trained = embedding.weight.requires_grad
    embedding.weight = nn.Parameter(weight, requires_grad=trained)
    embedding.forward = partial(embedding_forward, embedding, tp)  # type: ignore[method-assign]


def embedding_forward(embedding: nn.Embedding, tp: DeviceMesh, tokens_BS: Tensor) -> Tensor:
    assert isinstance(embedding.weight, DTensor)
    weight_vD = embedding.weight.to_local()
    rows_BRD: Tensor = VocabularyRows.apply(tokens_BS, weight_vD, tp.get_group())
    return rows_BRD


class VocabularyRows(torch.autograd.Function):
    """The rows of a table that is split over the vocabulary. Every token's row is on one rank; the
    others add zeros."""

    @staticmethod
    def forward(ctx: Any, tokens_BS: Tensor, weight_vD: Tensor, group: dist.ProcessGroup) -> Tensor:
        size = len(weight_vD)
        place_N1, here_N1 = places_of(tokens_BS.flatten(), dist.get_rank(group) * size, size)
        place_BS, here_BS1 = place_N1.view_as(tokens_BS), here_N1.view(*tokens_BS.shape, 1)
        rows_BSD = weight_vD[place_BS].masked_fill_(~here_BS1, 0)
        ctx.save_for_backward(place_BS.where(here_BS1[..., 0], size))  # of others: past the end
        ctx.size, ctx.group = size, group
        # Waited for: with the collective's unfinished result as input, a compiled block drops the
        # gradient of its input (torch 2.13, found by the proof `tp2:compile`).
        return wait_tensor(sum_and_scatter(rows_BSD, "sum", 1, group))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BRD: Tensor) -> tuple[Tensor | None, ...]:
        if not ctx.needs_input_grad[1]:
            return None, None, None
        (place_BS,) = ctx.saved_tensors
        grad_BSD = wait_tensor(gather(grad_BRD.contiguous(), 1, ctx.group))
        # One more row than there are, for the tokens of other ranks, which it leaves out.
        grad_vD = torch.ops.aten.embedding_dense_backward(
            grad_BSD, place_BS, ctx.size + 1, ctx.size, False
        )
        return None, grad_vD[: ctx.size], None


def split_head(head: Head, tied_weight: Tensor | None, tp: DeviceMesh) -> None:
    """Makes each rank keep only the output rows of its part of the vocabulary."""
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
    objective: HeadLoss | None = None,
    fields: Mapping[str, Tensor] | None = None,
) -> Tensor:
    """Returns the logits of the whole vocabulary, or the objective's result; `hidden` holds this
    rank's rows."""
    assert isinstance(head.weight, DTensor)
    weight_vD = head.weight.to_local()
    if objective is not None and fields is not None:
        return objective.sums(VocabularyPart(weight_vD, tp.get_group()), hidden_BRD, fields)
    hidden_BSD = DTensor.from_local(hidden_BRD, tp, [ROWS]).redistribute(placements=[Replicate()])
    logits_BSv = hidden_BSD.to_local() @ weight_vD.t()
    return DTensor.from_local(logits_BSv, tp, [Shard(-1)]).full_tensor()


class VocabularyPart(OutputMatrix):
    """A rank's v = V / tp rows of the output matrix. It receives this rank's rows of the hidden
    states, and all labels; results are the same on all ranks of `tp`."""

    def __init__(self, weight_vD: Tensor, group: dist.ProcessGroup) -> None:
        super().__init__(weight_vD)
        self.group = group

    def weighted_sum(
        self,
        hidden_BSD: Tensor,
        labels_BS: Tensor,
        weights_BS: Tensor | None = None,
        z_loss: float = 0.0,
    ) -> tuple[Tensor, Tensor]:
        total, z_part = VocabularyParallelLoss.apply(
            hidden_BSD, self.weight_VD, labels_BS, weights_BS, z_loss, self.group
        )
        return total, z_part

    def token_losses(self, hidden_BSD: Tensor, labels_BS: Tensor) -> Tensor:
        gathered_BSD = gather_with_gradient(hidden_BSD.contiguous(), 1, self.group)
        first = dist.get_rank(self.group) * len(self.weight_VD)
        losses_N: Tensor = TokenLosses.apply(
            gathered_BSD.flatten(0, 1), self.weight_VD, labels_BS.flatten(), first, self.group
        )
        return losses_N.view(labels_BS.shape)


class VocabularyParallelLoss(torch.autograd.Function):
    """The weighted sum with v = V / tp logits per rank. Per chunk, two small all-reduces (largest
    logit; exponentials and the label's logit) replace the whole logits."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_BRD: Tensor,
        weight_vD: Tensor,
        labels_BS: Tensor,
        weights_BS: Tensor | None,
        z_loss: float,
        group: dist.ProcessGroup,
    ) -> tuple[Tensor, Tensor]:
        hidden_BSD = gather(hidden_BRD.contiguous(), 1, group)
        hidden_ND, labels_N = hidden_BSD.flatten(0, 1), labels_BS.flatten()
        wide = torch.promote_types(hidden_ND.dtype, torch.float32)
        weights_N1 = (labels_N != IGNORED)[:, None].to(wide)
        if weights_BS is not None:
            weights_N1 = weights_N1 * weights_BS.flatten()[:, None]
        first = dist.get_rank(group) * weight_vD.shape[0]
        total = torch.zeros((), dtype=wide, device=hidden_ND.device)
        z_part = torch.zeros_like(total)
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        grad_hidden_ND = torch.empty_like(hidden_ND, dtype=wide) if need_hidden else None
        grad_weight_vD = None

        for start in range(0, len(hidden_ND), CHUNK_TOKENS):
            rows = slice(start, start + CHUNK_TOKENS)
            hidden_CD, weights_C1 = hidden_ND[rows], weights_N1[rows]
            place_C1, here_C1 = places_of(labels_N[rows], first, weight_vD.shape[0])

            logits_Cv = (hidden_CD @ weight_vD.t()).to(wide)
            largest_C1 = all_reduce(logits_Cv.amax(1, keepdim=True), "max", group)
            logits_Cv -= largest_C1
            label_C1 = logits_Cv.gather(1, place_C1) * here_C1
            exp_Cv = logits_Cv.exp_()
            sums_C2 = torch.cat((exp_Cv.sum(1, keepdim=True), label_C1), dim=1)
            sums_C2 = all_reduce(sums_C2, "sum", group)
            log_C1 = sums_C2[:, :1].log()
            total += ((log_C1 - sums_C2[:, 1:]) * weights_C1).sum()

            wide_Cv = exp_Cv.div_(sums_C2[:, :1])  # the gradient of the logits
            if z_loss:
                log_z_C1 = log_C1 + largest_C1
                z_part += (z_loss * log_z_C1.square() * weights_C1).sum()
                wide_Cv.mul_(1 + 2 * z_loss * log_z_C1)
            wide_Cv.scatter_add_(1, place_C1, -here_C1.to(wide))
            grad_Cv = wide_Cv.to(hidden_CD.dtype)
            del logits_Cv, exp_Cv, wide_Cv  # otherwise two chunks would exist at once
            if grad_hidden_ND is not None:
                product_CD = add_product(None, grad_Cv, weight_vD, wide)
                grad_hidden_ND[rows] = product_CD.mul_(weights_C1)
            if need_weight:
                weighted_CD = (hidden_CD * weights_C1).to(hidden_CD.dtype)
                grad_weight_vD = add_product(grad_weight_vD, grad_Cv.t(), weighted_CD, wide)
            del grad_Cv

        grad_hidden_BRD = None
        if grad_hidden_ND is not None:
            grad_hidden_BSD = grad_hidden_ND.unflatten(0, labels_BS.shape)
            grad_hidden_BRD = sum_and_scatter(grad_hidden_BSD, "sum", 1, group)
            grad_hidden_BRD = grad_hidden_BRD.to(hidden_BRD.dtype)
        ctx.save_for_backward(grad_hidden_BRD, grad_weight_vD)
        ctx.weight_dtype = weight_vD.dtype
        ctx.mark_non_differentiable(z_part)
        return total + z_part, z_part

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden_BRD, grad_weight_vD = ctx.saved_tensors
        if grad_hidden_BRD is not None:
            grad_hidden_BRD = (grad_hidden_BRD.to(grad.dtype) * grad).to(grad_hidden_BRD.dtype)
        if grad_weight_vD is not None:
            grad_weight_vD = scaled(grad_weight_vD, grad, ctx.weight_dtype)
        return grad_hidden_BRD, grad_weight_vD, None, None, None, None
