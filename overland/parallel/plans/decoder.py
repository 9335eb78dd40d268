"""The plan of a decoder, built-in or custom: splits its matrices over `tp` by their roles and its
rows over `cp`, and refuses sizes and modules that cannot be split.

    over tp           what is split                             how
    between blocks    rows of the sequence                      norms and residuals work on 1/tp
    into attention    gathered; heads are split                 q, k, v by columns; o by rows
    into the MLP      gathered; inner width is split            gate, up by columns; down by rows
    embedding, head   the vocabulary                            the loss never sees whole logits

The output of a block is scattered back to rows, so each block gathers twice and scatters twice.
Query and key norms work on a rank's own heads; their weight is shared, and its gradient is summed.

Over `cp`, rows are split; attention's core receives the keys and values of the whole row, and masks
use the true positions of a rank's own queries (see context.py).
"""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from overland.config.derived import Degrees
from overland.errors import ModelError
from overland.models.attention import Attention, Mask, Masks, build_mask, compute_dtype
from overland.models.config import ROLES, DecoderConfig
from overland.models.decoder import Decoder, Head, SelfAttention
from overland.models.structure import Role, find_module, inside, walk_roles
from overland.parallel.context import ContextAttention, gather_row, pieces_of_rank
from overland.parallel.tensor import (
    ROWS,
    SplitLinear,
    overlap_communication,
    split_embedding,
    split_head,
)

SPLIT_OUTSIDE_BLOCKS = ("model.embed_tokens", "model.norm", "lm_head")


class DecoderPlan:
    axes = ("tp", "cp")
    token_by_token: tuple[str, ...] = ()
    """Further modules that treat every token by itself, so that rows can be split over `cp`: a path
    within a block, such as `mlp`, or within the model."""

    def uneven(self, config: DecoderConfig, tp: int) -> list[str]:
        parts = {
            f"{config.num_attention_heads} attention heads": config.num_attention_heads,
            f"{config.num_key_value_heads} key-value heads": config.num_key_value_heads,
            f"an inner width of {config.intermediate_size}": config.intermediate_size,
            f"a vocabulary of {config.vocab_size}": config.vocab_size,
        }
        return [name for name, count in parts.items() if count % tp]

    def check(self, model: nn.Module, degrees: Degrees) -> None:
        if not isinstance(model, Decoder):
            axis = "tp" if degrees.tp > 1 else "cp"
            raise ModelError(
                f"{type(model).__name__} is not a Decoder, so {axis} = {getattr(degrees, axis)} "
                "cannot split it; it can be sharded and replicated"
            )
        if degrees.tp > 1:
            require_plan(model, block_plan(model.config.qk_norm))
            require_plain_head(model)
            require_roles(model)
        if degrees.cp > 1:
            require_separate_tokens(model, self.token_by_token)

    def split_tensors(self, model: nn.Module, tp: DeviceMesh, overlap: bool) -> None:
        """Splits every matrix of a decoder, or of one pipeline stage of it."""
        assert isinstance(model, Decoder)
        plan = block_plan(model.config.qk_norm)
        if overlap:
            overlap_communication(tp)
        frozen = {
            name for name, parameter in model.named_parameters() if not parameter.requires_grad
        }
        embedding, head = model.model.embed_tokens, model.lm_head
        if embedding is not None:
            if type(embedding).forward is nn.Embedding.forward:
                split_embedding(embedding, tp)
            else:  # one of a model's own
                split = RowwiseParallel(input_layouts=Replicate(), output_layouts=ROWS)
                parallelize_module(embedding, tp, split)
            # Copied to a plain tensor: with the collective's unfinished result as input, a compiled
            # block drops the gradient of its input (torch 2.13, found by the proof `tp2:compile`).
            embedding.register_forward_hook(lambda module, args, out: out.clone())
            if model.model.noise is not None:
                model.model.noise.part = tp.get_local_rank()
        for layer in model.model.layers.values():
            parallelize_module(layer, tp, {**plan, **changed_layers(layer)})
        if model.model.norm is not None:
            parallelize_module(model.model.norm, tp, SequenceParallel(use_local_output=True))
        if head is not None:
            tied = embedding is not None and model.config.tie_word_embeddings
            split_head(head, embedding.weight if tied and embedding is not None else None, tp)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name not in frozen)  # torch's styles make norms trainable

    def split_context(self, model: nn.Module, cp: DeviceMesh) -> None:
        """Makes a decoder work on this rank's share of each row."""
        assert isinstance(model, Decoder)
        if model.model.noise is not None:
            model.model.noise.num_shares = cp.size()
        model.model.masks = ContextMasks(model.model.masks, cp)
        for number, layer in model.model.layers.items():
            attention = getattr(layer, "self_attn", None)
            core = getattr(attention, "core", None)
            if attention is None or not isinstance(core, nn.Module):
                raise ModelError(
                    f"block {number} has no module self_attn.core, which context parallelism needs "
                    "to pass the keys and values of the whole row; train this model without it"
                )
            attention.core = ContextAttention(core, cp)
            if type(attention).forward is not SelfAttention.forward or "forward" in vars(attention):
                require_core(attention, f"model.layers.{number}.self_attn")
        # The dynamic rotary type stretches with the length of the whole row.
        model.model.rotary.register_forward_pre_hook(
            lambda module, args: (args[0], args[1] * cp.size(), args[2])
        )


