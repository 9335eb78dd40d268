"""A run writes its adapters as PEFT does, and starts from such adapters."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from overland.apps.convert import convert
from overland.apps.convert.exports import follow
from overland.apps.convert.formats import open_any
from overland.apps.convert.verify import model_with_weights
from overland.apps.evaluation import model as evaluation
from overland.apps.evaluation.main import open_model
from overland.apps.evaluation.model import find_run
from overland.apps.proofs.layouts import parse
from overland.apps.proofs.pool import RankPool
from overland.checks import load_checked
from overland.config.errors import ConfigError
from overland.config.load import load_config
from overland.config.schema import JobConfig
from overland.errors import CheckpointError
from overland.files import Disk
from overland.models.registry import read_hf_config
from overland.parallel.sharding import named_parameters
from overland.training.build import build_run
from overland.world import World
from tests.checkpoint.convert.samples import fixture
from tests.jobs import run_job, tiny_job

FOLDER, _ = fixture("peft")
BASE = FOLDER / "base"
DORA = {"rank": 4, "dora": True, "targets": ["q_proj", "down_proj"], "rank_pattern": {"q_proj": 2}}


def job(folder: Path, layout: str = "shard1", steps: int = 3, **sections: Any) -> JobConfig:
    given = parse(layout)
    lora = {"rank": 4, "alpha": 16.0, "targets": "all-linear", "modules_to_save": ["lm_head"]}
    checkpoint = {"enable": True, "interval": 1, "keep_latest_k": 2}
    return tiny_job(
        folder,
        model={"config": str(BASE), "overrides": {}},
        training={
            "steps": steps,
            "local_batch_size": 8 // given.degrees.get("shard", 1),
            "dtype": "float32",
            "mixed_precision_param": "float32",
            "mixed_precision_reduce": "float32",
        },
        lora={"save_as_peft": True, **sections.pop("lora", lora)},
        checkpoint={**checkpoint, "initial_load_path": str(BASE), **sections.pop("checkpoint", {})},
        parallelism=given.parallelism,
        **sections,
    )


def train(world: World, config: JobConfig) -> list[str]:
    return run_job(world, config).messages


def start(world: World, config: JobConfig) -> dict[str, Tensor]:
    """What this rank would train, before the first step."""
    run = build_run(config, world, torch.device("cpu"), log_ranks=())
    named = named_parameters(run.model.parts)
    found = {n: p.detach() for n, p in named.items() if p.requires_grad}
    whole = {n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in found.items()}
    run.store.close()
    return {name: tensor.clone() for name, tensor in whole.items()}


def adapters(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "adapter_model.safetensors")


@pytest.mark.parametrize("layout", ["shard2", "tp2", "pp2"])
def test_adapters_go_out_to_peft_and_come_back_bit_for_bit(
    ranks: RankPool, tmp_path: Path, layout: str
) -> None:
    run = tmp_path / "run"
    ranks.run(2, train, job(run, layout))
    assert sorted(path.name for path in run.glob("checkpoint-*")) == [
        "checkpoint-2",
        "checkpoint-3",
    ]
    assert not list(run.glob(".checkpoint-*"))
    written = adapters(run / "checkpoint-3")
    source = open_any(run / "checkpoint" / "step_3", whole=False)
    for name, tensor in written.items():
        assert torch.equal(tensor, source.read(name.replace("base_model.model.", "model.")))
    assert len(written) == 2 * 14 + 1
    config = json.loads((run / "checkpoint-3" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["modules_to_save"]) == (4, 16, ["lm_head"])
    assert len(config["target_modules"]) == 14
    assert config["base_model_name_or_path"] == str(BASE)

    on = job(tmp_path / "on", layout, lora={"adapter": str(run / "checkpoint-3")})
    file = tmp_path / "on.toml"
    file.write_text(f'[lora]\nadapter = "{run / "checkpoint-3"}"\n')
    on = on.model_copy(update={"lora": load_config(str(file)).config.lora})
    found: dict[str, Tensor] = {}
    for part in ranks.run(2, start, on):
        found |= part
    assert {f"base_model.model.{name}" for name in found} == written.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, written[f"base_model.model.{name}"]), name


def test_the_last_weights_are_merged_and_a_checkpoint_is_too(
    ranks: RankPool, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    last = {"last_save_in_hf": True, "export_dtype": "float32"}
    ranks.run(2, train, job(run, "shard2", 2, lora=DORA, checkpoint=last))
    done = convert(run / "checkpoint-2", tmp_path / "merged", "hf", merge_lora=True)
    assert done.source_format == "overland"  # whose base is found by its origin
    assert done.logits_difference is not None
    assert done.logits_difference < 1e-5
    first, second = (
        load_file(one / "model.safetensors") for one in (run / "hf", tmp_path / "merged")
    )
    assert first.keys() == second.keys() == load_file(BASE / "model.safetensors").keys()
    for name in first:
        assert torch.allclose(first[name], second[name], rtol=0, atol=1e-6), name
    convert(BASE, tmp_path / "same", "hf", adapter=run / "checkpoint" / "step_2", merge_lora=True)
    same = load_file(tmp_path / "same" / "model.safetensors")
    assert all(torch.equal(same[name], second[name]) for name in same)
    with pytest.raises(CheckpointError, match=r"--merge-lora to merge them .* --to peft"):
        convert(run, tmp_path / "hf", "hf")
    convert(run, tmp_path / "peft", "peft")
    ours, theirs = adapters(run / "checkpoint-2"), adapters(tmp_path / "peft")
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_adapters_follow_their_checkpoints(ranks: RankPool, tmp_path: Path) -> None:
    run = tmp_path / "run"
    foreign = run / "checkpoint-1"
    foreign.mkdir(parents=True)
    (foreign / "README.md").write_text("of another trainer")
    said = ranks.run(1, train, job(run, steps=3, lora=DORA))[0]
    assert any("checkpoint-1 was not written by this run" in line for line in said)
    assert [one.name for one in foreign.iterdir()] == ["README.md"]
    # A session that was killed between a checkpoint and its adapters, or while it deleted some.
    (run / "checkpoint-3").rename(run / ".checkpoint-3.tmp")
    shutil.copytree(run / "checkpoint-2", run / "checkpoint-9")
    follow(run, run / "checkpoint")
    names = sorted(path.name for path in run.glob("*checkpoint-*"))
    assert names == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]
    assert len(adapters(run / "checkpoint-3")) == 12
    # Going back to an earlier step sets the later ones aside, as it does with checkpoints.
    back = {"resume": str(run / "checkpoint" / "step_2")}
    ranks.run(1, train, job(run, steps=2, lora=DORA, checkpoint=back))
    assert (run / "checkpoint-3.set-aside").is_dir()
    assert not (run / "checkpoint-3").exists()


class Dying(Disk):
    """Ends the world at an operation."""

    def __init__(self, left: int) -> None:
        self.left = left

    def at(self, operation: str, path: Path) -> None:
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt


def test_adapters_are_whole_or_not_there_wherever_a_session_is_killed(
    ranks: RankPool, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    ranks.run(1, train, job(run, steps=2, lora=DORA))
    wanted = adapters(run / "checkpoint-2")
    shutil.rmtree(run / "checkpoint-2")
    deaths = 0
    while True:
        try:
            follow(run, run / "checkpoint", run / "checkpoint" / "step_2", Dying(deaths))
            break
        except KeyboardInterrupt:
            deaths += 1
        if (run / "checkpoint-2").exists():
            found = adapters(run / "checkpoint-2")
            assert all(torch.equal(found[name], wanted[name]) for name in wanted)
            assert (run / "checkpoint-2" / "adapter_config.json").is_file()
    assert deaths > 8
    assert sorted(path.name for path in run.glob("*checkpoint-*")) == [
        "checkpoint-1",
        "checkpoint-2",
    ]


def test_a_checkpoint_n_of_a_run_stands_for_its_step(ranks: RankPool, tmp_path: Path) -> None:
    run = tmp_path / "run"
    ranks.run(1, train, job(run, steps=2, lora=DORA))
    assert find_run(run / "checkpoint-1") == (run, run / "checkpoint" / "step_1")
    shutil.copytree(run / "checkpoint-2", tmp_path / "checkpoint-2")  # of no run
    assert find_run(tmp_path / "checkpoint-2") == (None, None)


def test_generation_takes_base_and_adapters(
    ranks: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    config = job(run, steps=2, lora=DORA, optimizer={"lr": 0.1})
    auto = config.training.model_copy(update={"mixed_precision_param": "auto"})
    ranks.run(1, train, config.model_copy(update={"training": auto}))
    monkeypatch.setattr(evaluation, "tokenizer_of", lambda run, data: Mock(end_id=None))
    model = open_model(run / "checkpoint-2").model
    convert(run, tmp_path / "merged", "hf", merge_lora=True)
    source, base = open_any(tmp_path / "merged"), open_any(BASE)
    tokens_BS = torch.arange(24).view(2, 12)
    with torch.no_grad():
        said = model(tokens_BS)
        merged, before = (
            model_with_weights(one, read_hf_config(one.config or {}))(tokens_BS)
            for one in (source, base)
        )
    assert torch.allclose(said, merged, rtol=0, atol=1e-5)
    assert not torch.allclose(said, before, rtol=0, atol=1e-3)


def config_file(folder: Path, adapter: Path | str, more: str = "") -> str:
    path = folder / "run.toml"
    path.write_text(
        f'[model]\nconfig = "{BASE}"\n[checkpoint]\ninitial_load_path = "{BASE}"\n'
        f'[training]\ndataset = "random"\nseq_len = 32\n[lora]\nadapter = "{adapter}"\n{more}'
    )
    return str(path)


def test_an_adapter_gives_the_keys_and_contradicts_others(tmp_path: Path) -> None:
    pattern = FOLDER / "adapters" / "lora_rank_pattern"
    lora = load_config(config_file(tmp_path, pattern, "alpha = 4.0\n")).config.lora
    assert (lora.rank, lora.alpha, lora.rank_pattern) == (2, 4.0, {"up_proj": 6})
    assert sorted(lora.targets) == ["q_proj", "up_proj"]
    loaded, problems = load_checked(config_file(tmp_path, pattern), [], world_size=1)
    assert not [problem for problem in problems if problem.kind != "note"]
    assert loaded.config.lora.rank == 2
    with pytest.raises(ConfigError, match="lora_rank_pattern has 2; remove one of them"):
        load_config(config_file(tmp_path, pattern, "rank = 3\n"))


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("targets", '"[q"', "is not a valid regular expression"),
        ("exclude", '"(.+)+x"', "could take forever to match"),
        ("rank_pattern", '{"(.|.)*x" = 4}', "could take forever to match"),
    ],
)
def test_a_bad_expression_is_one_sentence(
    key: str, value: str, sentence: str, tmp_path: Path
) -> None:
    path = tmp_path / "run.toml"
    path.write_text(f"[lora]\nrank = 4\n{key} = {value}\n")
    with pytest.raises(ConfigError) as error:
        load_checked(str(path))
    (problem,) = error.value.problems
    assert str(problem).startswith(f"{path}:3: lora.{key} = ")
    assert sentence in str(problem)


def other_names(folder: Path) -> None:
    tensors = adapters(folder)
    renamed = {name.replace(".layers.1.", ".layers.7."): one for name, one in tensors.items()}
    save_file(renamed, folder / "adapter_model.safetensors")


def other_shapes(folder: Path) -> None:
    tensors = {n: t[:, :48] if "lora_A" in n else t for n, t in adapters(folder).items()}
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "adapter_model.safetensors")


def other_kind(folder: Path) -> None:
    path = folder / "adapter_config.json"
    path.write_text(path.read_text().replace('"LORA"', '"IA3"'))


def values(value: float) -> Any:
    def change(folder: Path) -> None:
        tensors = adapters(folder)
        next(iter(tensors.values())).view(-1)[-1] = value
        save_file(tensors, folder / "adapter_model.safetensors")

    return change


def large(folder: Path) -> None:
    """Finite, but not in float32."""
    tensors = adapters(folder)
    name = next(iter(tensors))
    tensors[name] = torch.full_like(tensors[name], 1e300, dtype=torch.float64)
    save_file(tensors, folder / "adapter_model.safetensors")


def huge_alpha(folder: Path) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "lora_alpha": 1e30}))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (shutil.rmtree, "no such folder"),
        (values(torch.nan), "lora_A.weight holds NaN or infinity"),
        (values(torch.inf), "lora_A.weight holds NaN or infinity"),
        (large, "lora_A.weight holds NaN or infinity"),
        (huge_alpha, "lora_alpha = 1e\\+30 is more than 1,000,000"),
        (lambda folder: (folder / "adapter_config.json").unlink(), "holds no adapter_config.json"),
        (other_kind, "peft_type = 'IA3'; only LORA is supported"),
        (other_names, "does not fit this model: it lacks model.layers.1.self_attn.q_proj"),
        (other_shapes, "with shape \\[8, 48\\], but the model has \\[8, 64\\]"),
    ],
)
def test_check_refuses_an_adapter_that_does_not_fit(
    tmp_path: Path, change: Any, sentence: str
) -> None:
    adapter = tmp_path / "adapter"
    shutil.copytree(FOLDER / "adapters" / "lora", adapter)
    change(adapter)
    with pytest.raises(ConfigError, match=sentence) as raised:
        load_checked(config_file(tmp_path, adapter), [], world_size=1)
    assert len(raised.value.problems) == 1


def test_a_base_model_without_a_tokenizer_is_one_problem(tmp_path: Path) -> None:
    path, adapter = tmp_path / "run.toml", FOLDER / "adapters" / "lora"
    path.write_text(f'[model]\nfrom = "{BASE}"\n[lora]\nadapter = "{adapter}"\n')
    with pytest.raises(ConfigError, match="has no tokenizer") as raised:
        load_checked(str(path), [], world_size=1)
    assert len(raised.value.problems) == 1


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (["lora.save_as_peft=true"], "has no effect unless lora.rank or lora.adapter is set"),
        (
            ["lora.rank=4", "lora.save_as_peft=true", "checkpoint.type=local"],
            "stores the parts of a",
        ),
        (
            ["lora.rank=4", "lora.base=nf4", "checkpoint.last_save_in_hf=true"],
            "too coarse for that",
        ),
    ],
)
def test_check_refuses_adapters_that_cannot_be_written(
    tmp_path: Path, settings: list[str], sentence: str
) -> None:
    path = tmp_path / "run.toml"
    path.write_text(f'[model]\nconfig = "{BASE}"\n[training]\ndataset = "random"\nseq_len = 32\n')
    with pytest.raises(ConfigError, match=sentence):
        load_checked(str(path), ["checkpoint.enable=true", *settings], world_size=1)
