"""A folder in which the commands of the docs make sense: runs, texts and configs by their names."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np

from tests.cli.processes import overland

CONFIG = """\
[job]
dump_folder = "outputs/run"

[model]
name = "llama3"
flavor = "debug"
overrides = {{ hidden_size = 32, intermediate_size = 64, num_hidden_layers = 2, \
num_attention_heads = 4, num_key_value_heads = 4, vocab_size = 300 }}

[training]
dataset_path = "texts.jsonl"
seq_len = 32
local_batch_size = 4
steps = {steps}

[data]
vocab_size = 300
holdout = 0.1

[validation]
enable = true
steps = 1

[lr_scheduler]
warmup_steps = 1
"""
RUNS = ("llama", "a", "b", "mixture", "mine")


def make_example(folder: Path, steps: int) -> None:
    texts = [f"class Node{i}: value = {i} * {i}" for i in range(300)]
    records = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (folder / "texts.jsonl").write_text(records)
    (folder / "prompts.jsonl").write_text('{"prompt": "class"}\n{"prompt": "value"}\n')
    (folder / "my-corpus").mkdir()
    for i, text in enumerate(texts[:3]):
        (folder / "my-corpus" / f"{i}.txt").write_text(text)
    np.arange(999, dtype=np.uint16).tofile(folder / "tokens.uint16.bin")
    (folder / "run.toml").write_text(CONFIG.format(steps=steps))
    overland("train", "run.toml", "job.dump_folder=runs/quickstart", cwd=folder, NGPU="1")
    for name in RUNS:
        shutil.copytree(folder / "runs/quickstart", folder / "runs" / name)
    for name in ("Llama-3.1-8B", "t5"):
        shutil.copytree(folder / "runs/quickstart/tokenizer", folder / name)
