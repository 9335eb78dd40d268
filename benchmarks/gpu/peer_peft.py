"""One row of the comparison of adapters: Hugging Face's `Trainer` with PEFT, and Liger's kernels:
`python benchmarks/gpu/peer_peft.py 8B-lora [--plain]`.

A frozen bfloat16 model, adapters in float32 under autocast (PEFT's default), SDPA attention, no
recomputation. The data is random tokens in full rows. Prints one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from peer_transformers import timed
from shapes import SHAPES, Shape

sys.path.insert(0, str(Path(__file__).parents[2]))

from overland.config.schema import Model
from overland.models.registry import model_config


def measure(shape: Shape, plain: bool) -> dict[str, Any]:
    ours = model_config(
        Model(name="llama3", flavor=shape.flavor, overrides=dict(shape.overrides))
    ).to_hf()
    if not plain:
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama()
    config = transformers.LlamaConfig(**ours)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = transformers.LlamaForCausalLM._from_config(
            config, attn_implementation="sdpa", dtype=torch.bfloat16
        )
    adapters = peft.LoraConfig(
        r=shape.lora_rank, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    return timed(peft.get_peft_model(model, adapters), shape, config.vocab_size)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--plain", action="store_true", help="without Liger's kernels")
    args = parser.parse_args()
    print("RESULT " + json.dumps(measure(SHAPES[args.shape], args.plain)), flush=True)


if __name__ == "__main__":
    main()
