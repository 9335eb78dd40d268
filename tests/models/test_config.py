"""config.json in and out: read back unchanged, or refused by name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from overland.models import DecoderConfig, ModelError, RopeConfig

from .tiny import CASES, LLAMA3_ROPE, hf


@pytest.mark.parametrize("case", list(CASES), ids=" / ".join)
def test_config_written_is_read_back_equal(case: tuple[str, str]) -> None:
    config = DecoderConfig.from_hf(CASES[case][0])
    assert DecoderConfig.from_hf(config.to_hf()) == config


@pytest.mark.parametrize("case", list(CASES), ids=" / ".join)
def test_transformers_reads_our_config_as_the_same_model(
    case: tuple[str, str], tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    config = DecoderConfig.from_hf(CASES[case][0])
    (tmp_path / "config.json").write_text(json.dumps(config.to_hf()))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    # What transformers writes in turn (its newest form) is again the same model.
    theirs.save_pretrained(tmp_path / "again")
    assert DecoderConfig.from_hf(tmp_path / "again") == config


def test_config_is_read_from_a_folder_or_a_file(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(hf("llama")))
    assert DecoderConfig.from_hf(path) == DecoderConfig.from_hf(tmp_path)


def test_bookkeeping_keys_are_accepted() -> None:
    contents = hf("llama") | {
        "torch_dtype": "bfloat16",
        "dtype": "bfloat16",
        "architectures": ["LlamaForCausalLM"],
        "transformers_version": "4.31.0",
        "use_cache": True,
        "_name_or_path": "somewhere",
        "attention_dropout": 0.0,
        "pretraining_tp": 1,
        "some_unset_switch": None,
    }
    assert DecoderConfig.from_hf(contents) == DecoderConfig.from_hf(hf("llama"))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "gpt_bigcode"}, "model_type 'gpt_bigcode' is not supported"),
    ({"model_type": None}, "config.json has no model_type"),
    (hf("llama", hidden_act="gelu"), "hidden_act 'gelu' is not supported"),
    (hf("llama", hidden_size=None), "config.json has no hidden_size"),
    (hf("llama", quantization_config={"bits": 4}), "quantization_config is not supported"),
    (hf("llama", auto_map={"AutoModel": "x.y"}), "auto_map is not supported"),
    (hf("qwen3", num_experts=8), "num_experts is not supported: mixtures of experts"),
    (hf("llama", partial_rotary_factor=0.5), "partial_rotary_factor = 0.5 is not supported"),
    (hf("llama", attention_dropout=0.1), "attention_dropout = 0.1 is not supported"),
    (hf("llama", attention_multiplier=0.5), "key 'attention_multiplier' = 0.5 is not known"),
    (hf("llama", sliding_window=8), "key 'sliding_window' = 8 is not known"),
    (
        hf("llama", rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.5}),
        "partial_rotary_factor other than 1",
    ),
    (
        hf("llama", rope_scaling={"rope_type": "longrope", "factor": 2.0}),
        "rope_type 'longrope' is not supported",
    ),
    (hf("llama", rope_scaling={"type": "linear"}), "rope_type 'linear' needs factor"),
    (
        hf("llama", rope_scaling={"type": "default", "mrope_section": [1, 2]}),
        "rope key 'mrope_section' = [1, 2] is not supported",
    ),
    (
        hf("llama", rope_scaling={k: v for k, v in LLAMA3_ROPE.items() if k[:3] != "low"}),
        "rope_type 'llama3' needs low_freq_factor",
    ),
    (hf("qwen2", rope_parameters={"full_attention": {}}), "rope_parameters per layer type"),
    (hf("qwen2", layer_types=["sliding_attention"] * 3), "sliding_window is off"),
    (
        hf("qwen3", use_sliding_window=True, layer_types=["chunked_attention"] * 3),
        "layer type 'chunked_attention' is not supported",
    ),
    (
        hf("qwen3", use_sliding_window=True, layer_types=["sliding_attention", "full_attention"]),
        "layer_types has 2 entries for 3 layers",
    ),
    (hf("llama", num_key_value_heads=3), "not a multiple of num_key_value_heads 3"),
    (hf("llama", hidden_size=-1), "hidden_size must be a positive whole number"),
    (hf("llama", initializer_range=float("nan")), "initializer_range must be a number, 0 or more"),
    (hf("llama", rms_norm_eps=-1.0), "rms_norm_eps must be positive, got -1.0"),
    (hf("llama", rope_theta=0), "rope_theta must be positive, got 0.0"),
    (
        hf("llama", rope_scaling={"type": "linear", "factor": float("inf")}),
        "rope's factor must be a finite number",
    ),
]


@pytest.mark.parametrize(("contents", "sentence"), REFUSED, ids=[s for _, s in REFUSED])
def test_unsupported_config_is_refused_by_name(contents: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ModelError) as error:
        DecoderConfig.from_hf(contents)
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


def test_unreadable_files_are_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config.json cannot be read: No such file"):
        DecoderConfig.from_hf(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="is not valid JSON"):
        DecoderConfig.from_hf(tmp_path)


def test_overrides_follow_derived_sizes() -> None:
    base = DecoderConfig.from_hf(hf("llama", num_key_value_heads=4))
    wider = base.override({"hidden_size": 64, "num_attention_heads": 16, "num_hidden_layers": 5})
    assert (wider.head_dim, wider.num_key_value_heads, wider.num_hidden_layers) == (4, 16, 5)
    fixed = DecoderConfig.from_hf(hf("qwen3", head_dim=16)).override({"hidden_size": 64})
    assert (fixed.head_dim, fixed.num_key_value_heads) == (16, 2)


def test_overrides_of_rope_keep_the_rest() -> None:
    base = DecoderConfig.from_hf(hf("llama", rope_theta=1e4, rope_scaling=LLAMA3_ROPE))
    assert base.override({"rope_theta": 5e5}).rope.rope_theta == 5e5
    assert base.override({"rope_theta": 5e5}).rope.factor == 8.0
    assert base.override({"rope": RopeConfig(rope_theta=7.0)}).rope == RopeConfig(rope_theta=7.0)
    assert base.override({"rope_scaling": None}).rope == RopeConfig(rope_theta=1e4)


def test_overrides_of_windows() -> None:
    base = DecoderConfig.from_hf(hf("qwen2"))
    some = base.override({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2})
    assert [some.window_of(i) for i in range(3)] == [None, None, 8]
    assert some.override({"use_sliding_window": False}) == base
    every = base.override({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0})
    assert [every.override({"num_hidden_layers": 4}).window_of(i) for i in range(4)] == [8] * 4


def test_importing_models_does_not_import_torch() -> None:
    code = "import sys, overland.models; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
