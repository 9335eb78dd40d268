"""Preprocessing of images on the device, before the model gets them."""

from __future__ import annotations

import torch
from torch import Tensor

from overland.config.schema import Images
from overland.data.batch import Batch
from overland.data.sources.array_files import WANTED

EPSILON = 1e-6  # added to the variance, so that a constant image becomes zeros


def with_pixels(batch: Batch, settings: Images) -> Batch:
    """Returns the batch with its images preprocessed as `[images]` says. The ledger digests images
    as they are read, because devices differ in the last bit of a mean."""
    if not settings.instance_norm or WANTED not in batch:
        return batch
    return batch.replace(**{WANTED: instance_norm(batch[WANTED])})


def instance_norm(pixels_BCHW: Tensor) -> Tensor:
    """Normalizes each channel of each image to mean 0 and variance 1, in float32."""
    wide = pixels_BCHW if pixels_BCHW.dtype == torch.float64 else pixels_BCHW.to(torch.float32)
    var, mean = torch.var_mean(wide, dim=(-2, -1), correction=0, keepdim=True)
    return (wide - mean) * (var + EPSILON).rsqrt()
