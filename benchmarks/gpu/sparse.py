"""What 2:4 sparse weights cost and save on one GPU: `python benchmarks/gpu/sparse.py`.

Products of a Llama 3 8B layer, 16,384 tokens, bfloat16. dense: W as it is. masked: as
`[model.sparse]` trains, x · (mask ⊙ W)ᵀ by the dense units. sparse: the same product by the 2:4
units (cuSPARSELt, the fastest of its algorithms), with weights that were compressed before.
compress: what that takes, once per step, since the weights change. Milliseconds, the median of ten.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from overland.models.sparse import largest, masked, pack

TOKENS = 16_384
SHAPES = {"q, o": (4096, 4096), "gate, up": (14336, 4096), "down": (4096, 14336)}


def main() -> None:
    torch.manual_seed(0)
    rows = {}
    for name, (outputs, inputs) in SHAPES.items():
        x = torch.randn(TOKENS, inputs, device="cuda", dtype=torch.bfloat16)
        weight = torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16) * 0.02
        mask = pack(largest(weight, 2, 4), 4)
        zeros = masked(weight, mask, 4)
        compressed = torch._cslt_compress(zeros)
        wanted = F.linear(x, zeros)
        best = torch._cslt_sparse_mm_search(compressed, x.t(), transpose_result=True)

        def sparse(c: Tensor = compressed, x: Tensor = x, best: int = best) -> Tensor:
            return torch._cslt_sparse_mm(c, x.t(), transpose_result=True, alg_id=best)

        found = sparse()
        row = {
            "dense": timed(lambda x=x, w=weight: F.linear(x, w)),
            "masked": timed(lambda x=x, w=weight, m=mask: F.linear(x, masked(w, m, 4))),
            "sparse": timed(sparse),
            "compress": timed(lambda w=weight, m=mask: torch._cslt_compress(masked(w, m, 4))),
            "difference": float((found - wanted).abs().max() / wanted.abs().max()),
        }
        rows[name] = row
        print(name, {key: round(value, 4) for key, value in row.items()}, flush=True)
    print(json.dumps(rows))


def timed(work: Callable[[], object]) -> float:
    for _ in range(3):
        work()
    times = []
    for _ in range(10):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[5]


if __name__ == "__main__":
    main()
