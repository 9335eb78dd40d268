"""Configs of axolotl: what they resolve to here, what is reported, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from overland.apps.dialects.axolotl import is_axolotl, translate_axolotl
from overland.apps.dialects.axolotl_data import KINDS, UNUSED
from overland.apps.dialects.axolotl_keys import (
    LORA,
    PREFERENCE,
    RENAMED,
    SWITCHES,
)
from overland.config.errors import ConfigError
from overland.config.load import Loaded, load_config
from overland.config.source import read_yaml
from overland.config.write import to_toml
from tests.data.chats import ROLES, write_tokenizer

# Keys that are translated by code, not by a table.
TRANSLATED = (
    "base_model", "tokenizer_config", "overrides_of_model_config", "adapter", "load_in_4bit",
    "lora_target_modules", "lora_target_linear", "rl", "orpo_alpha", "cpo_alpha",
    "precompute_ref_log_probs", "datasets", "test_datasets", "chat_template",
    "chat_template_jinja", "train_on_inputs", "tokens", "special_tokens", "sequence_len",
    "excess_length_strategy", "sample_packing", "val_set_size", "micro_batch_size",
    "gradient_accumulation_steps", "num_epochs", "max_steps", "optimizer", "lr_scheduler",
    "cosine_min_lr_ratio", "warmup_steps", "warmup_ratio", "bf16", "fp16", "float32", "fp8",
    "eval_steps", "evals_per_epoch", "save_steps", "saves_per_epoch",
    "save_strategy", "wandb_project", "use_wandb", "deepspeed", "fsdp", "fsdp_config",
)  # fmt: skip

LORA_ALPACA = """
base_model: example/Tiny-Llama-3
model_type: AutoModelForCausalLM
tokenizer_type: AutoTokenizer

load_in_8bit: false
load_in_4bit: false
strict: false

datasets:
  - path: example/alpaca-small
    type: alpaca
dataset_prepared_path: prepared
val_set_size: 0.05
output_dir: ./outputs/lora

sequence_len: 2048
sample_packing: true
eval_sample_packing: false
pad_to_sequence_len: true

adapter: lora
lora_model_dir:
lora_r: 16
lora_alpha: 32
lora_dropout: 0.05
lora_target_linear: true
peft_use_rslora: true

wandb_project: tuning
wandb_entity:
wandb_name: first

gradient_accumulation_steps: 4
micro_batch_size: 2
num_epochs: 3
optimizer: adamw_bnb_8bit
lr_scheduler: cosine
learning_rate: 0.0002

train_on_inputs: false
group_by_length: false
bf16: auto
fp16:
tf32: false

gradient_checkpointing: true
early_stopping_patience:
resume_from_checkpoint:
logging_steps: 1
flash_attention: true

warmup_ratio: 0.1
evals_per_epoch: 4
saves_per_epoch: 1
debug:
deepspeed:
weight_decay: 0.01
fsdp:
fsdp_config:
special_tokens:
  pad_token: <|end_of_text|>
"""

FULL_CHAT = """
base_model: ./models/base
plugins:
  - axolotl.integrations.liger.LigerPlugin
liger_rms_norm: true
chat_template: chatml
datasets:
  - path: data/talks.jsonl
    ds_type: json
    type: chat_template
    field_messages: talk
    message_property_mappings:
      role: from
      content: value
    roles:
      user: [human]
      assistant: [gpt, model]
    roles_to_train: [assistant]
    train_on_eos: turn
tokens: ["<|im_start|>"]
special_tokens:
  eos_token: <|im_end|>
test_datasets:
  - path: data/held_out.jsonl
    ds_type: json
    type: chat_template
    field_messages: talk
sequence_len: 4096
excess_length_strategy: truncate
micro_batch_size: 1
max_steps: 500
learning_rate: 1e-5
lr_scheduler: constant_with_warmup
optimizer: adamw_torch_fused
adam_beta2: 0.95
bf16: true
eval_steps: 50
save_steps: 100
save_total_limit: 2
neftune_noise_alpha: 5
deepspeed: deepspeed_configs/zero2.json
"""

DPO = """
base_model: ./models/base
rl: dpo
rl_beta: 0.2
datasets:
  - path: data/pairs.jsonl
    ds_type: json
    split: train
    type: chat_template.argilla_chat
