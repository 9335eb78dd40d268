"""The tiny job that a proof trains, for each layout: its model, its data, and what it takes from a
user's config."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path
from random import Random
from string import ascii_letters
from typing import Any

from overland.apps.proofs.layouts import (
    ARCHITECTURE,
    KINDS,
    PAIRS,
    ROWS,
    WAYS,
    ProofLayout,
    Sections,
)
from overland.checks.model import with_custom_import
from overland.config.errors import ConfigError, Problem
from overland.config.load import load_config
from overland.config.schema import JobConfig
from overland.models.flops import sample_fields
from overland.models.hf_config import FULL, SLIDING, window_as_hf
from overland.models.registry import model_config, own_model_name

STEPS = 20
SEQ_LEN = 32
# In float64 every gradient is clipped; in narrower formats that would multiply the norm's rounding.
MAX_NORM = {"float64": 0.1}
MODEL_KINDS = ("model_type", "tie_word_embeddings", "attention_bias", "mlp_bias", "norm_type")
LORA_KINDS = {"alpha", "dropout", "targets", "exclude", "rslora", "dora", "lr_ratio",
              "modules_to_save"}  # fmt: skip

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content + '>' }}"
    "{% endgeneration %}{% else %}{{ '<' + m.content }}{% endif %}{% endfor %}"
)

# 4 key-value heads and 4 layers, so that everything can be split by 2 or 4. The sequence is split
# by 2·cp and by tp.
TINY: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "vocab_size": 96,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}


# On a GPU: sizes that its own kernels take. At a learning rate of 1e-2 such a model is chaotic: in
# twenty steps it makes 1e-4 of float64's last bit.
LARGER: dict[str, Any] = {
    **TINY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "head_dim": 64,
    "vocab_size": 512,
    "max_position_embeddings": 256,
}


def held_out_data(folder: Path) -> dict[str, Any]:
    """Writes validation data and returns settings that read it: documents of random tokens that do
    not fill the last row or the last batch."""
    draw = Random(0)
    sizes = [draw.randint(3, SEQ_LEN // 2) for _ in range(32)]
    documents = [draw.choices(range(TINY["vocab_size"]), k=size) for size in sizes]
    path = folder / "held_out.jsonl"
    path.write_text("".join(json.dumps({"tokens": ids}) + "\n" for ids in documents))
    return {"enable": True, "dataset_path": str(path), "freq": STEPS // 2, "steps": -1}


def talk_data(folder: Path, pairs: bool) -> Sections:
    """Writes short conversations, or pairs of answers, of random letters; returns settings that
    read them."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(letter_tokenizer())
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    draw = Random(1)

    def turn(role: str) -> dict[str, str]:
        return {"role": role, "content": "".join(draw.choices(ascii_letters, k=draw.randint(1, 5)))}

    for name, count in (("talks", 64), ("held_out_talks", 12)):
        lines: list[dict[str, Any]] = []
        for _ in range(count):
            asked = [turn("user"), turn("assistant"), turn("user")][draw.choice([0, 2]) :]
            one, other = [turn("assistant")], [turn("assistant")]
            told = {"prompt": asked, "chosen": one, "rejected": other}
            lines.append(told if pairs else {"messages": [*asked, *one]})
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"{name}.jsonl").write_text(text)
    return {
        "training": {"dataset_path": str(folder / "talks.jsonl")},
        "validation": {"dataset_path": str(folder / "held_out_talks.jsonl")},
        "data": {"folder": str(folder)},
        "model": {"hf_assets_path": str(folder)},
    }


