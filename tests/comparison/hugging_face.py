"""A run of transformers' Trainer or of TRL's SFTTrainer, as a user's script would be:

    python -m tests.comparison.hugging_face KIND FOLDER STEPS [--resume]

KIND is map, stream or packed. FOLDER holds `base` (a model and its tokenizer) and `texts.jsonl`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from tests.comparison import recorder  # noqa: F401  (records from here on)
from tests.comparison.shape import BATCH, INTERVAL, LR, SEED, SEQ_LEN
from tests.peers import TRL, install


def main(kind: str, folder: Path, steps: int, resume: bool) -> None:
    from transformers import AutoTokenizer, LlamaForCausalLM

    # The second process on a CPU asks torch.load for "cpu:1", which torch does not know. On GPUs,
    # where the device has such a name, the question does not come up.
    torch.serialization.register_package(
        0, lambda _: None, lambda one, place: one if place.startswith("cpu:") else None
    )
    settings: dict[str, Any] = {
        "output_dir": "run", "max_steps": steps, "save_steps": INTERVAL, "logging_steps": 1,
        "per_device_train_batch_size": BATCH // int(os.environ.get("WORLD_SIZE", "1")),
        "learning_rate": LR, "seed": SEED, "data_seed": SEED, "use_cpu": True, "bf16": False,
        "report_to": "none", "disable_tqdm": True,
    }  # fmt: skip
    model = LlamaForCausalLM.from_pretrained(folder / "base")
    tokenizer = AutoTokenizer.from_pretrained(folder / "base")
    texts = [json.loads(line)["text"] for line in (folder / "texts.jsonl").open()]
    make = packed if kind == "packed" else plain
    trainer = make(model, tokenizer, texts, settings, kind == "stream")
    trainer.train(resume_from_checkpoint=True if resume else None)


def plain(
    model: Any, tokenizer: Any, texts: list[str], settings: dict[str, Any], stream: bool
) -> Any:
    """transformers' Trainer, on a map-style dataset or a stream with a shuffle buffer."""
    from datasets import Dataset
    from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments

    rows = [tokenizer(text, truncation=True, max_length=SEQ_LEN) for text in texts]
    data = Dataset.from_list([{"input_ids": row["input_ids"]} for row in rows])
    return Trainer(
        model=model,
        args=TrainingArguments(**settings),
        train_dataset=(
            data.to_iterable_dataset(num_shards=4).shuffle(seed=SEED, buffer_size=64)
            if stream
            else data
        ),
        # accelerate joins the batches of a stream before it gives every process its part, so all
        # must be as long.
        data_collator=DataCollatorForLanguageModeling(
            tokenizer, mlm=False, pad_to_multiple_of=SEQ_LEN if stream else None
        ),
        processing_class=tokenizer,
    )


def packed(model: Any, tokenizer: Any, texts: list[str], settings: dict[str, Any], _: bool) -> Any:
    """TRL's SFTTrainer with packing."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    return SFTTrainer(
        model=model,
        args=SFTConfig(**settings, packing=True, max_length=SEQ_LEN),
        train_dataset=Dataset.from_list([{"text": text} for text in texts]),
        processing_class=tokenizer,
    )


if __name__ == "__main__":
    install("trl", TRL)
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), "--resume" in sys.argv)
