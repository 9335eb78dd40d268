"""A user's own network can use what it describes itself for, and is refused the rest by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from overland.apps.check.fake_step import fake_steps
from overland.apps.proofs.layout import difference
from overland.apps.proofs.layouts import parse
from overland.apps.proofs.pool import RankPool
from overland.checks import check_config
from overland.checks.own_model import require_order
from overland.cli.main import app
from overland.config.derived import resolve_degrees
from overland.config.load import load_config
from overland.config.schema import JobConfig
from overland.errors import FromFirstRank
from overland.models import ModelError, registry
from overland.models.flops import count_parameters
from overland.parallel import plans
from overland.training.build import build_run
from overland.world import World
from tests.jobs import losses_and_norms, tiny_job
from tests.seams import own_network


def job(folder: Path, name: str, flavor: str = "plain", **sections: Any) -> JobConfig:
    layout = parse(name)
    training = {"steps": 3, "local_batch_size": 8 // layout.degrees.get("shard", 1)}
    model = {"name": "network", "flavor": flavor, "overrides": {}}
    return tiny_job(
        folder / name, model=model, training=training, parallelism=layout.parallelism, **sections
    )


def curve(world: World, config: JobConfig) -> list[tuple[float, float]]:
    own_network.register()
    return losses_and_norms(world, config)


RECOMPUTED = {"activation_checkpoint": {"mode": "full"}}
COMPILED = {"compile": {"enable": True, "backend": "aot_eager"}}


@pytest.mark.parametrize(
    ("flavor", "layouts"),
    [
        ("plain", [("shard2", RECOMPUTED), ("pp2:ZBVZeroBubble", {}), ("cp2", {})]),
        ("tied", [("shard2", COMPILED), ("pp2", {})]),
    ],
    ids=["plain", "tied"],
)
def test_every_layout_that_it_describes_itself_for(
    ranks: RankPool, tmp_path: Path, flavor: str, layouts: list[tuple[str, dict[str, Any]]]
) -> None:
    (alone,) = ranks.run(1, curve, job(tmp_path, "shard1", flavor))
    for name, sections in layouts:
        config = job(tmp_path, name, flavor, **sections)
        for found in ranks.run(parse(name).num_ranks, curve, config):
            assert max(difference(found, alone, which) for which in (0, 1)) < 1e-9, name


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_MODELS", dict(registry._MODELS))  # gone after the test
    monkeypatch.setattr(plans, "_PLANS", dict(plans._PLANS))
    own_network.register()


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(
    ("flavor", "layout", "says"),
    [
        ("plain", "tp2", "Described has no plan for tp = 2"),
        ("silent", "pp2", "model of NetworkConfig does not say what passes between its blocks"),
        ("wrong", "shard2", "structure\\(\\) of Described names layers, which it does not have"),
        ("one block twice", "pp2", r"blocks\.1 and blocks\.3 share one module, the whole block"),
        (
            "tied blocks",
            "shard2",
            r"blocks\.2\.norm\.weight and blocks\.0\.norm\.weight are one par",
        ),
        ("tied the other way", "shard1", r'owner: ties={"head\.weight": "embed\.weight"}'),
        ("named twice", "pp2", r"names blocks\.0 twice, or inside another"),
        (
            "a block without parameters",
            "pp2",
            r"blocks\.1 has no parameters, and blocks are assigned",
        ),
        ("no tuple", "shard1", r"has last_stage = 'head', expected a tuple: \('head',\)"),
    ],
)
def test_the_rest_is_refused_by_name(tmp_path: Path, flavor: str, layout: str, says: str) -> None:
    with pytest.raises(ModelError, match=says):
        fake_steps(job(tmp_path, layout, flavor), parse(layout).num_ranks)


@pytest.mark.usefixtures("registered")
def test_check_says_what_cannot_be_split(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[model]\nname = "network"\nflavor = "silent"\n[training]\nseq_len = 32\n')
    for axis, says in (("tensor", "network has no plan for tp = 2"),
                       ("pipeline", "does not say what passes between its blocks")):  # fmt: skip
        loaded = load_config(str(path), [f"parallelism.{axis}_parallel_degree=2"])
        assert any(says in one.message for one in check_config(loaded, 2))


@pytest.mark.usefixtures("registered")
def test_counts_follow_from_what_it_says() -> None:
    counts = count_parameters(registry.resolve_config("network", "tied"))
    assert len(counts.blocks) == 5
    assert counts.blocks[4] > counts.blocks[0]
    assert counts.total == sum(counts.blocks) + 96 * 16


def check_order(folder: Path, flavor: str) -> str:
    config = job(folder, "pp2", flavor)
    degrees = resolve_degrees(config.parallelism, 2)
    return require_order(registry.resolve_config("network", flavor), config, degrees)


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(
    ("flavor", "says"),
    [
        (
            "lists in another order",
            r"names late\.0 as block 1, but its forward pass calls blocks\.0 there, so a pipeline",
        ),
        ("backwards", r"names blocks\.0 as block 1, but its forward pass calls blocks\.4 there"),
        ("leaves one out", r"names blocks\.2 among the blocks, which its forward pass does not"),
        ("calls one again", r"Described calls blocks\.0 2 times, but a pipeline stage calls"),
        ("returns two", r"blocks\.0 of Described returns a tuple, but pipeline stages pass"),
        (
            "another shape",
            r"returns the shape \(1, 32, 16\), but between\(\) of its structure\(\) says "
            r"\(1, 32, 17\), with the rows of",
        ),
    ],
)
def test_one_pass_shows_what_a_pipeline_would_change(
    tmp_path: Path, flavor: str, says: str
) -> None:
    with pytest.raises(ModelError, match=says):
        check_order(tmp_path, flavor)


def refusal(world: World, config: JobConfig) -> str:
    own_network.register()
    try:
        build_run(config, world, torch.device("cpu"), log_ranks=())
    except (ModelError, FromFirstRank) as error:
        return str(error)
    return "none"


def test_every_rank_of_a_run_is_told_before_a_pipeline_is_cut(
    ranks: RankPool, tmp_path: Path
) -> None:
    for said in ranks.run(2, refusal, job(tmp_path, "pp2", "another shape")):
        assert said.startswith("blocks.0 of Described returns the shape (1, 32, 16), but between()")


@pytest.mark.usefixtures("registered")
def test_a_pass_that_needs_numbers_is_no_error(tmp_path: Path) -> None:
    assert check_order(tmp_path, "plain") == ""
    note = check_order(tmp_path, "reads numbers")
    assert note.startswith("could not check whether Described calls its blocks in the order")
    assert "fails with RuntimeError: Tensor.item() cannot be called on meta tensors" in note


@pytest.mark.usefixtures("registered")
def test_check_takes_that_pass(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        '[model]\nname = "network"\n[training]\ndataset = "random"\nseq_len = 32\n'
        "[parallelism]\npipeline_parallel_degree = 2\n"
    )
    ask = lambda flavor: CliRunner().invoke(app, ["check", str(path), f"model.flavor={flavor}"])
    refused, noted = ask("another shape"), ask("reads numbers")
    assert refused.exit_code == 2
    assert refused.stderr.startswith("blocks.0 of Described returns the shape (1, 32, 16)")
    assert noted.exit_code == 0
    assert "note: could not check whether Described calls its blocks" in noted.stderr
    assert "none: the model reads values, and fake tensors have none" in noted.stdout
