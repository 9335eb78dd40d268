"""A checkpoint format: a folder with one NumPy file for each weight."""

import numpy as np
import torch

from overland import Format, LazyCheckpoint, register_format
from overland.apps.convert.formats.lazy import held


def detect(path):
    return (path / "weights.txt").is_file()


def open_folder(path, config):
    names = (path / "weights.txt").read_text().split()
    tensors = {name: held(torch.from_numpy(np.load(path / f"{name}.npy"))) for name in names}
    return LazyCheckpoint("arrays", path, tensors, config=config)


def write(checkpoint, folder, options):
    for name, lazy in checkpoint.tensors.items():  # model.<name of the parameter>
        np.save(folder / f"{name}.npy", lazy.load().numpy())
    (folder / "weights.txt").write_text("\n".join(checkpoint.tensors))


register_format("arrays", Format(detect, open_folder, write, weights_only=True))
