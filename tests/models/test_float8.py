"""Linear layers in 8 bits: close to the wide ones, and what is shared or kept."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor, nn

from overland.models import DecoderConfig, build_model
from overland.models.float8 import Float8, Float8Linear, linear8
from overland.models.init import init_weights

SIZES = {
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def model(float8: str) -> nn.Module:
    network = build_model(DecoderConfig.from_hf(SIZES), "sdpa").to(torch.bfloat16)
    init_weights(network, 0)
    if float8 != "off":
        Float8().apply(network)
    return network


def loss_of(network: nn.Module) -> Tensor:
    tokens = torch.arange(2 * 64).view(2, 64) % 128
    loss: Tensor = network(tokens, None, None, tokens)
    return loss


def test_blocks_are_narrowed_and_nothing_else() -> None:
    network = model("tensorwise")
    narrow = {name for name, module in network.named_modules() if type(module) is Float8Linear}
    assert len(narrow) == 2 * 7
    assert all(name.startswith("model.layers.") for name in narrow)
    assert set(dict(network.named_parameters())) == set(dict(model("off").named_parameters()))


def test_loss_and_gradients_are_near_those_in_bfloat16() -> None:
    wide, narrow = model("off"), model("tensorwise")
    losses = [loss_of(network) for network in (wide, narrow)]
    for loss in losses:
        loss.backward()
    assert abs(losses[1] / losses[0] - 1) < 2e-3
    for expected, got in zip(wide.parameters(), narrow.parameters(), strict=True):
        assert expected.grad is not None
        assert got.grad is not None
        assert (got.grad - expected.grad).norm() / expected.grad.norm() < 0.25


@pytest.mark.parametrize("shape", [(3, 5, 32), (16, 40)])
def test_odd_sides_are_computed_as_ever(shape: tuple[int, ...]) -> None:
    x, weight = torch.randn(shape), torch.randn(48, shape[-1])
    assert torch.equal(linear8(x, weight), x @ weight.t())


def test_frozen_weights_get_no_gradient() -> None:
    x, weight = torch.randn(16, 32, requires_grad=True), torch.randn(48, 32)
    linear8(x, weight).sum().backward()
    assert x.grad is not None
    x, weight = torch.randn(16, 32), torch.randn(48, 32, requires_grad=True)
    linear8(x, weight).sum().backward()
    assert weight.grad is not None


def test_a_compiled_block_casts_what_is_shared_once_and_keeps_it_in_8_bits() -> None:
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: object) -> object:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()  # sizes met in other tests would be made symbols
    network = model("tensorwise")
    eager = loss_of(network).item()
    backend = aot_autograd(
        fw_compiler=keep, bw_compiler=keep, partition_fn=min_cut_rematerialization_partition
    )
    for layer in network.model.layers.values():
        layer.forward = torch.compile(layer.forward, backend=backend, fullgraph=True, dynamic=False)
    loss = loss_of(network)
    loss.backward()
    assert loss.item() == pytest.approx(eager, rel=1e-6)

    def casts(graph: torch.fx.GraphModule) -> int:
        return Counter(str(node.target) for node in graph.graph.nodes)[
            "overland.float8_cast.default"
        ]

    # Inputs of q, k, v together, of o, of gate and up together, of down; and seven weights. Then
    # seven gradients, and the weights the other way round.
    assert [casts(graph) for graph in graphs] == [4 + 7, 7 + 7]
    (outputs,) = graphs[0].graph.output_node().args
    kept = Counter(node.meta["val"].dtype for node in outputs if "val" in node.meta)
    assert kept[torch.float8_e4m3fn] == 4
