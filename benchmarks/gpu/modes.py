"""Every recompute mode, attention backend and compile setting on one GPU, at a real Llama's shapes:

    python benchmarks/gpu/modes.py [--flavor 1B] [--rows 2] [--seq-len 8192]

Prints a Markdown table: first and last loss (equal work, equal numbers), tokens per second, memory.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from overland.config.schema import Comm, JobConfig
from overland.parallel.comm import process_group
from overland.training.build import build_run
from overland.training.callbacks import Callback, Record
from overland.training.loop import train
from overland.training.run import Run
from overland.world import World

STEPS, LOG_EVERY = 9, 3
COMPILED = {"compile": {"enable": True}}


def recompute(mode: str, **more: Any) -> dict[str, Any]:
    return {**COMPILED, "activation_checkpoint": {"mode": mode, **more}}


def attention(backend: str) -> dict[str, Any]:
    return {**COMPILED, "model": {"attention": backend}}


MODES: dict[str, dict[str, Any]] = {
    "eager": {},
    "compiled": COMPILED,
    "compiled, recompute op": recompute("selective"),
    "compiled, recompute every 2nd": recompute("selective", selective_ac_option="2"),
    "compiled, recompute full": recompute("full"),
    "compiled, memory budget 0.5": recompute("memory_budget", memory_budget=0.5),
    "eager, recompute op": {"activation_checkpoint": {"mode": "selective"}},
    "eager, recompute full": {"activation_checkpoint": {"mode": "full"}},
    "compiled, attention cudnn": attention("cudnn"),
    "compiled, attention flash": attention("flash"),
    "compiled, attention flex": attention("flex"),
    "compiled, attention sdpa": attention("sdpa"),
    "compiled, documents, auto": {**COMPILED, "data": {"document_mask": True}},
    "eager, offload": {"training": {"enable_cpu_offload": True}},
}


class Recorder(Callback):
    def __init__(self, run: Run) -> None:
        self.records: list[Record] = []

    def on_log(self, run: Run, record: Record) -> None:
        self.records.append(record)


def measure(changes: dict[str, Any], args: argparse.Namespace, device: torch.device) -> str:
    torch._dynamo.reset()
    torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as folder:
        settings: dict[str, dict[str, Any]] = {
            "job": {"dump_folder": folder},
            "model": {"name": "llama3", "flavor": args.flavor},
            "training": {
                "dataset": "random",
                "seq_len": args.seq_len,
                "local_batch_size": args.rows,
                "steps": STEPS,
            },
            "optimizer": {"lr": 1e-4},
            "lr_scheduler": {"warmup_steps": 2},
            "metrics": {"log_freq": LOG_EVERY, "enable_tensorboard": False},
            "checkpoint": {"enable": False},
        }
        for section, values in changes.items():
            settings[section] = {**settings.get(section, {}), **values}
        run = build_run(JobConfig.model_validate(settings), World(), device, log_ranks=())
        recorder = Recorder(run)
        run.callbacks = [recorder]
        train(run)
    first, last = recorder.records[0], recorder.records[-1]
    memory = torch.cuda.max_memory_allocated() / 2**30
    return (
        f"{first['loss']:.4f} | {last['loss']:.4f} | {last['tokens_per_second']:,.0f} | "
        f"{last['mfu']:.1%} | {memory:.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--flavor", default="1B")
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--seq-len", type=int, default=8192)
    parser.add_argument("--only", default="", help="part of a mode's name")
    args = parser.parse_args()
    print(f"Llama 3 {args.flavor}, {args.rows} × {args.seq_len} tokens, torch {torch.__version__}, "
          f"{torch.cuda.get_device_name()}\n")  # fmt: skip
    print(f"| mode | loss, step {LOG_EVERY} | loss, step {STEPS} | tokens/s | MFU | GiB |")
    print("|---|---|---|---|---|---|", flush=True)
    with process_group(Comm(), World(), "cuda") as device:
        for name, changes in MODES.items():
            if args.only not in name:
                continue
            try:
                row = measure(changes, args, device)
            except Exception as error:
                traceback.print_exc(limit=-2)
                row = f"{type(error).__name__}: {str(error).splitlines()[0][:80]}"
            print(f"| {name} | {row} |", flush=True)
            gc.collect()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
