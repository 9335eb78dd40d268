"""Other libraries to compare with, each in a folder of its own, so that nothing else can come to
need them. Torch, transformers and what these need are the environment's."""

from __future__ import annotations

import subprocess
import sys

from tests.cli.processes import ROOT

PEFT = ("peft==0.21.2", "accelerate==1.15.0", "psutil==7.2.2")
DATASETS = (
    "datasets==5.2.0", "dill==0.4.1", "multiprocess==0.70.19", "pandas==3.1.1",
    "python-dateutil==4.0.0", "six==1.17.0", "xxhash==4.1.0",
)  # fmt: skip
TRL = (*PEFT, "trl==1.16.0", *DATASETS)
TORCHTITAN = (
    *DATASETS, "torchtitan==0.2.2", "torchdata==0.11.0", "tyro==1.0.16",
    "docstring_parser==0.18.0", "typeguard==4.6.0", "einops==0.8.2",
)  # fmt: skip
AXOLOTL = (*TRL, "axolotl==0.19.0", "addict==2.4.0", "art==6.5")
NANOCHAT = (
    "rustbpe==0.1.0", "tiktoken==0.14.0", "wandb==0.31.0", "kernels==0.17.2", "psutil==7.2.2",
)  # fmt: skip
"""What nanochat needs; its own code is a clone."""


def install(name: str, packages: tuple[str, ...], marker: str = "") -> None:
    """Puts packages where only scripts find them that call this: .venv/NAME. They are there if
    `marker` is, a folder of one of them; by default, NAME."""
    place = ROOT / ".venv" / name
    if not (place / (marker or name)).is_dir():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        subprocess.run([*command, "--target", str(place), *packages], check=True)
    sys.path.append(str(place))
