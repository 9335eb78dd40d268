"""A user's module whose rows interact, or seem to."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from overland.models import register_model, registry
from overland.models.init import Constant, Normal
from overland.models.inner import InnerLoss
from overland.objectives import register_objective
from overland.objectives.gathered import Gathered
from overland.objectives.objective import Objective


@dataclass(frozen=True)
class KindConfig:
    kind: str = "separate"
    vocab_size: int = 512


@dataclass(frozen=True)
class FeaturesConfig(KindConfig):
    objective = "compared"


class Network(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.embed = nn.Embedding(512, 8)
        self.norm = nn.BatchNorm1d(8) if kind == "batch norm" else nn.Identity()
        if kind == "frozen norm":
            self.norm = nn.BatchNorm1d(8).eval()
        self.dropout = nn.Dropout(0.5 if "dropout" in kind else 0.0)
        self.head = nn.Linear(8, 512, bias=False)
        self.inner = InnerLoss("aux", 1.0) if kind == "inner" else None
        self.register_buffer("calls", torch.zeros(()))

    def init_buffers(self) -> None:
        self.calls.zero_()
        if isinstance(self.norm, nn.BatchNorm1d):
            self.norm.reset_running_stats()

    def forward(self, tokens_BS: Tensor, labels_BS: Tensor | None = None) -> Tensor:
        x_BSD = self.dropout(self.embed(tokens_BS))
        if self.kind == "counting":  # its state changes with every pass
            self.calls += 1
            x_BSD = x_BSD * self.calls
        x_BSD = self.norm(x_BSD.transpose(1, 2)).transpose(1, 2)
        if "mixed" in self.kind:  # with a head that starts at zero, only gradients show it
            x_BSD = x_BSD - x_BSD.mean(dim=0)
            x_BSD = x_BSD + (0.5 * torch.randn_like(x_BSD) if "noise" in self.kind else 0.0)
            logits = self.head(x_BSD).flatten(0, 1)
            return F.cross_entropy(logits, labels_BS.flatten(), reduction="sum")
        if self.inner is not None:
            x_BSD = self.inner(x_BSD, x_BSD.mean(dim=0).square().mean().expand(len(x_BSD)))
        if self.kind == "contrastive":
            x_BD = x_BSD.mean(dim=1)
            return F.cross_entropy(x_BD @ x_BD.T, torch.arange(len(x_BD)), reduction="sum")
        loss_BS = x_BSD.square().sum(dim=2)
        if self.kind == "noise":
            loss_BS = loss_BS + torch.randn_like(loss_BS) * self.head.weight.sum()
        if self.kind == "per row":
            return loss_BS.sum(dim=1)
        if self.kind == "tuple":
            return loss_BS.sum(), x_BSD  # type: ignore[return-value]
        if self.kind == "narrow sum":
            return loss_BS.bfloat16().sum()
        if self.kind == "once per pass":
            return loss_BS.sum() + self.embed.weight.square().sum()
        return loss_BS.mean() if self.kind == "mean" else loss_BS.sum()

    def init_rule(self, name: str) -> Constant | Normal:
        if name.startswith("norm"):
            return Constant(1.0)
        if name.startswith("head"):
            return Constant(0.0)
        return Normal(0.3, name)


class Features(nn.Module):
    """Features of rows, for an objective that compares them."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.objective = kind, None
        self.embed = nn.Embedding(512, 8)

    def forward(self, tokens_BS: Tensor, **fields: Tensor) -> Tensor:
        x_BD = self.embed(tokens_BS).mean(dim=1)
        if self.kind == "compared, mixed":
            x_BD = x_BD - x_BD.mean(dim=0)
        assert self.objective is not None
        return self.objective.compare(x_BD, {} if "without" in self.kind else fields)

    def init_rule(self, name: str) -> Normal:
        return Normal(0.3, name)


class Narrow(Features):
    def forward(self, tokens_BS: Tensor) -> Tensor:
        return super().forward(tokens_BS)


class Compared(Gathered):
    def loss(self, features_BD: Tensor, fields: object) -> tuple[Tensor, dict[str, Tensor]]:
        own = torch.arange(len(features_BD))
        return F.cross_entropy(features_BD @ features_BD.T, own, reduction="none"), {}


class Centered(Objective):
    def loss(self, terms_Bk: Tensor, fields: object) -> tuple[Tensor, dict[str, Tensor]]:
        return (terms_Bk[:, 0] - terms_Bk[:, 0].mean()).square(), {}


if "interacting" not in registry._MODELS:
    kinds = ("separate", "contrastive", "mean", "batch norm", "dropout", "counting", "mixed",
             "mixed after dropout", "mixed with noise", "inner", "once per pass", "frozen norm",
             "noise", "narrow sum", "per row", "tuple")  # fmt: skip
    flavors = {kind: KindConfig(kind) for kind in kinds}
    build = lambda config, attention: Network(config.kind)
    register_model("interacting", flavors=flavors, config_class=KindConfig, build=build)
    kinds = ("compared", "compared, mixed", "compared, without fields", "compared, narrow")
    flavors = {kind: FeaturesConfig(kind) for kind in kinds}
    build = lambda config, attention: (Narrow if "narrow" in config.kind else Features)(config.kind)
    register_model("features", flavors=flavors, config_class=FeaturesConfig, build=build)
    register_objective("compared", Compared)
    register_objective("centered", Centered)