def changed_layers(layer: nn.Module) -> dict[str, SplitLinear]:
    """Returns the linear layers that a transform has changed."""
    return {
        path: SplitLinear(role)
        for path, role in ROLES.items()
        if hasattr(find_module(layer, path), "roles")
    }


def require_plan(model: Decoder, plan: dict[str, Any]) -> None:
    """Raises if a parameter is not in the plan. Torch only warns about such a parameter, and would
    compute something else."""
    for name, _ in model.named_parameters():
        owner = name.rpartition(".")[0]
        in_block = re.fullmatch(r"model\.layers\.\d+\.(.+)", owner)
        if (in_block and in_block[1] in plan) or owner in SPLIT_OUTSIDE_BLOCKS:
            continue
        around = in_block[1].rpartition(".")[0] if in_block else ""
        if around in plan and hasattr(model.get_submodule(owner.rpartition(".")[0]), "roles"):
            continue
        raise ModelError(
            f"tensor parallelism cannot split {name}; it splits the projections of a Decoder's "
            "attention and MLP by their names, so train this model without it"
        )


def require_separate_tokens(model: Decoder, token_by_token: tuple[str, ...]) -> None:
    """Raises if a parameter, or attention, is not known to work on a share of each row. Nothing
    would fail, but the model would compute something else."""
    known = {*block_plan(model.config.qk_norm)} - {"self_attn", "mlp"}
    known |= {"self_attn.core", *token_by_token}
    names = [name for name, _ in model.named_parameters()]
    names += [name for name, module in model.named_modules() if isinstance(module, Attention)]
    for name in names:
        in_block = re.fullmatch(r"model\.layers\.[^.]+\.(.+)", name)
        if in_block and inside(in_block[1], tuple(known)):
            continue
        if not inside(name, (*SPLIT_OUTSIDE_BLOCKS, *token_by_token)):
            raise ModelError(
                f"context parallelism splits rows, and cannot know whether {name} treats every "
                "token by itself: train this model without it or, if it does, say so in a plan "
                "(token_by_token, see docs/extending.md)"
            )


def require_plain_head(model: Decoder) -> None:
    """Raises if the model has its own head, which would be replaced by one that never sees whole
    logits."""
    head = model.lm_head
    if head is not None and (type(head).forward is not Head.forward or "forward" in vars(head)):
        raise ModelError(
            f"tensor parallelism computes logits and loss on parts of the vocabulary, so this "
            f"model's own head, {type(head).__name__}, would be ignored; train it without tensor "
            "parallelism"
        )


def require_roles(model: Decoder) -> None:
    """Raises if a module that a transform has changed says that it cannot be split."""
    for name, role in walk_roles(model):
        describe = getattr(model.get_submodule(name), "roles", None)
        if describe is not None:
            describe(role)


def block_plan(qk_norm: bool) -> dict[str, Any]:
    # q and k, [B, S, heads, d], are split by heads.
    own_heads = SequenceParallel(sequence_dim=2, use_local_output=True)
    norms = {"self_attn.q_norm": own_heads, "self_attn.k_norm": own_heads} if qk_norm else {}
    gathered = PrepareModuleInput(
        input_layouts=(ROWS, None, None, None),
        desired_input_layouts=(Replicate(), None, None, None),
    )
    styles = {Role.COLUMN: ColwiseParallel(), Role.ROW: RowwiseParallel(output_layouts=ROWS)}
    return {
        "input_layernorm": SequenceParallel(),
        "self_attn": gathered,
        **norms,
        "post_attention_layernorm": SequenceParallel(),
        "mlp": PrepareModuleInput(input_layouts=(ROWS,), desired_input_layouts=(Replicate(),)),
        **{path: styles[role] for path, role in ROLES.items() if role in styles},
    }


def require_core(attention: nn.Module, name: str) -> None:
    """Has a custom attention raise if it does not call its core, and so sees only a share of the
    row."""
    called = {"core": False}

    def end(module: nn.Module, args: object, out: object) -> None:
        if not called["core"]:
            raise ModelError(
                f"{name} ({type(attention).__name__}) does not call its module core, which context "
                "parallelism needs to pass the keys and values of the whole row; train this model "
                "without it"
            )

    attention.register_forward_pre_hook(lambda module, args: called.update(core=False))
    attention.core.register_forward_pre_hook(lambda module, args: called.update(core=True))  # type: ignore[union-attr]
    attention.register_forward_hook(end)


class ContextMasks(Masks):
    """Masks for a rank's own queries against the keys of the whole row."""

    def __init__(self, masks: Masks, cp: DeviceMesh) -> None:
        super().__init__(masks.attention, masks.windows)
        self.cp = cp

    def forward(
        self, x_BSD: Tensor, seq_len: int, documents_BS: Tensor | None
    ) -> dict[int | None, Mask]:
        batch, dtype, size = x_BSD.shape[0], compute_dtype(x_BSD), self.cp.size()
        whole_len = seq_len * size
        if documents_BS is not None:
            documents_BS = gather_row(documents_BS[:, None, :, None], self.cp)[:, 0, :, 0]
        pieces = pieces_of_rank(whole_len, self.cp.get_local_rank(), size)
        return {
            window: build_mask(
                self.attention, batch, whole_len, x_BSD.device, dtype, window, documents_BS, pieces
            )
            for window in self.windows
        }
