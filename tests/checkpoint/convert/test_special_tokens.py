"""An exported model knows where a text ends: loaded by transformers, it stops there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from overland.apps.convert.formats import LazyCheckpoint, Options
from overland.apps.convert.formats.hf import write_hf
from overland.apps.convert.formats.lazy import held
from overland.apps.data.tokenizer_training import train_tokenizer
from overland.data.tokenizer import Tokenizer
from overland.data.tokenizer_files import companions_in
from overland.models import DecoderConfig, build_model
from overland.models.init import init_weights
from tests.data.tokenizer_folders import CORPUS, KINDS, byte_level_bpe
from tests.models.tiny import hf


def silent_model(**config: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Weights of a model whose logits are all equal, so that greedy decoding takes id 0."""
    model = build_model(DecoderConfig.from_hf(hf("llama") | {"vocab_size": 600} | config))
    init_weights(model, 0)
    with torch.no_grad():
        dict(model.named_parameters())["model.norm.weight"].zero_()
    weights = {f"model.{name}": held(p) for name, p in model.named_parameters()}
    return weights, model.config.to_hf()


def export(folder: Path, assets: Path, format_: str = "overland", **config: Any) -> Path:
    weights, contents = silent_model(**config)
    folder.mkdir()
    source = LazyCheckpoint(
        format_, folder, weights, config=contents, companions=companions_in(assets)
    )
    write_hf(source, folder, Options())
    return folder


@pytest.mark.parametrize("ids", [{"bos_token_id": None, "eos_token_id": None}, {"eos_token_id": 7}])
def test_generation_stops_at_the_token_that_training_put_after_each_document(
    tmp_path: Path, ids: dict[str, Any]
) -> None:
    """With a tokenizer trained here, whatever ids a flavor brings along."""
    transformers = pytest.importorskip("transformers")
    assets = tmp_path / "tokenizer"
    assets.mkdir()
    train_tokenizer(CORPUS, 600, assets / "tokenizer.json")
    folder = export(tmp_path / "hf", assets, **ids)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    ours = Tokenizer(assets)
    assert tokenizer.eos_token_id == model.config.eos_token_id == ours.eos_id == 0
    assert tokenizer.pad_token_id == model.config.pad_token_id == 0
    assert tokenizer.encode("the quick brown fox") == ours.encode("the quick brown fox")
    prompt = tokenizer("the quick", return_tensors="pt")
    written = model.generate(**prompt, max_new_tokens=5, do_sample=False)
    assert written[0].tolist() == [*ours.encode("the quick"), 0]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_tokenizer_says_how_a_text_ends(tmp_path: Path, kind: str) -> None:
    assets = tmp_path / "tokenizer"
    assets.mkdir()
    KINDS[kind](assets)
    folder = export(tmp_path / "hf", assets, vocab_size=1024)
    ours = Tokenizer(assets)
    for name in ("config.json", "generation_config.json"):
        assert json.loads((folder / name).read_text())["eos_token_id"] == ours.eos_id
    named = json.loads((folder / "tokenizer_config.json").read_text())["eos_token"]
    assert ours.specials[named] == ours.eos_id


def test_what_a_model_from_elsewhere_says_about_itself_is_kept(tmp_path: Path) -> None:
    """Its chat template too, and the temperature of its generation config."""
    assets = tmp_path / "model"
    assets.mkdir()
    KINDS["tokenizer.json"](assets)
    (assets / "chat_template.jinja").write_text("{{ messages }}")
    generation = {"eos_token_id": [5, 6], "temperature": 0.6}
    (assets / "generation_config.json").write_text(json.dumps(generation))
    folder = export(tmp_path / "hf", assets, "hf", eos_token_id=[5, 6])
    assert (folder / "chat_template.jinja").read_text() == "{{ messages }}"
    assert json.loads((folder / "config.json").read_text())["eos_token_id"] == [5, 6]
    kept = json.loads((folder / "generation_config.json").read_text())
    assert (kept["eos_token_id"], kept["temperature"]) == ([5, 6], 0.6)
    trained = export(tmp_path / "trained", assets, "overland", eos_token_id=[5, 6])
    kept = json.loads((trained / "generation_config.json").read_text())
    assert set(kept["eos_token_id"]) == {0, 5, 6}


def test_a_tokenizer_without_an_end_is_exported_without_one(tmp_path: Path) -> None:
    assets = tmp_path / "tokenizer"
    assets.mkdir()
    byte_level_bpe().save(str(assets / "tokenizer.json"))
    folder = export(tmp_path / "hf", assets, bos_token_id=None, eos_token_id=7)
    assert json.loads((folder / "config.json").read_text())["eos_token_id"] is None
    assert "eos_token_id" not in json.loads((folder / "generation_config.json").read_text())
    assert "tokenizer_class" in json.loads((folder / "tokenizer_config.json").read_text())
