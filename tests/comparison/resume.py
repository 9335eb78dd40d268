"""Killed and resumed: what a trainer's model is given, and its losses, compared with the same
trainer's unbroken run.

Each trainer trains in processes of its own. One run is left alone, one is killed with SIGKILL at a
random step and resumed in the way that the trainer's documentation names, once on as many processes
and once on two, with as many rows per step.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

from overland.config.errors import toml_value
from tests.cli.processes import environment, losses
from tests.comparison.shape import BATCH, INTERVAL, LR, NUM_TEXTS, SEED, SEQ_LEN, STEPS, VOCABULARY
from tests.data.chats import write_lines, write_tokenizer

LIMIT_SECONDS = 600
NANOCHAT_TEXTS = 4096
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port"]


Command = Callable[[Path, Path, bool, int], list[str]]
"""Of the files' folder, the run's folder, whether to resume, and the number of processes."""


@dataclass(frozen=True)
class Trainer:
    """A trainer and how it is started."""

    name: str
    command: Command
    """Words after `python`, which are run in the run's own folder."""
    env: dict[str, str] = field(default_factory=dict)
    prepare: Callable[[Path], dict[str, str]] = lambda _: {}
    """Adds to the files, and returns further variables of the environment."""
    losses: Callable[[Path], dict[int, float]] | None = None
    """Loss by step from the run's own log, instead of what the model returned."""


@dataclass
class Session:
    """What one start of a trainer has done."""

    samples: list[list[str]]
    """Of every step, over all processes, sorted."""
    losses: list[float]
    code: int
    said: str

    def __len__(self) -> int:
        return len(self.samples)


@dataclass(frozen=True)
class Outcome:
    """What came of a resume, next to the unbroken run."""

    resumed_after: int
    same_losses: int
    """How many steps after the resume have the loss of the unbroken run, to the bit."""
    loss_difference: float
    """The largest relative difference of a loss."""
    same_steps: int
    """How many steps after the resume have the samples of the unbroken run."""
    repeated: int
    skipped: int
    """Samples that were seen more often, or less often, over the whole run."""
    num_samples: int
    problem: str = ""
    """The error, if it failed."""

    @property
    def num_steps(self) -> int:
        return STEPS - self.resumed_after


