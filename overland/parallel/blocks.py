"""Activation checkpointing and compilation, block by block: which blocks or operators the backward
pass recomputes instead of keeping."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._functorch import config as functorch_config
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from overland.config.schema import ActivationCheckpoint, Compile
from overland.models.decoder import MLP
from overland.models.structure import blocks_of, find_module, structure_of

aten = torch.ops.aten
RECOMPILE_LIMIT = 64
RECOMPUTE_PRODUCTS = False  # until it is timed on GPUs
# Expensive to compute and cheap to keep: matrix products and attention. The rest is recomputed.
KEPT_OPS = {
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten._scaled_mm.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.higher_order.flex_attention,
}


def checkpoint_activations(
    blocks: Iterable[nn.Module],
    settings: ActivationCheckpoint,
    random: bool,
    only_by_compiler: bool = False,
) -> None:
    """Wraps the forward pass of the blocks that are recomputed; names and hooks stay the same.
    `random`: blocks may draw random numbers, and must draw the same ones when they are recomputed.
    `only_by_compiler`: blocks are compiled and their matrices split, and torch 2.13 fails to
    compile the recomputation of such a block (it treats the mesh as a tensor to be kept)."""
    assert settings.mode != "auto"  # resolved before
    # The compiler weighs the cost of keeping each value against that of recomputing it; 1 keeps
    # all, 0 only the inputs of a block.
    budget = settings.memory_budget if settings.mode == "memory_budget" else 1.0
    if only_by_compiler and settings.mode == "full":
        budget = 0.0
    functorch_config.activation_memory_budget = budget
    if RECOMPUTE_PRODUCTS and settings.mode == "none" and not random and not only_by_compiler:
        for block in blocks:
            for module in block.modules():
                if isinstance(module, MLP):
                    module.recomputes = True
    if budget < 1 or settings.mode in ("none", "memory_budget"):
        return
    every, options = 1, dict[str, Any]()
    if settings.mode == "selective" and settings.selective_ac_option == "op":
        options = {"context_fn": partial(create_selective_checkpoint_contexts, _policy)}
    elif settings.mode == "selective":
        every = int(settings.selective_ac_option)
        assert not only_by_compiler  # refused before
    for number, block in enumerate(blocks):
        if number % every == 0:
            block.forward = partial(
                checkpoint,
                block.forward,
                use_reentrant=False,
                preserve_rng_state=random,
                **options,
            )


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in KEPT_OPS else CheckpointPolicy.PREFER_RECOMPUTE


def compile_blocks(model: nn.Module, settings: Compile) -> None:
    """Compiles block by block: one compilation serves all layers, which keeps start-up short."""
    assert settings.enable != "auto"  # resolved before
    if not settings.enable:
        return
    from torch._dynamo import config as dynamo_config  # a fifth of the import time at start

    # Lets compiled 8-bit products be cached for the next start like everything else: both of their
    # passes are part of the graph that is the cache key.
    functorch_config.autograd_cache_allow_custom_autograd_functions = True
    # A block passes dropout seeds to its adapters; it need not do so again when it is recomputed.
    dynamo_config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
    # A block is recompiled for each power of two of documents that a batch may hold, for the
    # lengths of training and validation, and with and without gradients; torch's default limit of 8
    # would end the run.
    dynamo_config.recompile_limit = RECOMPILE_LIMIT
    structure = structure_of(model)
    others = (find_module(model, path) for path in structure.compiled)
    # Uncompiled, a decoder's last norm takes fourteen small kernels; under tensor parallelism such
    # modules are left alone.
    whole = [
        module
        for module in others
        if module is not None and not any(isinstance(p, DTensor) for p in module.parameters())
    ]
    for block in [*blocks_of(model).values(), *whole]:
        # Only the forward function, so that the hooks of sharding stay outside the graph.
        block.forward = torch.compile(
            block.forward, backend=settings.backend, fullgraph=True, dynamic=False
        )
