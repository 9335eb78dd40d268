"""A decoder whose MLPs are mixtures of experts, kept in balance in two ways: by a loss inside each
block, and by a bias per expert that changes after every step (Wang et al. 2024)."""

from dataclasses import dataclass

from overland.models import DecoderConfig, register_model


@dataclass(frozen=True)
class ExpertsConfig(DecoderConfig):
    num_experts: int = 4
    experts_per_token: int = 2
    balance_loss: float = 0.01
    bias_step: float = 1e-3


def build_experts(config, attention):
    import torch
    from torch import nn
    from torch.nn import functional as F

    from overland.models.decoder import Decoder
    from overland.models.init import Normal
    from overland.models.inner import InnerLoss, Statistic

    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            num, width, inner = config.num_experts, config.hidden_size, config.intermediate_size
            self.router = nn.Linear(width, num, bias=False)
            self.up = nn.Parameter(torch.empty(num, width, inner))
            self.down = nn.Parameter(torch.empty(num, inner, width))
            self.balance = InnerLoss("balance_loss", config.balance_loss)
            self.load = Statistic(num)
            self.register_buffer("bias", torch.empty(num))  # saved in checkpoints

        def init_buffers(self):
            self.bias.zero_()

        def forward(self, x_BSD):
            score_BSE = self.router(x_BSD).softmax(dim=-1)
            order_BSk = (score_BSE + self.bias).topk(config.experts_per_token).indices
            chosen_BSE = torch.zeros_like(score_BSE).scatter(-1, order_BSk, 1.0)
            # Per sequence: the share of tokens of each expert, times its mean score.
            share_BE = chosen_BSE.mean(dim=1) / config.experts_per_token
            loss_B = config.num_experts * (share_BE * score_BSE.mean(dim=1)).sum(dim=-1)
            x_BSD = self.balance(x_BSD, loss_B)
            x_BSD = self.load(x_BSD, chosen_BSE.sum(dim=(0, 1)))
            # Every expert computes every token, which is fine for a few small ones.
            inner_BSEI = F.relu(torch.einsum("bsd,edi->bsei", x_BSD, self.up))
            weight_BSE = chosen_BSE * score_BSE
            return torch.einsum("bsei,eid,bse->bsd", inner_BSEI, self.down, weight_BSE)

        def after_step(self):
            """An expert with less than its share of the global batch is chosen more often."""
            load_E = self.load.total
            self.bias += config.bias_step * (load_E.mean() - load_E).sign()

    class ExpertsDecoder(Decoder):
        def init_rule(self, name):
            if ".mlp." in name:
                return Normal(config.initializer_range, name)
            return super().init_rule(name)

    model = ExpertsDecoder(config, attention)
    for layer in model.model.layers.values():
        layer.mlp = Experts()
    return model


register_model(
    "experts",
    flavors={
        "tiny": ExpertsConfig(
            model_type="llama",
            vocab_size=96,
            hidden_size=32,
            intermediate_size=24,
            num_hidden_layers=4,
            num_attention_heads=4,
        )
    },
    config_class=ExpertsConfig,
    build=build_experts,
)
