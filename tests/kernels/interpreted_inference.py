"""What the kernels for generation compute, compared with their plain definitions.

Run by test_triton.py, in Triton's interpreter.
"""

from __future__ import annotations

import pytest
import torch

from overland.apps.evaluation.kernels import Heads, triton_cached_attention, triton_inference
from overland.apps.evaluation.kernels.layers import add_norm, attend, begin, gated


@pytest.mark.parametrize(
    ("rows", "outputs", "width", "has_bias"),
    [
        (1, 8, 48, False),
        (1, 9, 5000, True),
        (3, 40, 96, True),
        (17, 33, 160, False),
        (2, 4, 8192, False),
    ],
)
def test_linear(rows: int, outputs: int, width: int, has_bias: bool) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(rows, width), torch.randn(outputs, width) / width**0.5
    bias = torch.randn(outputs) if has_bias else None
    out = triton_inference.linear(x, weight, bias)
    torch.testing.assert_close(out, torch.nn.functional.linear(x, weight, bias))


@pytest.mark.parametrize("rows", [1, 3])
def test_gated(rows: int) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(rows, 96), torch.randn(80, 96) / 10
    both = x @ weight.T
    plain = gated(x, weight)
    torch.testing.assert_close(triton_inference.gated(x, weight), plain)
    torch.testing.assert_close(triton_inference.silu_times(both), plain)


@pytest.mark.parametrize("adds", [False, True])
def test_add_norm(adds: bool) -> None:
    torch.manual_seed(0)
    x, more, weight = torch.randn(3, 48), torch.randn(3, 48), torch.randn(48)
    ours = triton_inference.add_norm(x, more if adds else None, weight, 1e-5)
    plain = add_norm(x, more if adds else None, weight, 1e-5)
    torch.testing.assert_close(ours, plain)


@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize("head_dim", [16, 24])
def test_begin(head_dim: int, has_norms: bool) -> None:
    torch.manual_seed(0)
    qkv, cache = torch.randn(2, 7, 10 * head_dim), torch.randn(2, 3, 2, 12, head_dim)
    norms = [torch.randn(head_dim) if has_norms else None for _ in range(2)]
    angles = torch.randn(12, head_dim // 2).repeat(1, 2)
    heads = Heads(angles.cos(), angles.sin(), *norms, eps=1e-5)
    ours, plain = cache.clone(), cache.clone()
    q = triton_cached_attention.begin(qkv, *ours[:, 1:], heads)  # rows of a larger cache
    torch.testing.assert_close(q, begin(qkv, *plain[:, 1:], heads))
    torch.testing.assert_close(ours, plain)


@pytest.mark.parametrize("window", [None, 1, 5, 200])
@pytest.mark.parametrize(
    ("batch", "room", "head_dim", "has_norms"),
    [(3, 70, 16, False), (1, 300, 24, True), (9, 4, 8, True)],
)
def test_attend(batch: int, room: int, head_dim: int, has_norms: bool, window: int | None) -> None:
    """Rows of unequal lengths, an empty one and one that fills its places among them; one row
    alone, whose keys several programs share."""
    torch.manual_seed(0)
    num_heads, num_kv_heads = 6, 2
    qkv = torch.randn(batch, (num_heads + 2 * num_kv_heads) * head_dim)
    cache = torch.randn(2, batch, num_kv_heads, room, head_dim)
    lengths = torch.randint(0, room, (batch,), dtype=torch.int32)
    lengths[0], lengths[-1] = 0, room - 1
    norms = [torch.randn(head_dim) if has_norms else None for _ in range(2)]
    angles = torch.randn(room, head_dim // 2).repeat(1, 2)
    heads = Heads(angles.cos(), angles.sin(), *norms, eps=1e-5, window=window)
    ours, plain = cache.clone(), cache.clone()
    out = triton_cached_attention.attend(qkv, *ours, lengths, heads)
    torch.testing.assert_close(out, attend(qkv, *plain, lengths, heads))
    torch.testing.assert_close(ours, plain)
    if window is None:
        again = triton_cached_attention.attend(
            qkv, *cache, lengths, heads
        )  # the counts are zero again
        torch.testing.assert_close(again, out)
