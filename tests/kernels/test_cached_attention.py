"""One query per row over the cached keys equals attention over exactly those that it sees."""

from __future__ import annotations

import pytest
import torch

from overland.apps.evaluation.kernels.layers import cached_attention


@pytest.mark.parametrize("window", [None, 1, 3, 64])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 6])
def test_each_row_sees_its_own_keys_and_no_others(num_kv_heads: int, window: int | None) -> None:
    draw = torch.Generator().manual_seed(0)
    lengths = [1, 5, 12, 20]
    q_BHd = torch.randn(4, 6, 8, generator=draw, dtype=torch.float64)
    k_BKTd = torch.randn(4, num_kv_heads, 20, 8, generator=draw, dtype=torch.float64)
    v_BKTd = torch.randn(4, num_kv_heads, 20, 8, generator=draw, dtype=torch.float64)
    found_BHd = cached_attention(q_BHd, k_BKTd, v_BKTd, torch.tensor(lengths), window)
    for row, length in enumerate(lengths):
        first = 0 if window is None else max(0, length - window)
        for head in range(6):
            own = head * num_kv_heads // 6
            keys_Td, values_Td = k_BKTd[row, own, first:length], v_BKTd[row, own, first:length]
            chances_T = torch.softmax(keys_Td @ q_BHd[row, head] / 8**0.5, dim=0)
            assert torch.allclose(found_BHd[row, head], chances_T @ values_Td, rtol=1e-12)


def test_what_lies_behind_a_row_does_not_matter() -> None:
    q_BHd, kept = torch.randn(2, 4, 8), torch.randn(2, 2, 10, 8)
    lengths_B = torch.tensor([3, 7])
    wanted = cached_attention(q_BHd, kept, kept, lengths_B, None)
    other = kept.clone()
    other[0, :, 3:], other[1, :, 7:] = 1e6, -1e6
    assert torch.equal(cached_attention(q_BHd, other, other, lengths_B, None), wanted)
