"""A user's own model computes the same in every layout, buffers included, and is refused by name
where a layout cannot split it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F
from typer.testing import CliRunner

from overland.apps.convert import convert
from overland.apps.proofs.layout import difference
from overland.apps.proofs.layouts import WAYS, parse
from overland.apps.proofs.pool import RankPool
from overland.checkpoint.read import open_checkpoint
from overland.checks import check_config
from overland.cli.main import app
from overland.config.load import load_config
from overland.config.schema import JobConfig
from overland.errors import CheckpointError, ModelError
from overland.models import DecoderConfig, register_model, registry
from overland.models.attention import Attention
from overland.models.decoder import MLP, Decoder, Head, SelfAttention
from overland.models.init import Normal
from overland.world import World
from tests.jobs import losses_and_norms, run_job, tiny_job

SIZES: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}


@dataclass(frozen=True)
class OwnConfig(DecoderConfig):
    counts: bool = False  # a model whose state changes in every forward pass
    kind: str = "good"


@dataclass(frozen=True)
class NamedConfig(OwnConfig):
    def to_hf(self) -> dict[str, Any]:
        return {**super().to_hf(), "hidden_act": "relu"}


class OwnMLP(MLP):
    """ReGLU, times a number that is computed from another buffer, and maybe from a counter."""

    def __init__(self, config: OwnConfig) -> None:
        super().__init__(config)
        self.counts = config.counts
        self.register_buffer("turn", torch.empty(2, dtype=torch.complex64), persistent=False)
        self.register_buffer("level", torch.empty(1))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def init_buffers(self) -> None:
        self.turn = torch.polar(torch.full((2,), 0.5), torch.arange(2.0))  # assigned
        self.level.fill_(0.75)  # or filled
        self.calls.zero_()

    def forward(self, x_BSD):
        level = self.level + self.turn.imag.sum()
        if self.counts:
            self.calls += 1
            level = level + 0.01 * self.calls
        inner = F.relu(self.gate_proj(x_BSD)) * self.up_proj(x_BSD)
        return self.down_proj(inner * level.to(inner.dtype))


class OtherMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.only = nn.Linear(32, 32)

    def forward(self, x_BSD):
        return self.only(x_BSD)


class OwnAttention(SelfAttention):
    def forward(self, x_BSD, cos_BSd, sin_BSd, mask):
        return self.o_proj(self.q_proj(x_BSD).cumsum(dim=1))


class CappedHead(Head):
    def forward(self, hidden_BSD, objective=None, fields=None):
        return 30 * torch.tanh(super().forward(hidden_BSD, objective, fields) / 30)


class NotADecoder(nn.Module):
    def __init__(self, config: OwnConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.vocab_size)

    def init_rule(self, name: str) -> Normal:
        return Normal(0.1, name)


def build(config: OwnConfig, attention: str) -> nn.Module:
    if config.kind == "not a decoder":
        return NotADecoder(config)
    model = Decoder(config, attention)
    for layer in model.model.layers.values():
        layer.mlp = OtherMLP() if config.kind == "other names" else OwnMLP(config)
    if config.kind == "nothing":
        return None  # type: ignore[return-value]
    if config.kind == "no rule":
        model.init_rule = lambda name: None
    if config.kind == "named blocks":
        blocks = {f"block{name}": layer for name, layer in model.model.layers.items()}
        model.model.layers = nn.ModuleDict(blocks)
    if config.kind == "own head":
        model.lm_head = CappedHead(config.hidden_size, config.vocab_size, bias=False)
    if config.kind == "shared block":
        model.model.layers["2"].mlp = model.model.layers["0"].mlp
    if config.kind == "tied by hand":
        model.lm_head.weight = model.model.embed_tokens.weight
    if config.kind == "parameter outside":
        model.extra = nn.Linear(2, 2)
    if config.kind == "second attention":
        model.look = nn.ModuleDict({"core": Attention()})
    if config.kind == "no core":
        for layer in model.model.layers.values():
            layer.self_attn.__class__ = OwnAttention
    if config.kind == "no start":
        model.model.layers["3"].self_attn.register_buffer("table", torch.zeros(3))
    return model


def register() -> None:
    if "own" not in registry._MODELS:
        flavors = {"own": OwnConfig(**SIZES), "counting": OwnConfig(**SIZES, counts=True)}
        kinds = ("not a decoder", "other names", "parameter outside", "no start", "own head",
                 "shared block", "tied by hand", "nothing", "no rule",
                 "named blocks", "second attention", "no core")  # fmt: skip
        flavors |= {kind: OwnConfig(**SIZES, kind=kind) for kind in kinds}
        register_model("own", flavors=flavors, config_class=OwnConfig, build=build)
        named = {"named": NamedConfig(**SIZES)}
        register_model("named", flavors=named, config_class=NamedConfig, build=build)


def job(folder: Path, name: str = "shard1", flavor: str = "own", **sections: Any) -> JobConfig:
    layout = parse(name)
    ways = [WAYS[way]["parallelism"] for way in layout.ways]
    parallelism = {**layout.parallelism, **{k: v for way in ways for k, v in way.items()}}
    sections.setdefault("training", {})
    sections["training"] = {
        "steps": 3,
        "local_batch_size": 8 // layout.degrees.get("shard", 1),
        **sections["training"],
    }
    model = {"name": "own", "flavor": flavor, "overrides": {}}
    return tiny_job(folder, model=model, parallelism=parallelism, **sections)


def curve(world: World, config: JobConfig) -> list[tuple[float, float]]:
    register()
    return losses_and_norms(world, config)


def test_a_registered_model_is_the_same_in_every_layout(ranks: RankPool, tmp_path: Path) -> None:
    (alone,) = ranks.run(1, curve, job(tmp_path))
    plain = tiny_job(tmp_path, model={"name": "llama3", "overrides": SIZES}, training={"steps": 3})
    assert abs(ranks.run(1, curve, plain)[0][0][0] - alone[0][0]) > 1e-4  # not a plain Llama
    for name in ("pp2:ZBVZeroBubble", "tp2", "cp2", "shard2"):
        layout = parse(name)
        for found in ranks.run(layout.num_ranks, curve, job(tmp_path, name)):
            assert max(difference(found, alone, 0), difference(found, alone, 1)) < 1e-9, name


@pytest.mark.parametrize("name", ["pp2", pytest.param("pp2xtp2", marks=pytest.mark.long)])
def test_persistent_buffers_are_saved_and_resumed(
    ranks: RankPool, tmp_path: Path, name: str
) -> None:
    def counting(folder: str, steps: int) -> JobConfig:
        saves = {"enable": True, "interval": 2}
        return job(
            tmp_path / folder, name, "counting", checkpoint=saves, training={"steps": steps},
            lr_scheduler={"total_steps": 4},
        )  # fmt: skip

    size = parse(name).num_ranks
    unbroken = ranks.run(size, curve, counting("a", 4))
    first = ranks.run(size, curve, counting("b", 2))
    second = ranks.run(size, curve, counting("b", 4))
    assert [one + two for one, two in zip(first, second, strict=True)] == unbroken
    with open_checkpoint(tmp_path / "b" / "checkpoint" / "step_4") as saved:
        buffers = {name for name in saved.tensors if name.endswith((".level", ".calls", ".turn"))}
        layers = [f"model.model.layers.{n}.mlp." for n in range(4)]
        assert buffers == {f"{layer}{b}" for layer in layers for b in ("level", "calls")}
        assert saved.read("model.model.layers.3.mlp.calls") >= 4


def forget_buffers(world: World, config: JobConfig) -> None:
    """A run whose checkpoints hold no buffers, as they did once."""
    import overland.training.state as state

    register()
    found, state.named_buffers = state.named_buffers, lambda parts: {}
    try:
        run_job(world, config)
    finally:
        state.named_buffers = found


def test_a_checkpoint_without_buffers_still_loads(ranks: RankPool, tmp_path: Path) -> None:
    saves = {"enable": True, "interval": 2}
    ranks.run(1, forget_buffers, job(tmp_path, checkpoint=saves, training={"steps": 2}))
    (found,) = ranks.run(1, curve, job(tmp_path, checkpoint=saves, training={"steps": 3}))
    assert len(found) == 1


@pytest.mark.parametrize(
    ("flavor", "layout", "says"),
    [
        ("not a decoder", "pp2", "model of OwnConfig does not say what passes between its blocks"),
        ("not a decoder", "tp2", "NotADecoder is not a Decoder, so tp = 2 cannot split it"),
        ("not a decoder", "cp2", "NotADecoder is not a Decoder, so cp = 2 cannot split it"),
        ("other names", "tp2", r"cannot split model\.layers\.0\.mlp\.only\.weight"),
        ("parameter outside", "pp2", r"extra\.weight is outside model\."),
        ("parameter outside", "tp2", r"cannot split extra\.weight"),
        ("parameter outside", "cp2", r"cannot know whether extra\.weight treats every token"),
        ("other names", "cp2", r"cannot know whether model\.layers\.0\.mlp\.only\.weight"),
        ("second attention", "cp2", r"cannot know whether look\.core treats every token"),
        ("no core", "cp2", r"layers\.0\.self_attn \(OwnAttention\) does not call its module core"),
        ("own head", "tp2", "this model's own head, CappedHead, would be ignored"),
        ("own head", "pp2xtp2", "this model's own head, CappedHead, would be ignored"),
        ("shared block", "pp2", r"model\.layers\.0 and model\.layers\.2 share one module, mlp"),
        ("shared block", "shard2", r"model\.layers\.0 and model\.layers\.2 share one module, mlp"),
        ("tied by hand", "shard2", r"model\.embed_tokens\.weight and lm_head\.weight are one para"),
        ("nothing", "shard1", "build function of OwnConfig returned None, expected a torch.nn"),
        ("no rule", "shard1", r"init_rule\('model.embed_tokens.weight'\) of Decoder returned None"),
        ("no start", "shard2", r"model\.layers\.3\.self_attn\.table"),
    ],
)
def test_what_a_layout_cannot_do_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flavor: str, layout: str, says: str
) -> None:
    from overland.apps.check.fake_step import fake_steps

    monkeypatch.setattr(registry, "_MODELS", dict(registry._MODELS))  # gone after the test
    register()
    with pytest.raises(ModelError, match=says):
        fake_steps(job(tmp_path, layout, flavor), parse(layout).num_ranks)


def saved_run(ranks: RankPool, folder: Path, name: str) -> Path:
    model = {"name": name, "flavor": name, "overrides": {}}
    saves = {"enable": True, "interval": 1}
    ranks.run(1, curve, tiny_job(folder, model=model, checkpoint=saves, training={"steps": 1}))
    return folder


def test_an_export_carries_buffers_and_says_that_logits_were_not_compared(
    ranks: RankPool, tmp_path: Path
) -> None:
    run, target = saved_run(ranks, tmp_path / "run", "named"), tmp_path / "hf"
    words = ["convert", str(run), str(target), "--to", "hf", "--verify", "logits"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "logits were not compared, only weights: NamedConfig is a custom model" in (done.output)
    assert json.loads((target / "config.json").read_text())["hidden_act"] == "relu"
    assert "model.layers.3.mlp.level" in load_file(target / "model.safetensors")


def test_a_model_is_not_exported_as_the_plain_one_that_it_inherits_from(
    ranks: RankPool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = saved_run(ranks, tmp_path / "run", "own")
    with pytest.raises(CheckpointError, match=r"OwnConfig.*does not define to_hf\(\)"):
        convert(run, tmp_path / "hf", "hf")
    (tmp_path / "config.json").write_text(json.dumps(NamedConfig(**SIZES).to_hf()))
    convert(run, tmp_path / "hf", "hf", config=tmp_path / "config.json")

    monkeypatch.setattr(registry, "_MODELS", dict(registry._MODELS))  # gone after the test
    register()
    for name, count in (("own", 1), ("named", 0)):
        words = [f"model.name={name}", f"model.flavor={name}", "checkpoint.last_save_in_hf=true"]
        said = [str(one) for one in check_config(load_config("llama3_debug", words, {}), 1)]
        assert sum("has no to_hf() of its own" in line for line in said) == count, said