adapter: qlora
load_in_4bit: true
lora_r: 8
lora_alpha: 16
lora_target_modules: [q_proj, v_proj, o_proj]
loraplus_lr_ratio: 16
sequence_len: 1024
gradient_accumulation_steps: 8
micro_batch_size: 2
dp_shard_size: 4
learning_rate: 5e-6
fsdp_config:
  fsdp_version: 2
  offload_params: true
  reshard_after_forward: false
seed: 7
"""

COMPLETION = """
base_model: ./models/base
datasets:
  - path: data/texts.jsonl
    ds_type: json
    type: completion
    field: body
sequence_len: 512
sample_packing: true
num_epochs: 1
learning_rate: 2e-5
lr_scheduler: constant
warmup_steps: 10
optimizer: lion_8bit
float32: true
bf16: false
"""


def load(folder: Path, text: str, *settings: str) -> Loaded:
    (folder / "tune.yml").write_text(text)
    return load_config(str(folder / "tune.yml"), settings, {}, resolve=False)


def values(loaded: Loaded, *keys: str) -> list[Any]:
    found = []
    for key in keys:
        section, name = key.split(".")
        found.append(getattr(getattr(loaded.config, section), name))
    return found


def test_lora_on_alpaca(tmp_path: Path) -> None:
    loaded = load(tmp_path, LORA_ALPACA)
    config = loaded.config
    assert config.model.from_ == "assets/hf/Tiny-Llama-3"
    assert values(loaded, "training.dataset", "data.cache_folder", "job.dump_folder") == [
        "alpaca-small", "prepared", "./outputs/lora"]  # fmt: skip
    assert values(loaded, "sft.shape", "sft.chat_template", "sft.learn", "sft.too_long") == [
        "instruction", "alpaca", "assistant", "drop"]  # fmt: skip
    assert values(loaded, "data.packing", "data.document_mask", "data.holdout") == [
        "best_fit", True, 0.05]  # fmt: skip
    assert values(loaded, "validation.enable", "validation.steps") == [True, -1]
    lora = config.lora
    assert (lora.rank, lora.alpha, lora.dropout, lora.targets) == (16, 32, 0.05, "all-linear")
    assert (lora.rslora, lora.dora, lora.base, lora.save_as_peft) == (True, False, "auto", True)
    training = config.training
    assert (training.local_batch_size, training.global_batch_size) == (2, 8)
    assert (training.seq_len, training.epochs, training.max_norm) == (2048, 3.0, 1.0)
    optimizer = config.optimizer
    assert (optimizer.name, optimizer.lr, optimizer.beta2) == ("AdamW", 2e-4, 0.999)
    assert optimizer.weight_decay == 0.01
    assert values(loaded, "lr_scheduler.decay_type", "lr_scheduler.warmup_ratio") == ["cosine", 0.1]
    assert values(loaded, "metrics.enable_wandb", "metrics.log_freq", "debug.seed") == [True, 1, 42]
    said = "\n".join(loaded.notes)
    for words in (
        "tune.yml: an axolotl config, read as: base_model → model.from",
        "overland fetch model example/Tiny-Llama-3 --to assets/hf/Tiny-Llama-3`",
        "training.global_batch_size = 8 (2 × 4 × one device)",
        'optimizer = "adamw_bnb_8bit" is now AdamW with full-precision moments',
        "evals_per_epoch has no equivalent; set validation.freq",
        "flash_attention (line 51): the fastest implementation",
        "lora_model_dir (line 23)",
        "empty values have no effect",
        "axolotl's defaults: ",
    ):
        assert words in said, said


def test_full_fine_tuning_on_chats(tmp_path: Path) -> None:
    loaded = load(tmp_path, FULL_CHAT)
    config = loaded.config
    assert (config.model.from_, config.training.dataset_path) == (
        "./models/base", "data/talks.jsonl")  # fmt: skip
    sft = config.sft
    assert (sft.shape, sft.chat_template, sft.too_long) == ("sharegpt", "chatml", "truncate")
    assert (config.training.column, config.validation.column) == ("talk", "talk")
    assert sft.new_tokens == ["<|im_start|>", "<|im_end|>"]
    assert sft.neftune_alpha == 5
    assert config.lora.rank == 0
    assert config.checkpoint.last_save_in_hf
    assert config.data.packing == "trunc"  # axolotl packs only where it is told to
    assert config.validation.dataset_path == "data/held_out.jsonl"
    assert values(loaded, "validation.freq", "checkpoint.interval", "checkpoint.keep_latest_k") == [
        50, 100, 2]  # fmt: skip
    # At most 100 steps of warm-up, or 3 %.
    assert values(loaded, "training.steps", "lr_scheduler.warmup_steps") == [500, 15]
    assert config.lr_scheduler.decay_type == "constant"
    assert (config.optimizer.beta2, config.optimizer.weight_decay) == (0.95, 0.0)
    assert config.training.mixed_precision_param == "bfloat16"
    assert config.training.global_batch_size == -1
    assert config.parallelism.sharding_stage == "zero2"


def test_renamed_roles_and_no_validation_are_heeded(tmp_path: Path) -> None:
    text = FULL_CHAT.replace("role: from", "role: role").replace(
        "content: value", "content: content"
    )
    assert load(tmp_path, text).config.sft.shape == "sharegpt"
    text = text.replace("[human]", "[user]").replace("[gpt, model]", "assistant")
    assert load(tmp_path, text).config.sft.shape == "messages"
    assert load(tmp_path, LORA_ALPACA).config.validation.enable is True
    off = load(tmp_path, LORA_ALPACA + "eval_strategy: 'no'\n")
    assert off.config.validation.enable is False
    assert "eval_strategy → validation.enable" in "\n".join(off.notes)


def test_preference_tuning(tmp_path: Path) -> None:
    loaded = load(tmp_path, DPO)
    config = loaded.config
    assert (config.preference.loss, config.preference.beta) == ("dpo", 0.2)
    assert (config.sft.shape, config.data.packing) == ("preference", "trunc")
    assert config.training.seq_len == 2048
    assert config.training.global_batch_size == 2 * 8 * 4
    assert config.parallelism.data_parallel_shard_degree == 4
    lora = config.lora
    assert (lora.base, lora.targets, lora.lr_ratio) == ("nf4", ["q_proj", "v_proj", "o_proj"], 16)
    assert (config.training.enable_cpu_offload, config.debug.seed) == (True, 7)
    assert config.parallelism.fsdp_reshard_after_forward == "never"
    assert (config.training.epochs, config.lr_scheduler.warmup_ratio) == (1.0, 0.03)
    assert "a row holds both answers of a pair" in "\n".join(loaded.notes)


def test_plain_texts(tmp_path: Path) -> None:
    config = load(tmp_path, COMPLETION).config
    assert (config.sft.shape, config.training.column) == ("text", "body")
    assert (config.sft.parse_specials, config.sft.too_long) == (True, "split")
    assert config.data.packing == "best_fit"
    alone = load(tmp_path, COMPLETION.replace("sample_packing: true", "")).config
    assert alone.data.packing == "overflow"  # what is split fills several rows
    assert (config.lr_scheduler.decay_type, config.lr_scheduler.warmup_steps) == ("constant", 0)
    assert config.optimizer.name == "Lion"
    assert config.optimizer.options == {"beta1": 0.9, "beta2": 0.999}
    assert config.training.mixed_precision_param == "float32"


@pytest.mark.parametrize("text", [LORA_ALPACA, FULL_CHAT, DPO, COMPLETION])
def test_every_key_is_named_in_what_is_said(tmp_path: Path, text: str) -> None:
    said = "\n".join(load(tmp_path, text).notes)
    for key in yaml.safe_load(text):
        assert re.search(rf"\b{key}\b", said), key


@pytest.mark.parametrize("text", [LORA_ALPACA, FULL_CHAT, DPO, COMPLETION])
def test_a_converted_file_is_the_same_config_and_says_nothing_new(
    tmp_path: Path, text: str
) -> None:
    first = load(tmp_path, text)
    (tmp_path / "new.toml").write_text(to_toml(first.config, resolved=False))
    second = load_config(str(tmp_path / "new.toml"), (), {}, resolve=False)
    assert second.config == first.config
    assert second.notes == []


def test_todays_keys_win_in_the_file_and_on_the_command_line(tmp_path: Path) -> None:
    text = LORA_ALPACA + "training:\n  seq_len: 256\n"
    loaded = load(tmp_path, text, "training.global_batch_size=64")
    assert values(loaded, "training.seq_len", "training.global_batch_size") == [256, 64]
    said = "\n".join(loaded.notes)
    assert "sequence_len is ignored, since training.seq_len is also set" in said
    assert (
        "gradient_accumulation_steps (line 34): it follows from training.global_batch_size" in said
    )


BAD = {
    "seqence_len: 5": "seqence_len = 5: unknown key, which may change what is "
    "trained; remove it; did you mean sequence_len?",
    "load_in_8bit: true": "load_in_8bit = true: 8-bit frozen weights are not supported",
    "rl: kto": 'rl = "kto": expected dpo, ipo, orpo or simpo',
    "rl: simpo": "cpo_alpha = null: must be 0 for simpo; it also learns the chosen answers",
    "relora: true": "relora = true: ReLoRA is not supported",
    "optimizer: muon": 'optimizer = "muon": only AdamW and Lion are supported',
    "lr_scheduler: rex": 'lr_scheduler = "rex": expected one of cosine',
    "lr_scheduler: polynomial": 'lr_scheduler = "polynomial": expected one of cosine',
    "chat_template: phi_3": 'chat_template = "phi_3": this template is built into axolotl',
    "adapter: qlora": 'adapter = "qlora": qlora needs load_in_4bit: true',
    "adapter: lora": "lora_r = null: is missing; an adapter needs it",
    "load_in_4bit: true": "load_in_4bit = true: 4-bit frozen weights need an adapter",
    "plugins: [my.Plugin]": "my.Plugin is not supported",
    "shuffle_merged_datasets: false": "training data is always shuffled",
    "early_stopping_patience: 3": "early stopping is not supported",
    "special_tokens: {eos_token: <x>}": "special_tokens.eos_token: the tokenizer's own is used",
    "lr_scheduler_kwargs: {power: 2}": "for cosine, power is not supported",
}  # fmt: skip
BAD_DATASETS = {
    "type: mine": "type: mine: expected chat_template, sharegpt, alpaca or completion",
    "type: {format: x}": "custom prompt formats (type) are not supported",
    "{}": "has no type, so it holds token ids",
    "type: chat_template, roles_to_train: [user]": "roles_to_train: only assistant turns can be",
    "type: chat_template, train_on_eos: none": "train_on_eos: the token that ends a turn",
    "type: chat_template, roles: {assistant: [narrator]}": "roles: narrator is not a known role",
    "type: chat_template, message_property_mappings: {role: who}": "expected role and content",
    "type: chat_template, split: 'train[:10%]'": "slices of a split are not supported",
    "type: chat_template, color: red": "color: unknown key",
    "type: chat_template, conversation: vicuna": "conversation: unknown key",
    "type: sharegpt, conversation: vicuna": 'chat_template = "vicuna": this template is built into',
}
PLAIN = "base_model: b\nlearning_rate: 1\n"


@pytest.mark.parametrize("line", BAD)
def test_what_would_train_something_else_is_refused(tmp_path: Path, line: str) -> None:
    text = PLAIN + "datasets: [{path: a.jsonl, type: chat_template}]\n" + line
    try:
        said = "\n".join(load(tmp_path, text).notes)
    except ConfigError as error:
        said = str(error)
    assert BAD[line] in said
    if line != "special_tokens: {eos_token: <x>}":  # noted, as there is no tokenizer to compare
        with pytest.raises(ConfigError):
            load(tmp_path, text)


@pytest.mark.parametrize("key", SWITCHES)
@pytest.mark.parametrize("value", ["'false'", "'no'", "0"])
def test_text_for_a_switch_is_refused_and_not_taken_for_true(
    tmp_path: Path, key: str, value: str
) -> None:
    text = f"base_model: b\ndatasets: [{{path: a.jsonl, type: alpaca}}]\n{key}: {value}\n"
    with pytest.raises(ConfigError) as raised:
        load(tmp_path, text)
    assert [(one.key, one.message) for one in raised.value.problems] == [
        (key, "expected true or false")
    ]


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ("lora_r: 16", "loar_r: 16", "loar_r"),
        ("lora_alpha: 32", "lora_alhpa: 32", "lora_alhpa"),
        ("base_model:", "base_modle:", "base_modle"),
        ("datasets:", "dataset:", "dataset"),
        ("micro_batch_size: 2", "micro_batch_size: '2'", "training.local_batch_size"),
        ("num_epochs: 3", "batch_size: '8'", "batch_size"),
        ("bf16: auto", "bf16: 'false'", "bf16"),
    ],
)
def test_one_mistake_is_one_problem(tmp_path: Path, old: str, new: str, key: str) -> None:
    """Not also the consequences: a section without what enables it, a missing key."""
    with pytest.raises(ConfigError) as raised:
        load(tmp_path, LORA_ALPACA.replace(f"\n{old}", f"\n{new}"))
    assert [one.key for one in raised.value.problems] == [key]


@pytest.mark.parametrize("dataset", BAD_DATASETS)
def test_datasets_that_would_be_read_otherwise_are_refused(tmp_path: Path, dataset: str) -> None:
    inside = "" if dataset == "{}" else f", {dataset}"
    with pytest.raises(ConfigError, match=re.escape(BAD_DATASETS[dataset])):
        load(tmp_path, PLAIN + f"datasets: [{{path: a.jsonl{inside}}}]\n")


def test_several_datasets_are_refused_until_they_have_a_place(tmp_path: Path) -> None:
    one = "{path: a.jsonl, type: chat_template}"
    text = PLAIN + f"datasets: [{one}, {one}]\n"
    with pytest.raises(ConfigError, match="axolotl concatenates several datasets"):
        load(tmp_path, text)
    assert load(tmp_path, text, "training.dataset_path=all").config.training.dataset_path == "all"


def test_a_tokenizer_that_is_there_is_compared(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "base", **ROLES["llama3"])
    text = f"base_model: {tmp_path / 'base'}\nlearning_rate: 1\n"
    text += "datasets: [{path: a.jsonl, type: chat_template}]\nspecial_tokens:\n  eos_token: "
    assert load(tmp_path, text + "<|eot_id|>\n")
    with pytest.raises(ConfigError, match=r"eos_token: </s>: the tokenizer uses"):
        load(tmp_path, text + "</s>\n")


def test_the_page_has_every_key(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "coming-from" / "axolotl.md").read_text()
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| `")]
    for key, today in {**RENAMED, **LORA, **PREFERENCE}.items():
        assert any(f"`{key}" in row[0] and today in row[1] for row in rows), key
    for kind in KINDS:
        assert any(f"`{kind}`" in row[0] for row in rows), kind
    for key in TRANSLATED:
        assert any(f"`{key}" in row[0] for row in rows) or f"`{key}`" in page, key


@pytest.mark.parametrize("value", ["3", "x", "[1]", "[{a: 1}]", "{a: 1}", "true", "1.5"])
def test_no_value_of_a_key_breaks_it(value: str) -> None:
    """One key at a time, of a file and of a dataset, with values that few of them expect."""
    known = [name for name in (*TRANSLATED, *LORA, *PREFERENCE, "plugins") if name != "datasets"]
    parts = ["path", "data_files", "name", "split", "type", "roles", "message_property_mappings",
             "field_messages", "chat_template", "chat_template_jinja", *UNUSED]  # fmt: skip
    dataset = "datasets: [{{path: a.jsonl, type: chat_template{}}}]\n"
    texts = [PLAIN + dataset.format("") + f"{key}: {value}\n" for key in known[1:]]
    texts += [PLAIN + f"datasets: [{{{part}: {value}, x: 1}}]\n" for part in parts]
    texts += [PLAIN + dataset.format(f", {part}: {value}") for part in parts[2:] if part != "type"]
    texts += [f"{key}: {value}\nlearning_rate: 1\nmax_steps: 1\nrl: dpo\n" for key in known
              if key not in ("learning_rate", "max_steps", "rl")]  # fmt: skip
    texts += [f"base_model: {value}\ndatasets: {value}\n"]
    for text in texts:
        entries = read_yaml(text, "tune.yml")
        assert not is_axolotl(entries) or translate_axolotl(entries, "tune.yml", {})
