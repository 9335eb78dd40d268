"""A model of images trains end to end: from the command line, in every layout that it supports,
resumed and exported."""

from __future__ import annotations

import importlib
import json
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from overland.apps.check.fake_step import fake_steps
from overland.apps.convert import convert
from overland.apps.proofs.layouts import WAYS, parse
from overland.apps.proofs.pool import RankPool
from overland.checkpoint.folder import newest_in
from overland.checkpoint.read import open_checkpoint
from overland.checks.parallelism import check_splits
from overland.config.load import Loaded
from overland.config.schema import JobConfig, Lora
from overland.data import registry
from overland.errors import ModelError
from overland.models import build_model, resolve_config
from overland.models.flops import measure_of
from overland.training import callbacks
from overland.world import World
from tests.cli.processes import overland, read_metrics, start_overland
from tests.jobs import losses_and_norms, tiny_job
from tests.training.test_rehearsal import outcomes, rehearsed

IMAGES = "tests.seams.images"  # it registers sources: not in this process, where others would see
MODEL = {"name": "vit_mae", "flavor": "debug", "overrides": {}}
CONFIG = """
[job]
custom_import = "tests.seams.images"
dump_folder = "run"

[model]
name = "vit_mae"
flavor = "debug"

[training]
dataset = "images"
local_batch_size = 8
steps = 8
mixed_precision_param = "float32"

[data]
tokenise_processes = 0

[lr_scheduler]
warmup_steps = 2

[metrics]
log_freq = 1

[checkpoint]
interval = 2
last_save_in_hf = true

[debug]
deterministic = true
"""
CLOCKED = ("samples_per_second", "tflops", "memory_gib", "data_wait", "time", "seconds")


