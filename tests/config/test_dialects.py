"""Configs of torchtitan, old and new, and of the stub."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from overland.apps.dialects.torchtitan import CHANGED, OLD_NAMES, REFUSED
from overland.checks import load_checked
from overland.config.errors import ConfigError, toml_value
from overland.config.fields import is_current
from overland.config.load import Loaded, load_config
from overland.config.schema import JobConfig
from overland.config.write import to_toml
from overland.models.registry import model_config

from .torchtitan_v02 import V02


def load(tmp_path: Path, text: str, *arguments: str, name: str = "old.toml") -> Loaded:
    (tmp_path / name).write_text(text)
    return load_config(str(tmp_path / name), arguments, {})


def leaves(tree: dict[str, Any], *path: str) -> list[tuple[tuple[str, ...], Any]]:
    found = []
    for key, value in tree.items():
        here = (*path, key)
        found += leaves(value, *here) if isinstance(value, dict) else [(here, value)]
    return found


KEYS = leaves(V02)
# With the values of that file they would train something else here, so a note is not enough.
REFUSED_V02 = {"checkpoint.exclude_from_loading"}
REFUSED_V02 |= {
    ".".join(path)
    for path, value in KEYS
    if ".".join(path) in REFUSED and value not in REFUSED[".".join(path)][0]
}
# Alone, it asks for weights without saying which.
NEEDS_OTHERS = {"checkpoint.initial_load_in_hf"}


@pytest.mark.parametrize(("path", "value"), KEYS, ids=[".".join(path) for path, _ in KEYS])
def test_every_key_of_torchtitan_is_ours_or_noted(
    path: tuple[str, ...], value: Any, tmp_path: Path
) -> None:
    text = f"{'.'.join(path)} = {toml_value(value)}\n"
    if ".".join(path) in REFUSED_V02 | NEEDS_OTHERS:
        with pytest.raises(ConfigError, match=re.escape(".".join(path))):
            load(tmp_path, text)
        return
    loaded = load(tmp_path, text)
    mine = loaded.config.model_dump()
    native = len(path) == 2 and path[1] in mine.get(path[0], {})
    if native and mine[path[0]][path[1]] == value:
        assert not loaded.notes
    else:
        assert loaded.notes
        assert any(path[-1] in note for note in loaded.notes)


def test_a_whole_v02_file_loads_and_its_values_arrive(tmp_path: Path) -> None:
    taken = [(".".join(path), value) for path, value in KEYS]
    taken = [one for one in taken if one[0] not in REFUSED_V02]
    text = "".join(f"{key} = {toml_value(value)}\n" for key, value in taken)
    config = load(tmp_path, text).config
    assert config.model.flavor == "8B"
    assert config.model.attention == "flex"
    assert config.data.document_mask
    assert config.model.hf_assets_path == "./assets"
    assert config.checkpoint.initial_load_path == "./weights"
    assert config.job.custom_import == "json"
    assert config.parallelism.context_parallel_degree == 2
    assert config.validation.steps == -1


def test_defaults_of_torchtitan_share_one_note(tmp_path: Path) -> None:
    text = """
[parallelism]
expert_tensor_parallel_degree = 1
expert_parallel_degree = 1
[checkpoint]
async_mode = "disabled"
load_step = -1
[comm]
trace_buf_size = 20000
"""
    (note,) = load(tmp_path, text).notes
    assert note.endswith(
        "old.toml: ignored: parallelism.expert_tensor_parallel_degree (line 3), "
        "parallelism.expert_parallel_degree (line 4), checkpoint.load_step (line 7), "
        "comm.trace_buf_size (line 9): torchtitan's default values, so nothing is lost"
    )


OLD = """
[job]
print_args = true

[model]
name = "llama3"
flavor = "8B"
norm_type = "rmsnorm"
tokenizer_path = "./tokenizers/llama/original/tokenizer.model"

[optimizer]
lr = 2e-4
fused = true

[training]
batch_size = 21
seq_len = 4096
warmup_steps = 50
steps = 900
data_parallel_replicate_degree = 2
data_parallel_shard_degree = 32
tensor_parallel_degree = 8
compile = true
dataset = "mine"
seed = 3
deterministic = true

