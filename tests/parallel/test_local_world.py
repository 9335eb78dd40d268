"""The benchmark of one rank of many (benchmarks/gpu/local_world.py) gives every collective the
result that equal ranks would give it."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import ReduceOp

PATH = Path(__file__).parents[2] / "benchmarks/gpu/local_world.py"
SUM, AVG, MAX = (
    SimpleNamespace(reduceOp=one) for one in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX)
)


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    return runpy.run_path(str(PATH))


def test_collectives_of_equal_ranks(names: dict[str, Any]) -> None:
    group = names["LocalGroup"](None, None, 0, 4, None)
    mine = torch.tensor([1.0, 2.0])
    gathered = torch.full((8,), torch.nan)
    gathered[:2] = mine  # as FSDP does: the shard is a part of the output
    group.all_gather_single(gathered, gathered[:2]).wait()
    assert gathered.tolist() == [1.0, 2.0] * 4

    for options, factor in ((SUM, 4), (AVG, 1), (MAX, 1)):
        part = torch.empty(2)
        group.reduce_scatter_single(part, gathered, options).wait()
        assert part.tolist() == [factor, 2 * factor]
        whole = mine.clone()
        group.allreduce([whole], options).wait()
        assert whole.tolist() == [factor, 2 * factor]


def test_a_network_takes_the_time_of_what_a_ring_sends(names: dict[str, Any]) -> None:
    network = names["Network"](seconds=1e-5, bytes_per_second=1e9)
    assert network.nanoseconds(8000, 8) == 10_000 + 7_000