def write_files(folder: Path) -> None:
    """Writes a small Llama, its tokenizer and texts, each with a number of its own."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(SEED)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, vocab_size=VOCABULARY,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=2 * SEQ_LEN,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "base")
    write_tokenizer(folder / "base", eos_token="</s>", pad_token="<unk>")
    write_lines(folder / "texts.jsonl", [{"text": text} for text in texts(NUM_TEXTS)])


def texts(count: int) -> list[str]:
    draw = random.Random(SEED)
    words = ["the", "model", "reads", "a", "list", "of", "names", "and", "writes", "one", "line"]
    lengths = [draw.randint(4, 24) for _ in range(count)]
    return [
        f"Record {i}: {' '.join(draw.choice(words) for _ in range(length))}"
        for i, length in enumerate(lengths)
    ]


def prove(trainer: Trainer, files: Path, kill_at: int) -> tuple[Outcome, Outcome]:
    """Returns what came of a resume on one process and on two."""
    place = files / trainer.name.replace(" ", "-").replace(",", "")
    trainer = replace(trainer, env={**trainer.env, **trainer.prepare(files)})
    whole = run(trainer, files, place / "whole", 1)
    assert not whole.code, whole.said
    assert len(whole) == STEPS
    assert max(whole.losses) / min(whole.losses) > 1.02, whole.losses  # or nothing would be shown
    first = run(trainer, files, place / "killed", 1, kill_at=kill_at)
    assert first.code == -signal.SIGKILL, first.said
    assert first.samples == whole.samples[: len(first)]  # or the seed would not hold
    shutil.copytree(place / "killed", place / "on-two", ignore=shutil.ignore_patterns("record"))
    again = run(trainer, files, place / "killed", 1, resume=True)
    on_two = run(trainer, files, place / "on-two", 2, resume=True)
    return compared(whole, again, len(first)), compared(whole, on_two, len(first))


def compared(whole: Session, again: Session, killed_at: int) -> Outcome:
    start = STEPS - len(again)
    if again.code or not 0 < start <= killed_at:
        errors = re.findall(r"^(?:\[rank\d\]: )?(\w+(?:Error|Exception)\b.*)$", again.said, re.M)
        problem = errors[0] if errors else f"{len(again)} steps after step {killed_at}"
        return Outcome(0, 0, 1.0, 0, 0, 0, 0, problem)
    rest, losses = whole.samples[start:], whole.losses[start:]
    was, now = Counter(chain(*rest)), Counter(chain(*again.samples))
    pairs = list(zip(losses, again.losses, strict=True))
    return Outcome(
        start,
        same_losses=sum(a == b for a, b in pairs),
        loss_difference=max(abs(a - b) / max(abs(a), abs(b)) for a, b in pairs),
        same_steps=sum(a == b for a, b in zip(rest, again.samples, strict=True)),
        repeated=(now - was).total(),
        skipped=(was - now).total(),
        num_samples=was.total(),
    )


def run(
    trainer: Trainer,
    files: Path,
    place: Path,
    processes: int,
    resume: bool = False,
    kill_at: int = 0,
) -> Session:
    """Runs a trainer to its end, or until the model is given the batch of step `kill_at`."""
    record = place / ("record-resumed" if resume else "record")
    shutil.rmtree(record, ignore_errors=True)
    place.mkdir(parents=True, exist_ok=True)
    words = trainer.command(files, place, resume, processes)
    env = environment(
        RECORD=str(record), HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", **trainer.env
    )
    with (place / "said.txt").open("w") as said:
        process = subprocess.Popen(
            [sys.executable, *words], cwd=place, env=env, stdout=said, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            deadline = time.monotonic() + LIMIT_SECONDS
            while process.poll() is None and time.monotonic() < deadline:
                if kill_at and len(samples_of(record)) >= kill_at:
                    break
                time.sleep(0.01)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
    samples = samples_of(record)
    losses = losses_of(record)
    if trainer.losses is not None:
        by_step = trainer.losses(place)
        losses = [by_step[step] for step in sorted(by_step)][-len(samples) :]
    return Session(samples, losses, code, (place / "said.txt").read_text())


def samples_of(record: Path) -> list[list[str]]:
    """Returns the samples of each step, over all processes."""
    ranks = [[one["samples"] for one in lines if "samples" in one] for lines in lines_of(record)]
    return [sorted(chain(*step)) for step in zip(*ranks, strict=False)]


def losses_of(record: Path) -> list[float]:
    """Returns the loss of each step, as a mean over processes."""
    ranks = [[one["loss"] for one in lines if "loss" in one] for lines in lines_of(record)]
    return [sum(step) / len(step) for step in zip(*ranks, strict=False)]


def lines_of(record: Path) -> list[list[dict[str, list[str]]]]:
    files = sorted(record.glob("*.jsonl"))
    return [
        [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")]
        for file in files
    ]


def launch(processes: int) -> list[str]:
    if processes == 1:
        return []
    return [*TORCHRUN, str(random.SystemRandom().randint(20000, 30000))]


def hugging_face(kind: str) -> Command:
    def command(files: Path, place: Path, resume: bool, processes: int) -> list[str]:
        words = ["-m", "tests.comparison.hugging_face", kind, str(files), str(STEPS)]
        return [*launch(processes), *words, *(["--resume"] if resume else [])]

    return command


def overland(files: Path, place: Path, resume: bool, processes: int) -> list[str]:
    """The same command starts a run and resumes it."""
    sections = {
        "job": {"dump_folder": "run", "custom_import": "tests.comparison.recorder"},
        "model": {"from": str(files / "base")},
        "training": {
            "dataset_path": str(files / "texts.jsonl"), "seq_len": SEQ_LEN, "steps": STEPS,
            "local_batch_size": BATCH // processes, "global_batch_size": BATCH,
            "dtype": "float32", "mixed_precision_param": "float32",
        },
        "optimizer": {"lr": LR},
        "lr_scheduler": {"warmup_steps": 0},
        "metrics": {"log_freq": 1, "enable_tensorboard": False},
        "checkpoint": {"interval": INTERVAL},
        "data": {"folder": str(files / "prepared")},
    }  # fmt: skip
    lines = []
    for section, values in sections.items():
        lines += [f"[{section}]", *(f"{key} = {toml_value(one)}" for key, one in values.items())]
    file = files / f"overland-{processes}.toml"
    file.write_text("\n".join(lines))
    return [*launch(processes), "-m", "overland", "train", str(file)]


def logged(place: Path) -> dict[int, float]:
    return losses(place / "run" / "metrics.jsonl")


def nanochat(clone: Path) -> Trainer:
    """Its base_train, with the settings of its example for CPUs, made smaller. There are more texts
    than for the others, because it keeps a thousand of them in a buffer."""
    start = ["-m", "tests.comparison.nanochat", str(clone)]
    env = {"TORCHDYNAMO_DISABLE": "1"}  # compiled, it would compute the same, minutes later

    def prepare(files: Path) -> dict[str, str]:
        import pyarrow as pa
        import pyarrow.parquet as pq
        import torch

        base = files / "nanochat-data"
        (base / "base_data_climbmix").mkdir(parents=True, exist_ok=True)
        table = pa.table({"text": texts(NANOCHAT_TEXTS)})
        for name in ("shard_00000", "shard_00001"):  # the last one is for validation
            file = base / "base_data_climbmix" / f"{name}.parquet"
            pq.write_table(table, file, row_group_size=256)
        subprocess.run(
            [sys.executable, *start, "scripts.tok_train", "--vocab-size", "512"],
            env=environment(NANOCHAT_BASE_DIR=str(base), **env), check=True,
        )  # fmt: skip
        num_bytes = torch.load(base / "tokenizer" / "token_bytes.pt")
        first_special = int((num_bytes == 0).nonzero()[0])  # begins every document
        return {**env, "NANOCHAT_BASE_DIR": ".", "RECORD_SPLIT": str(first_special)}

    def command(files: Path, place: Path, resume: bool, processes: int) -> list[str]:
        for name in ("base_data_climbmix", "tokenizer"):
            if not (place / name).exists():
                (place / name).symlink_to(files / "nanochat-data" / name)
        settings = {
            "depth": 2, "aspect-ratio": 32, "head-dim": 32, "max-seq-len": SEQ_LEN,
            "window-pattern": "L", "device-batch-size": BATCH // processes,
            "total-batch-size": BATCH * SEQ_LEN, "num-iterations": STEPS, "warmup-steps": 0,
            "save-every": INTERVAL, "eval-every": -1, "core-metric-every": -1, "sample-every": -1,
        }  # fmt: skip
        if resume:
            saved = (place / "base_checkpoints" / "d2").glob("optim_*_rank0.pt")  # written last
            settings["resume-from-step"] = max(int(file.name.split("_")[1]) for file in saved)
        words = [f"--{key}={value}" for key, value in settings.items()]
        return [*launch(processes), *start, "scripts.base_train", *words]

    return Trainer("nanochat", command, prepare=prepare)


TRAINERS = (
    Trainer("Overland", overland, {"NGPU": "1"}, losses=logged),
    Trainer("transformers Trainer", hugging_face("map"), {"RECORD_PAD": "0"}),
    Trainer("transformers Trainer, streaming", hugging_face("stream"), {"RECORD_PAD": "0"}),
    Trainer(
        "TRL SFTTrainer, packing", hugging_face("packed"), {"RECORD_PAD": "0", "RECORD_SPLIT": "2"}
    ),
)


def trainers(clone: Path | None) -> tuple[Trainer, ...]:
    return (*TRAINERS, nanochat(clone)) if clone else TRAINERS
