"""Weights through transformers and back, in shards, in slices, and refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from overland.apps.convert.formats import LazyCheckpoint, Options
from overland.apps.convert.formats.hf import write_hf
from overland.apps.convert.formats.lazy import cast_lazily, held
from overland.models import DecoderConfig, ModelError, build_model
from overland.models.init import Part, init_weights
from overland.models.weights import load_hf

from .tiny import CASES, hf

ROUNDTRIPS = [
    ("Llama 3.1", "llama3"),
    ("Llama 3.2, tied", "llama3"),
    ("Llama, all biases", "default"),
    ("Mistral, window 8", "default"),
    ("Qwen2, layer_types", "default"),
    ("Qwen3, tied, biases", "yarn"),
]


def tiny(contents: dict[str, object] | None = None, seed: int = 0) -> torch.nn.Module:
    model = build_model(DecoderConfig.from_hf(contents or hf("llama")))
    init_weights(model, seed)
    return model


def save(
    model: torch.nn.Module,
    folder: Path,
    dtype: torch.dtype = torch.float32,
    max_shard_bytes: int = 10**9,
) -> Path:
    weights = {f"model.{name}": cast_lazily(held(p), dtype) for name, p in model.named_parameters()}
    folder.mkdir()
    source = LazyCheckpoint("test", folder, weights, config=model.config.to_hf())
    write_hf(source, folder, Options(max_shard_bytes=max_shard_bytes))
    return folder


@pytest.mark.parametrize("case", ROUNDTRIPS, ids=" / ".join)
@pytest.mark.parametrize("max_shard_bytes", [10_000, 10**9])
def test_transformers_reads_what_we_write(
    case: tuple[str, str], max_shard_bytes: int, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    contents, seq_len = CASES[case]
    ours = tiny(contents)
    folder = save(ours, tmp_path / "out", max_shard_bytes=max_shard_bytes)
    assert len(list(folder.glob("*.safetensors"))) > 1 or max_shard_bytes > 10_000
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    tokens_BS = torch.randint(0, 96, (2, seq_len))
    assert (theirs(tokens_BS).logits - ours(tokens_BS)).abs().max() <= 1e-4


@pytest.mark.parametrize("case", ROUNDTRIPS, ids=" / ".join)
@pytest.mark.parametrize("shard", ["10KB", "1GB"])
def test_we_read_what_transformers_writes(
    case: tuple[str, str], shard: str, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    contents, seq_len = CASES[case]
    config = transformers.AutoConfig.for_model(**contents)
    theirs = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    theirs.save_pretrained(tmp_path, max_shard_size=shard)
    ours = build_model(DecoderConfig.from_hf(tmp_path))
    load_hf(ours, tmp_path)
    tokens_BS = torch.randint(0, 96, (2, seq_len))
    assert (theirs(tokens_BS).logits - ours(tokens_BS)).abs().max() <= 1e-4


def test_index_and_metadata(tmp_path: Path) -> None:
    model = tiny()
    folder = save(model, tmp_path / "out", dtype=torch.bfloat16, max_shard_bytes=10_000)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == model.config.parameter_shapes().keys()
    assert index["metadata"]["total_size"] == 2 * sum(p.numel() for p in model.parameters())
    assert json.loads((folder / "config.json").read_text())["torch_dtype"] == "bfloat16"
    files = sorted(folder.glob("*.safetensors"))
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    assert all(tensor.dtype == torch.bfloat16 for f in files for tensor in load_file(f).values())
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_weights_are_cast_to_the_parameters_type(tmp_path: Path) -> None:
    model = tiny()
    save(model, tmp_path / "out")
    narrow = build_model(model.config).to(torch.bfloat16)
    load_hf(narrow, tmp_path / "out")
    for (name, a), b in zip(narrow.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(a, b.to(torch.bfloat16)), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_flipped_byte_of_an_export_is_found(tmp_path: Path, dtype: torch.dtype) -> None:
    model = tiny()
    file = save(model, tmp_path / "out", dtype) / "model.safetensors"
    load_hf(build_model(model.config), file.parent)
    data = bytearray(file.read_bytes())
    data[-2] ^= 1
    file.write_bytes(data)
    with pytest.raises(ModelError, match=r"model\.safetensors is damaged: .* checksums\.json"):
        load_hf(build_model(model.config), file.parent)
    (file.parent / "checksums.json").unlink()
    load_hf(build_model(model.config), file.parent)


def test_a_stage_reads_only_its_slices(tmp_path: Path) -> None:
    model = tiny(hf("llama", tie_word_embeddings=True))
    save(model, tmp_path / "out", max_shard_bytes=10_000)
    with torch.device("meta"):
        stage = build_model(model.config)
    stage.model.embed_tokens = None
    del stage.model.layers["0"]
    stage.to_empty(device="cpu")

    def quarter(parameter: torch.nn.Parameter) -> Part:
        if parameter.dim() == 1:
            return parameter.data[8:16], (8,), parameter.shape
        return parameter.data[8:16, 4:9], (8, 4), parameter.shape

    load_hf(stage, tmp_path / "out", local_part=quarter)
    reference = model.state_dict()
    for name, parameter in stage.named_parameters():
        part, _, _ = quarter(parameter)
        expected, _, _ = quarter(reference[name])
        assert torch.equal(part, expected), name


def test_bytes_are_counted_as_they_are_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("overland.models.weights.READ_BYTES", 1024)
    model = tiny()
    save(model, tmp_path / "out")
    other, counts = tiny(seed=1), list[int]()
    load_hf(other, tmp_path / "out", moved=counts.append)
    assert sum(counts) == sum(parameter.nbytes for parameter in model.parameters())
    assert max(counts) <= 1024
    for (name, a), b in zip(other.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_either_tensor_of_a_tied_pair_will_do(tmp_path: Path) -> None:
    model = tiny(hf("llama", tie_word_embeddings=True))
    save(model, tmp_path / "out")
    file = tmp_path / "out" / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, file)
    other = tiny(hf("llama", tie_word_embeddings=True), seed=1)
    load_hf(other, tmp_path / "out")
    assert torch.equal(other.lm_head.weight, model.lm_head.weight)


def test_files_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    model = tiny()
    with pytest.raises(ModelError, match=r"has neither model.safetensors nor"):
        load_hf(model, tmp_path)
    folder = save(model, tmp_path / "out")
    file = folder / "model.safetensors"
    tensors = load_file(file)

    save_file({k: v for k, v in tensors.items() if k != "model.norm.weight"}, file)
    with pytest.raises(ModelError, match=r"lacks model.norm.weight, which this model needs"):
        load_hf(model, folder)

    save_file(tensors | {"model.extra": torch.ones(2)}, file)
    with pytest.raises(ModelError, match=r"has model.extra, which this model does not have"):
        load_hf(model, folder)
    load_hf(model, folder, strict=False)

    save_file(tensors | {"model.norm.weight": torch.ones(31)}, file)
    with pytest.raises(ModelError, match=r"model.norm.weight in .* shape \[31\], but .* \[32\]"):
        load_hf(model, folder)

    file.write_bytes(b"garbage")
    with pytest.raises(ModelError, match=r"cannot read .* as safetensors"):
        load_hf(model, folder)

    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "b.safetensors"}}')
    with pytest.raises(ModelError, match=r"lacks b.safetensors, which its index names"):
        load_hf(model, folder)
