"""Losses and statistics inside a model: counted once, wide, and whatever is frozen."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from overland.apps.proofs.pool import RankPool
from overland.config.derived import Degrees
from overland.errors import ModelError
from overland.models.init import cast_floats
from overland.models.inner import InnerLoss, Statistic
from overland.parallel.apply import require_splittable
from overland.parallel.mesh import build_mesh
from overland.training.inner_state import InnerState
from overland.world import World


def degrees(shard: int = 1, tp: int = 1) -> Degrees:
    return Degrees(1, 1, shard, 1, tp, True)


class Counter(nn.Module):
    """Counts its tokens; a module around it may read that too."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = Statistic()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.tokens(x, x.new_tensor(float(x.shape[0])))
        return out

    def after_step(self) -> None:
        self.seen += self.tokens.total


class Around(nn.Sequential):
    def after_step(self) -> None:
        pass


def count_tokens(world: World) -> float:
    counter = Counter()
    counter.tokens.init_buffers()
    inner = InnerState([Around(counter)], build_mesh(degrees(shard=world.size), "cpu"))
    counter(torch.ones(3, 2, requires_grad=True)).sum().backward()
    inner.after_step(torch.tensor(False), 1)
    return float(counter.seen)


def test_statistics_are_summed_once_though_two_modules_read_them(ranks: RankPool) -> None:
    assert ranks.run(2, count_tokens) == [6.0, 6.0]


def test_what_follows_frozen_parameters_is_noted() -> None:
    """In a later stage of a pipeline the same place has a gradient."""
    loss, statistic, head = InnerLoss("balance", 0.1), Statistic(), nn.Linear(2, 1)
    for one in (loss, statistic):
        one.init_buffers()
    x = loss(statistic(torch.ones(3, 2), torch.tensor(7.0)), torch.ones(3))
    head(x).sum().backward()
    assert (float(loss.total), float(statistic.total)) == (3.0, 7.0)
    with torch.no_grad():
        statistic(torch.ones(3, 2), torch.tensor(7.0))
    assert float(statistic.total) == 7.0


def test_sums_stay_wide_in_a_narrow_model() -> None:
    statistic = Statistic(2)
    cast_floats(nn.Sequential(statistic), torch.bfloat16)
    statistic.init_buffers()
    x = torch.ones(1, requires_grad=True)
    statistic(x, torch.tensor([1000.0, 1.0])).sum().backward()
    statistic(x, torch.tensor([1.0, 1.0])).sum().backward()
    assert statistic.total.tolist() == [1001.0, 2.0]


def test_a_loss_that_is_no_number_per_row_is_refused() -> None:
    with pytest.raises(ModelError, match=r"balance has shape .*one number for each of the 3 ro"):
        InnerLoss("balance", 0.1)(torch.ones(3, 2), torch.ones(3).mean())
    with pytest.raises(ModelError, match=r"shape \(2,\) was given values of shape \(\)"):
        Statistic(2)(torch.ones(3, 2), torch.tensor(1.0))
    with pytest.raises(ModelError, match="cannot be logged as 'loss'"):
        InnerLoss("loss", 0.1)


def test_tensor_parallelism_refuses_what_it_would_split() -> None:
    from overland.models import DecoderConfig
    from overland.models.decoder import Decoder

    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    config = DecoderConfig(model_type="llama", num_attention_heads=2, **sizes)  # type: ignore[arg-type]
    with torch.device("meta"):
        model = Decoder(config, "sdpa")
        model.model.layers["0"].mlp.load = Statistic(2)
    with pytest.raises(ModelError, match="has an inner loss or statistic"):
        require_splittable(model, config, degrees(tp=2))
