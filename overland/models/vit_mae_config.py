"""The config of a masked autoencoder for images: one frozen record with Hugging Face's field names.

Does not import torch, so that configs are checked quickly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from overland.errors import ModelError
from overland.models.hf_config import check_type, contents_of
from overland.words import did_you_mean

# The beginning of our parameter names, which are those of transformers 4, and of those of 5.
OLD_NAMES, NEW_NAMES = "decoder.decoder_layers.", "decoder.decoder_encoder.layer."

# Keys of a config.json that do not describe the model.
ABOUT_FILES = {"architectures", "dtype", "torch_dtype", "transformers_version", "_name_or_path"}


@dataclass(frozen=True)
class ViTMAEConfig:
    """A Vision Transformer that sees some patches of an image and reconstructs the others (He et
    al. 2021)."""

    model_type: str = "vit_mae"
    image_size: int | tuple[int, int] = 224
    """A number for squares, or height and width."""
    patch_size: int = 16
    num_channels: int = 3
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    decoder_hidden_size: int = 512
    decoder_num_hidden_layers: int = 8
    decoder_num_attention_heads: int = 16
    decoder_intermediate_size: int = 2048
    mask_ratio: float = 0.75
    norm_pix_loss: bool = False
    qkv_bias: bool = True
    hidden_act: str = "gelu"
    layer_norm_eps: float = 1e-12
    initializer_range: float = 0.02
    hidden_dropout_prob: float = 0.0
    attention_probs_dropout_prob: float = 0.0

    objective = "per_sample"  # the model computes its own loss
    casts_samples = True  # images may have any dtype

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of an image."""
        one = self.image_size
        return one if isinstance(one, tuple) else (one, one)

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches."""
        height, width = self.size
        return height // self.patch_size, width // self.patch_size

    @property
    def num_patches(self) -> int:
        return self.grid[0] * self.grid[1]

    @property
    def num_seen(self) -> int:
        """Number of patches that the encoder sees."""
        return int(self.num_patches * (1 - self.mask_ratio))

    def sample_fields(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Returns what a sample must hold: dtype and shape by name."""
        return {"pixel_values": ("float32", (self.num_channels, *self.size))}

    def flops_per_sample(self) -> float:
        """Returns the training FLOP per image by the reporting convention: 6 per matrix element and
        vector that it is applied to, and 12 per element of queries and key. The encoder processes
        only visible patches; the decoder processes all, and predicts the masked ones."""
        pixels, hidden = self.num_channels * self.patch_size**2, self.hidden_size
        seen, painted = self.num_seen + 1, self.num_patches + 1
        width = self.decoder_hidden_size
        num_hidden = self.num_patches - self.num_seen
        matrices = (
            pixels * hidden * self.num_seen + hidden * width * seen + width * pixels * num_hidden
        )
        attention = 0
        for blocks, size, inner, length in (
            (self.num_hidden_layers, hidden, self.intermediate_size, seen),
            (self.decoder_num_hidden_layers, width, self.decoder_intermediate_size, painted),
        ):
            matrices += blocks * length * (4 * size**2 + 2 * size * inner)
            attention += blocks * length**2 * size
        return 6.0 * matrices + 12.0 * attention

    @classmethod
    def from_hf(cls, source: Mapping[str, Any] | str | Path) -> ViTMAEConfig:
        """Reads a config.json, given as its contents, its path, or the folder that holds it."""
        contents, where = contents_of(source)
        kind = contents.get("model_type")
        if kind != "vit_mae":
            raise ModelError(f"{where} has model_type {kind!r:.60}, expected 'vit_mae'")
        known = {key: value for key, value in contents.items() if key not in ABOUT_FILES}
        return cls().override(known)

    def own_name(self, name: str) -> str:
        """Returns our name of a parameter, given its name in a file of transformers."""
        return name.replace(NEW_NAMES, OLD_NAMES)

    def to_hf(self) -> dict[str, Any]:
        return {"architectures": ["ViTMAEForPreTraining"], **asdict(self)}

    def override(self, overrides: Mapping[str, Any]) -> ViTMAEConfig:
        known = [item.name for item in fields(self)]
        overrides = dict(overrides)
        if isinstance(size := overrides.get("image_size"), list | tuple):
            overrides["image_size"] = _height_and_width(size)
        for name, value in overrides.items():
            if name not in known:
                raise ModelError(f"'{name}' is not a key of vit_mae{did_you_mean(name, known)}")
            if not isinstance(value, tuple):
                check_type(ViTMAEConfig, name, value, "vit_mae")
        return replace(self, **overrides)

    def __post_init__(self) -> None:
        if self.model_type != "vit_mae":
            raise ModelError(f"model_type '{self.model_type}' is not vit_mae")
        for item in fields(self):
            value = getattr(self, item.name)
            numbers = value if isinstance(value, tuple) else (value,)
            if type(item.default) is int and min(numbers) < 1:
                raise ModelError(f"{item.name} must be a positive whole number, got {value!r}")
        if any(length % self.patch_size for length in self.size):
            shown = " × ".join(map(str, dict.fromkeys(self.size)))
            raise ModelError(f"patch_size {self.patch_size} does not divide image_size {shown}")
        for prefix in ("", "decoder_"):
            width = getattr(self, f"{prefix}hidden_size")
            heads = getattr(self, f"{prefix}num_attention_heads")
            if width % heads:
                raise ModelError(
                    f"{prefix}num_attention_heads {heads} does not divide {prefix}hidden_size "
                    f"{width}"
                )
            if width % 4:
                raise ModelError(
                    f"{prefix}hidden_size must be a multiple of 4 for its sines and cosines, got "
                    f"{width}"
                )
        if not 0 < self.mask_ratio < 1 or not 0 < self.num_seen < self.num_patches:
            raise ModelError(
                f"mask_ratio {self.mask_ratio} must leave some of the {self.num_patches} patches "
                "visible and some masked"
            )
        if self.hidden_act != "gelu":
            raise ModelError(f"hidden_act '{self.hidden_act}' is not supported; only 'gelu' is")
        if self.hidden_dropout_prob or self.attention_probs_dropout_prob:
            raise ModelError("dropout is not supported: set both dropout probabilities to 0")


def _height_and_width(size: Sequence[Any]) -> tuple[int, int]:
    if len(size) != 2 or any(type(length) is not int for length in size):
        raise ModelError(f"image_size must be a number, or height and width, got {size!r:.60}")
    return size[0], size[1]


FLAVORS: dict[str, ViTMAEConfig] = {
    "debug": ViTMAEConfig(
        image_size=32,
        patch_size=8,
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=128,
        decoder_hidden_size=32,
        decoder_num_hidden_layers=2,
        decoder_num_attention_heads=4,
        decoder_intermediate_size=64,
    ),
    "base": ViTMAEConfig(),
    "large": ViTMAEConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
    ),
    "huge": ViTMAEConfig(
        patch_size=14,
        hidden_size=1280,
        num_hidden_layers=32,
        num_attention_heads=16,
        intermediate_size=5120,
    ),
}
