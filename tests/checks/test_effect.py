"""Every setting either has an effect or is refused.

Every key of the schema is given another value. It must be refused, or change how the run is
described before it starts, or be read outside of config and checks by a small run in which the
feature that it belongs to is on.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

import overland
from overland.apps.check.rehearsal import model_of
from overland.apps.console.opening import data_in_words, precision_in_words
from overland.apps.console.readme import readme
from overland.apps.proofs.pool import RankPool
from overland.checks import check_config, load_checked
from overland.checks.effect import RULES, without_hidden
from overland.cli.config import show
from overland.config.arguments import COMMAND_LINE
from overland.config.derived import group_rates, optimizer_settings, resolve_degrees
from overland.config.errors import ConfigError, Problem
from overland.config.fields import all_keys
from overland.config.load import Loaded, load_config
from overland.config.schema import (
    DataSource,
    JobConfig,
    ParameterGroup,
    Section,
    Sparse,
    ValidationSet,
)
from overland.config.write import write_config
from overland.data.wanted import held_out_sources, sources_of
from overland.errors import OverlandError
from overland.models.registry import model_config
from overland.objectives import objective_for
from overland.optimizers.registry import rules_of
from overland.run_folder import RunFolder
from overland.training.schedule import learning_rate
from overland.world import World
from tests.data.chats import LLAMA3, ROLES, write_lines, write_tokenizer
from tests.jobs import TINY_MODEL, run_job, tiny_job

Settings = dict[str, Any]

# Where a key is tried, if not alone: something that it belongs to must be on.
WITH: dict[str, Settings] = {
    "lora": {"lora.rank": 4},
    "sft": {"sft.shape": "messages"},
    "preference": {"sft.shape": "preference", "preference.loss": "dpo", "data.packing": "trunc"},
    "validation": {"validation.enable": True},
    "images": {"model.name": "vit_mae", "model.overrides": {}},
    "profiling": {"profiling.enable_profiling": True},
    "lr_scheduler.decay_ratio": {"training.steps": 40},
    "optimizer.groups.lr_factor": {"optimizer.groups": [{"pattern": "*.embed_tokens.*"}]},
    "optimizer.groups.weight_decay": {"optimizer.groups": [{"pattern": "*.embed_tokens.*"}]},
    "model.sparse.pattern": {"model.sparse": {"pattern": "2:4"}},
    "parallelism.pipeline_parallel_schedule": {"parallelism.pipeline_parallel_degree": 2},
    "parallelism.pipeline_parallel_microbatch_size": {"parallelism.pipeline_parallel_degree": 2},
}
# Values that follow from no type.
OTHER: Settings = {
    "model.overrides": {"hidden_size": 48, "num_attention_heads": 4},
    "model.freeze": ["model.embed_tokens.*"],
    "model.transforms": {"none_such": {}},
    "model.sparse": {"pattern": "2:4"},
    "compile.enable": True,
    "model.flavor": "8B",
    "model.name": "qwen3",
    "parallelism.fsdp_reshard_after_forward": "never",
    "optimizer.groups.lr_factor": [{"pattern": "*.embed_tokens.*", "lr_factor": 0.5}],
    "optimizer.groups.weight_decay": [{"pattern": "*.embed_tokens.*", "weight_decay": 0.5}],
    "model.sparse.pattern": {"pattern": "1:4"},
    "training.objective": "per_sample",
    "training.global_batch_size": 64,
    "training.seq_len": 24,
    "optimizer.options": {"nothing": 1},
    "optimizer.groups": [{"pattern": "*.embed_tokens.*", "lr_factor": 0.5}],
    "optimizer.name": "Lion",
    "optimizer.bf16_moments": True,
    "data.sources": {"a": {"dataset": "stdlib:0/2"}},
    "data.datasets": {"x": "nowhere"},
    "data.holdout": 0.1,
    "validation.sets": {"x": {"dataset": "stdlib:1/2"}},
    "lora.rank_pattern": {"layers.0.*": 2},
    "lora.alpha_pattern": {"layers.0.*": 2.0},
    "lora.layers": [0],
    "lora.exclude": ["q_proj"],
    "lora.targets": ["q_proj"],
    "lora.modules_to_save": ["lm_head"],
    "sft.new_tokens": ["<|x|>"],
    "checkpoint.allow_changes": ["nothing.there"],
    "images.shape": [3, 8, 8],
    "images.pad": [64, 64],
    "parallelism.data_parallel_shard_degree": 2,
    "parallelism.data_parallel_replicate_degree": 2,
}
NESTED = {"data.sources": DataSource, "validation.sets": ValidationSet,
          "optimizer.groups": ParameterGroup, "model.sparse": Sparse}  # fmt: skip

# Keys that neither a description nor a small run on a CPU can show.
NOT_HERE = {
    "checkpoint.skip_optimizer": "only a resumed run has an optimizer to skip (tests/training)",
    "comm.backend": "read where ranks connect (tests/parallel)",
    "compile.cuda_graphs": "needs a GPU",
    "health.max_failed_starts": "read by the supervisor of a job (tests/cluster/supervise)",
    "job.custom_import": "refused if it is not there, imported otherwise (tests/checks)",
    "job.print_config": "read by `overland train` (tests/cli)",
    "metrics.disable_color_printing": "read by a terminal (tests/cli)",
    "metrics.sample_at_validation": "read by `overland train` (tests/evaluation)",
    "metrics.sample_prompt": "read by `overland train` (tests/evaluation)",
    "model.sparse.pattern": "read by Sparse.ratio (tests/models/test_sparse.py)",
    "model.from": "replaced by other keys as it is loaded (tests/config/test_model_from.py)",
    "parallelism.pipeline_parallel_schedule": "needs several ranks (tests/parallel)",
}


def every_key() -> dict[str, Any]:
    """Every key, those of tables included, with another value than its default."""
    found = {name: other_value(name, key.default, key.choices) for name, key in all_keys().items()}
    for table, section in NESTED.items():
        for name, field in section.model_fields.items():
            found[f"{table}.{name}"] = other_value(f"{table}.{name}", field.default, [])
    return found


def other_value(name: str, default: Any, choices: list[str]) -> Any:
    if name in OTHER:
        return OTHER[name]
    if isinstance(default, bool):
        return not default
    if choices:
        return next(one for one in choices if one != default and one not in ("auto", "off"))
    if isinstance(default, int):
        return default + 1
    if isinstance(default, float):
        return default / 2 + 0.01
    if isinstance(default, dict):
        return {"x": 1}
    if isinstance(default, list):
        return ["x"]
    kinds = str(all_keys()[name].field.annotation) if name in all_keys() else ""
    if "float" in kinds:
        return 0.5
    if "bool" in kinds:
        return True
    return 5 if "int" in kinds else "other"


def with_settings(base: JobConfig, settings: Settings) -> JobConfig:
    tree = base.model_dump(by_alias=True)
    for key, value in settings.items():
        section, name = key.split(".")[:2]  # a key inside a table has the whole table
        tree[section][name] = value
    return JobConfig.model_validate(tree)


def refusals(config: JobConfig, typed: Settings, base: Settings | None = None) -> list[Problem]:
    places = {tuple(key.split(".")): "run.toml:1" for key in base or {}}
    places |= {tuple(key.split(".")): COMMAND_LINE for key in typed}
    found = check_config(Loaded(config, [], "run.toml", places), 8)
    return [one for one in found if one.kind != "note"]


def described(config: JobConfig) -> Settings:
    """What is known about a run before it starts, from the functions that the run itself uses."""
    architecture = model_config(config.model)
    degrees = resolve_degrees(config.parallelism, 8, 4)
    settings = optimizer_settings(config)
    folder = RunFolder(config)
    model = model_of(config)
    matrices = [(name, p.ndim) for name, p in model.named_parameters()]
    return {
        "readme": readme(config, World(), degrees, architecture, folder),
        "folder": folder,
        "degrees": asdict(degrees),
        "data": (repr(sources_of(config)), data_in_words(config)),
        "held out": repr(held_out_sources(config)),
        "learning rates": [learning_rate(step, config) for step in range(0, 60, 3)],
        "optimizer": [repr(one) for one in rules_of(settings)],
        "groups": [group_rates(name, dims, settings) for name, dims in matrices],
        "objective": repr(vars(objective_for(config, architecture))),
        "model": (str(model), matrices),
        "precision": precision_in_words(config),
    }


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JobConfig:
    monkeypatch.chdir(tmp_path)
    job = tiny_job(tmp_path / "run", training={"dtype": "float32"}, checkpoint={"enable": True})
    return job.model_copy(update={"metrics": job.metrics.model_copy(update={"log_freq": 10})})


def test_every_key_has_an_effect_or_is_refused(
    base: JobConfig, ranks: RankPool, tmp_path: Path
) -> None:
    read = set().union(*(ranks.run(1, reads, config)[0] for config in small_runs(tmp_path)))
    without, descriptions = [], {}
    for key, value in every_key().items():
        if key in read or key in NOT_HERE:
            continue
        around = {**WITH.get(key.partition(".")[0], {}), **WITH.get(key, {})}
        plain = with_settings(base, around)
        try:
            changed = with_settings(plain, {key: value})
        except ValueError:  # the schema refuses it
            continue
        if any(one.key.startswith(key) for one in refusals(changed, {key: value})):
            continue
        shown = repr(sorted(around.items(), key=str))
        if shown not in descriptions:
            descriptions[shown] = described(plain)
        try:
            if described(changed) == descriptions[shown]:
                without.append(key)
        except OverlandError:
            pass
    assert without == []
    assert read.isdisjoint(NOT_HERE), "these have an effect in a small run: remove the exception"


HIDDEN: list[tuple[str, Any, Settings]] = [
    ("training.dataset", "random", {"data.sources": {"a": {"dataset": "stdlib:0/2"}}}),
    ("training.last_batch", "drop", {}),
    ("training.seq_len", 64, {"model.name": "vit_mae", "model.overrides": {}}),
    ("data.vocab_size", 300, {"model.hf_assets_path": "."}),
    ("data.holdout", 0.1, {"training.dataset": "random"}),
    ("data.add_bos", True, {"training.dataset": "random"}),
    ("data.last_block", "drop", {"data.packing": "trunc"}),
    ("images.pad", [64, 64], {}),
    ("images.if_missing", "random", {}),
    ("images.segment_size", 4, {"model.name": "vit_mae", "model.overrides": {}}),
    ("model.flavor", "8B", {"model.config": "config.json"}),
    ("lr_scheduler.min_lr_factor", 0.1, {"lr_scheduler.decay_type": "constant"}),
    ("lr_scheduler.decay_ratio", 0.1, {"lr_scheduler.decay_type": "constant"}),
    ("preference.label_smoothing", 0.1, {**WITH["preference"], "preference.loss": "simpo"}),
    ("preference.simpo_gamma", 0.1, WITH["preference"]),
    ("preference.reference", "copy", {**WITH["preference"], "preference.loss": "orpo"}),
    ("preference.prompt_side", "right", WITH["preference"]),
    ("checkpoint.full_format", "torch", {}),
    ("checkpoint.keep_every", 5, {"checkpoint.keep_latest_k": 0}),
    ("lora.save_as_peft", True, {"lora.rank": 2, "checkpoint.enable": False}),
    ("validation.local_batch_size", 4, {"validation.enable": True,
                                        "parallelism.pipeline_parallel_degree": 2}),
    ("validation.column", "x", {"validation.enable": True, "data.holdout": 0.1,
                                "training.dataset": "stdlib"}),
    ("metrics.sample_at_validation", True, {}),
    ("profiling.enable_memory_snapshot", True, {}),
    ("activation_checkpoint.selective_ac_option", "2", {}),
]  # fmt: skip
SWITCHED_OFF: list[tuple[str, Any, Settings]] = [
    ("checkpoint.interval", 5, {"checkpoint.enable": False}),
    ("checkpoint.export_dtype", "bfloat16", {}),
    ("validation.freq", 5, {}),
    ("profiling.profile_freq", 5, {}),
    ("profiling.save_memory_snapshot_folder", "x", {"profiling.enable_profiling": True}),
    ("compile.backend", "eager", {"compile.enable": False}),
    ("metrics.save_tb_folder", "x", {}),
    ("activation_checkpoint.selective_ac_option", "2", {"activation_checkpoint.mode": "full"}),
    ("activation_checkpoint.memory_budget", 0.1, {}),
    ("images.shape", [3, 32, 32], {"model.name": "vit_mae", "model.overrides": {},
                                   "training.dataset": "shapes"}),
    ("parallelism.pipeline_parallel_schedule", "GPipe", {}),
    ("parallelism.enable_async_tensor_parallel", True, {"compile.enable": True}),
    ("health.spike_window", 64, {}),
    ("data.document_mask", True, {"data.packing": "trunc"}),
    ("lr_scheduler.total_steps", 64, {"lr_scheduler.decay_type": "constant"}),
    ("debug.deterministic_warn_only", True, {}),
]  # fmt: skip


@pytest.mark.parametrize("is_switch", [False, True])
def test_a_key_that_another_one_hides_is_refused(base: JobConfig, is_switch: bool) -> None:
    """On the command line always; in a file unless something is only switched off."""
    for key, value, around in SWITCHED_OFF if is_switch else HIDDEN:
        config = with_settings(base, {**around, key: value})

        def hidden(typed: Settings, config: JobConfig = config, key: str = key) -> bool:
            found = refusals(config, typed, {key: value, **around})  # noqa: B023
            return any(one.key == key and "has no effect" in one.message for one in found)

        assert hidden({key: value}), key
        assert hidden({}) != is_switch, key
        rules = [rule for rule in RULES if key in rule.keys and rule.hidden(config)]
        hiders = {name: around[name] for rule in rules for name in rule.by if name in around}
        if not is_switch and hiders:
            assert not hidden(hiders), f"{key}: what is typed wins over a file"
            places = {tuple(name.split(".")): COMMAND_LINE for name in hiders}
            written = without_hidden(Loaded(config, [], "run.toml", places)).config
            again = refusals(written, {}, {key: value, **around})
            assert not any("has no effect" in one.message for one in again), key


def test_a_config_of_which_the_command_line_hides_a_part_can_be_written_and_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a run folder, a submitted job and `overland.train` do."""
    file, again = tmp_path / "run.toml", tmp_path / "again.toml"
    file.write_text("[data]\nvocab_size = 300\n[lr_scheduler]\nmin_lr_factor = 0.1\n")
    given = ["lr_scheduler.decay_type=constant", f"job.dump_folder={tmp_path / 'a'}"]
    loaded, _ = load_checked(str(file), given, world_size=1)
    assert loaded.config.lr_scheduler.min_lr_factor == 0
    assert loaded.config.data.vocab_size == 300
    write_config(loaded.config, again, full=True)
    assert load_checked(str(again), world_size=1)[0].config == loaded.config
    show([str(file), *given])
    assert "min_lr_factor" not in capsys.readouterr().out


