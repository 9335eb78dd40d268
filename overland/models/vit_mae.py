"""A masked autoencoder for images (He et al. 2021): the encoder sees a quarter of the patches, the
decoder reconstructs the rest, and the loss is the squared error of the reconstructed pixels.

The module tree and the parameter names are those of Hugging Face's checkpoints. Which patches are
visible is a function of the seed, the epoch and the number of the sample: neither the number of
ranks nor restarts change it.
"""

from __future__ import annotations

import hashlib
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from overland.models.draws import hash_bits, signed, unit
from overland.models.structure import Constant, Normal, Rule, Structure
from overland.models.vit_mae_config import NEW_NAMES, OLD_NAMES, ViTMAEConfig


class ViTMAE(nn.Module):
    def __init__(self, config: ViTMAEConfig) -> None:
        super().__init__()
        self.config = config
        self.vit = ViTEncoder(config)
        self.decoder = MAEDecoder(config)
        self.error = PaintingError(config)
        self.seed = 0
        """The seed of the masks, set by the trainer."""

    def forward(
        self,
        pixel_values: Tensor,
        sample_B: Tensor | None = None,
        epoch_B: Tensor | None = None,
        weight_B: Tensor | None = None,
        noise: Tensor | None = None,
    ) -> Tensor:
        """Returns the loss, summed over images: for each, the mean squared error of its masked
        patches. `noise` [B, patches] decides which are visible: those with the smallest values."""
        latent_BSD, order_BN = self.encode(pixel_values, sample_B, epoch_B, noise)
        hidden_BH = order_BN[:, self.config.num_seen :]
        painted_BHP = self.decoder(latent_BSD, order_BN, hidden_BH)
        losses_B: Tensor = self.error(painted_BHP, pixel_values, hidden_BH)
        return (losses_B if weight_B is None else losses_B * weight_B).sum()

    def paint(
        self,
        pixel_values: Tensor,
        sample_B: Tensor | None = None,
        epoch_B: Tensor | None = None,
        noise: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Returns the reconstructed pixels of every patch, and which patches were masked."""
        latent_BSD, order_BN = self.encode(pixel_values, sample_B, epoch_B, noise)
        painted_BNP = self.decoder(latent_BSD, order_BN)
        return painted_BNP, order_BN.argsort(dim=1) >= self.config.num_seen

    def encode(
        self,
        pixel_values: Tensor,
        sample_B: Tensor | None,
        epoch_B: Tensor | None,
        noise: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Returns what the encoder makes of the visible patches, and the patch numbers of each
        image, visible patches first."""
        if sample_B is None:
            sample_B = torch.arange(len(pixel_values), device=pixel_values.device)
        if epoch_B is None:
            epoch_B = torch.zeros_like(sample_B)
        if noise is None:
            noise = uniform(f"{self.seed}/masks", sample_B, epoch_B, self.config.num_patches)
        order_BN = noise.argsort(dim=1)
        return self.vit(pixel_values, order_BN[:, : self.config.num_seen]), order_BN

    def structure(self) -> Structure:
        # Encoder and decoder differ in width and length, so there is no single shape between
        # blocks.
        return Structure(
            blocks=("vit.encoder.layer", "decoder.decoder_layers"),
            compiled=("vit.embeddings", "vit.layernorm", "decoder.decoder_norm", "error"),
            random=False,
            recordable=True,
        )

    def other_names(self, name: str) -> tuple[str, ...]:
        """Returns the name of a parameter in files written by transformers 5."""
        return (name.replace(OLD_NAMES, NEW_NAMES),)

    def init_rule(self, name: str) -> Rule:
        if name.endswith(".bias"):
            return Constant(0.0)
        if "norm" in name:
            return Constant(1.0)
        if name.endswith("projection.weight"):  # like a linear layer over a patch's pixels
            config = self.config
            fan_in = config.num_channels * config.patch_size**2
            return Normal(math.sqrt(2 / (fan_in + config.hidden_size)), name)
        return Normal(self.config.initializer_range, name)


class ViTEncoder(nn.Module):
    def __init__(self, config: ViTMAEConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.embeddings = ViTEmbeddings(config)
        self.encoder = nn.Module()
        self.encoder.layer = nn.ModuleList(
            ViTLayer(config, width, config.num_attention_heads, config.intermediate_size)
            for _ in range(config.num_hidden_layers)
        )
        self.layernorm = nn.LayerNorm(width, config.layer_norm_eps)

    def forward(self, pixel_values: Tensor, seen_BS: Tensor) -> Tensor:
        x_BSD = self.embeddings(pixel_values, seen_BS)
        for layer in self.encoder.layer:  # type: ignore[union-attr]
            x_BSD = layer(x_BSD)
        out_BSD: Tensor = self.layernorm(x_BSD)
        return out_BSD


class ViTEmbeddings(nn.Module):
    """Embeds the visible patches, preceded by a vector for the whole image."""

    def __init__(self, config: ViTMAEConfig) -> None:
        super().__init__()
        width, patch = config.hidden_size, config.patch_size
        self.config = config
        self.cls_token = nn.Parameter(torch.empty(1, 1, width))
        self.patch_embeddings = nn.Module()
        self.patch_embeddings.projection = nn.Conv2d(config.num_channels, width, patch, patch)
        self.register_buffer("position_embeddings", torch.empty(1, config.num_patches + 1, width))

    def init_buffers(self) -> None:
        self.position_embeddings = places(self.config.grid, self.config.hidden_size)

    def forward(self, pixel_values: Tensor, seen_BS: Tensor) -> Tensor:
        # A convolution whose stride equals its width is a product with each patch, and only visible
        # patches need one.
        projection: nn.Conv2d = self.patch_embeddings.projection  # type: ignore[assignment]
        weight_DP = projection.weight.permute(0, 2, 3, 1).flatten(1)
        positions_1ND = self.position_embeddings.to(weight_DP.dtype)
        seen_BSP = patches(pixel_values, self.config.patch_size, seen_BS).to(weight_DP.dtype)
        x_BSD = F.linear(seen_BSP, weight_DP, projection.bias)
        x_BSD = x_BSD + positions_1ND[0, 1:][seen_BS]
        first_11D = self.cls_token + positions_1ND[:, :1]
        return torch.cat((first_11D.expand(len(x_BSD), -1, -1), x_BSD), dim=1)


class MAEDecoder(nn.Module):
    def __init__(self, config: ViTMAEConfig) -> None:
        super().__init__()
        width = config.decoder_hidden_size
        self.config = config
        self.decoder_embed = nn.Linear(config.hidden_size, width)
        self.mask_token = nn.Parameter(torch.empty(1, 1, width))
        self.register_buffer("decoder_pos_embed", torch.empty(1, config.num_patches + 1, width))
        heads, inner = config.decoder_num_attention_heads, config.decoder_intermediate_size
        self.decoder_layers = nn.ModuleList(
            ViTLayer(config, width, heads, inner) for _ in range(config.decoder_num_hidden_layers)
        )
        self.decoder_norm = nn.LayerNorm(width, config.layer_norm_eps)
        self.decoder_pred = nn.Linear(width, config.num_channels * config.patch_size**2)

    def init_buffers(self) -> None:
        self.decoder_pos_embed = places(self.config.grid, self.config.decoder_hidden_size)

    def forward(
        self, latent_BSD: Tensor, order_BN: Tensor, wanted_BH: Tensor | None = None
    ) -> Tensor:
        """Reconstructs the wanted patches, or all. `order_BN` lists visible patches first."""
        place_BN = order_BN.argsort(dim=1)
        seen_BSD = self.decoder_embed(latent_BSD)
        num_hidden = place_BN.shape[1] + 1 - seen_BSD.shape[1]
        hidden_BHD = self.mask_token.expand(len(seen_BSD), num_hidden, -1)
        x_BND = torch.cat((seen_BSD[:, 1:], hidden_BHD), dim=1)
        x_BND = torch.cat((seen_BSD[:, :1], rows_of(x_BND, place_BN)), dim=1)
        x_BND = x_BND + self.decoder_pos_embed.to(x_BND.dtype)
        for layer in self.decoder_layers:
            x_BND = layer(x_BND)
        x_BND = x_BND[:, 1:] if wanted_BH is None else rows_of(x_BND, wanted_BH + 1)
        out_BNP: Tensor = self.decoder_pred(self.decoder_norm(x_BND))
        return out_BNP


class PaintingError(nn.Module):
    """Computes the mean squared error of the reconstructed patches of each image."""

    def __init__(self, config: ViTMAEConfig) -> None:
        super().__init__()
        self.config = config

    def forward(self, painted_BHP: Tensor, pixel_values: Tensor, hidden_BH: Tensor) -> Tensor:
        wide = torch.promote_types(painted_BHP.dtype, torch.float32)
        target_BHP = patches(pixel_values, self.config.patch_size, hidden_BH).to(wide)
        if self.config.norm_pix_loss:
            mean, var = target_BHP.mean(-1, keepdim=True), target_BHP.var(-1, keepdim=True)
            target_BHP = (target_BHP - mean) / (var + 1e-6).sqrt()
        return (painted_BHP.to(wide) - target_BHP).square().mean(-1).mean(-1)


class ViTLayer(nn.Module):
    def __init__(self, config: ViTMAEConfig, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.attention = ViTAttention(width, heads, config.qkv_bias)
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(width, inner)})
        self.output = nn.ModuleDict({"dense": nn.Linear(inner, width)})
        self.layernorm_before = nn.LayerNorm(width, config.layer_norm_eps)
        self.layernorm_after = nn.LayerNorm(width, config.layer_norm_eps)

    def forward(self, x_BSD: Tensor) -> Tensor:
        x_BSD = x_BSD + self.attention(self.layernorm_before(x_BSD))
        inner_BSF = F.gelu(self.intermediate["dense"](self.layernorm_after(x_BSD)))
        return x_BSD + self.output["dense"](inner_BSF)


class ViTAttention(nn.Module):
    def __init__(self, width: int, heads: int, bias: bool) -> None:
        super().__init__()
        self.head_dim = width // heads
        names = ("query", "key", "value")
        self.attention = nn.ModuleDict({name: nn.Linear(width, width, bias) for name in names})
        self.output = nn.ModuleDict({"dense": nn.Linear(width, width)})

    def forward(self, x_BSD: Tensor) -> Tensor:
        q, k, v = (
            self.attention[name](x_BSD).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for name in ("query", "key", "value")
        )
        out_BHSd = F.scaled_dot_product_attention(q, k, v)
        out_BSD: Tensor = self.output["dense"](out_BHSd.transpose(1, 2).flatten(2))
        return out_BSD


def rows_of(x_BND: Tensor, which_BS: Tensor) -> Tensor:
    """Returns the given rows of each sample, in the given order."""
    return x_BND.gather(1, which_BS[..., None].expand(-1, -1, x_BND.shape[-1]))


def patches(pixel_values: Tensor, size: int, which_BS: Tensor | None = None) -> Tensor:
    """Returns the pixels of each patch, row by row, channels last: of some patches, or of all."""
    x = pixel_values.unflatten(3, (-1, size)).unflatten(2, (-1, size))  # B, C, rows, p, columns, p
    x = x.permute(0, 2, 4, 3, 5, 1)
    if which_BS is None:
        return x.flatten(3).flatten(1, 2)
    columns, image_B1 = x.shape[2], torch.arange(len(x), device=x.device)[:, None]
    return x[image_B1, which_BS // columns, which_BS % columns].flatten(2)


def places(grid: tuple[int, int], width: int) -> Tensor:
    """Returns position embeddings: sines and cosines of a patch's column, then of its row, a
    quarter of the width each; zeros for the vector of the whole image."""
    rows, columns = grid
    quarter = width // 4
    rates = 10000.0 ** (-torch.arange(quarter, dtype=torch.float64) / quarter)
    angles_Nq = torch.arange(max(grid), dtype=torch.float64)[:, None] * rates
    along_Nh = torch.cat((angles_Nq.sin(), angles_Nq.cos()), dim=1)
    column = along_Nh[None, :columns].expand(rows, -1, -1)
    row = along_Nh[:rows, None].expand(-1, columns, -1)
    grid_ND = torch.cat((column, row), dim=-1).flatten(0, 1)
    return torch.cat((grid_ND.new_zeros(1, width), grid_ND))[None]


def uniform(seed: str, sample_B: Tensor, epoch_B: Tensor, count: int) -> Tensor:
    """Returns [B, count] numbers from [0, 1) with 24 bits each, which float32 holds exactly. They
    are a pure function of the seed, the epoch and the number of the sample: the same on every rank
    and device, and after a restart."""
    digest = hashlib.blake2b(seed.encode(), digest_size=32).digest()
    keys = [signed(int.from_bytes(digest[i : i + 8])) for i in range(0, 32, 8)]
    row_B = hash_bits(hash_bits(sample_B, (keys[0], keys[1])) + epoch_B, (keys[2], keys[3]))
    places_N = torch.arange(count, device=sample_B.device)
    return unit(hash_bits(row_B[:, None] + places_N, (keys[1], keys[2])))
