"""Writes a checkpoint as one file of float32 weights; with --merge_lora, merges the adapters:

    python checkpoint-63/zero_to_fp32.py --model_dir checkpoint-63 --merge_lora --output_path OUT

MODEL_DIR is a checkpoint of Overland or DeepSpeed, or a PEFT folder; the default is the folder of
this file. A run that imports this module (`job.custom_import`) gets a copy next to the adapters of
each save.
"""

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any, NoReturn

from overland.cli.main import app
from overland.training.callbacks import Callback, register_callback

HERE = Path(__file__).resolve()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model_dir", type=Path, default=HERE.parent)
    parser.add_argument("--output_path", type=Path, default=Path("model.safetensors"))
    parser.add_argument("--merge_lora", action="store_true")
    parser.add_argument(
        "--base_dir", type=Path, help="the base model, if a PEFT folder does not name it"
    )
    given = parser.parse_args()
    base = given.base_dir or base_of(given.model_dir)
    source = [str(base or given.model_dir), str(given.output_path), "--to", "safetensors"]
    adapter = ["--adapter", str(given.model_dir)] if base else []
    app(["convert", *source, *adapter, *(["--merge-lora"] if given.merge_lora else [])])


def base_of(folder: Path) -> Path | None:
    """Returns the base model of adapters; None if the checkpoint itself leads to it."""
    config = folder / "adapter_config.json"
    if not config.is_file() or (folder.absolute().parent / "config.toml").is_file():
        return None
    try:
        named = str(json.loads(config.read_text()).get("base_model_name_or_path") or "no model")
    except (ValueError, AttributeError, OSError):
        refuse(f"{config} is damaged, or not an adapter_config.json of PEFT")
    if Path(named).is_dir():
        return Path(named)
    if (folder / "latest").is_file():  # DeepSpeed's checkpoints include the base model
        return None
    refuse(f"{config} names {named}, which is not a folder here")


def refuse(problem: str) -> NoReturn:
    print(f"{problem}; name the base model with --base_dir", file=sys.stderr)
    sys.exit(2)


class Copies(Callback):
    """Copies this file next to adapters, where people look for it."""

    def on_save(self, run: Any, saved: Any) -> None:
        for folder in run.folder.root.glob("checkpoint-*") if run.world.is_first else ():
            if not (folder / HERE.name).exists():
                shutil.copy(HERE, folder)

    def on_end(self, run: Any) -> None:
        self.on_save(run, None)


if __name__ == "__main__":
    main()
else:
    register_callback(Copies)
