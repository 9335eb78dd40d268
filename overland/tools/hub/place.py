"""Where a snapshot goes, and the lines of a config that lead there.

With SCRATCH_ROOT, one folder per repository below it. Without, where a config looks anyway:
`assets/hf/NAME`, as the recipes and torchtitan have it, and `data/NAME`, where `data.folder` is
searched for datasets by name.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from overland.config.model_from import parts_of

Kind = Literal["model", "tokenizer", "dataset"]

ON_SCRATCH = {"model": "models_cache", "tokenizer": "tokenizers_cache", "dataset": "data_cache"}
HERE = {"model": "assets/hf", "tokenizer": "assets/hf", "dataset": "data"}


def default_folder(kind: Kind, name: str, env: Mapping[str, str] = os.environ) -> Path:
    root = env.get("SCRATCH_ROOT")
    if root:
        return Path(root).expanduser() / ON_SCRATCH[kind] / name.replace("/", "___")
    return Path(HERE[kind]) / name.rpartition("/")[2]


def config_lines(kind: Kind, name: str, folder: Path, subset: str | None) -> str:
    """To paste into a config."""
    path = json.dumps(str(folder), ensure_ascii=False)  # a JSON string is a TOML string
    if kind == "dataset":
        source = re.sub(r"[^\w-]", "_", name.rpartition("/")[2], flags=re.ASCII)
        lines = f"[data.sources.{source}]\npath = {path}\n"
        return lines + (f"subset = {json.dumps(subset)}\n" if subset else "")
    if kind == "model" and parts_of(folder)[0]:
        return f"[model]\nfrom = {path}\n"
    lines = f"[model]\nhf_assets_path = {path}\n"  # Meta's own files do not say the architecture
    return lines + (f"\n[checkpoint]\ninitial_load_path = {path}\n" if kind == "model" else "")
