"""How fast lists of images are read, next to a plain sequential read of the same files.

python benchmarks/images.py [--folder DIR] [--images 64] [--size 1920] [--batch 16] [--rounds 5]

Writes one-channel images of 16 bits as `.npy` files, then reads them in turn: file after file into
one buffer, and as batches of the loader, as a step is given them. The rounds alternate, so that
whatever else the machine does meets both. Files that fit in memory are read from it after the first
round: the loader's own cost shows best then. For a disk, choose a `--folder` on it and more images
than memory holds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from overland.config.schema import Data, JobConfig, Model, Training
from overland.data.batch import batches, read_ahead
from overland.data.corpora import Preparer
from overland.data.prepare import training_data
from overland.data.sampler import Sampler

EPOCHS = 4  # per round: what is read ahead at its end is little then


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--size", type=int, default=1920)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        paths = write_images(Path(folder), options.images, options.size)
        rows = open_rows(Path(folder), options.batch, options.size)
        plain, loader = [], []
        for _ in range(options.rounds + 1):
            plain.append(read_plainly(paths))
            loader.append(read_batches(rows, EPOCHS * options.images // options.batch) / EPOCHS)
    num_bytes = options.images * options.size**2 * 2
    rates = {
        name: num_bytes / statistics.median(seconds[1:]) / 1e9
        for name, seconds in (("plain", plain), ("loader", loader))
    }
    print(json.dumps({
        "images": options.images, "bytes_per_image": num_bytes // options.images,
        "plain_gb_per_s": round(rates["plain"], 2), "loader_gb_per_s": round(rates["loader"], 2),
        "images_per_s": round(rates["loader"] * 1e9 / (num_bytes / options.images), 1),
        "share": round(rates["loader"] / rates["plain"], 3),
    }))  # fmt: skip


def write_images(folder: Path, count: int, size: int) -> list[Path]:
    draw = np.random.default_rng(0)
    paths = [folder / f"{number}.npy" for number in range(count)]
    for path in paths:
        np.save(path, draw.integers(0, 60_000, (size, size), np.uint16))
    (folder / "images.csv").write_text("\n".join(path.name for path in paths) + "\n")
    return paths


def open_rows(folder: Path, batch: int, size: int) -> Sampler:
    sizes = {"image_size": size, "patch_size": size // 15, "num_channels": 1}
    config = JobConfig(
        model=Model(name="vit_mae", flavor="debug", overrides=sizes),
        training=Training(dataset_path=str(folder / "images.csv")),
        data=Data(folder=str(folder)),
    )
    return training_data(config, batch, None, Preparer()).rows


def read_plainly(paths: list[Path]) -> float:
    buffer = bytearray(max(path.stat().st_size for path in paths))
    started = time.perf_counter()
    for path in paths:
        with path.open("rb", buffering=0) as file:
            file.readinto(buffer)
    return time.perf_counter() - started


def read_batches(rows: Sampler, count: int) -> float:
    ahead = read_ahead(batches(rows, 0), depth=4)
    started = time.perf_counter()
    for _ in range(count):
        next(ahead)
    seconds = time.perf_counter() - started
    ahead.close()
    return seconds


if __name__ == "__main__":
    main()
