"""Estimates of memory and disk space use what an optimizer says it keeps."""

from __future__ import annotations

from math import prod

import pytest
from torch import nn

from overland.apps.check.fake_step import fake_steps
from overland.config import schema
from overland.config.derived import resolve_degrees
from overland.config.load import load_config
from overland.config.schema import JobConfig
from overland.models.config import DecoderConfig
from overland.models.registry import model_config
from overland.optimizers.optimizer import Optimizer
from overland.optimizers.registry import state_bytes
from overland.optimizers.whole_matrix import Matrix, rounds
from overland.training.memory import step_memory
from tests.optimizers import own

# Bytes of state per number of a matrix inside of a block, and of any other parameter.
EXPECTED = {
    "AdamW": (8.0, 8.0),
    "AdamW narrow": (4.0, 4.0),
    "Lion": (4.0, 4.0),
    "Muon": (4.0, 8.0),
    "EightBit": (1 + 4 / own.BLOCK, 1 + 4 / own.BLOCK),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_every_count_is_the_state_that_there_is(name: str) -> None:
    config = load_config(
        "llama3_debug",
        [
            f"optimizer.name={name.split()[0]}",
            f"optimizer.bf16_moments={str('narrow' in name).lower()}",
            "training.seq_len=64",
            "training.mixed_precision_param=bfloat16",
        ],
        env={},
    ).config
    model = model_config(config.model)
    assert isinstance(model, DecoderConfig)
    shapes = model.parameter_shapes()
    inner, other = EXPECTED[name]
    in_blocks = {n: s for n, s in shapes.items() if len(s) == 2 and ".layers." in n}
    expected = sum(prod(s) * (inner if n in in_blocks else other) for n, s in shapes.items())
    scalars = 8 * len(shapes) if name == "EightBit" else 0
    assert state_bytes(config, shapes) == pytest.approx(expected + scalars)
    (step,) = fake_steps(config, 1)
    assert step.num_bytes["optimizer"] == pytest.approx(expected + scalars, rel=1e-3)
    degrees = resolve_degrees(config.parallelism, 1)
    memory = step_memory(model, config, degrees, "none", compiled=False)
    total = sum(map(prod, shapes.values()))
    assert memory.state == pytest.approx(4 * total + expected + scalars)


def test_packed_state_is_saved_in_full() -> None:
    config = JobConfig(optimizer=schema.Optimizer(name="EightBit"))
    shapes = {"weight": (64, 128)}
    assert state_bytes(config, shapes, saved=True) == 4 * 64 * 128 + 8
    model = nn.Linear(128, 64, bias=False)
    optimizer = Optimizer([model], config.optimizer)
    assert optimizer.num_bytes == 64 * 128 + 4 * 128 + 8
    with optimizer.whole():
        assert optimizer.tensors()["optimizer.weight.momentum"].nbytes == 4 * 64 * 128


def test_matrices_are_dealt_evenly_and_every_one_once() -> None:
    ranks = (4, 5, 6, 7)
    sizes = {f"{layer}.{name}": size for layer in range(8) for name, size in
             {"q": 64, "k": 16, "up": 256, "down": 256}.items()}  # fmt: skip
    matrices = [Matrix(name, (size, 1), ranks, ()) for name, size in sizes.items()]
    dealt = rounds(matrices)
    assert dealt == rounds(matrices[::-1])
    owned = [[one[owner] for one in dealt if one[owner]] for owner in range(4)]
    assert sorted(one.name for own in owned for one in own if one) == sorted(sizes)
    loads = [sum(sizes[one.name] for one in own if one) for own in owned]
    assert max(loads) - min(loads) <= 64
