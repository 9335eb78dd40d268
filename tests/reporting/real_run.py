"""A real run with two kills and two resumes, for its report.

python -m tests.reporting.real_run FOLDER [STEPS]
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from tests.cli.processes import ROOT, overland, start_overland, wait_for_step

CONFIG = """\
[job]
dump_folder = "run"
description = "A tiny Llama on code and prose"

[model]
name = "llama3"
flavor = "debug"
overrides = {{ hidden_size = 32, intermediate_size = 64, num_hidden_layers = 2, \
num_attention_heads = 4, num_key_value_heads = 2, vocab_size = 512 }}

[training]
seq_len = 32
local_batch_size = 4
steps = {steps}

[data]
vocab_size = 512
folder = "data"
holdout = 0.3  # of 31 files, the text of which changes, so that some are always among them

[data.sources.code]
path = "code"
weight = 3.0

[data.sources.prose]
path = "prose"

[optimizer]
lr = 3e-3

[lr_scheduler]
warmup_steps = 5
decay_type = "cosine"

[checkpoint]
interval = {interval}
async_mode = "disabled"  # a kill after the next step finds it committed

[metrics]
log_freq = 1
enable_tensorboard = false
sample_prompt = "def "
sample_at_validation = true

[validation]
enable = true
freq = {interval}
steps = 2
"""


def make_real_run(folder: Path, steps: int = 60) -> Path:
    """Trains `steps` steps in three sessions; the first two are killed between two checkpoints."""
    train_and_kill(folder, steps)
    overland("train", "run.toml", cwd=folder, NGPU="1")
    return folder / "run"


def train_and_kill(folder: Path, steps: int) -> None:
    """The first two sessions."""
    for name, files in (
        ("code", sorted((ROOT / "overland" / "data").glob("*.py"))),
        ("prose", sorted((ROOT / "docs").glob("*.md"))),
    ):
        (folder / name).mkdir(parents=True)
        for file in files:
            (folder / name / f"{file.stem}.txt").write_bytes(file.read_bytes())
    interval = steps // 6
    (folder / "run.toml").write_text(CONFIG.format(steps=steps, interval=interval))
    for lost_after in (2, 4):
        process = start_overland("train", "run.toml", cwd=folder, NGPU="1")
        last = interval * lost_after + interval // 2
        wait_for_step(folder / "run" / "metrics.jsonl", last)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


if __name__ == "__main__":
    print(make_real_run(Path(sys.argv[1]).absolute(), *map(int, sys.argv[2:])))
