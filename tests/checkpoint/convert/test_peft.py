"""Adapters that the real PEFT wrote: read, written back, and merged into the weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from overland.apps.convert import convert
from overland.apps.convert.formats import LazyCheckpoint, open_any
from overland.apps.convert.formats.lazy import held
from overland.apps.convert.formats.merge import Merged, join, merge
from overland.apps.convert.formats.overland import adapter_config
from overland.apps.convert.formats.peft import plain_name
from overland.apps.convert.verify import model_with_weights
from overland.apps.dialects.peft import read_adapter_config, settings_of
from overland.errors import CheckpointError
from overland.models.init import init_buffers
from overland.models.lora import LoRA
from overland.models.registry import build_model, read_hf_config
from overland.models.transform import apply_transforms

from .samples import fixture
from .test_cli import overland

ADAPTERS = ["lora", "rslora_all_linear", "dora", "lora_rank_pattern", "lora_save_lm_head"]
FOLDER, EXPECTED = fixture("peft")
BASE = FOLDER / "base"
# PEFT's defaults of keys that we leave out, where they are not empty.
UNUSED = {"init_lora_weights": True, "megatron_core": "megatron.core", "qalora_group_size": 16}


def folder_of(name: str) -> Path:
    return FOLDER / "adapters" / name


def expected(name: str) -> dict[str, Tensor]:
    return load_file(FOLDER / "expected" / f"{name}_logits.safetensors")


def wide(source: LazyCheckpoint) -> LazyCheckpoint:
    return source.with_tensors(
        {name: held(lazy.load().double()) for name, lazy in source.tensors.items()}
    )


def wide_logits(source: LazyCheckpoint, tokens_BS: Tensor) -> Tensor:
    assert source.config is not None
    model: nn.Module = build_model(read_hf_config(source.config))
    if source.adapter is not None:
        settings = settings_of(source.adapter, "")
        apply_transforms(model, [LoRA(settings.model_copy(update={"dropout": 0.0}))])
    model.double()
    init_buffers(model, torch.device("cpu"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(source.read(f"model.{name}"))
        logits: Tensor = model(tokens_BS)
    return logits


@pytest.mark.parametrize("name", ADAPTERS)
def test_merged_weights_give_the_logits_of_base_and_adapter(name: str, tmp_path: Path) -> None:
    wanted = expected(name)
    tokens_BS = wanted["input_ids"]
    joined = join(wide(open_any(BASE)), wide(open_any(folder_of(name))))
    before = wide_logits(joined, tokens_BS)
    after = wide_logits(merge(joined), tokens_BS)
    assert (before - after).abs().max() < 1e-12
    assert (before.float() - wanted["adapter_logits"]).abs().max() < 1e-5  # PEFT's, in float32

    done = convert(BASE, tmp_path / "hf", "hf", adapter=folder_of(name), merge_lora=True)
    assert done.merged > 0
    assert done.products_difference is not None
    assert done.products_difference < 1e-6
    assert done.logits_difference is not None
    assert done.logits_difference < 1e-5
    source = open_any(tmp_path / "hf")
    with torch.no_grad():
        ours = model_with_weights(source, read_hf_config(source.config or {}))(tokens_BS)
    assert (ours - wanted["merged_logits"]).abs().max() < 1e-5


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_is_written_as_peft_wrote_it(name: str, tmp_path: Path) -> None:
    convert(folder_of(name), tmp_path / "again", "peft")
    before, after = folder_of(name), tmp_path / "again"
    config = json.loads((before / "adapter_config.json").read_text())
    assert json.loads((after / "adapter_config.json").read_text()) == config
    with safe_open(before / "adapter_model.safetensors", "pt") as a, safe_open(
        after / "adapter_model.safetensors", "pt"
    ) as b:  # fmt: skip
        assert a.metadata() == b.metadata() == {"format": "pt"}
        assert sorted(a.keys()) == sorted(b.keys())
        assert all(torch.equal(a.get_tensor(key), b.get_tensor(key)) for key in sorted(a.keys()))
    # Its settings alone are enough to write the config that PEFT did.
    modules = {plain_name(key)[0].partition(".lora_")[0] for key in load_file(
        before / "adapter_model.safetensors") if ".lora_" in key}  # fmt: skip
    ours = adapter_config(settings_of(config, before), sorted(modules), "base")
    lists = ("target_modules", "modules_to_save")  # PEFT writes them in any order
    assert {k: sorted(v) if k in lists and v else v for k, v in ours.items()} == {
        k: sorted(v) if k in lists and v else v for k, v in config.items() if k in ours
    }
    assert {k: v for k, v in config.items() if v and k not in ours} == UNUSED


def test_merging_rounds_once_and_changes_nothing_else(tmp_path: Path) -> None:
    done = convert(BASE, tmp_path / "half", "hf", dtype="bfloat16")
    assert done.merged == 0
    weights = open_any(tmp_path / "half")
    merged = merge(join(weights, open_any(folder_of("dora"))), torch.float32)
    for lazy in merged.weights().values():
        if isinstance(lazy, Merged):
            coarse = lazy.load().bfloat16().float()
            assert not torch.equal(lazy.load(), coarse)  # not rounded to the weights' type
        else:
            assert lazy.load().dtype == torch.bfloat16
    one = tmp_path / "all.safetensors"
    done = convert(tmp_path / "half", one, "safetensors", adapter=folder_of("dora"),
                   merge_lora=True)  # fmt: skip
    written = load_file(one)
    assert {tensor.dtype for tensor in written.values()} == {torch.float32}
    assert written.keys() == weights.weights().keys()
    assert torch.equal(written["model.layers.1.self_attn.q_proj.weight"],
                       merged.read("model.model.layers.1.self_attn.q_proj.weight"))  # fmt: skip


def embedding_adapter(folder: Path, **config: Any) -> Path:
    """One that PEFT would write for an embedding and a matrix, with the table itself."""
    folder.mkdir()
    draw = torch.Generator().manual_seed(5)
    table = load_file(BASE / "model.safetensors")["model.embed_tokens.weight"]
    tensors = {
        "model.embed_tokens.lora_embedding_A": torch.randn(4, 256, generator=draw),
        "model.embed_tokens.lora_embedding_B": torch.randn(64, 4, generator=draw),
        "model.embed_tokens.base_layer.weight": table,
        "model.layers.0.self_attn.v_proj.lora_A.weight": torch.randn(4, 64, generator=draw),
        "model.layers.0.self_attn.v_proj.lora_B.weight": torch.randn(32, 4, generator=draw),
    }
    named = {f"base_model.model.{name}": tensor for name, tensor in tensors.items()}
    save_file(named, folder / "adapter_model.safetensors", {"format": "pt"})
    contents = read_adapter_config(folder_of("lora")) | {
        "r": 4, "target_modules": ["embed_tokens", "v_proj"], "layers_to_transform": None, **config
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(contents))
    return folder


def test_a_tied_embedding_with_an_adapter_is_untied(tmp_path: Path) -> None:
    """Its output matrix has no adapter, so that the two are not one matrix any more."""
    tied = tmp_path / "tied"
    tied.mkdir()
    weights = load_file(BASE / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, tied / "model.safetensors", {"format": "pt"})
    config = json.loads((BASE / "config.json").read_text()) | {"tie_word_embeddings": True}
    (tied / "config.json").write_text(json.dumps(config))
    adapter = embedding_adapter(tmp_path / "adapter", target_modules=["embed_tokens", "v_proj"])
    # A list of names: only layer 0 has an adapter here, so only it is named.
    contents = json.loads((adapter / "adapter_config.json").read_text())
    contents["target_modules"] = ["embed_tokens", "layers.0.self_attn.v_proj"]
    (adapter / "adapter_config.json").write_text(json.dumps(contents))
    done = convert(tied, tmp_path / "out", "hf", adapter=adapter, merge_lora=True)
    assert done.logits_difference is not None
    assert (
        json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False
    )
    merged = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(merged["lm_head.weight"], weights["model.embed_tokens.weight"])
    assert not torch.equal(merged["lm_head.weight"], merged["model.embed_tokens.weight"])


def wrapped(name: str) -> str:
    """What a tensor of a PEFT file is called in the model itself."""
    for end in ("lora_A", "lora_B"):
        name = name.replace(f"{end}.weight", f"{end}.default.weight")
    name = name.replace("lora_magnitude_vector", "lora_magnitude_vector.default.weight")
    return name.replace("lm_head.weight", "lm_head.modules_to_save.default.weight")


def deepspeed_of(folder: Path, name: str, with_base: bool = True) -> Path:
    """A checkpoint of stage 2, as DeepSpeed saves the model that PEFT has wrapped."""
    adapter = {wrapped(key): value for key, value in load_file(
        folder_of(name) / "adapter_model.safetensors").items()}  # fmt: skip
    modules = {key.partition(".lora_")[0] for key in adapter if ".lora_" in key}
    frozen = {}
    for key, value in load_file(BASE / "model.safetensors").items():
        module = f"base_model.model.{key.removesuffix('.weight')}"
        layer = ".base_layer" if module in modules else ""
        layer = (
            ".original_module" if f"{module}.modules_to_save.default.weight" in adapter else layer
        )
        frozen[f"{module}{layer}.weight"] = value
    step = folder / "global_step3"
    step.mkdir(parents=True)
    (folder / "latest").write_text("global_step3")
    flat = torch.cat([value.flatten() for value in adapter.values()])
    shapes = {key: value.shape for key, value in adapter.items()}
    state: dict[str, Any] = {
        "module": {**frozen, **adapter},
        "param_shapes": [shapes],
        "frozen_param_shapes": {k: v.shape for k, v in frozen.items()} if with_base else None,
        "frozen_param_fragments": frozen if with_base else None,
        "buffer_names": [],
        "shared_params": {},
        "global_steps": 3,
    }
    torch.save(state, step / "mp_rank_00_model_states.pt")
    adam = {"exp_avg": flat * 2, "exp_avg_sq": flat * 3, "step": 3}
    optimizer = {
        "zero_stage": 2,
        "partition_count": 1,
        "single_partition_of_fp32_groups": [flat],
        "base_optimizer_state": {"state": {0: adam}, "param_groups": [{"lr": 0.1, "params": [0]}]},
    }
    torch.save(
        {"optimizer_state_dict": optimizer}, step / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    )
    shutil.copy(folder_of(name) / "adapter_config.json", folder)
    return folder


@pytest.mark.parametrize("name", ["dora", "lora_save_lm_head"])
def test_a_deepspeed_checkpoint_of_a_peft_model(name: str, tmp_path: Path) -> None:
    saved = deepspeed_of(tmp_path / "checkpoint-3", name)
    source = open_any(saved)
    states = {(parameter, kind) for parameter, kind, _ in source.states()}
    assert ("model.layers.0.self_attn.q_proj.lora_A.weight", "exp_avg") in states
    convert(saved, tmp_path / "peft", "peft")
    before = load_file(folder_of(name) / "adapter_model.safetensors")
    after = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    convert(saved, tmp_path / "hf", "hf", config=BASE, merge_lora=True)
    convert(BASE, tmp_path / "same", "hf", adapter=folder_of(name), merge_lora=True)
    ours, same = (load_file(tmp_path / one / "model.safetensors") for one in ("hf", "same"))
    assert ours.keys() == same.keys()
    assert all(torch.equal(ours[key], same[key]) for key in ours)


def test_a_deepspeed_checkpoint_without_its_base_is_merged_into_one(tmp_path: Path) -> None:
    saved = deepspeed_of(tmp_path / "checkpoint-3", "lora", with_base=False)
    with pytest.raises(CheckpointError, match="nothing of that name"):
        convert(saved, tmp_path / "hf", "hf", config=BASE, merge_lora=True)
    convert(BASE, tmp_path / "hf", "hf", adapter=saved, merge_lora=True)
    (saved / "adapter_config.json").unlink()
    with pytest.raises(CheckpointError, match="put it there"):
        convert(saved, tmp_path / "peft", "peft")


def test_what_a_conversion_says_and_refuses(tmp_path: Path) -> None:
    lora, out = folder_of("lora"), tmp_path / "out"
    code, said, _ = overland(BASE, out, "--to", "hf", "--adapter", lora, "--merge-lora")
    assert code == 0
    assert "merged: 4 matrices, each compared with base + adapter" in said
    assert "logits of base + adapter and of the merged model differ by" in said
    quantized = tmp_path / "quantized"
    shutil.copytree(BASE, quantized)
    config = json.loads((BASE / "config.json").read_text())
    config["quantization_config"] = {"load_in_4bit": True}
    (quantized / "config.json").write_text(json.dumps(config))
    saved = deepspeed_of(tmp_path / "checkpoint-3", "lora")
    for arguments, sentence in [
        ([lora, "--to", "hf", "--merge-lora"], "contains only adapters: give their base model"),
        ([lora, "--to", "hf"], "(it names 'base', which is not looked up)"),
        ([lora, "--to", "peft", "--merge-lora"], "omit --merge-lora"),
        ([BASE, "--to", "hf", "--adapter", lora], "give both"),
        ([BASE, "--to", "hf", "--merge-lora"], "has no adapters"),
        ([BASE, "--to", "peft"], "has no adapters"),
        ([quantized, "--to", "hf", "--adapter", lora, "--merge-lora"], "quantization_config"),
        ([saved, "--to", "hf", "--config", BASE], "--merge-lora to merge them into the weights"),
        ([saved, "--to", "hf", "--adapter", lora, "--merge-lora"], "already has adapters"),
    ]:
        source, *others = arguments
        code, _, error = overland(source, tmp_path / "new", *others)
        assert code == 2, arguments
        assert sentence in error
        assert len(error.splitlines()) == 1
        assert not (tmp_path / "new").exists()


Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


def config_with(**changes: Any) -> Any:
    def change(folder: Path) -> None:
        path = folder / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def tensors_with(changes: dict[str, Tensor | None]) -> Any:
    def change(folder: Path) -> None:
        path = folder / "adapter_model.safetensors"
        tensors = {**load_file(path), **changes}
        save_file({k: v for k, v in tensors.items() if v is not None}, path, {"format": "pt"})

    return change


def text(contents: str) -> Any:
    return lambda folder: (folder / "adapter_config.json").write_text(contents)


HOSTILE: list[tuple[Any, str]] = [
    (config_with(peft_type="LOHA"), "peft_type = 'LOHA'; only LORA is supported"),
    (config_with(bias="all"), "bias = 'all'"),
    (config_with(megatron_config={"a": 1}), "megatron_config = "),
    (config_with(fan_in_fan_out=True), "fan_in_fan_out = True is not supported"),
    (config_with(lora_bias=True), "lora_bias = True is not supported"),
    (config_with(trainable_token_indices=[1]), "trainable_token_indices"),
    (config_with(target_parameters=["a"]), "target_parameters"),
    (config_with(of_a_later_version=1), "of_a_later_version = 1 is not supported"),
    (config_with(init_lora_weights="pissa_niter_4"), "changes the frozen weights"),
    (config_with(layers_to_transform=[0], layers_pattern="h"), "only 'layers' is supported"),
    (config_with(r="8"), "r = '8' is not a value that PEFT writes there"),
    (config_with(r=0), "expected a rank of 1 or more"),
    (config_with(r=10**30), "does not fit the other parts and the rank, 1000"),
    (config_with(lora_alpha=[16]), "lora_alpha = [16] is not a value that PEFT writes there"),
    (
        config_with(lora_alpha=float("nan")),
        "lora_alpha = nan is not a value that PEFT writes there",
    ),
    (config_with(target_modules=None), "target_modules is empty"),
    (config_with(target_modules={"a": 1}), "target_modules = {'a': 1} is not"),
    (config_with(target_modules="(q_proj"), "is not a valid regular expression"),
    (config_with(target_modules="(.+)+x"), "could take forever to match"),
    (config_with(exclude_modules=".*" * 9 + "!"), "could take forever to match"),
    (config_with(rank_pattern={"(.|.)*x": 4}), "could take forever to match"),
    (config_with(target_modules=["k_proj"]), "q_proj, which adapter_config.json does not name"),
    (config_with(layers_to_transform=[1]), "0.self_attn.q_proj, which adapter_config.json does"),
    (config_with(lora_alpha=1e30), "lora_alpha = 1e+30 is more than 1,000,000"),
    (config_with(alpha_pattern={"q_proj": 1e30}), "is more than 1,000,000"),
    (config_with(rank_pattern={"q_proj": 4}), "does not fit the other parts and the rank, 4"),
    (config_with(rank_pattern=[1]), "rank_pattern = [1] is not"),
    (config_with(base_model_name_or_path={"../..": 1}), "is not a name"),
    (config_with(use_dora=True), "lacks model.layers.0.self_attn.q_proj.lora_magnitude_vector"),
    (config_with(modules_to_save=["lm_head"]), "lacks lm_head, one of its modules_to_save"),
    (text("[]"), "holds a list, expected an object"),
    (text('{"r": '), "is not valid JSON"),
    (text("[" * 100_000), "is not valid JSON"),
    (lambda folder: (folder / "adapter_model.safetensors").unlink(), "no adapter_model.safe"),
    (lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"x" * 99), "is not a safe"),
    (tensors_with({Q: None}), "lacks model.layers.0.self_attn.q_proj.lora_A.weight"),
    (tensors_with({Q: None, Q.replace("_A", "_B"): None}), "some of the adapters are missing"),
    (tensors_with({Q: torch.zeros(9, 64)}), "has shape [9, 64]"),
    (tensors_with({Q: torch.zeros(8, 63)}), "adapters belong to another model"),
    (tensors_with({Q: torch.zeros(8, 64, 1, 1)}), "adapters of convolutions are not supported"),
    (tensors_with({Q: torch.full((8, 64), torch.nan)}), "holds values that are not finite"),
    (tensors_with({Q: torch.zeros(8, 64, dtype=torch.int32)}), "has dtype torch.int32"),
    (tensors_with({"elsewhere.weight": torch.zeros(1)}), "does not begin with base_model.model."),
    (
        tensors_with({"base_model.model.more.weight": torch.zeros(1)}),
        "neither an adapter nor in modules_to_save",
    ),
    (tensors_with({Q.replace("A.weight", "A.bias"): torch.zeros(8)}), "lora_A.bias: this is not"),
    (tensors_with({Q.replace(".weight", ".a.weight"): torch.zeros(8, 64)}), "twice, under two"),
]


def test_a_flipped_byte_of_an_export_is_found(tmp_path: Path) -> None:
    """Also in weights, which are read as a whole by evaluation and in slices by training."""
    exported = tmp_path / "exported"
    convert(folder_of("lora"), exported, "peft")
    convert(BASE, tmp_path / "hf", "hf")
    for folder, name, words in (
        (exported, "adapter_model.safetensors", ("--to", "peft")),
        (tmp_path / "hf", "model.safetensors", ("--to", "hf")),
    ):
        assert overland(folder, tmp_path / "good", *words)[0] == 0
        shutil.rmtree(tmp_path / "good")
        right = (folder / name).read_bytes()
        for at in (9, len(right) - 2):  # in the header, in the data
            damaged = bytearray(right)
            damaged[at] ^= 1
            (folder / name).write_bytes(damaged)
            code, _, error = overland(folder, tmp_path / "new", *words)
            assert code == 2
            assert name in error
            assert "damaged" in error
            assert len(error.splitlines()) == 1
        (folder / name).write_bytes(right)
        (folder / "checksums.json").write_text("[1]")
        code, _, error = overland(folder, tmp_path / "new", *words)
        assert (code, len(error.splitlines())) == (2, 1)
    # Another tool may replace the file, and says so by removing the sums.
    (exported / "checksums.json").unlink()
    assert overland(exported, tmp_path / "good", "--to", "peft")[0] == 0


@pytest.mark.parametrize(("change", "sentence"), HOSTILE, ids=[one[:40] for _, one in HOSTILE])
def test_a_bad_adapter_is_one_sentence(change: Any, sentence: str, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    shutil.copytree(folder_of("lora"), adapter)
    change(adapter)
    arguments = ("--to", "hf", "--adapter", adapter, "--merge-lora")
    code, _, error = overland(BASE, tmp_path / "out", *arguments)
    assert code == 2
    assert sentence in error
    assert len(error.splitlines()) == 1
    assert not (tmp_path / "out").exists()