[experimental]
pipeline_parallel_degree = 1
context_parallel_degree = 2
enable_async_tensor_parallel = true
pipeline_parallel_schedule = "1F1B"
custom_import = "json"

[checkpoint]
enable_checkpoint = true
interval_type = "steps"
interval = 100
model_weights_only = false
async_mode = "async_with_pinned_mem"

[lr_scheduler]
lr_min = 0.1

[float8]
enable_float8_linear = true

[validation]
enabled = true

[metrics]
rank_0_only = true
"""


def test_an_older_file_is_read_in_todays_keys(tmp_path: Path) -> None:
    loaded = load(tmp_path, OLD)
    config = loaded.config
    assert config.job.print_config
    assert config.job.custom_import == "json"
    assert config.model.hf_assets_path == "./tokenizers/llama"
    assert config.parallelism.enable_async_tensor_parallel
    assert config.training.local_batch_size == 21
    assert config.lr_scheduler.warmup_steps == 50
    assert config.lr_scheduler.min_lr_factor == 0.1
    assert config.compile.enable
    assert (config.debug.seed, config.debug.deterministic) == (3, True)
    layout = config.parallelism
    assert (layout.data_parallel_replicate_degree, layout.data_parallel_shard_degree) == (2, 32)
    assert (layout.tensor_parallel_degree, layout.context_parallel_degree) == (8, 2)
    assert config.checkpoint.enable
    assert config.checkpoint.async_mode == "async"
    assert config.validation.enable

    file = tmp_path / "old.toml"
    assert f"{file}:16: training.batch_size is now training.local_batch_size" in loaded.notes
    assert f"{file}:36: checkpoint.enable_checkpoint is now checkpoint.enable" in loaded.notes
    text = "\n".join(loaded.notes)
    for key in (
        "norm_type",
        "enable_async_tensor_parallel",
        "rank_0_only",
        "enable_float8_linear",
        "interval_type",
        "pipeline_parallel_schedule",
    ):
        assert key in text


def test_an_older_file_says_nothing_new_once_converted(tmp_path: Path) -> None:
    first = load(tmp_path, OLD)
    second = load(tmp_path, to_toml(first.config), name="new.toml")
    assert second.config == first.config
    assert second.notes == []


def test_todays_key_wins_over_the_older_one(tmp_path: Path) -> None:
    loaded = load(tmp_path, "[training]\nlocal_batch_size = 2\nbatch_size = 4\n")
    assert loaded.config.training.local_batch_size == 2
    assert "ignored, since training.local_batch_size is also set" in loaded.notes[0]


def test_an_older_key_on_the_command_line_wins_over_the_file(tmp_path: Path) -> None:
    loaded = load(tmp_path, "[training]\nlocal_batch_size = 2\n", "--training.batch_size", "4")
    assert loaded.config.training.local_batch_size == 4


@pytest.mark.parametrize(
    ("text", "check"),
    [
        ('[model]\nflavor = "debugmodel_varlen_attn"\n',
         lambda c: (c.model.flavor, c.model.attention, c.data.document_mask)
         == ("debugmodel", "auto", True)),
        ("[activation_checkpoint]\nselective_ac_option = 2\n",
         lambda c: c.activation_checkpoint.selective_ac_option == "2"),
        ('[checkpoint]\ninitial_load_in_hf = true\n[model]\nhf_assets_path = "./a"\n',
         lambda c: c.checkpoint.initial_load_path == "./a"),
        ("[metrics]\nenable_color_printing = false\n", lambda c: c.metrics.disable_color_printing),
        ('[training]\ncheckpoint_folder = ""\n', lambda c: not c.checkpoint.enable),
        ('[model]\ntokenizer_path = "/a/b/tokenizer.json"\n',
         lambda c: c.model.hf_assets_path == "/a/b"),
        ('[model]\ntokenizer_path = "/a/b"\n', lambda c: c.model.hf_assets_path == "/a/b"),
    ],
)  # fmt: skip
def test_values_that_changed_their_meaning_are_translated(tmp_path: Path, text, check) -> None:
    assert check(load(tmp_path, text).config)


def test_a_dense_torchtitan_file_runs_once_its_dataset_has_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    (tmp_path / "run.toml").write_text(
        '[model]\nflavor = "debugmodel"\n[training]\ndataset = "c4"\n'
    )
    with pytest.raises(ConfigError, match="overland fetch dataset allenai/c4"):
        load_checked("run.toml", (), {}, world_size=2)
    load_checked("run.toml", ["data.datasets.c4=texts"], {}, world_size=2)


STUB = """
checkpoint:
  state_dict_type: full
  chkpt_saving_iterations: 100
  preempt_chkpt_saving_iterations: 60
  preempt_metadata_path: preempt
  directory: experiments/chkpts
  prefix: test-1
  path_chkpt_prev: null