def test_every_rule_is_tried() -> None:
    tried = {key for key, _, _ in HIDDEN + SWITCHED_OFF}
    assert all(tried & set(rule.keys) for rule in RULES)


def test_one_of_two_ways_to_set_the_same_wins_on_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(f'[training]\ndataset_path = "{tmp_path}"\n')
    replaced = load_config(str(file), ["training.dataset=random"], {}).config.training
    assert (replaced.dataset, replaced.dataset_path) == ("random", None)
    file.write_text('[training]\ndataset = "random"\n')
    for path, dataset in ((str(tmp_path), "stdlib"), ("none", "random")):
        config = load_config(str(file), [f"training.dataset_path={path}"], {}).config
        assert config.training.dataset == dataset
    file.write_text(f'[training]\ndataset = "random"\ndataset_path = "{tmp_path}"\n')
    (problem,) = [
        one
        for one in check_config(load_config(str(file), (), {}), 1)
        if one.key == "training.dataset_path"
    ]
    assert "training.dataset is set too" in problem.message
    assert problem.kind == "invalid"


def test_the_library_refuses_it_too(tmp_path: Path) -> None:
    config = overland.load_config("quickstart", f"job.dump_folder={tmp_path / 'run'}")
    config.training.dataset_path = str(tmp_path)
    config.training.dataset = "random"
    with pytest.raises(ConfigError, match=r"training\.dataset is set too"):
        overland.train(config)
    with pytest.raises(ConfigError, match=r"profiling\.profile_freq.*has no effect"):
        overland.load_config("quickstart", "profiling.profile_freq=5")


