"""Paints held-out images with the model of a run: `overland train vit_mae_quickstart`, then

python docs/scripts/vit_mae_picture.py runs/vit_mae_quickstart docs/images/vit-mae-shapes.png

Each row shows two images: as they are, the patches that the encoder is shown, and the painting.
"""

from __future__ import annotations

import struct
import sys
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from overland.checkpoint.folder import newest_in
from overland.checkpoint.read import open_checkpoint
from overland.config.load import load_config
from overland.config.schema import DataSource
from overland.data.registry import HELD_OUT_SHAPES
from overland.data.wanted import WantedSource
from overland.models.registry import build_model, model_config
from overland.models.vit_mae import ViTMAE, patches

ROWS, PER_ROW, SCALE, GAP = 4, 2, 2, 6
LOW, HIGH = -1.6, 1.6  # of the shades of shapes


def main(run: Path, picture: Path) -> None:
    config = load_config(str(run / "config.toml")).config
    model = build_model(model_config(config.model))
    assert isinstance(model, ViTMAE)
    with open_checkpoint(newest_in(run)) as saved:
        model.load_state_dict({name: saved.read(f"model.{name}") for name in model.state_dict()})
    source = WantedSource(config, "validation", HELD_OUT_SHAPES, DataSource()).made_images()
    assert source is not None
    pixels = np.empty((ROWS * PER_ROW, *source.shape), np.float32)
    for number, image in enumerate(pixels):
        source.fill(number, image)
    write_png(picture, rows_of_three(model, torch.from_numpy(pixels)))


@torch.no_grad()
def rows_of_three(model: ViTMAE, pixels_BCHW: Tensor) -> Tensor:
    size = model.config.patch_size
    patches_BNP = patches(pixels_BCHW, size)
    painted_BNP, is_hidden_BN = model.paint(pixels_BCHW)
    hidden = is_hidden_BN[..., None]
    columns = [
        patches_BNP,
        torch.where(hidden, HIGH, patches_BNP),
        torch.where(hidden, painted_BNP, patches_BNP),
    ]
    images = torch.stack([unpatched(one, model.config.grid, size) for one in columns], dim=1)
    large = images.repeat_interleave(SCALE, -1).repeat_interleave(SCALE, -2)
    framed = torch.nn.functional.pad(large, (GAP, 0, GAP, 0), value=HIGH)
    lines = [torch.cat(list(line.flatten(0, 1)), dim=1) for line in framed.split(PER_ROW)]
    return torch.nn.functional.pad(torch.cat(lines), (0, GAP, 0, GAP), value=HIGH)


def unpatched(patches_BNP: Tensor, grid: tuple[int, int], size: int) -> Tensor:
    """The first channel, as images."""
    x = patches_BNP.unflatten(2, (size, size, -1))[..., 0].unflatten(1, grid)
    return x.permute(0, 1, 3, 2, 4).flatten(3).flatten(1, 2)


def write_png(path: Path, image_HW: Tensor) -> None:
    grey = ((image_HW - LOW) / (HIGH - LOW)).clamp(0, 1).mul(255).to(torch.uint8).numpy()
    lines = b"".join(b"\0" + line.tobytes() for line in grey)
    head = struct.pack(">IIBBBBB", grey.shape[1], grey.shape[0], 8, 0, 0, 0, 0)
    chunks = ((b"IHDR", head), (b"IDAT", zlib.compress(lines, 9)), (b"IEND", b""))
    data = b"\x89PNG\r\n\x1a\n"
    for name, body in chunks:
        data += (
            struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
        )
    path.write_bytes(data)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