dataset:
  batch_size: 16
  num_workers: 1
  num_channels: 1
  path_train: a.csv
  path_eval: b.csv
  transforms: {H_pad: 1920, W_pad: 1080, set: {pad: true, random_shift: false}}
dist:
  cpu_only: true
  backend: nccl
  dtype: float16
  sharding_stage: zero2_hybrid
logging: {directory: logs, level: info}
loss: {grad_accum_steps: 1}
lr_scheduler:
  min_lr: 1e-7
  total_iterations: 1000
  warmup_iterations: 10
misc: {max_epochs: 5, compiles_model: true, peak_flops_per_sec: 1}
model:
  hf_config: {hidden_size: 96, num_hidden_layers: 2, mask_ratio: 0.75, num_channels: 1}
  from_scratch: true
optim: {lr: 3e-4, weight_decay: 0.05, grad_clip: 0.5, fused: false}
"""


def test_the_stubs_yaml_is_translated(tmp_path: Path) -> None:
    loaded = load(tmp_path, STUB, name="stub.yaml")
    config = loaded.config
    assert config.model.name == "vit_mae"
    assert config.model.overrides["mask_ratio"] == 0.75
    assert config.images.if_missing == "random"
    assert (config.training.dataset_path, config.validation.dataset_path) == ("a.csv", "b.csv")
    assert (config.training.local_batch_size, config.training.epochs) == (16, 5)
    assert config.images.pad == [1920, 1080]
    assert config.metrics.peak_flops == 1
    assert config.validation.enable
    assert config.training.mixed_precision_param == "float16"
    assert config.training.max_norm == 0.5
    assert config.parallelism.sharding_stage == "zero2_hybrid"
    assert (config.comm.backend, config.training.device) == ("gloo", "cpu")
    assert (config.optimizer.lr, config.optimizer.weight_decay) == (3e-4, 0.05)
    schedule = config.lr_scheduler
    assert (schedule.warmup_steps, schedule.total_steps) == (10, 1000)
    assert (schedule.min_lr, schedule.decay_type) == (1e-7, "cosine")
    assert (config.checkpoint.interval, config.checkpoint.preempt_interval) == (100, 60)
    assert (config.validation.freq, config.checkpoint.keep_best) == (100, 1)
    assert config.checkpoint.link_by_time
    assert config.job.dump_folder == "experiments/chkpts/test-1"
    assert config.compile.enable


def test_every_key_of_the_stub_is_translated_or_noted(tmp_path: Path) -> None:
    import yaml

    text = "\n".join(load(tmp_path, STUB, name="stub.yaml").notes)
    for path, _ in leaves(yaml.safe_load(STUB)):
        if path[:2] != ("model", "hf_config") and path != ("lr_scheduler", "min_lr"):
            assert path[-1] in text, path


def test_a_part_of_the_stubs_yaml_is_recognized(tmp_path: Path) -> None:
    text = "dist:\n  backend: gloo\noptim:\n  lr: 1e-3\n  leanring: 2\n"
    with pytest.raises(ConfigError, match=r"stub.yaml:5: optimizer.leanring = 2: unknown key"):
        load(tmp_path, text, name="stub.yaml")
    config = load(tmp_path, text.replace("  leanring: 2\n", ""), name="stub.yaml").config
    assert config.optimizer.lr == 1e-3


def test_a_config_in_todays_keys_gets_no_notes(tmp_path: Path) -> None:
    text = '[model]\nflavor = "8B"\n[training]\nlocal_batch_size = 2\n[comm]\nbackend = "gloo"\n'
    assert load(tmp_path, text).notes == []


def test_saving_by_the_clock_keeps_its_meaning(tmp_path: Path) -> None:
    loaded = load(tmp_path, '[checkpoint]\ninterval_type = "seconds"\ninterval = 1800\n')
    assert loaded.config.checkpoint.interval_minutes == 30
    assert "interval in seconds is now checkpoint.interval_minutes" in loaded.notes[0]


@pytest.mark.parametrize(
    "text",
    [
        '[model]\nconverters = ["quantize.linear.float8"]\n',
        '[model]\nconverters = "float8"\n',
        "[float8]\nenable_float8_linear = true\n",
        "[training]\nenable_fp8_linear = true\n",
    ],
)
def test_products_in_8_bits_are_asked_for_in_one_key(tmp_path: Path, text: str) -> None:
    loaded = load(tmp_path, text)
    assert loaded.config.training.float8 == "tensorwise"
    assert 'is now training.float8 = "tensorwise"' in loaded.notes[0]


def test_layernorm_of_older_files_is_built(tmp_path: Path) -> None:
    loaded = load(tmp_path, '[model]\nnorm_type = "layernorm"\n')
    assert loaded.config.model.overrides == {"norm_type": "layernorm"}
    assert 'model.norm_type = "layernorm" is now model.overrides.norm_type' in loaded.notes[0]
    assert model_config(loaded.config.model).norm_type == "layernorm"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('[model]\nconverters = ["mine"]\n', '"mine" is not known: there are no converters'),
        ("[checkpoint]\nload_step = 5\n", "set checkpoint.resume to the path of that step"),
        (
            '[checkpoint]\nexclude_from_loading = ["optimizer", "lr_scheduler"]\n',
            "only the optimizer can be excluded from loading, not lr_scheduler",
        ),
        ('[fault_tolerance]\nsemi_sync_method = "diloco"\n', "every step is synchronous"),
        ("[fault_tolerance]\nenable = true\n", "start one run on all devices"),
        ('[model]\nconverters = ["quantize.linear.mx"]\n', '"quantize.linear.mx" is not supported'),
        ('[quantize.linear.float8]\nrecipe_name = "rowwise"\n', "float8 uses one scale per tensor"),
        (
            '[float8]\nfilter_fqns = ["attention.wk"]\n',
            "applies to all linear layers of the blocks",
        ),
        ('[float8]\nscaling_type_input = "delayed"\n', "are dynamic; remove this key"),
        ("[float8]\nmine = 1\n", "float8.mine = 1: this torchtitan key is unknown"),
        ("[quantize.linear]\nmine = 1\n", "quantize.linear.mine = 1: this torchtitan key"),
        ("[experimental]\nmine = 1\n", "experimental.mine = 1: this torchtitan key is"),
        ('[experimental]\ncustom_args_module = "m"\n', "set job.custom_import to a module"),
        ('[job]\ncustom_config_module = "m"\n', "set job.custom_import to a module"),
        ("[optimizer]\nearly_step_in_backward = true\n", "set training.max_norm = 0"),
        ("[checkpoint]\ncreate_seed_checkpoint = true\n", "no seed checkpoint is needed"),
        ('[comm]\nmode = "fake_backend"\n', "DRY_RUN=1"),
        ("[checkpoint]\ninitial_load_in_hf = true\n", "no weights are given"),
        ('[checkpoint]\ninitial_load_in_hf = "true"\n', "expected true or false"),
        ('[float8]\nenable_float8_linear = "false"\n', "expected true or false"),
        ('[checkpoint]\ninterval_type = "seconds"\ninterval = "60"\n', "expected a positive"),
        ("[optimizer]\nearly_step_in_backward = 0\n", "set training.max_norm = 0"),
    ],
)
def test_what_would_train_something_else_is_refused(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        load(tmp_path, text)


def test_sections_of_torchtitans_own_dense_files_load(tmp_path: Path) -> None:
    text = """
