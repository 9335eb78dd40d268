"""A user's own network, no Decoder: it describes its blocks, and has a plan for `cp`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.nn import functional as F

from overland.errors import ModelError
from overland.models import register_model
from overland.models.init import Constant, Normal
from overland.models.structure import Structure
from overland.parallel.plans import register_plan


@dataclass(frozen=True)
class NetworkConfig:
    vocab_size: int = 96
    width: int = 16
    depth: int = 5
    tied: bool = False
    describes: bool = True
    names: str = "right"
    odd: str = ""


class Block(nn.Module):
    def __init__(self, width: int, number: int, returns_two: bool) -> None:
        super().__init__()
        self.returns_two = returns_two
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Linear(width, width * (number + 1))  # every block is wider than the last
        self.outer = nn.Linear(width * (number + 1), width)

    def forward(self, x):
        x = x + self.outer(F.gelu(self.inner(self.norm(x))))
        return (x, None) if self.returns_two else x


class Network(nn.Module):
    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.width)
        two = config.odd == "returns two"
        self.blocks = nn.ModuleList(Block(config.width, i, two) for i in range(config.depth))
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        if config.tied:
            self.head.weight = self.embed.weight
        if config.odd == "one block twice":
            self.blocks[3] = self.blocks[1]
        if config.odd == "tied blocks":
            self.blocks[2].norm.weight = self.blocks[0].norm.weight
        if config.odd == "lists in another order":
            self.blocks, self.late = self.blocks[:3], self.blocks[3:]
        if config.odd == "a block without parameters":
            self.blocks[1] = nn.GELU()

    def forward(self, tokens_BS, labels_BS=None):
        x = tokens_BS if self.embed is None else self.embed(tokens_BS)
        for block in self.in_order():
            x = block(x)
            if self.config.odd == "returns two":
                x = x[0]
            if self.config.odd == "reads numbers" and x.mean().item() > 1e9:
                return x
        if self.head is None:
            return x
        logits = self.head(x)
        if labels_BS is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), labels_BS.flatten(), reduction="sum")

    def in_order(self):
        blocks = list(self.blocks)
        ways = {
            "lists in another order": lambda: [*blocks, *self.late],
            "backwards": lambda: blocks[::-1],
            "leaves one out": lambda: blocks[:2] + blocks[3:],
            "calls one again": lambda: [*blocks, blocks[0]],
        }
        return ways.get(self.config.odd, lambda: blocks)()

    def init_rule(self, name: str):
        if name.endswith("norm.weight"):
            return Constant(1.0)
        return Constant(0.0) if name.endswith("bias") else Normal(0.3, name)


ODD: dict[str, dict[str, Any]] = {
    "one block twice": {},
    "tied blocks": {"ties": {"blocks.2.norm.weight": "blocks.0.norm.weight"}},
    "tied the other way": {"ties": {"embed.weight": "head.weight"}},
    "named twice": {"first_stage": ("embed", "blocks.0")},
    "no tuple": {"last_stage": "head"},
    "lists in another order": {"blocks": ("late", "blocks")},
    "backwards": {},
    "leaves one out": {},
    "calls one again": {},
    "returns two": {},
    "reads numbers": {},
    "another shape": {"between": lambda tokens: (tokens, 17)},
    "a block without parameters": {},
}


class Described(Network):
    def structure(self) -> Structure:
        said = Structure(
            blocks=("blocks" if self.config.names == "right" else "layers",),
            first_stage=("embed",),
            last_stage=("head",),
            ties={"head.weight": "embed.weight"} if self.config.tied else {},
            between=lambda tokens: (tokens, self.config.width),
        )
        return replace(said, **ODD.get(self.config.odd, {}))


class TokenByToken:
    """Nothing here looks at two tokens at once, so rows are split as they are."""

    axes = ("cp",)

    def uneven(self, config, tp):
        return []

    def check(self, model, degrees):
        if not isinstance(model, Network):
            raise ModelError("not ours")

    def split_tensors(self, model, tp, overlap):
        raise AssertionError

    def split_context(self, model, cp):
        pass


def register() -> None:
    from overland.models import registry

    if "network" not in registry._MODELS:
        flavors = {
            "plain": NetworkConfig(),
            "tied": NetworkConfig(tied=True),
            "silent": NetworkConfig(describes=False),
            "wrong": NetworkConfig(names="wrong"),
            **{odd: NetworkConfig(odd=odd, tied="other way" in odd) for odd in ODD},
        }
        build = lambda config, attention: (Described if config.describes else Network)(config)
        register_model("network", flavors=flavors, config_class=NetworkConfig, build=build)
        register_plan(NetworkConfig, TokenByToken)
