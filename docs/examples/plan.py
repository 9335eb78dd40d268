"""A decoder with an MLP of its own, and a plan. Its rows can be split over `cp`, since the MLP
treats every token by itself; its matrices cannot be split over `tp`."""

from dataclasses import dataclass

from overland.models import DecoderConfig, register_model
from overland.parallel.plans import register_plan


@dataclass(frozen=True)
class SquaredConfig(DecoderConfig):
    attention_flops = DecoderConfig.attention_flops  # attention costs what it costs there


def build_squared(config, attention):
    from torch import nn
    from torch.nn import functional as F

    from overland.models.decoder import Decoder
    from overland.models.init import Normal

    class Squared(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
            self.outer = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

        def forward(self, x_BSD):
            return self.outer(F.relu(self.inner(x_BSD)).square())

    class SquaredDecoder(Decoder):
        def init_rule(self, name):
            if ".mlp." in name:
                return Normal(config.initializer_range, name)
            return super().init_rule(name)

    model = SquaredDecoder(config, attention)
    for layer in model.model.layers.values():
        layer.mlp = Squared()
    return model


def open_plan():
    from overland.parallel.plans.decoder import DecoderPlan

    class SquaredPlan(DecoderPlan):
        axes = ("cp",)
        token_by_token = ("mlp",)

    return SquaredPlan()


register_model(
    "squared",
    flavors={
        "tiny": SquaredConfig(
            model_type="llama",
            vocab_size=96,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
        )
    },
    config_class=SquaredConfig,
    build=build_squared,
)
register_plan(SquaredConfig, open_plan)
