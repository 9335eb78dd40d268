"""One row of the comparison, Hugging Face's, by its own `Trainer`:
`python benchmarks/gpu/peer_transformers.py 1B`.

Its defaults for bfloat16 (float32 parameters, autocast, fused AdamW), SDPA attention, not compiled,
no recomputation. Only the data is ours (random tokens, as on our side). Prints one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from shapes import SHAPES, STEPS, Shape
from torch import Tensor
from transformers.trainer import Trainer
from transformers.trainer_callback import TrainerCallback

sys.path.insert(0, str(Path(__file__).parents[2]))

from overland.config.schema import Model
from overland.models.registry import model_config


class RandomTokens(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __init__(self, shape: Shape, vocab_size: int) -> None:
        self.seq_len, self.vocab_size = shape.seq_len, vocab_size

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.randint(0, self.vocab_size, (self.seq_len,))
        return {"input_ids": tokens, "labels": tokens}


class Clock(TrainerCallback):  # type: ignore[misc]
    """The second half of the steps."""

    def __init__(self) -> None:
        self.start = self.end = 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % STEPS == 0:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.start, self.end = self.end, time.perf_counter()


def measure(shape: Shape) -> dict[str, Any]:
    ours = model_config(
        Model(name="llama3", flavor=shape.flavor, overrides=dict(shape.overrides))
    ).to_hf()
    config = transformers.LlamaConfig(**ours)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = transformers.LlamaForCausalLM._from_config(config, attn_implementation="sdpa")
    return timed(model, shape, config.vocab_size)


def timed(model: Any, shape: Shape, vocab_size: int) -> dict[str, Any]:
    """Trains a model by transformers' own trainer."""
    arguments = transformers.TrainingArguments(
        tempfile.mkdtemp(),
        per_device_train_batch_size=shape.rows,
        max_steps=2 * STEPS,
        learning_rate=1e-4,
        bf16=True,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    clock = Clock()
    data = RandomTokens(shape, vocab_size)
    Trainer(model, arguments, train_dataset=data, callbacks=[clock]).train()
    on_gpu = torch.cuda.is_available()
    return {
        "tokens_per_second": STEPS * shape.tokens / (clock.end - clock.start),
        "memory_gib": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("shape", choices=SHAPES)
    print("RESULT " + json.dumps(measure(SHAPES[parser.parse_args().shape])), flush=True)


if __name__ == "__main__":
    main()
