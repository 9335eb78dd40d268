"""Models open from every format, with the same weights, and whatever is missing is reported."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from overland.apps.convert import convert
from overland.apps.convert.formats import Options
from overland.apps.evaluation.main import generate, open_model
from overland.config.schema import Model
from overland.errors import CheckpointError, DataError, ModelError
from overland.models.registry import build_model, model_config, read_hf_config
from overland.models.weights import load_hf
from tests.checkpoint.convert.samples import fixture, saved

from .texts import write_text_model

TOKENS = torch.arange(24).view(2, 12)
PEFT, _ = fixture("peft")
ADAPTERS = sorted(path.name for path in (PEFT / "adapters").iterdir())


def logits(path: Path, **options: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = open_model(path, **options).model(TOKENS)
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_model(tmp_path_factory.mktemp("open") / "model")


@pytest.fixture(scope="module")
def wanted(model: Path) -> torch.Tensor:
    plain = build_model(read_hf_config(model))
    load_hf(plain, model)
    with torch.no_grad():
        found: torch.Tensor = plain(TOKENS)
    return found


@pytest.mark.parametrize("to", ["hf", "dcp", "meta", "torch", "safetensors", "overland"])
def test_every_format_gives_the_same_model(
    to: str, model: Path, wanted: torch.Tensor, tmp_path: Path
) -> None:
    target = tmp_path / ("one.safetensors" if to == "safetensors" else "out")
    convert(model, target, to, options=Options(max_shard_bytes=20_000))
    before = sorted(tmp_path.rglob("*"))
    more: dict[str, Any] = {}
    if to == "safetensors":  # a file alone says nothing about its model
        with pytest.raises(CheckpointError, match="does not specify its model: give its"):
            open_model(target)
        more["config"] = model
    if to == "overland":  # has no tokenizer
        with pytest.raises(DataError, match="give a tokenizer file, or the folder"):
            open_model(target, needs_tokenizer=True)
        bare = open_model(target)  # its weights need none
        with torch.no_grad():
            assert torch.equal(bare.model(TOKENS), wanted)
        assert not bare.tokenizer
        with pytest.raises(DataError, match="give a tokenizer file, or the folder"):
            generate(bare, "def ")
        more["tokenizer"] = model
    opened = open_model(target, **more)
    with torch.no_grad():
        assert torch.equal(opened.model(TOKENS), wanted)
    assert opened.tokenizer.decode(opened.tokenizer.encode("import os")) == "import os"
    assert (opened.config, opened.context) == (None, 4096 if to == "meta" else 256)
    assert sorted(tmp_path.rglob("*")) == before  # nothing is converted on the way


@pytest.mark.parametrize("name", ["deepspeed_z2_tied", "deepspeed_z3_tied"])
def test_deepspeed_opens_with_the_config_that_is_named(name: str, model: Path) -> None:
    folder, _ = fixture(name)
    config = folder / "hf_config.json"
    opened = open_model(saved(folder), config=config, tokenizer=model)
    stored = load_file(folder / "expected" / "logits.safetensors")
    with torch.no_grad():
        found = opened.model(stored["input_ids"])
    assert torch.allclose(found, stored["logits"], rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters_open_on_their_base(name: str, model: Path, tmp_path: Path) -> None:
    expected = load_file(PEFT / "expected" / f"{name}_logits.safetensors")
    tokens_BS, wanted = expected["input_ids"], expected["adapter_logits"]
    adapter = tmp_path / "adapter"
    shutil.copytree(PEFT / "adapters" / name, adapter)
    found = open_model(adapter, base=PEFT / "base", tokenizer=model)
    with torch.no_grad():
        assert torch.allclose(found.model(tokens_BS), wanted, rtol=0, atol=1e-4)
    contents = json.loads((adapter / "adapter_config.json").read_text())
    names = contents | {"base_model_name_or_path": str(PEFT / "base")}
    (adapter / "adapter_config.json").write_text(json.dumps(names))
    with torch.no_grad():
        again = open_model(adapter, tokenizer=model).model(tokens_BS)
        assert torch.equal(again, found.model(tokens_BS))


def test_an_adapter_whose_base_is_elsewhere_asks_for_it(tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    shutil.copytree(PEFT / "adapters" / "lora", adapter)
    contents = json.loads((adapter / "adapter_config.json").read_text())
    contents["base_model_name_or_path"] = "meta-llama/Llama-3.1-8B"
    (adapter / "adapter_config.json").write_text(json.dumps(contents))
    with pytest.raises(CheckpointError, match=r"names 'meta-llama/Llama-3\.1-8B', which is no"):
        open_model(adapter)
    with pytest.raises(CheckpointError, match="is a complete model: omit --base"):
        open_model(PEFT / "base", base=PEFT / "base")


def test_end_ids_come_from_the_generation_config_then_the_config_then_the_tokenizer(
    model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    assert open_model(folder).end_ids == (0,)  # <|endoftext|>
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": 7}))
    assert open_model(folder).end_ids == (7,)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 11]}))
    assert open_model(folder).end_ids == (9, 11)


def test_a_model_in_bfloat16_is_the_stored_one_rounded_once(model: Path) -> None:
    opened = open_model(model, dtype="bfloat16")
    stored = load_file(model / "model.safetensors")
    for name, parameter in opened.model.named_parameters():
        assert torch.equal(parameter, stored[name].to(torch.bfloat16)), name


def test_tied_embeddings_stay_one_matrix_and_must_be_equal(tmp_path: Path) -> None:
    folder = write_text_model(tmp_path / "tied", tie_word_embeddings=True)
    opened = open_model(folder)
    assert opened.model.lm_head.weight is opened.model.model.embed_tokens.weight  # type: ignore
    tensors = load_file(folder / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    save_file(tensors | {"lm_head.weight": embedding + 1}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="but they differ"):
        open_model(folder)
    del tensors["model.embed_tokens.weight"]
    save_file(tensors | {"lm_head.weight": embedding}, folder / "model.safetensors")
    with torch.no_grad():
        assert torch.equal(open_model(folder).model(TOKENS), opened.model(TOKENS))


def test_what_does_not_fit_is_named(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"model.router.weight": torch.ones(2)}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"has model\.router\.weight, which its config\.json"):
        open_model(folder)
    left = {name: one for name, one in tensors.items() if name != "model.norm.weight"}
    save_file(left, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lacks model\.norm\.weight"):
        open_model(folder)
    save_file(tensors | {"model.norm.weight": torch.ones(2)}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight with shape \[2\]"):
        open_model(folder)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "float31"}, "--dtype float31 is unknown; did you mean 'float32'"),
        ({"device": "warp"}, "--device warp cannot be used here"),
        ({"device": "meta"}, "--device meta stores no values"),
        ({"step": 3}, "--step 3 selects a checkpoint of a run"),
        ({"tokenizer": Path("nowhere")}, "--tokenizer: nowhere does not exist"),
        ({"config": Path("nowhere")}, "--config nowhere: nowhere does not exist"),
    ],
)
def test_an_option_that_cannot_be_used_is_named(
    options: dict[str, Any], message: str, model: Path
) -> None:
    with pytest.raises((ModelError, CheckpointError, DataError), match=message):
        open_model(model, **options)


def test_a_model_of_images_is_said_to_have_no_text(tmp_path: Path) -> None:
    config = model_config(Model(name="vit_mae", flavor="debug"))
    model = build_model(config)
    (tmp_path / "config.json").write_text(json.dumps(config.to_hf()))
    tensors = {name: one.detach().contiguous() for name, one in model.state_dict().items()}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="is a model of arrays, not of text"):
        open_model(tmp_path)
