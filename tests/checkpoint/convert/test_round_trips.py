"""Any format to any other and back, through every pair of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from overland.apps.convert import convert
from overland.apps.convert.formats import (
    FORMATS,
    Options,
    lazy,
    open_any,
    register_format,
    targets,
)
from overland.checkpoint.lazy import counting
from overland.checkpoint.write import bytes_of
from overland.cli.main import app
from overland.errors import CheckpointError
from tests.jobs import write_model
from tests.models.tiny import LLAMA3_ROPE, hf

from .samples import assert_same, contents, tiny_config, tiny_source

KINDS = {
    "llama": {},
    "tied": {"tie_word_embeddings": True},
    "llama 3.1": {
        "rope_theta": 500000.0,
        "rope_scaling": LLAMA3_ROPE | {"original_max_position_embeddings": 8192},
    },
}
WHOLE = [name for name in targets() if name != "peft"]  # which holds adapters alone
WITH_OPTIMIZER = [name for name in targets() if not FORMATS[name].weights_only]


def path_of(folder: Path, name: str) -> Path:
    return folder / (f"{name}.safetensors" if name == "safetensors" else name)


@pytest.mark.parametrize("name", WITH_OPTIMIZER)
def test_narrow_moments_stay_so(name: str, tmp_path: Path) -> None:
    config = tiny_config()
    source = tiny_source(config, moments=torch.bfloat16)
    start = tmp_path / "start"
    start.mkdir()
    FORMATS[name].write(source, start, Options())
    assert_same(contents(open_any(start, config)), contents(source))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("first", WHOLE)
def test_any_to_any_keeps_every_bit(first: str, kind: str, tmp_path: Path) -> None:
    config = tiny_config(**KINDS[kind])
    source = tiny_source(config)
    weights = {n: t for n, t in contents(source).items() if n.startswith("model.")}
    config_file = tmp_path / "config.json"
    config_file.write_text(json.dumps(config))
    start = path_of(tmp_path, first)
    if not FORMATS[first].is_file:
        start.mkdir()
    FORMATS[first].write(source, start, Options())
    for second in WHOLE:
        target = path_of(tmp_path / "second", second)
        summary = convert(start, target, second, config=config_file, verify="logits")
        assert summary.verified == summary.num_tensors
        assert summary.logits_difference == 0
        back = contents(open_any(target, config))
        if "meta" in (first, second) and kind == "tied":
            assert torch.equal(
                back.pop("model.lm_head.weight", weights["model.model.embed_tokens.weight"]),
                weights["model.model.embed_tokens.weight"],
            )
        if first in WITH_OPTIMIZER and second in WITH_OPTIMIZER:
            assert_same(back, contents(source))
        else:
            assert_same({n: t for n, t in back.items() if n.startswith("model.")}, weights)


@pytest.mark.parametrize("through", WITH_OPTIMIZER)
def test_progress_and_parameter_groups_survive(through: str, tmp_path: Path) -> None:
    source = tiny_source(tiny_config())
    (tmp_path / "a").mkdir()
    FORMATS[through].write(source, tmp_path / "a", Options())
    extras = open_any(tmp_path / "a").extras
    assert extras["step"] == 7
    assert (extras["batch"], extras["tokens"]) == (8, 900)
    if through != "dcp":  # which keeps it with the facts of a run
        assert extras["best_validation_loss"] == 2.5
    if through != "overland":  # whose groups follow from its config
        found = [set(group["names"]) for group in extras["param_groups"]]
        assert found == [set(group["names"]) for group in source.extras["param_groups"]]
        assert [group["weight_decay"] for group in extras["param_groups"]] == [0.1, 0.0]


def test_a_run_that_went_through_dcp_keeps_its_place_in_the_data(tmp_path: Path) -> None:
    facts = {"progress": {"step": 7, "batch": 8, "tokens": 900}, "data": {"plan": {"seed": 3}}}
    source = tiny_source(tiny_config())
    source = replace(source, extras={**source.extras, "run": facts})
    for folder, kind in (("a", "dcp"), ("b", "overland")):
        (tmp_path / folder).mkdir()
        FORMATS[kind].write(source, tmp_path / folder, Options())
        source = open_any(tmp_path / folder)
    run = source.extras["run"]
    assert (run["progress"], run["data"]) == (facts["progress"], facts["data"])


def test_a_run_folder_gives_its_newest_checkpoint_and_tokenizer(tmp_path: Path) -> None:
    config = tiny_config()
    run = tmp_path / "run"
    (run / "tokenizer").mkdir(parents=True)
    (run / "tokenizer" / "tokenizer.json").write_text("{}")
    (run / "config.toml").write_text('[checkpoint]\nfolder = "kept"\n')
    with pytest.raises(CheckpointError, match="has no checkpoint yet"):
        open_any(run)
    for step in (9, 10):
        folder = run / "kept" / f"step_{step}"
        folder.mkdir(parents=True)
        source = tiny_source(config, seed=step)
        source.extras = {**source.extras, "step": step}
        FORMATS["overland"].write(source, folder, Options())
    for path, step in ((run, 10), (run / "kept" / "step_9", 9)):
        convert(path, tmp_path / f"hf{step}", "hf")
        assert (tmp_path / f"hf{step}" / "tokenizer.json").is_file()
        weights = contents(tiny_source(config, optimizer=False, seed=step))
        assert_same(contents(open_any(tmp_path / f"hf{step}")), weights)
    source = open_any(run)
    name = "model.model.layers.0.mlp.up_proj.weight"
    rows = source.tensors[name].load_box((3, 0), (4, 5))
    assert torch.equal(rows, source.read(name)[3:7, :5])


def test_foreign_moments_make_a_checkpoint_that_can_be_resumed(tmp_path: Path) -> None:
    """A run asks for its loss scale as well, which no other format has."""
    source = tiny_source(tiny_config())
    del source.tensors["scaler.scale"], source.tensors["scaler.good_steps"]
    (tmp_path / "a").mkdir()
    FORMATS["overland"].write(source, tmp_path / "a", Options())
    assert open_any(tmp_path / "a").read("scaler.scale") == 1


def test_torchtitan_names_and_back(tmp_path: Path) -> None:
    config = tiny_config()
    source = tiny_source(config)
    (tmp_path / "ours").mkdir()
    FORMATS["overland"].write(source, tmp_path / "ours", Options())
    for prefix in (None, "model."):
        folder = tmp_path / f"titan{prefix}"
        options = Options(names="torchtitan", key_prefix=prefix)
        convert(tmp_path / "ours", folder, "dcp", options=options)
        from overland.apps.convert.formats.dcp import read_dcp

        tensors, _ = read_dcp(folder)
        stem = prefix or ""
        assert f"{stem}layers.0.attention.wq.weight" in tensors
        assert "optimizer.state.layers.0.attention.wq.weight.exp_avg" in tensors
        wq = tensors[f"{stem}layers.0.attention.wq.weight"].load()
        q_proj = source.read("model.model.layers.0.self_attn.q_proj.weight")
        # Heads of 8 rows: Meta's 0, 1, 2, 3, … are Hugging Face's 0, 4, 1, 5, …
        assert torch.equal(wq[:8], q_proj[[0, 4, 1, 5, 2, 6, 3, 7]])
        assert_same(contents(open_any(folder)), contents(source))
        (folder / "config.json").unlink()
        with pytest.raises(CheckpointError, match="--config"):
            open_any(folder)
        assert_same(contents(open_any(folder, config)), contents(source))


def test_shards_of_meta_are_merged(tmp_path: Path) -> None:
    config = tiny_config(num_attention_heads=8, num_key_value_heads=4)
    (tmp_path / "whole").mkdir()
    FORMATS["meta"].write(tiny_source(config, optimizer=False), tmp_path / "whole", Options())
    whole = torch.load(tmp_path / "whole" / "consolidated.00.pth", weights_only=True)
    params = json.loads((tmp_path / "whole" / "params.json").read_text())
    for style, embedding_dim in (("llama 2", 1), ("llama 3", 0)):
        folder = tmp_path / style
        folder.mkdir()
        if style == "llama 2":
            params["vocab_size"] = -1
        (folder / "params.json").write_text(json.dumps(params))
        for rank in range(4):
            shard = {"rope.freqs": torch.ones(2)}
            for name, tensor in whole.items():
                last = name.split(".")[-2]
                dim = {"wo": 1, "w2": 1, "tok_embeddings": embedding_dim}.get(last, 0)
                is_norm = "norm" in last
                shard[name] = tensor if is_norm else tensor.chunk(4, dim)[rank].clone()
            torch.save(shard, folder / f"consolidated.{rank:02d}.pth")
        assert_same(contents(open_any(folder)), contents(open_any(tmp_path / "whole")))


def test_dtype_and_exclude(tmp_path: Path) -> None:
    source = tiny_source(tiny_config())
    (tmp_path / "a").mkdir()
    FORMATS["dcp"].write(source, tmp_path / "a", Options())
    convert(tmp_path / "a", tmp_path / "b", "torch", dtype="bfloat16", exclude=["lm_head.*"])
    found = contents(open_any(tmp_path / "b"))
    assert not [name for name in found if "lm_head" in name]
    name = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(found[f"model.{name}"], source.read(f"model.{name}").bfloat16())
    assert torch.equal(found[f"optimizer.{name}.exp_avg"], source.read(f"optimizer.{name}.exp_avg"))
    convert(tmp_path / "a", tmp_path / "c", "torch", weights_only=True)
    assert all(name.startswith("model.") for name in open_any(tmp_path / "c").tensors)
    with pytest.raises(CheckpointError, match=r"did you mean 'lm_head\.weight'"):
        convert(tmp_path / "a", tmp_path / "d", "torch", exclude=["lm_haed.weight"])


def test_hf_in_shards_with_tokenizer(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = tiny_config()
    (tmp_path / "a").mkdir()
    FORMATS["hf"].write(tiny_source(config), tmp_path / "a", Options())
    for name in ("tokenizer.json", "generation_config.json", "chat_template.jinja"):
        (tmp_path / "a" / name).write_text("{}")
    (tmp_path / "a" / "optimizer.pt").write_text("not to be copied")
    convert(tmp_path / "a", tmp_path / "b", "hf", options=Options(max_shard_bytes=30_000))
    files = {path.name for path in (tmp_path / "b").iterdir()}
    assert {"tokenizer.json", "generation_config.json", "chat_template.jinja"} <= files
    assert "optimizer.pt" not in files
    shards = [name for name in files if name.startswith("model-")]
    assert len(shards) > 3
    assert max((tmp_path / "b" / name).stat().st_size for name in shards) < 35_000
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "b", output_loading_info=True
    )
    assert not report["missing_keys"]
    wanted = open_any(tmp_path / "a").weights()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, wanted[name].load())


def test_pytorch_bin_is_read(tmp_path: Path) -> None:
    weights = {f"model.layers.{i}.x": torch.randn(3, 4) for i in range(4)}
    torch.save(weights, tmp_path / "pytorch_model.bin")
    assert_same(contents(open_any(tmp_path)), {f"model.{name}": t for name, t in weights.items()})


def test_what_cannot_be_written_is_said(tmp_path: Path) -> None:
    config = hf("qwen2")
    (tmp_path / "a").mkdir()
    FORMATS["hf"].write(tiny_source(config), tmp_path / "a", Options())
    with pytest.raises(
        CheckpointError, match="only plain Llama models, but for this one model_type"
    ):
        convert(tmp_path / "a", tmp_path / "b", "meta")
    assert not (tmp_path / "b").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a"]  # and no leftovers
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "notes.txt").touch()
    with pytest.raises(CheckpointError, match="already exists"):
        convert(tmp_path / "a", tmp_path / "b", "dcp")


def test_a_tied_head_that_differs_is_no_tied_head(tmp_path: Path) -> None:
    config = tiny_config()
    (tmp_path / "a").mkdir()
    FORMATS["torch"].write(tiny_source(config), tmp_path / "a", Options())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    with pytest.raises(CheckpointError, match="but they differ"):
        convert(tmp_path / "a", tmp_path / "b", "hf", config=tmp_path / "config.json")


def test_a_missing_weight_is_named(tmp_path: Path) -> None:
    source = tiny_source(tiny_config())
    del source.tensors["model.model.norm.weight"]
    (tmp_path / "a").mkdir()
    FORMATS["dcp"].write(source, tmp_path / "a", Options())
    with pytest.raises(CheckpointError, match=r"lacks model\.norm\.weight"):
        convert(tmp_path / "a", tmp_path / "b", "hf")


def test_bytes_are_counted_as_they_are_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(lazy, "READ_BYTES", 1000)
    tensor, path, counts = torch.arange(10_000), tmp_path / "a.bin", list[int]()
    path.write_bytes(bytes_of(tensor))
    stored = lazy.Stored((10_000,), torch.int64, path, 0)
    with counting(counts.append):
        assert torch.equal(stored.load(), tensor)
    assert counts == [1000] * 80
    stored.load()
    assert len(counts) == 80


def test_a_target_in_fewer_bits_has_the_logits_of_rounded_weights(tmp_path: Path) -> None:
    done = convert(write_model(tmp_path / "a"), tmp_path / "b", "hf", dtype="bfloat16",
                   verify="logits")  # fmt: skip
    assert done.logits_difference is not None
    assert 1e-4 < done.logits_difference < 0.1  # next to the weights that were not rounded
    assert (tmp_path / "b" / "model.safetensors").is_file()


def test_a_registered_format_is_written_and_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = dict(FORMATS)
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "docs" / "examples"))
    config, start = tmp_path / "config.json", tmp_path / "start"
    config.write_text(json.dumps(tiny_config()))
    start.mkdir()
    FORMATS["hf"].write(tiny_source(tiny_config()), start, Options())
    try:
        words = ["--import", "arrays_format"]
        for source, target, to in (("start", "a", "arrays"), ("a", "b", "hf")):
            given = [str(tmp_path / source), str(tmp_path / target), "--to", to]
            done = CliRunner().invoke(app, ["convert", *given, "--config", str(config), *words])
            assert done.exit_code == 0, done.output
        assert_same(contents(open_any(tmp_path / "b")), contents(open_any(start)))
        with pytest.raises(CheckpointError, match="named 'hf' is already registered"):
            register_format("hf", FORMATS["arrays"])
    finally:
        FORMATS.clear()
        FORMATS.update(known)
