"""A config.json with values of another type or size is one sentence that names the key."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from overland.models import DecoderConfig, ModelError, build_model
from overland.models.weights import INDEX, load_hf
from tests.limited import limited

GOOD: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "rms_norm_eps": 1e-5, "rope_theta": 10000,
    "eos_token_id": [1, 2],
}  # fmt: skip
ROPE = {"rope_type": "linear", "factor": 2}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", "32"), ("hidden_size", 32.0), ("hidden_size", True), ("hidden_size", [32]),
        ("hidden_size", {"a": 1}), ("hidden_size", 10**30), ("hidden_size", -1),
        ("num_hidden_layers", 10**9), ("vocab_size", "64"), ("num_key_value_heads", "4"),
        ("head_dim", "8"), ("max_position_embeddings", "2048"), ("rms_norm_eps", "1e-5"),
        ("rms_norm_eps", [1]), ("tie_word_embeddings", "true"), ("hidden_act", 3),
        ("attention_bias", 1), ("eos_token_id", ["1"]), ("bos_token_id", "1"),
        ("model_type", ["llama"]), ("model_type", {}), ("rope_theta", "10000"),
        ("rope_theta", [1]), ("rope_scaling", "linear"), ("rope_scaling", [1, 2]),
        ("rope_scaling", ROPE | {"factor": "2"}), ("rope_scaling", ROPE | {"rope_type": 7}),
        ("rope_scaling", ROPE | {"rope_type": ["linear"]}), ("initializer_range", None),
    ],
)  # fmt: skip
def test_a_wrong_type_is_named(key: str, value: Any, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(GOOD | {key: value}))
    if value is None:  # as if it were not there
        DecoderConfig.from_hf(path)
        return
    ended = limited(partial(DecoderConfig.from_hf, path))
    assert ended.startswith(f"ModelError: {path}"), ended
    assert "\n" not in ended


@pytest.mark.parametrize(
    ("model_type", "keys"),
    [
        ("mistral", {"sliding_window": "4096"}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": "8"}),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": "1"}),
        ("qwen2", {"use_sliding_window": True, "layer_types": 7}),
        ("qwen2", {"layer_types": [[1]]}),
        ("qwen2", {"use_sliding_window": True, "num_hidden_layers": 10**10}),
    ],
)
def test_a_wrong_window_is_named(model_type: str, keys: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(GOOD | {"model_type": model_type} | keys))
    ended = limited(partial(DecoderConfig.from_hf, path))
    assert ended.startswith(f"ModelError: {path}"), ended


@pytest.mark.parametrize("text", ["[" * 100_000, "[]", "7", '"a"', "{", "\\xff", '{"a": ' * 50_000])
def test_a_config_that_is_none_is_one_sentence(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"config\.json"):
        DecoderConfig.from_hf(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "[]", "7", "[" * 100_000, "{}", '{"weight_map": []}', '{"weight_map": {"a": 7}}',
        '{"weight_map": {"a": ["x"]}}', '{"weight_map": "abc"}', '{"weight_map": {"a": "/etc/x"}}',
    ],
)  # fmt: skip
def test_an_index_of_another_structure_is_one_sentence(text: str, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(ModelError):
        load_hf(build_model(DecoderConfig.from_hf(GOOD)), tmp_path)