[quantize.linear.float8]
enable_fsdp_float8_all_gather = false
precompute_float8_dynamic_scale_for_fsdp = false
filter_fqns = ["output"]
[quantize.linear.mx]
recipe_name = "mxfp8_cublas"
[fault_tolerance]
enable = false
group_size = 2
[experimental]
"""
    notes = "\n".join(load(tmp_path, text).notes)
    assert all(name in notes for name in ("filter_fqns", "recipe_name", "group_size"))


def test_weights_come_from_the_assets_that_the_command_line_names(tmp_path: Path) -> None:
    text = '[checkpoint]\ninitial_load_in_hf = true\n[model]\nhf_assets_path = "./a"\n'
    config = load(tmp_path, text, "model.hf_assets_path=./b").config
    assert (config.model.hf_assets_path, config.checkpoint.initial_load_path) == ("./b", "./b")


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (
            "grad_accum_steps: 1",
            "grad_accum_steps: 4",
            "loss.grad_accum_steps = 4: accumulation follows from the global batch size; set "
            "training.global_batch_size to 16 × 4 × the number of data-parallel devices",
        ),
        (
            "path_chkpt_prev: null",
            "pretrain: weights",
            "model.from_scratch = true: checkpoint.pretrain sets initial weights",
        ),
        (
            "random_shift: false",
            "random_shift: true",
            "dataset.transforms.set.random_shift = true: this transform is not supported",
        ),
        ("pad: true", "pad: 'on'", 'dataset.transforms.set.pad = "on": expected true or false'),
        (
            "pad: true",
            "pad: {H: 2}",
            "dataset.transforms.set.pad.H = 2: expected dataset.transforms",
        ),
        ("cpu_only: true", "cpu_only: 1", "dist.cpu_only = 1: expected true or false"),
        ("from_scratch: true", "from_scratch: 'no'", 'model.from_scratch = "no": expected true'),
        ("num_workers: 1", "drop_last: 'yes'", 'dataset.drop_last = "yes": expected true or false'),
        (
            "state_dict_type: full",
            "state_dict_type: ful",
            'checkpoint.state_dict_type = "ful": expected full, sharded, shard or local',
        ),
        (
            "mask_ratio: 0.75, num_channels: 1}",
            "mask_ratio: 0.75, num_channels: 3}",
            "dataset.num_channels = 1: model.hf_config.num_channels is 3; make them equal",
        ),
        (
            ", num_channels: 1}",
            "}",
            "dataset.num_channels = 1: model.hf_config.num_channels is not set, and 3 by default",
        ),
        (
            "{hidden_size: 96, num_hidden_layers: 2, mask_ratio: 0.75, num_channels: 1}",
            "[1280]",
            "model.hf_config = [1280]: expected keys",
        ),
        (", W_pad: 1080", "", "dataset.transforms.set.pad = true: set H_pad and W_pad of"),
        ("num_workers: 1", "input: {C: 1, H: 8}", "dataset.input.W is missing"),
        ("  warmup_it", "  scheduler_update_iterations: 5\n  warmup_it", "updated at every step"),
        ("misc: {", "misc: {mine: 1, ", "misc.mine = 1: unknown key"),
    ],
)
def test_what_would_train_something_else_than_the_stub_is_refused(
    tmp_path: Path, old: str, new: str, says: str
) -> None:
    assert old in STUB
    with pytest.raises(ConfigError, match=re.escape(says)):
        load(tmp_path, STUB.replace(old, new), name="stub.yaml")


@pytest.mark.parametrize("nothing", ["", "{}", "# ... architecture parameters"])
def test_an_hf_config_without_keys_is_transformers_default(tmp_path: Path, nothing: str) -> None:
    text = re.sub(r"hf_config: .*", f"hf_config: {nothing}", STUB)
    loaded = load(tmp_path, text.replace("num_channels: 1", "num_channels: 3"), name="stub.yaml")
    assert (loaded.config.model.flavor, dict(loaded.config.model.overrides)) == ("base", {})
    assert any("does not set image_size" in note for note in loaded.notes_at_start())


def test_one_value_of_the_stub_that_sets_several_keys_is_one_problem(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, STUB.replace("saving_iterations: 100", "saving_iterations: '100'", 1),
             name="stub.yaml")  # fmt: skip
    (problem,) = caught.value.problems
    assert problem.value == "100"


def test_the_stubs_accumulation_follows_from_a_global_batch(tmp_path: Path) -> None:
    text = STUB.replace("grad_accum_steps: 1", "grad_accum_steps: 4")
    loaded = load(tmp_path, text, "training.global_batch_size=128", name="stub.yaml")
    assert loaded.config.training.global_batch_size == 128


@pytest.mark.parametrize(
    ("own", "form"),
    [
        ("type: shard", ("shard", "safetensors")),
        ("full_format: safetensors", ("full", "safetensors")),
    ],
)
def test_the_stubs_own_form_of_checkpoints_wins_over_its_state_dict_type(
    own: str, form: tuple[str, str], tmp_path: Path
) -> None:
    others = "optim: {lr: 1e-3}\ndist: {backend: gloo}\n"
    text = f"checkpoint:\n  state_dict_type: full\n  {own}\n{others}"
    loaded = load(tmp_path, text, name="stub.yaml")
    checkpoint = loaded.config.checkpoint
    assert (checkpoint.type, checkpoint.full_format) == form
    key = own.partition(":")[0]
    assert any(
        f"does not set checkpoint.{key}, since checkpoint.{key} is" in n for n in loaded.notes
    )


def test_the_stub_without_mixed_precision_trains_in_float32_whatever_its_dtype(
    tmp_path: Path,
) -> None:
    text = "misc: {uses_mixed_precision: false}\ndist: {dtype: float16}\n"
    config = load(tmp_path, text, name="stub.yaml").config
    assert config.training.mixed_precision_param == "float32"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            '[model]\ntokenizer_path = "/a/original/tokenizer.model"\n',
            'model.tokenizer_path = "/a/original/tokenizer.model" is now '
            'model.hf_assets_path = "/a"',
        ),
        ("[comm]\ntrace_buf_size = 1\n", "save PyTorch's flight recorder"),
        ("[memory_estimation]\nenable = true\n", "`overland check` computes the memory of a step"),
    ],
)
def test_notes_name_what_there_is(tmp_path: Path, text: str, says: str) -> None:
    (note,) = load(tmp_path, text).notes
    assert says in note


def test_the_page_states_the_defaults_where_a_file_is_silent() -> None:
    page = (Path(__file__).parents[2] / "docs" / "config.md").read_text()
    defaults = JobConfig()
    assert defaults.checkpoint.enable
    mode = defaults.activation_checkpoint.mode
    assert f"checkpoints are on; recomputation is `{mode}`" in page


def test_every_older_value_of_a_key_of_ours_is_recognized() -> None:
    """Else no dialect would be asked about it."""
    assert all(not is_current(("model", "name"), name) for name in OLD_NAMES)
    assert not is_current(("model", "flavor"), "8B_flex_attn")
    assert not is_current(("activation_checkpoint", "selective_ac_option"), 2)
    assert not is_current(("checkpoint", "async_mode"), "async_with_pinned_mem")
    sections = JobConfig().model_dump()
    ours = [key.split(".") for key in CHANGED]
    assert {".".join(one) for one in ours if one[1] in sections.get(one[0], {})} == {
        "model.name", "model.flavor", "activation_checkpoint.selective_ac_option",
        "checkpoint.async_mode",
    }  # fmt: skip


def test_a_file_in_todays_keys_loads_no_dialect() -> None:
    script = (
        "import sys; from overland.config.load import load_config; load_config('llama3_8b');"
        "print([name for name in sys.modules if 'dialects' in name])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


@pytest.mark.parametrize(
    ("sampler", "loader", "how"),
    [(True, False, "drop"), (False, True, "drop"), (False, False, "pad")],
)
def test_the_stub_drops_the_last_batch_in_either_of_two_places(
    tmp_path: Path, sampler: bool, loader: bool, how: str
) -> None:
    text = STUB.replace(
        "\ndataset:\n",
        f"\ndataset:\n  drop_last_in_sampler: {sampler}\n  drop_last_in_loader: {loader}\n",
    )
    assert load(tmp_path, text, name="stub.yaml").config.training.last_batch == how


def test_steps_on_the_command_line_win_over_the_stubs_epochs(tmp_path: Path) -> None:
    loaded = load(tmp_path, STUB, "training.steps=7", name="stub.yaml")
    assert (loaded.config.training.epochs, loaded.config.training.steps) == (None, 7)
    assert "the run ends after misc.max_epochs" not in "\n".join(loaded.notes)