def letter_tokenizer() -> str:
    """Returns a tokenizer.json whose tokens are letters and two special tokens."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    vocabulary = {token: i for i, token in enumerate(["<", ">", *ascii_letters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.add_special_tokens(["<", ">"])
    return tokenizer.to_str()


def proof_job(
    layout: ProofLayout,
    dtype: str,
    steps: int,
    folder: Path,
    settings: Sections | None = None,
    device: str = "cpu",
) -> JobConfig:
    wide = "float64" if dtype == "float64" else "float32"
    data_parallel = layout.degrees.get("shard", 1) * layout.degrees.get("rep", 1)
    job: Sections = {
        "job": {"dump_folder": str(folder)},
        "training": {
            "dataset": "random",
            "seq_len": SEQ_LEN,
            "max_norm": MAX_NORM.get(dtype, 1.0),
            "global_batch_size": ROWS,
            "local_batch_size": ROWS // data_parallel,
            "steps": steps,
            "dtype": wide,
            "mixed_precision_param": dtype,
            "mixed_precision_reduce": wide,
            "device": "cpu" if device == "cpu" else "auto",
        },
        "compile": {"enable": False},
        "optimizer": {"lr": 1e-2 if device == "cpu" else 1e-3},
        "lr_scheduler": {"warmup_steps": 4},
        "metrics": {"log_freq": 1, "enable_tensorboard": False},
        "checkpoint": {"enable": False},
    }
    kinds, ways = [KINDS[kind] for kind in layout.kinds], [WAYS[way] for way in layout.ways]
    for change in (settings or {}, *kinds, *ways):
        _merge(job, change)
    if device == "cuda" and "compile" in layout.ways:
        _merge(job, {"compile": {"backend": "inductor"}})
    degrees = layout.parallelism
    if "sharding_stage" in job.get("parallelism", {}):  # derives the data-parallel degrees
        degrees = {key: n for key, n in degrees.items() if not key.startswith("data_parallel")}
    _merge(job, {"parallelism": degrees})
    if "sft" in job:
        _merge(job, talk_data(folder / "talks", pairs="preference" in job))
    changes, own = job.pop(ARCHITECTURE, {}), job.get("model", {}).get("name")
    if own and changes:
        message = f"{', '.join(layout.kinds)} changes a plain decoder, and {own} is a custom model"
        raise ConfigError([Problem(message, "command line", "--layouts")])
    if not own:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "config.json"
        path.write_text(json.dumps((TINY if device == "cpu" else LARGER) | changes))
        _merge(job, {"model": {"config": str(path)}})
    return JobConfig.model_validate(job)


def _own_sections(config: JobConfig, architecture: Any) -> Sections:
    """Returns the sections that name a custom model and, if it takes arrays, its data."""
    keys = {"name", "flavor", "config", "overrides", "freeze"}
    found: Sections = {"model": config.model.model_dump(include=keys)}
    if sample_fields(architecture) is None:
        if getattr(architecture, "vocab_size", 0) < TINY["vocab_size"]:
            message = f"the proof needs a vocabulary of at least {TINY['vocab_size']} tokens"
            raise ConfigError([Problem(message, "", "model.flavor", config.model.flavor)])
        return found
    name = config.training.dataset
    if config.training.dataset_path is not None or config.data.sources:
        message = "the proof of a model of arrays needs one named source (register_source)"
        raise ConfigError([Problem(message, "", "training.dataset", name)])
    found["training"] = {"dataset": name}
    found["validation"] = {"enable": True, "dataset": name, "freq": STEPS // 2, "steps": 2,
                           "allow_training_data": True}  # fmt: skip
    return found


def _merge(job: Sections, change: Sections) -> None:
    for section, values in change.items():
        job[section] = {**job.get(section, {}), **values}


def settings_of(source: str | None) -> Sections | None:
    """Returns what the proof takes from a user's config, as sections for every layout: the kind of
    model and how it computes, but not its size; a custom model as it is. None without a config."""
    if source is None:
        return None
    config = with_custom_import(load_config(source))
    settings: Sections = {
        "job": {"custom_import": config.job.custom_import},
        "activation_checkpoint": config.activation_checkpoint.model_dump(),
        "compile": config.compile.model_dump(),
        "data": config.data.model_dump(include={"document_mask"}),
        "optimizer": config.optimizer.model_dump(include={"name", "options"}),
        "debug": config.debug.model_dump(include={"seed"}),
        "model": config.model.model_dump(include={"transforms", "sparse"}),
        "training": config.training.model_dump(
            include={"objective", "objective_options", "z_loss"}
        ),
    }
    if config.lora.rank:
        if config.lora.base == "nf4":
            _merge(settings, KINDS["qlora"])
        kind = config.lora.model_dump(include=LORA_KINDS)
        _merge(settings, {"lora": {**kind, "rank": min(config.lora.rank, 4)}})
    if config.preference.loss != "off":
        _merge(settings, {**PAIRS, "preference": config.preference.model_dump()})
    elif config.sft.shape != "off":
        _merge(settings, KINDS["sft"])
    if config.compile.enable:  # the proof is about the layout; generated code rounds differently
        settings["compile"]["backend"] = "aot_eager"
    architecture = model_config(config.model)
    if own_model_name(architecture):  # a plain decoder of its sizes would prove nothing
        _merge(settings, _own_sections(config, architecture))
        settings.pop(ARCHITECTURE, None)
        return settings
    hf = architecture.to_hf()
    _merge(settings, {ARCHITECTURE: {key: hf[key] for key in MODEL_KINDS if key in hf}})
    if architecture.sliding_window:
        layers = TINY["num_hidden_layers"]
        types = ([SLIDING, FULL] * layers)[:layers] if architecture.layer_types else []
        window = {"sliding_window": 9} if "use_sliding_window" not in hf else {}
        settings[ARCHITECTURE] |= window or window_as_hf(9, types, layers)
    return settings


def left_out(source: str | None) -> list[str]:
    """Returns the keys of a user's config that change what a layout computes and that no proof
    takes."""
    if source is None:
        return []
    config = load_config(source).config
    architecture = model_config(config.model)
    plain = own_model_name(architecture) is None
    changed = {
        "model.attention": config.model.attention != "auto",
        "rope scaling": plain and architecture.rope.rope_type != "default",
        "training.max_norm": config.training.max_norm == 0,
        "lora.base": bool(config.lora.rank) and config.lora.base not in ("auto", "nf4"),
        "training.float8": config.training.float8 != "off",
        "training.enable_cpu_offload": config.training.enable_cpu_offload,
        "training.kernels": config.training.kernels != "auto",
        "model.freeze": plain and bool(config.model.freeze),
        "optimizer.groups": bool(config.optimizer.groups),
        "optimizer.bf16_moments": config.optimizer.bf16_moments,
        "lora.layers": bool(config.lora.rank and config.lora.layers),
        "lora.rank_pattern": bool(config.lora.rank and config.lora.rank_pattern),
        "lora.alpha_pattern": bool(config.lora.rank and config.lora.alpha_pattern),
    }
    return [key for key, is_set in changed.items() if is_set]


def digest(settings: Sections) -> str:
    """Returns a short name for these settings, which changes with any of them."""
    return sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:8]
