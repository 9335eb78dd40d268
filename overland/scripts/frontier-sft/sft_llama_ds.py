"""LoRA fine-tuning of Llama 3 8B on guanaco, with the files in SCRATCH_ROOT: runs `overland train
sft_lora_llama3_8b`. Settings may follow as section.key=value."""

import os
import sys
from pathlib import Path

from overland.cli.main import app

SCRATCH_ROOT = Path(os.environ.get("SCRATCH_ROOT", "/lustre/orion/ALLOCATION/scratch/USER"))
SETTINGS = {
    "model.from": SCRATCH_ROOT / "llama-models-cache",
    "model.hf_assets_path": SCRATCH_ROOT / "llama-tokenizers-cache",
    "training.dataset_path": SCRATCH_ROOT / "data_cache/mlabonne___guanaco-llama2-1k",
    "job.dump_folder": "results_modified",
    "job.custom_import": "zero_to_fp32",  # which copies itself next to the adapters
}

if __name__ == "__main__":
    settings = [f"{key}={value}" for key, value in SETTINGS.items()]
    app(["train", "sft_lora_llama3_8b", *settings, *sys.argv[1:]])