def small_runs(folder: Path) -> list[JobConfig]:
    """Runs that have between them everything on."""
    text = folder / "text"
    text.mkdir()
    for number in range(40):
        (text / f"{number}.txt").write_text(f"line {number} of some text\n" * 30)
    saves = {"enable": True, "interval": 2, "keep_latest_k": 1, "type": "full", "keep_best": 1,
             "last_save_in_hf": True}  # fmt: skip
    held_out = {"enable": True, "freq": 2, "sequences": 2,
                "sets": {"y": {"path": str(text), "freq": 2, "sequences": 2}},
                "allow_training_data": True}  # fmt: skip
    data = {"folder": str(folder / "data"), "vocab_size": 300, "holdout": 0.1,
            "sources": {"x": {"path": str(text)}}, "tokenise_processes": 0}  # fmt: skip
    groups = [{"pattern": "*.embed_tokens.*", "weight_decay": 0.2}]
    words = tiny_job(
        folder / "a", training={"steps": 4, "dtype": "float32", "mixed_precision_param": "float32"},
        model={"sparse": {"pattern": "2:4"}}, data=data, validation=held_out, checkpoint=saves,
        optimizer={"groups": groups}, health={"spike_guard": "skip"},
        metrics={"enable_tensorboard": True},
        profiling={"enable_profiling": True, "profile_freq": 2, "profiler_warmup": 0},
    )  # fmt: skip
    images = tiny_job(
        folder / "b", training={"steps": 2}, model={"name": "vit_mae", "overrides": {}},
        checkpoint={"enable": True, "type": "full", "full_format": "torch"},
        images={"segment_size": 4},
    )  # fmt: skip
    write_tokenizer(folder / "tokenizer", **ROLES["llama3"], chat_template=LLAMA3)
    pairs = [{"prompt": "what?", "chosen": f"it is {i}", "rejected": "no"} for i in range(8)]
    write_lines(folder / "pairs.jsonl", pairs)
    adapters = tiny_job(
        folder / "c", training={"steps": 1, "dataset_path": str(folder / "pairs.jsonl")},
        model={"hf_assets_path": str(folder / "tokenizer"),
               "overrides": {**TINY_MODEL, "vocab_size": 640}},
        data={"folder": str(folder / "data"), "packing": "trunc", "tokenise_processes": 0},
        sft={"shape": "preference", "too_long": "truncate", "new_tokens": []},
        preference={"loss": "dpo", "label_smoothing": 0.1}, lora={"rank": 2, "save_as_peft": True},
        checkpoint={"enable": True, "link_by_time": True},
    )  # fmt: skip
    return [words, images, adapters]


def reads(world: World, config: JobConfig) -> set[str]:
    """Trains, and returns the keys that code outside of config and checks has read."""
    names = {type(getattr(config, name)): name for name in JobConfig.model_fields}
    names |= {section: table for table, section in NESTED.items()}
    found: set[str] = set()

    def look(self: Section, name: str) -> Any:
        kind = type(self)
        if name in kind.model_fields and kind in names:
            reader = sys._getframe(1).f_globals.get("__name__", "")
            if not reader.startswith(("overland.config", "overland.checks", "pydantic", "tests")):
                found.add(f"{names[kind]}.{name.removesuffix('_')}")
        return object.__getattribute__(self, name)

    Section.__getattribute__ = look  # type: ignore[assignment, method-assign]
    try:
        run_job(world, config)
    finally:
        del Section.__getattribute__
    return found
