"""N:M sparse layers: what they compute, that masks are state, and which weights are exported."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

from overland.apps.check.rehearsal import require_start
from overland.apps.convert.convert import convert
from overland.apps.evaluation.main import open_model
from overland.apps.proofs.pool import RankPool
from overland.checks import check_config
from overland.config.errors import ConfigError
from overland.config.load import Loaded, load_config
from overland.config.schema import JobConfig, Sparse
from overland.config.write import to_toml
from overland.errors import ModelError
from overland.models.sparse import (
    SparseLinear,
    largest,
    make_sparse,
    pack,
    register_mask,
    unpack,
)
from overland.training.callbacks import Record
from overland.world import World
from tests.jobs import run_job, tiny_job
from tests.models.sparse_parts import sorted_mask


@pytest.mark.parametrize(("kept", "group"), [(2, 4), (1, 2), (4, 8), (3, 7)])
def test_the_largest_are_used_and_of_equal_ones_the_first(kept: int, group: int) -> None:
    weight = torch.randn(5, 8 * group, generator=torch.Generator().manual_seed(1)).round()
    used = largest(weight, kept, group)
    assert torch.equal(used, sorted_mask(weight, kept, group))
    assert torch.equal(unpack(pack(used, group), group), used)


def test_a_product_is_that_of_the_masked_matrix_and_the_gradient_is_dense() -> None:
    linear = nn.Linear(16, 6).double()
    make_sparse(linear, "some", Sparse())
    assert isinstance(linear, SparseLinear)
    linear.renew()
    x = torch.randn(3, 5, 16, dtype=torch.float64, requires_grad=True)
    out = linear(x)
    (out * torch.arange(6)).sum().backward()
    twin = (linear.weight * sorted_mask(linear.weight, 2, 4)).detach().requires_grad_()
    other = x.detach().requires_grad_()
    expected = F.linear(other, twin, linear.bias)
    (expected * torch.arange(6)).sum().backward()
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(linear.weight.grad, twin.grad)
    torch.testing.assert_close(x.grad, other.grad)
    assert (linear.weight.grad[1:] != 0).all()


def records(world: World, config: JobConfig) -> list[Record]:
    return run_job(world, config).records


def test_a_run_is_that_of_its_masked_dense_twin(ranks: RankPool, tmp_path: Path) -> None:
    curves = {}
    for name, model in (
        ("sparse", {"sparse": {}}),
        ("twin", {"transforms": {"twin": {}}}),
        ("all", {"sparse": {"method": "all"}}),
        ("dense", {}),
    ):
        (found,) = ranks.run(1, records, tiny_job(tmp_path / name, model=model))
        curves[name] = [one["loss"] for one in found]
        share = {"sparse": 0.5, "all": 0.0}.get(name)
        assert found[-1].get("train/sparsity") == share
    assert curves["sparse"] == pytest.approx(curves["twin"], rel=1e-12)
    assert curves["all"] == pytest.approx(curves["dense"], rel=1e-12)
    assert curves["sparse"] != pytest.approx(curves["dense"], rel=1e-4)


def test_masks_are_saved_and_a_resumed_run_has_the_same_bits(
    ranks: RankPool, tmp_path: Path
) -> None:
    def losses(name: str, steps: int, num_ranks: int = 1) -> list[float]:
        job = tiny_job(
            tmp_path / name,
            model={"sparse": {"refresh": 4, "exclude": ["o_proj"]}},
            training={"steps": steps, "local_batch_size": 8 // num_ranks},
            lr_scheduler={"total_steps": 11},
            checkpoint={"enable": True, "interval": 6},
        )
        return [one["loss"] for one in ranks.run(num_ranks, records, job)[0]]

    whole = losses("whole", 11)
    half = losses("half", 6)
    shutil.copytree(tmp_path / "half", tmp_path / "more")
    assert [*half, *losses("half", 11)] == whole  # with the masks of step 4, not of step 6
    assert losses("more", 11, 2) == pytest.approx(whole[6:], rel=1e-9)


def test_a_dense_checkpoint_resumed_with_sparse_layers_gets_masks_from_its_weights(
    ranks: RankPool, tmp_path: Path
) -> None:
    def job(**model: object) -> JobConfig:
        return tiny_job(
            tmp_path / "run",
            model=dict(model),
            training={"steps": 4 if model else 2, "local_batch_size": 4},
            checkpoint={"enable": True, "interval": 2, "allow_changes": ["model.sparse"]},
            metrics={"log_freq": 1},
        )

    for number in (1, 2):
        ranks.run(number, records, job())
        require_start(Loaded(job(sparse={}), [], "the config"))
        resumed = ranks.run(number, records, job(sparse={}))[0]
        assert [one["train/sparsity"] for one in resumed] == [0.5, 0.5]
        shutil.rmtree(tmp_path / "run")


def test_what_leaves_is_dense_with_zeros(ranks: RankPool, tmp_path: Path) -> None:
    run, kinds = tmp_path / "run", {"dtype": "float32", "mixed_precision_param": "float32"}
    job = tiny_job(
        run,
        training={**kinds, "dataset": "stdlib:1/64"},
        data={"vocab_size": 512, "folder": str(tmp_path)},
        model={"sparse": {"exclude": r"model\.layers\.0\..*"}},
        checkpoint={"enable": True, "last_save_in_hf": True, "export_dtype": "float32"},
    )
    ranks.run(1, records, job)
    tokens, tokenizer = torch.arange(20)[None], run / "tokenizer"
    expected = open_model(run).model(tokens)
    convert(run, tmp_path / "hf", to="hf")
    for folder in (tmp_path / "hf", run / "hf"):
        weights = load_file(folder / "model.safetensors")
        assert not [name for name in weights if "mask" in name]
        up = weights["model.layers.1.mlp.up_proj.weight"]
        assert ((up != 0).unflatten(1, (-1, 4)).sum(-1) == 2).all()
        assert (weights["model.layers.0.mlp.up_proj.weight"] != 0).all()
        torch.testing.assert_close(open_model(folder).model(tokens), expected)
    alone = next((run / "checkpoint").glob("step_*")).rename(tmp_path / "alone")
    torch.testing.assert_close(open_model(alone, tokenizer=tokenizer).model(tokens), expected)
    # A dense run that starts from it starts with what it computed.
    start = tiny_job(
        tmp_path / "start",
        training={**kinds, "steps": 1},
        checkpoint={"enable": True, "initial_load_path": str(alone)},
        optimizer={"lr": 1e-30},
    )
    ranks.run(1, records, start)
    begun = open_model(tmp_path / "start", tokenizer=tokenizer).model(tokens)
    torch.testing.assert_close(begun, expected)


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ("pattern = '4:4'", "keeps all weights"),
        ("pattern = 'half'", "model.sparse.pattern"),
        ("patern = '2:4'", "did you mean model.sparse.pattern"),
        ("pattern = '2:7'", "needs rows of a multiple of 7 weights, but model.layers.0."),
        ("modules = ['upproj']", "matches no linear layer of this model's blocks, such as model.l"),
        ("method = 'magnitud'", "did you mean 'magnitude'"),
        ("[lora]\nrank = 4", "choose one"),
        ("[preference]\nloss = 'dpo'\n[sft]\nshape = 'preference'", "masks that keep changing"),
        ("[training]\nfloat8 = 'tensorwise'", "choose one of the two"),
        ("pattern = '2:8'\n[parallelism]\ntensor_parallel_degree = 4", "within groups of 8"),
    ],
)
def test_what_cannot_be_is_said_before_training(lines: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    sizes = "hidden_size = 32, intermediate_size = 80, num_attention_heads = 4"
    model = f"[model]\noverrides = {{{sizes}}}\n[model.sparse]\n"
    path.write_text(f"{model}{lines}\n")
    try:
        problems = list(check_config(load_config(str(path)), 8))
    except ConfigError as error:
        problems = error.problems
    assert any(says in str(one) for one in problems), problems


def test_the_table_is_written_as_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text("[model.sparse]\n")
    assert load_config(str(path)).config.model.sparse == Sparse()
    job = tiny_job(tmp_path, model={"sparse": {"pattern": "1:4", "exclude": ["o_proj"]}})
    path.write_text(to_toml(job))
    assert load_config(str(path)).config.model.sparse == job.model.sparse


def test_a_method_of_ones_own_must_return_a_mask() -> None:
    linear = nn.Linear(8, 2)
    make_sparse(linear, "some", Sparse())
    assert isinstance(linear, SparseLinear)
    linear.method = lambda weight, kept, group: weight
    with pytest.raises(ModelError, match="expected a bool for each weight"):
        linear.renew()
    with pytest.raises(ModelError, match="already registered"):
        register_mask("magnitude", largest)
