"""Other libraries to compare with, each in a folder of its own, so that nothing else can come to
need them. Torch, transformers and what these need are the environment's."""

from __future__ import annotations

import subprocess
import sys

from tests.cli.processes import ROOT

PEFT = ("peft==0.21.2", "accelerate==1.15.0", "psutil==7.2.2")
TRL = (
    *PEFT, "trl==1.16.0", "datasets==5.2.0", "dill==0.4.1", "multiprocess==0.70.19",
    "pandas==3.1.1", "python-dateutil==4.0.0", "six==1.17.0", "xxhash==4.1.0",
)  # fmt: skip


def install(name: str, packages: tuple[str, ...]) -> None:
    """Puts packages where only scripts find them that call this: .venv/NAME."""
    place = ROOT / ".venv" / name
    if not (place / name).is_dir():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        subprocess.run([*command, "--target", str(place), *packages], check=True)
    sys.path.append(str(place))