def job(folder: Path, layout: str = "shard1", **sections: Any) -> JobConfig:
    found = parse(layout)
    num_rows = found.degrees.get("rep", 1) * found.degrees.get("shard", 1)
    changes: dict[str, dict[str, Any]] = {
        "model": dict(MODEL),
        "training": {"dataset": "images", "local_batch_size": 8 // num_rows, "steps": 4},
        "data": {"folder": str(folder / "data"), "tokenise_processes": 0},
        "parallelism": dict(found.parallelism),
    }
    for more in (*(WAYS[way] for way in found.ways), sections):
        for section, values in more.items():
            changes.setdefault(section, {}).update(values)
    return tiny_job(folder / layout.replace(":", "_"), **changes)


@pytest.mark.parametrize(
    "names",
    [
        ("shard2:full", "shard2:accumulate", "tp2:compile"),
        pytest.param(
            ("shard2", "shard4", "rep2xshard2", "shard1:compile", "tp2", "shard2xtp2", "tp2:full"),
            marks=pytest.mark.long,
        ),
    ],
    ids=["some", "others"],
)
def test_every_layout_equals_one_process(
    ranks: RankPool, tmp_path: Path, names: tuple[str, ...]
) -> None:
    """Four steps of eight, of 24 images: the second epoch has other masks."""
    (alone,) = ranks.run(1, on_rank, losses_and_norms, job(tmp_path))
    assert len(alone) == 4
    for name in names:
        config, count = job(tmp_path, name), parse(name).num_ranks
        for found in ranks.run(count, on_rank, losses_and_norms, config):
            assert len(found) == 4
            for one, other in zip(found, alone, strict=True):
                assert one == pytest.approx(other, abs=1e-9, rel=0), name


def test_tensor_parallelism_refuses_a_parameter_that_it_does_not_split(tmp_path: Path) -> None:
    config = job(tmp_path, "tp2", lora={"rank": 2, "targets": ["query"]})
    with pytest.raises(ModelError, match=r"cannot split .*query\.lora_A\.weight"):
        fake_steps(config, 2)


@pytest.mark.parametrize("name", ["cp2", "pp2"])
def test_layouts_that_it_cannot_have_are_refused_by_name(name: str, tmp_path: Path) -> None:
    (problem,) = check_splits(Loaded(job(tmp_path, name), [], "run.toml"))
    assert "vit_mae" in str(problem)
    assert name[:-1] in str(problem).replace("pipeline", "pp").replace("tensor", "tp").replace(
        "context", "cp"
    )


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The sources of images are known here, until the test ends."""
    monkeypatch.setattr(registry, "_sources", dict(registry._sources))
    monkeypatch.setattr(callbacks, "_factories", list(callbacks._factories))
    importlib.import_module(IMAGES)
    yield
    del sys.modules[IMAGES]


def on_rank(world: World, function: Callable[[World, Any], Any], config: Any) -> Any:
    """What a rank finds, which knows the sources."""
    importlib.import_module(IMAGES)
    return function(world, config)


PIXELS = "pixel_values (float32 3 × 32 × 32)"


@pytest.mark.usefixtures("registered")
def test_data_that_does_not_fit_the_model_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    said = {
        "wide_images": "wide_images has pixel_values (float32 3 × 32 × 48), but vit_mae debug "
        f"takes {PIXELS}",
        "words": f"words has text or tokens, but vit_mae debug takes {PIXELS}",
    }
    configs = {name: job(tmp_path, training={"dataset": name}) for name in said}
    configs["images"] = job(tmp_path, model={"name": "llama3"})
    said["images"] = f"images has {PIXELS}, label (int64), but llama3 debug takes tokens"
    config = job(tmp_path, validation={"enable": True, "dataset": "words", "freq": 1})
    configs["validation"], said["validation"] = config, said["words"]
    (trained,) = ranks.run(1, on_rank, outcomes, list(configs.values()))
    for (name, config), words in zip(configs.items(), trained, strict=True):
        for sentence in (words, rehearsed(config)):
            assert said[name] in sentence, (name, sentence)
            assert "\n" not in sentence
    assert not list(tmp_path.glob("data/tokenizer*"))  # none was trained first


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run to its end, from the command line."""
    folder = tmp_path_factory.mktemp("unbroken")
    (folder / "run.toml").write_text(CONFIG)
    done = overland("train", "run.toml", cwd=folder, NGPU="1")
    assert "samples/s/device" in done.stdout
    assert "tok" not in done.stdout
    return folder


def test_what_is_said_about_a_run_is_said_in_samples(unbroken: Path) -> None:
    record = read_metrics(unbroken / "run" / "metrics.jsonl")[-1]
    assert record["samples"] == 64
    assert record["samples_per_second"] > 0
    assert record["tflops"] > 0
    page = (unbroken / "run" / "README.md").read_text()
    assert "| batch | 8 samples per step; 1 × 8 per device |" in page
    assert "| steps | 8 (64 samples) |" in page
    assert "sequence" not in page
    assert "generate" not in page
    words = ["check", "run.toml", "--json", "--no-step"]
    facts = json.loads(overland(*words, cwd=unbroken, NGPU="1").stdout)
    assert facts["flops_per_sample"] == 5_698_560
    assert (facts["samples_per_step"], facts["samples_in_all"]) == (8, 64)
    assert not any("token" in key or "sequence" in key for key in facts)
    told = overland(*words, "training.seq_len=7", cwd=unbroken, NGPU="1", code=2)
    assert "training.seq_len = 7: has no effect" in told.stderr


def test_a_killed_run_resumes_to_the_same_bits(unbroken: Path, tmp_path: Path) -> None:
    """It dies in its third epoch, between two checkpoints."""
    (tmp_path / "run.toml").write_text(CONFIG)
    killed = start_overland("train", "run.toml", cwd=tmp_path, NGPU="1", DIES_AFTER="7")
    assert killed.wait() in (-signal.SIGKILL, 128 + signal.SIGKILL), killed.stdout
    assert not (tmp_path / "run" / "checkpoint" / "step_8").exists()
    overland("train", "run.toml", cwd=tmp_path, NGPU="1")

    def logged(folder: Path) -> list[dict[str, Any]]:
        records = read_metrics(folder / "run" / "metrics.jsonl")
        return [{key: one[key] for key in one if key not in CLOCKED} for one in records]

    assert logged(tmp_path) == logged(unbroken)
    assert len(logged(unbroken)) == 8
    with last_checkpoint(tmp_path) as ours, last_checkpoint(unbroken) as theirs:
        assert ours.tensors.keys() == theirs.tensors.keys()
        for name in theirs.tensors:
            assert torch.equal(ours.read(name), theirs.read(name)), name
    proof = overland("prove", "data", "run", cwd=tmp_path).stdout
    assert "64 rows, none repeated, none skipped" in proof


def last_checkpoint(folder: Path) -> Any:
    return open_checkpoint(newest_in(folder / "run" / "checkpoint"))


def test_exports_load_in_transformers_and_give_the_same_loss(
    unbroken: Path, tmp_path: Path
) -> None:
    from transformers import ViTMAEForPreTraining  # takes seconds

    ours = build_model(resolve_config("vit_mae", "debug"))
    with last_checkpoint(unbroken) as checkpoint:
        ours.load_state_dict({name: checkpoint.read(f"model.{name}") for name in ours.state_dict()})
    pixels, noise = torch.randn(4, 3, 32, 32), torch.rand(4, 16)
    expected = ours(pixels, noise=noise) / 4
    summary = convert(unbroken / "run", tmp_path / "converted", "hf", verify="logits")
    assert summary.logits_difference == 0
    for folder in (unbroken / "run" / "hf", tmp_path / "converted"):
        theirs, report = ViTMAEForPreTraining.from_pretrained(folder, output_loading_info=True)
        assert not any(report[key] for key in ("missing_keys", "unexpected_keys"))
        torch.testing.assert_close(theirs(pixels, noise=noise).loss, expected)
        assert not (folder / "generation_config.json").exists()


def test_flops_are_those_that_torch_counts() -> None:
    config = resolve_config("vit_mae", "debug")
    model, pixels = build_model(config), torch.randn(1, 3, 32, 32)
    counter = FlopCounterMode(display=False)
    with counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        model(pixels, noise=torch.rand(1, 16))
    assert measure_of(config, 7, Lora(), ()).flops == 3 * counter.get_total_flops()
