"""What `overland prove layout CONFIG` takes from a config, and what counts as equal."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import cast

import pytest

from overland.apps.proofs.job import left_out, proof_job, settings_of
from overland.apps.proofs.layout import (
    Curve,
    Curves,
    LayoutVerdict,
    Tolerance,
    difference,
    largest_difference,
    prove_layouts,
    spread_bounds,
)
from overland.apps.proofs.layouts import parse
from overland.apps.proofs.pool import RankPool
from overland.apps.proofs.resume import prove_resumes
from overland.data import registry as sources
from overland.models import registry
from overland.models.build import build_undivided
from overland.objectives import registry as objectives


def test_the_kind_of_a_built_in_model_is_taken(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('[model]\nname = "qwen3"\nflavor = "0.6B"\n')
    settings = settings_of(str(tmp_path / "run.toml"))
    assert settings is not None
    assert settings["architecture"]["model_type"] == "qwen3"
    assert settings["architecture"]["tie_word_embeddings"] is True


def test_windows_and_z_loss_are_taken_and_what_is_not_is_named(tmp_path: Path) -> None:
    """Qwen's windows have keys of their own."""
    window = "use_sliding_window = true, sliding_window = 16, max_window_layers = 0"
    (tmp_path / "run.toml").write_text(
        f'[model]\nname = "qwen3"\nflavor = "0.6B"\noverrides = {{{window}}}\nattention = "sdpa"\n'
        '[training]\nz_loss = 1e-2\nmax_norm = 0.0\n[lora]\nrank = 4\nbase = "float32"\n'
    )
    source = str(tmp_path / "run.toml")
    job = proof_job(parse("tp2"), "float64", 2, tmp_path / "proof", settings_of(source))
    model = registry.model_config(job.model)
    assert {model.window_of(layer) for layer in range(4)} == {9}
    assert (job.training.z_loss, job.training.max_norm) == (1e-2, 0.1)
    assert {"model.attention", "training.max_norm", "lora.base"} <= set(left_out(source))


def test_layouts_that_cannot_start_are_refused(ranks: RankPool) -> None:
    """In training, the config checks would refuse them."""
    layouts = [parse(name) for name in ("cp3", "tp8", "pp5", "tp2:async")]
    verdicts = list(prove_layouts(layouts, ranks, steps=1))
    assert [one.is_refused for one in verdicts] == [True] * 4
    assert "training.seq_len = 32: with context_parallel_degree = 3" in verdicts[0].verdict


