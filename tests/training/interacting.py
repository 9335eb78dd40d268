"""A user's module whose rows interact, or seem to."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from overland.models import register_model, registry
from overland.models.init import Constant, Normal
from overland.objectives import register_objective
from overland.objectives.objective import Objective


@dataclass(frozen=True)
class KindConfig:
    kind: str = "separate"
    vocab_size: int = 512


class Network(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.embed = nn.Embedding(512, 8)
        self.norm = nn.BatchNorm1d(8) if kind == "batch norm" else nn.Identity()
        self.dropout = nn.Dropout(0.5 if kind == "dropout" else 0.0)
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
        if self.kind == "contrastive":
            x_BD = x_BSD.mean(dim=1)
            return F.cross_entropy(x_BD @ x_BD.T, torch.arange(len(x_BD)), reduction="sum")
        loss_BS = x_BSD.square().sum(dim=2)
        return loss_BS.mean() if self.kind == "mean" else loss_BS.sum()

    def init_rule(self, name: str) -> Constant | Normal:
        if name.startswith("norm"):
            return Constant(1.0)
        return Normal(0.3, name)


class Centered(Objective):
    def loss(self, terms_Bk: Tensor, fields: object) -> tuple[Tensor, dict[str, Tensor]]:
        return (terms_Bk[:, 0] - terms_Bk[:, 0].mean()).square(), {}


if "interacting" not in registry._MODELS:
    kinds = ("separate", "contrastive", "mean", "batch norm", "dropout", "counting")
    flavors = {kind: KindConfig(kind) for kind in kinds}
    build = lambda config, attention: Network(config.kind)
    register_model("interacting", flavors=flavors, config_class=KindConfig, build=build)
    register_objective("centered", Centered)
