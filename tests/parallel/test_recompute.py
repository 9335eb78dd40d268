"""What blocks keep for the backward pass, and recompute there."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from overland.config.schema import ActivationCheckpoint, Compile
from overland.models.config import DecoderConfig
from overland.models.decoder import Decoder
from overland.models.structure import blocks_of
from overland.parallel import blocks
from overland.parallel.blocks import checkpoint_activations, compile_blocks

WIDTH, INNER, TOKENS = 32, 96, 64


@pytest.mark.parametrize("compiled", [False, True])
def test_recomputing_products_changes_what_is_kept_and_no_bit(
    monkeypatch: pytest.MonkeyPatch, compiled: bool
) -> None:
    kept, gradients = zip(*(_kept(monkeypatch, on, compiled) for on in (False, True)), strict=True)
    # A number per token and inner unit; uncompiled, silu(gate) too.
    assert kept[0] - kept[1] == 4 * TOKENS * INNER * (1 if compiled else 2)
    assert all(map(torch.equal, *gradients))


def _kept(
    monkeypatch: pytest.MonkeyPatch, recomputes: bool, compiled: bool
) -> tuple[int, list[Tensor]]:
    monkeypatch.setattr(blocks, "RECOMPUTE_PRODUCTS", recomputes)
    torch._dynamo.reset()
    torch.manual_seed(1)
    config = DecoderConfig(
        model_type="llama", hidden_size=WIDTH, intermediate_size=INNER, vocab_size=50,
        num_hidden_layers=1, num_attention_heads=2,
    )  # fmt: skip
    model = Decoder(config, "sdpa")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    settings = ActivationCheckpoint(mode="none")
    checkpoint_activations(blocks_of(model).values(), settings, random=False)
    compile_blocks(model, Compile(enable=compiled, backend="aot_eager"))
    sizes_by_place: dict[int, int] = {}
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        sizes_by_place[storage.data_ptr()] = storage.nbytes()
        return tensor

    tokens = torch.arange(TOKENS)[None] % 50
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = model(tokens)
    out.square().mean().backward()
    kept = sum(size for place, size in sizes_by_place.items() if place not in weights)
    return kept, [p.grad for p in model.parameters() if p.grad is not None]
