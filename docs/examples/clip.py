"""Pictures and their captions, brought together by two towers (CLIP, Radford et al. 2021): of all
captions of the global batch, each picture finds its own, and each caption its picture."""

from dataclasses import dataclass

import numpy as np

from overland.data.registry import register_source
from overland.models import register_model
from overland.objectives import register_objective


@dataclass(frozen=True)
class ClipConfig:
    vocab_size: int = 32
    width: int = 16
    objective = "contrastive"

    def sample_fields(self):
        return {"pixels": ("float32", (1, 8, 8)), "words": ("int64", (4,))}


def build_clip(config, attention):
    import torch
    from torch import nn
    from torch.nn import functional as F

    from overland.models.init import Constant, Normal

    class Clip(nn.Module):
        def __init__(self):
            super().__init__()
            width = config.width
            self.patches = nn.Linear(16, width)
            self.embedding = nn.Embedding(config.vocab_size, width)
            self.image_out = nn.Linear(width, width, bias=False)
            self.text_out = nn.Linear(width, width, bias=False)
            self.log_scale = nn.Parameter(torch.empty(1))
            self.objective = None  # the trainer sets it

        def forward(self, pixels, words, **fields):
            patches = pixels.unfold(2, 4, 4).unfold(3, 4, 4).flatten(4).flatten(1, 3)
            patches = patches.to(self.patches.weight.dtype)
            image = self.image_out(F.gelu(self.patches(patches)).mean(dim=1))
            text = self.text_out(F.gelu(self.embedding(words)).mean(dim=1))
            # Everything with parameters happens here, the temperature too.
            image = F.normalize(image, dim=-1) * self.log_scale.exp()
            return self.objective.compare(
                torch.stack([image, F.normalize(text, dim=-1)], dim=1), fields
            )

        def init_rule(self, name):
            if name == "log_scale":
                return Constant(2.0)
            return Constant(0.0) if name.endswith("bias") else Normal(0.3, name)

    return Clip()


def make_contrastive():
    import torch
    from torch.nn import functional as F

    from overland.objectives.gathered import Gathered

    class Contrastive(Gathered):
        metrics = ("accuracy",)

        def loss(self, features, fields):
            """Of all rows of the global batch: features has the shape (rows, 2, width)."""
            logits = features[:, 0] @ features[:, 1].T
            own = torch.arange(len(logits), device=logits.device)
            losses = F.cross_entropy(logits, own, reduction="none")
            losses = (losses + F.cross_entropy(logits.T, own, reduction="none")) / 2
            return losses, {"accuracy": (logits.argmax(dim=1) == own).to(losses.dtype)}

    return Contrastive()


class Captions:
    """Squares somewhere in a picture, and words that say where and how bright."""

    kind = "arrays"
    fields = {"pixels": ("float32", (1, 8, 8)), "words": ("int64", (4,))}

    def chunks(self):
        return ["0", "1"]

    def read(self, chunk):
        draw = np.random.default_rng(int(chunk))
        for _ in range(64):
            row, column, size, light = draw.integers(1, 5, 4)
            pixels = np.zeros((1, 8, 8), np.float32)
            pixels[0, row : row + size, column : column + size] = light
            yield {"pixels": pixels, "words": np.array([row, column + 8, size + 16, light + 24])}


register_source("captions", Captions)
register_objective("contrastive", make_contrastive)
register_model("clip", flavors={"tiny": ClipConfig()}, config_class=ClipConfig, build=build_clip)
