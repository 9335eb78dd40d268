"""Files that DeepSpeed, torch and Meta's layout wrote give the tensors and logits they must."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from overland.apps.convert import convert
from overland.apps.convert.formats import open_any
from overland.apps.convert.formats.dcp import read_dcp
from overland.apps.convert.formats.lazy import digest
from overland.apps.convert.formats.torch_save import scalar
from overland.apps.convert.verify import model_with_weights
from overland.models import DecoderConfig

from .samples import DCP, DEEPSPEED, META, fixture, saved


def logits_of(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    stored = load_file(folder / "expected" / "logits.safetensors")
    return stored["input_ids"], stored["logits"]


def assert_logits(hf_folder: Path, folder: Path) -> None:
    """Of our decoder, and of transformers."""
    tokens_BS, wanted = logits_of(folder)
    source = open_any(hf_folder)
    assert source.config is not None
    with torch.no_grad():
        ours = model_with_weights(source, DecoderConfig.from_hf(source.config))(tokens_BS)
        assert (ours - wanted).abs().max() <= 1e-4
        transformers = pytest.importorskip("transformers")
        theirs, report = transformers.AutoModelForCausalLM.from_pretrained(
            hf_folder, dtype=torch.float32, output_loading_info=True
        )
        assert not report["missing_keys"]
        assert not report["unexpected_keys"]
        assert (theirs(tokens_BS).logits - wanted).abs().max() <= 1e-4


@pytest.mark.parametrize("name", DEEPSPEED)
def test_deepspeed_weights_and_moments(name: str) -> None:
    folder, expected = fixture(name)
    for path in (saved(folder), saved(folder) / expected["tag"]):
        source = open_any(path)
        assert source.format == "deepspeed"
        weights = source.weights()
        assert weights.keys() == expected["fp32_state_dict"].keys()
        for parameter, wanted in expected["fp32_state_dict"].items():
            assert digest(weights[parameter].load()) == wanted["sha256"], parameter
        moments = {(parameter, kind): lazy for parameter, kind, lazy in source.states()}
        assert len(moments) == 2 * len(expected["optimizer_moments_fp32"])
        for parameter, wanted in expected["optimizer_moments_fp32"].items():
            for kind in ("exp_avg", "exp_avg_sq"):
                found = digest(moments[parameter, kind].load())
                assert found == wanted[f"{kind}_sha256"], (parameter, kind)
        assert source.read("optimizer.num_updates") == expected["optimizer_steps"]


@pytest.mark.parametrize("name", DEEPSPEED)
def test_deepspeed_becomes_what_zero_to_fp32_gives(name: str, tmp_path: Path) -> None:
    folder, expected = fixture(name)
    convert(saved(folder), tmp_path / "all.safetensors", "safetensors")
    written = load_file(tmp_path / "all.safetensors")
    assert written.keys() == expected["fp32_state_dict"].keys()
    for parameter, wanted in expected["fp32_state_dict"].items():
        assert digest(written[parameter]) == wanted["sha256"]
    convert(saved(folder), tmp_path / "hf", "hf", config=folder / "hf_config.json")
    assert_logits(tmp_path / "hf", folder)


@pytest.mark.parametrize("name", DCP)
def test_dcp_tensors_and_objects(name: str) -> None:
    folder, expected = fixture(name)
    tensors, objects = read_dcp(saved(folder))
    assert tensors.keys() == expected["tensors"].keys()
    for key, wanted in expected["tensors"].items():
        assert digest(tensors[key].load()) == wanted["sha256"], key
    plain = {key: scalar(value) for key, value in objects.items()}
    assert json.loads(json.dumps(plain)) == expected["non_tensors"]


@pytest.mark.parametrize("name", DCP)
def test_dcp_by_our_names(name: str) -> None:
    folder, expected = fixture(name)
    source = open_any(saved(folder))
    moments = {
        key: wanted["sha256"]
        for key, wanted in expected["tensors"].items()
        if key.endswith(("exp_avg", "exp_avg_sq"))
    }
    assert moments
    for key, wanted in moments.items():
        assert digest(source.read(key.replace("optimizer.state.", "optimizer."))) == wanted
    steps = expected["non_tensors"].get("train_state.step", source.extras["step"])
    assert source.read("optimizer.num_updates") == steps
    parameters = {name for group in source.extras["param_groups"] for name in group["names"]}
    assert parameters == {parameter for parameter, _, _ in source.states()}


@pytest.mark.parametrize("name", META)
def test_meta_tensors_and_logits(name: str, tmp_path: Path) -> None:
    folder, expected = fixture(name)
    source = open_any(saved(folder))
    weights = source.weights()
    assert weights.keys() == expected["hf_tensors"].keys()
    for parameter, wanted in expected["hf_tensors"].items():
        assert digest(weights[parameter].load()) == wanted["sha256"], parameter
    convert(saved(folder), tmp_path / "hf", "hf")
    assert_logits(tmp_path / "hf", folder)
    ours = DecoderConfig.from_hf(tmp_path / "hf")
    theirs = DecoderConfig.from_hf(folder / "hf")
    # params.json does not say what length the model was trained for.
    assert ours.override({"max_position_embeddings": 64}) == theirs


@pytest.mark.parametrize("name", META)
def test_hf_to_meta_gives_the_original(name: str, tmp_path: Path) -> None:
    folder, expected = fixture(name)
    convert(saved(folder), tmp_path / "hf", "hf")
    convert(tmp_path / "hf", tmp_path / "meta", "meta")
    written = torch.load(tmp_path / "meta" / "consolidated.00.pth", weights_only=True)
    assert written.keys() == expected["meta_tensors_unsharded"].keys()
    for parameter, wanted in expected["meta_tensors_unsharded"].items():
        assert digest(written[parameter]) == wanted["sha256"]
    assert_same_model(tmp_path / "meta" / "params.json", saved(folder) / "params.json")


def assert_same_model(ours: Path, theirs: Path) -> None:
    from overland.apps.convert.formats.meta import feed_forward_size

    def sizes(path: Path) -> dict[str, Any]:
        params = json.loads(path.read_text())
        size = feed_forward_size(
            params["dim"], params.get("ffn_dim_multiplier"), params["multiple_of"]
        )
        kept = ("dim", "n_heads", "n_layers", "norm_eps")
        return {
            "feed_forward": size,
            "n_kv_heads": params.get("n_kv_heads", params["n_heads"]),
            "rope_theta": params.get("rope_theta", 10000.0),
            **{key: params[key] for key in kept},
        }

    assert sizes(ours) == sizes(theirs)
