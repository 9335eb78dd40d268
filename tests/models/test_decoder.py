"""The decoder in parts, in other dtypes, and as the trainer calls it."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from overland.apps.convert.formats.hf import require_known
from overland.errors import CheckpointError, ModelError
from overland.models import DecoderConfig, build_model
from overland.models.init import init_weights

from .tiny import CASES, hf


def tiny(**changes: object) -> torch.nn.Module:
    model = build_model(DecoderConfig.from_hf(hf("llama", **changes)))
    init_weights(model, seed=0)
    return model


def test_loss_is_the_sum_over_valid_labels() -> None:
    model = tiny()
    tokens_BS = torch.randint(0, 96, (2, 12))
    labels_BS = tokens_BS.roll(-1, dims=1)
    labels_BS[:, -1] = -100
    expected = F.cross_entropy(model(tokens_BS).flatten(0, 1), labels_BS.flatten(), reduction="sum")
    torch.testing.assert_close(model(tokens_BS, labels_BS=labels_BS), expected)


def test_loss_can_be_replaced_from_outside() -> None:
    model = tiny()
    seen = []

    class Seen:
        def sums(self, head, hidden, fields):
            seen.append((hidden, head.weight_VD, fields["labels_BS"]))
            return hidden.sum()

    model.objective = Seen()
    tokens_BS = torch.randint(0, 96, (2, 12))
    model(tokens_BS, labels_BS=tokens_BS)
    assert seen[0][0].shape == (2, 12, 32)
    assert seen[0][1] is model.lm_head.weight


@pytest.mark.parametrize("tied", [False, True])
def test_stages_of_a_pipeline_compute_the_whole(tied: bool) -> None:
    model = tiny(tie_word_embeddings=tied)
    first, last = copy.deepcopy(model), copy.deepcopy(model)
    first.model.norm = first.lm_head = None
    del first.model.layers["1"], first.model.layers["2"]
    last.model.embed_tokens = None
    del last.model.layers["0"]
    names = {*dict(first.named_parameters()), *dict(last.named_parameters())}
    assert names >= set(model.config.parameter_shapes())
    tokens_BS = torch.randint(0, 96, (2, 12))
    documents_BS = (torch.arange(12) // 5).expand(2, 12)
    hidden_BSD = first(tokens_BS, documents_BS=documents_BS)
    assert hidden_BSD.shape == (2, 12, 32)
    assert torch.equal(
        last(hidden_BSD, documents_BS=documents_BS), model(tokens_BS, documents_BS=documents_BS)
    )


class OnlyFloat64(TorchDispatchMode):
    """Fails on any operation that gives a floating tensor of another type."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                assert value.dtype == torch.float64, func
        return result


@pytest.mark.parametrize("case", list(CASES), ids=" / ".join)
def test_float64_is_float64_throughout(case: tuple[str, str]) -> None:
    contents, seq_len = CASES[case]
    model = build_model(DecoderConfig.from_hf(contents)).double()
    init_weights(model, seed=0)
    tokens_BS = torch.randint(0, 96, (1, seq_len))
    with OnlyFloat64():
        model(tokens_BS)
        model(tokens_BS, labels_BS=tokens_BS).backward()


def test_bfloat16_stays_near_float32() -> None:
    model = tiny()
    tokens_BS = torch.randint(0, 96, (2, 12))
    wide = model(tokens_BS)
    narrow = model.to(torch.bfloat16)(tokens_BS)
    assert narrow.dtype == torch.bfloat16
    assert (narrow - wide).abs().max() < 0.1 * wide.abs().max()
    assert model(tokens_BS, labels_BS=tokens_BS).dtype == torch.float32


def test_autocast_computes_documents_and_loss() -> None:
    model = tiny()
    tokens_BS = torch.randint(0, 96, (2, 12))
    documents_BS = (torch.arange(12) // 5).expand(2, 12)
    exact = model(tokens_BS, documents_BS=documents_BS, labels_BS=tokens_BS)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(tokens_BS, documents_BS=documents_BS, labels_BS=tokens_BS)
    loss.backward()
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, exact, rtol=1e-2, atol=0)


def test_gradients_reach_every_parameter() -> None:
    model = tiny(attention_bias=True, mlp_bias=True)
    tokens_BS = torch.randint(0, 96, (2, 12))
    model(tokens_BS, labels_BS=tokens_BS).backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in model.parameters())


def test_layernorm_is_a_switch_of_the_decoder() -> None:
    """LayerNorm with a weight and no bias, in every place but the names unchanged."""
    model = tiny(norm_type="layernorm")
    layer = model.config
    assert layer.parameter_shapes() == tiny().config.parameter_shapes()
    assert {n: tuple(p.shape) for n, p in model.named_parameters()} == layer.parameter_shapes()
    x_BSD = torch.randn(2, 3, layer.hidden_size) + 1
    block = model.model.layers["0"]
    for norm in (block.input_layernorm, block.post_attention_layernorm, model.model.norm):
        centered = x_BSD - x_BSD.mean(-1, keepdim=True)
        expected = centered / (centered.square().mean(-1, keepdim=True) + layer.rms_norm_eps).sqrt()
        torch.testing.assert_close(norm(x_BSD), expected)
    assert DecoderConfig.from_hf(layer.to_hf()) == layer
    with pytest.raises(CheckpointError, match="cannot be exported to Hugging Face"):
        require_known(layer.to_hf())
    with pytest.raises(ModelError, match="norm_type 'np_layernorm' is not supported"):
        tiny(norm_type="np_layernorm")