def test_adapters_and_preferences_are_taken(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(
        "[lora]\nrank = 64\nalpha = 32.0\nrslora = true\n"
        '[sft]\nshape = "preference"\n[preference]\nloss = "ipo"\nbeta = 0.5\n'
    )
    settings = settings_of(str(tmp_path / "run.toml"))
    assert settings is not None
    job = proof_job(parse("tp2"), "float64", 2, tmp_path / "proof", settings)
    assert (job.lora.rank, job.lora.alpha, job.lora.rslora) == (4, 32.0, True)
    assert (job.preference.loss, job.preference.beta) == ("ipo", 0.5)
    assert (job.sft.shape, job.data.packing) == ("preference", "trunc")


def test_a_base_in_4_bits_is_taken_with_sizes_that_it_can_have(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(
        '[model]\nname = "qwen3"\nflavor = "0.6B"\n'
        '[lora]\nrank = 8\nbase = "nf4"\ntargets = ["q_proj"]\n'
    )
    settings = settings_of(str(tmp_path / "run.toml"))
    assert settings is not None
    assert settings["architecture"]["model_type"] == "qwen3"
    job = proof_job(parse("shard2"), "float64", 2, tmp_path / "proof", settings)
    assert (job.lora.base, job.lora.targets) == ("nf4", ["q_proj"])
    build_undivided(registry.model_config(job.model), job)  # no row is too short


def test_an_optimizer_of_ones_own_is_taken_with_its_module(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(
        '[job]\ncustom_import = "tests.optimizers.own"\n'
        '[optimizer]\nname = "Muon"\noptions = {momentum = 0.9}\n'
    )
    settings = settings_of(str(tmp_path / "run.toml"))
    assert settings is not None
    assert settings["job"] == {"custom_import": "tests.optimizers.own"}
    assert settings["optimizer"] == {"name": "Muon", "options": {"momentum": 0.9}}


def test_a_model_of_ones_own_is_proven_as_it_is(
    ranks: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its objective and its data; a layout that it cannot have is refused, by name."""
    monkeypatch.chdir(tmp_path)
    examples = Path(__file__).parents[2] / "docs" / "examples"
    Path("clip.py").write_text((examples / "clip.py").read_text())
    Path("run.toml").write_text(
        '[job]\ncustom_import = "clip"\n[model]\nname = "clip"\nflavor = "tiny"\n'
        '[training]\ndataset = "captions"\n'
    )
    for registered in ((registry, "_MODELS"), (objectives, "_OBJECTIVES"), (sources, "_sources")):
        monkeypatch.setattr(*registered, dict(getattr(*registered)))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "clip", raising=False)
    settings = settings_of("run.toml")
    assert settings is not None
    layouts = [parse("shard2:accumulate"), parse("tp2")]
    equal, refused = prove_layouts(layouts, ranks, steps=10, settings=settings)
    assert equal.is_equal, equal
    assert equal.validation_difference < 1e-12
    assert refused.is_refused
    assert "clip has no plan for tp = 2" in refused.error


def test_a_schedule_that_torch_cannot_run_is_refused_and_not_waited_for(
    ranks: RankPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("overland.checks.machine.version", lambda name: "2.12.1")
    (refused,) = prove_layouts([parse("pp2:DualPipeV")], ranks, steps=1)
    assert refused.is_refused
    assert not refused.is_equal
    assert '"DualPipeV": needs torch 2.13 or newer' in refused.verdict, refused


def test_what_is_not_a_number_or_is_missing_is_no_equal() -> None:
    fine: Curve = [(1.0, 1.0), (0.0, 1.0)]
    assert difference(fine, fine, 0) == 0
    for wrong in ([(1.0, 1.0), (math.nan, 1.0)], [(1.0, 1.0)], [(1.0, 1.0), (math.inf, 1.0)]):
        assert difference(wrong, fine, 0) == math.inf
        assert largest_difference([fine, wrong], fine, 0) == math.inf
    verdict = LayoutVerdict("tp2", 2, "bfloat16", 0, math.inf, 0, Tolerance(1, math.inf))
    assert verdict.verdict == "differs"
    assert "Infinity" not in json.dumps(verdict.to_json())


def test_one_rank_that_differs_from_itself_widens_no_bound_beyond_those_of_ranks() -> None:
    alone: Curves = [(1.0, 1.0)], [(1.0,)]
    other: Curves = [(2.0, 2.0)], []
    assert spread_bounds([other], alone, "float32") == (1e-4, 1e-2)


def test_keys_that_no_proof_takes_are_named(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(
        '[model]\nname = "llama3"\nflavor = "debug"\nfreeze = ["*norm*"]\n'
        '[training]\nfloat8 = "tensorwise"\n[optimizer]\nbf16_moments = true\n'
    )
    found = left_out(str(tmp_path / "run.toml"))
    assert found == ["training.float8", "model.freeze", "optimizer.bf16_moments"]
    assert left_out("llama3_debug") == []


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("tp2xtp4", "once"),
        ("shard0", "1 or more"),
        ("shard16", "8 rows"),
        ("shard1:zero3_hybrid", "2 nodes"),
        ("shard2:full:op", "activation_checkpoint.mode"),
        ("tp2+lora+dora", "lora.rank"),
    ],
)
def test_a_name_that_means_two_things_or_nothing_is_refused(name: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse(name)


class Broken:
    """Stands for ranks of which all fail."""

    device_type = "cpu"

    def run(self, *args: object, **kwargs: object) -> list[object]:
        raise AssertionError("rank 0:\nno answer")


def test_a_run_that_fails_is_a_row_and_no_end_of_the_proof() -> None:
    pool = cast("RankPool", Broken())
    (layout,) = prove_layouts([parse("tp2")], pool)
    assert layout.verdict == "failed: on one rank: no answer within 300 s"
    pairs = list(prove_resumes([(parse("tp2"), parse("pp2")), (parse("tp2"), parse("tp2"))], pool))
    assert [pair.verdict for pair in pairs] == ["failed: no answer within 300 s"] * 2
