"""Adapters compute what PEFT's do: checked here by the formulas, and against the installed PEFT by
`make prove-all`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from overland.apps.proofs.pool import RankPool
from overland.checkpoint.folder import latest_checkpoint
from overland.checkpoint.read import open_checkpoint
from overland.config.derived import group_rates, optimizer_settings
from overland.config.schema import JobConfig, Lora
from overland.errors import ModelError
from overland.models.build import build_undivided
from overland.models.config import DecoderConfig
from overland.models.draws import draws_of
from overland.models.flops import count_parameters, flops_per_token, trained_parameters
from overland.models.init import init_buffers, init_weights
from overland.models.lora import LoRALinear, without_adapters
from overland.models.registry import model_config
from overland.world import World
from tests.jobs import TINY_MODEL, run_job, tiny_job


def adapted(training: dict[str, Any] | None = None, **lora: Any) -> nn.Module:
    """A tiny Llama with adapters whose B are not zero."""
    settings = {"rank": 4, **lora}
    wide = {"dtype": "float64", "mixed_precision_param": "float64"}
    config = JobConfig.model_validate(
        {"model": {"overrides": TINY_MODEL}, "training": training or wide, "lora": settings}
    )
    with torch.device("meta"):
        model = build_undivided(model_config(config.model), config)
    model.to_empty(device="cpu")
    init_buffers(model, torch.device("cpu"))
    init_weights(model, seed=0)
    for name, parameter in model.named_parameters():
        if name.endswith("lora_B.weight"):
            nn.init.normal_(parameter, generator=torch.Generator().manual_seed(len(name)))
    return model


def linear(model: nn.Module, name: str = "model.layers.0.self_attn.q_proj") -> LoRALinear:
    found = model.get_submodule(name)
    assert isinstance(found, LoRALinear)
    return found


def x_of(module: nn.Linear) -> Tensor:
    draw = torch.Generator().manual_seed(3)
    return torch.randn(2, 5, module.in_features, dtype=module.weight.dtype, generator=draw)


def dense(module: LoRALinear) -> Tensor:
    return module.weight + module.scale * (module.lora_B.weight @ module.lora_A.weight)


@pytest.mark.parametrize(("rslora", "scale"), [(False, 8 / 4), (True, 8 / 2)])
def test_an_adapter_adds_a_low_rank_matrix(rslora: bool, scale: float) -> None:
    module = linear(adapted(rslora=rslora))
    assert module.scale == scale
    x = x_of(module)
    torch.testing.assert_close(module(x), F.linear(x, dense(module), module.bias))
    with without_adapters([module]):
        torch.testing.assert_close(module(x), F.linear(x, module.weight, module.bias))


def test_with_dora_rows_have_lengths_of_their_own() -> None:
    module = linear(adapted(dora=True))
    lengths = torch.linspace(0.5, 2, module.out_features, dtype=torch.float64)
    with torch.no_grad():
        module.lora_magnitude_vector.copy_(lengths)  # type: ignore[union-attr]
    weight = dense(module)
    weight = lengths[:, None] * weight / weight.norm(dim=1, keepdim=True)
    x = x_of(module)
    torch.testing.assert_close(module(x), F.linear(x, weight))


def test_adapters_start_as_pefts_do() -> None:
    config = JobConfig.model_validate(
        {"model": {"overrides": TINY_MODEL}, "lora": {"rank": 4},
         "training": {"mixed_precision_param": "float32"}}
    )  # fmt: skip
    with torch.device("meta"):
        model = build_undivided(model_config(config.model), config)
    model.to_empty(device="cpu")
    init_weights(model, seed=0)
    module = linear(model)
    assert not module.lora_B.weight.any()
    bound = module.in_features**-0.5
    largest = module.lora_A.weight.abs().max()
    assert 0.9 * bound < largest <= bound


def test_only_adapters_are_trained_and_the_rest_is_as_narrow_as_the_pass() -> None:
    model = adapted({"mixed_precision_param": "bfloat16"}, modules_to_save=["lm_head"])
    for name, parameter in model.named_parameters():
        is_trained = ".lora_" in name or name == "lm_head.weight"
        assert parameter.requires_grad == is_trained, name
        assert parameter.dtype == (torch.float32 if is_trained else torch.bfloat16), name


@pytest.mark.parametrize("layout", [{}, {"pipeline_parallel_degree": 2}])
def test_a_tied_matrix_is_trained_by_the_name_of_its_embedding(
    layout: dict[str, int], ranks: RankPool, tmp_path: Path
) -> None:
    """It has another one, which nobody names."""
    config = tiny_job(
        tmp_path,
        model={"overrides": {**TINY_MODEL, "tie_word_embeddings": True}},
        lora={"rank": 4, "modules_to_save": ["embed_tokens"]},
        parallelism={**layout, "pipeline_parallel_microbatch_size": 4},
        training={"steps": 1},
        checkpoint={"enable": True},
    )
    ranks.run(2 if layout else 1, losses, config)
    path = latest_checkpoint(tmp_path / "checkpoint")
    assert path is not None
    with open_checkpoint(path) as saved:
        assert "optimizer.model.embed_tokens.weight.exp_avg" in saved.tensors


def test_frozen_weights_may_be_kept_in_another_type_than_they_are_computed_with(
    ranks: RankPool, tmp_path: Path
) -> None:
    sections: dict[str, Any] = {"lora": {"rank": 4, "base": "bfloat16"}, "training": {"steps": 2}}
    (alone,) = ranks.run(1, losses, tiny_job(tmp_path / "one", **sections))
    sections["training"]["local_batch_size"] = 4
    for found in ranks.run(2, losses, tiny_job(tmp_path / "two", **sections)):
        assert found == pytest.approx(alone, rel=1e-12)


PROJECTIONS = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
               "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [f"{i}.{name}" for i in (0, 1) for name in PROJECTIONS[0:3:2]]),
        ({"targets": "all-linear"}, [f"{i}.{name}" for i in (0, 1) for name in PROJECTIONS]),
        ({"targets": r".*\.1\..*_proj", "exclude": ["gate_proj"]},
         [f"1.{name}" for name in PROJECTIONS if "gate" not in name]),
        ({"targets": ["down_proj"], "layers": [1]}, ["1.mlp.down_proj"]),
        ({"targets": "all-linear", "exclude": r".*self_attn.*", "layers": [0]},
         [f"0.{name}" for name in PROJECTIONS[4:]]),
    ],
)  # fmt: skip
def test_targets_are_found_as_peft_finds_them(
    settings: dict[str, Any], expected: list[str]
) -> None:
    model = adapted(**settings)
    found = [name for name, one in model.named_modules() if isinstance(one, LoRALinear)]
    assert found == [f"model.layers.{name}" for name in expected]
    # The count without torch, which memory and FLOP are estimated by, agrees.
    trained = trained_parameters(config_of(), Lora(rank=4, **settings))
    assert trained == {
        name: tuple(one.shape) for name, one in model.named_parameters() if one.requires_grad
    }


def config_of() -> DecoderConfig:
    found = model_config(JobConfig.model_validate({"model": {"overrides": TINY_MODEL}}).model)
    assert isinstance(found, DecoderConfig)
    return found


def test_ranks_and_alphas_by_pattern() -> None:
    model = adapted(
        targets="all-linear",
        rank_pattern={"1.self_attn.q_proj": 2, "down_proj": 8},
        alpha_pattern={r"^model.layers.0.*": 32.0},
    )
    assert linear(model, "model.layers.1.self_attn.q_proj").scale == 8 / 2
    assert linear(model, "model.layers.0.self_attn.q_proj").scale == 32 / 4
    assert linear(model, "model.layers.0.mlp.down_proj").lora_A.out_features == 8


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"targets": ["q_porj"]}, r"lora.targets names 'q_porj', .*did you mean 'q_proj'"),
        ({"targets": ["q_proj", "wq"]}, "lora.targets names 'wq', which the model does not have"),
        ({"targets": "layers.0.q_proj"}, "lora.targets names 'layers.0.q_proj'"),
        ({"modules_to_save": ["head"]}, "lora.modules_to_save names 'head'"),
        ({"targets": "q_proj,v_proj"}, r"write several names as a list: \["),
        ({"layers": [7]}, "lora.exclude and lora.layers exclude every matrix"),
        ({"targets": ["lm_head"]}, "lm_head computes its own product .*modules_to_save"),
    ],
)
def test_what_matches_nothing_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        adapted(**settings)


def test_an_embedding_gets_an_adapter() -> None:
    model = adapted(targets=["embed_tokens"])
    table = model.get_submodule("model.embed_tokens")
    with torch.no_grad():
        table.lora_embedding_A.normal_()  # type: ignore[union-attr,operator]
    tokens = torch.tensor([[1, 5, 5, 300]])
    low = table.lora_embedding_B @ table.lora_embedding_A  # type: ignore[operator]
    expected = F.embedding(tokens, table.weight + table.scale * low.t())  # type: ignore[operator]
    torch.testing.assert_close(table(tokens), expected)


def test_dropout_is_drawn_by_sample_epoch_and_place_alone() -> None:
    module = linear(adapted(dropout=0.25))
    sample_B, epoch_B = torch.tensor([7, 9]), torch.tensor([0, 0])
    x = torch.ones(2, 400, module.in_features, dtype=torch.float64)

    def dropped(sample_B: Tensor, epoch_B: Tensor, seed: int = 0) -> Tensor:
        module.draws_BS = draws_of(seed, sample_B, epoch_B, 400)
        return module.drop(x, 0)

    first = dropped(sample_B, epoch_B)
    assert abs((first == 0).double().mean() - 0.25) < 0.01
    assert first.max() == 1 / 0.75
    assert torch.equal(first, dropped(sample_B, epoch_B))
    assert torch.equal(first.flip(0), dropped(sample_B.flip(0), epoch_B))
    for other in (dropped(sample_B, epoch_B + 1), dropped(sample_B, epoch_B, seed=1)):
        assert abs((first == other).double().mean() - (0.75**2 + 0.25**2)) < 0.02
    module.draws_BS = None
    assert module.drop(x, 0) is x


def test_lora_plus_is_a_group_of_its_own() -> None:
    config = JobConfig.model_validate({
        "lora": {"rank": 4, "lr_ratio": 16.0},
        "optimizer": {"groups": [{"pattern": "*.layers.0.*", "lr_factor": 0.5}]},
    })  # fmt: skip
    settings = optimizer_settings(config)
    name = "model.layers.{}.self_attn.q_proj.lora_{}.weight"
    assert group_rates(name.format(1, "B"), 2, settings).lr_factor == 16
    assert group_rates(name.format(1, "A"), 2, settings).lr_factor == 1
    assert group_rates(name.format(0, "B"), 2, settings).lr_factor == 0.5


def test_frozen_matrices_cost_two_thirds() -> None:
    model = config_of()
    number = count_parameters(model).in_matmuls
    adapters = sum(rank * size for rank, size in [(1, 2 * 32), (1, 32 + 16)] * 2)
    saved = flops_per_token(model, 32) - flops_per_token(model, 32, Lora(rank=1))
    assert saved == 2 * number - 6 * adapters


LORA = {"rank": 4, "targets": "all-linear", "dropout": 0.1}


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_run_with_adapters_goes_on_with_the_same_bits(
    num_ranks: int, ranks: RankPool, tmp_path: Path
) -> None:
    """And its checkpoints hold the adapters, not the base that it was given."""
    base = export_base(ranks, tmp_path)
    sections: dict[str, Any] = {
        "lora": LORA,
        "training": {"local_batch_size": 8 // num_ranks},
        "checkpoint": {"enable": True, "interval": 3, "initial_load_path": str(base)},
    }
    whole = ranks.run(num_ranks, losses, tiny_job(tmp_path / "whole", **sections))[0]
    stopped = {**sections, "training": {**sections["training"], "steps": 3}}
    stopped["lr_scheduler"] = {"warmup_steps": 2, "total_steps": 6}
    ranks.run(num_ranks, losses, tiny_job(tmp_path / "two", **stopped))
    again = ranks.run(num_ranks, losses, tiny_job(tmp_path / "two", **sections))[0]
    assert again == whole[3:]
    paths = [latest_checkpoint(tmp_path / name / "checkpoint") for name in ("whole", "two")]
    one, other = (open_checkpoint(path) for path in paths)  # type: ignore[arg-type]
    names = {name for name in one.tensors if not name.startswith("rng.")}
    assert all(".lora_" in name for name in names if name.startswith("model."))
    for name in names:
        assert torch.equal(one.read(name), other.read(name)), name


def losses(world: World, config: JobConfig) -> list[float]:
    return run_job(world, config).losses


def export_base(ranks: RankPool, folder: Path) -> Path:
    """A Hugging Face folder of the tiny model, trained for a step."""
    job = tiny_job(folder / "base", training={"steps": 1},
                   checkpoint={"enable": True, "last_save_in_hf": True})  # fmt: skip
    ranks.run(1, losses, job)
    return folder / "base" / "hf"
