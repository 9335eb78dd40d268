"""One row of the comparison, ours: `python benchmarks/gpu/ours.py 1B [--profile] [key=value …]`.

Trains a few steps through the real loop and prints one line of JSON. With --profile a few more
steps are traced and their time on the device is summed by kind of kernel. With --world 8 this is
one rank of eight (local_world.py). `@name=value` sets a constant of a module in place of a config
key, for experiments that have no key.
"""

from __future__ import annotations

import argparse
import json
import os
import pkgutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import local_world
import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from kinds import device_time
from shapes import SHAPES, STEPS, Shape

from overland.config.schema import JobConfig
from overland.kernels.nf4 import pack
from overland.models.nf4 import narrow_matrices
from overland.parallel.comm import process_group
from overland.training.build import build_run
from overland.training.callbacks import Callback, Record
from overland.training.loop import train
from overland.training.run import Run
from overland.world import World
from overland.world.devices import device_type

TRACED_STEPS = 3
RANKS_PER_NODE = 8


class Recorder(Callback):
    def __init__(self, run: Run) -> None:
        self.records: list[Record] = []
        self.first_step_seconds = 0.0

    def on_log(self, run: Run, record: Record) -> None:
        self.first_step_seconds = self.first_step_seconds or process_seconds()
        self.records.append(record)


def job(shape: Shape, folder: str, changes: list[str]) -> JobConfig:
    settings: dict[str, dict[str, Any]] = {
        "job": {"dump_folder": folder},
        "model": {"name": "llama3", "flavor": shape.flavor, "overrides": dict(shape.overrides)},
        "training": {
            "dataset": "random",
            "seq_len": shape.seq_len,
            "local_batch_size": shape.rows,
            "steps": 2 * STEPS,
            "float8": shape.float8,
        },
        "optimizer": {"lr": 1e-4},
        "lr_scheduler": {"warmup_steps": 2},
        "compile": {"enable": True},
        "metrics": {"log_freq": STEPS, "enable_tensorboard": False},
        "checkpoint": {"enable": False},
    }
    if shape.lora_rank:
        settings["training"] |= {"dataset_path": str(documents(shape, Path(folder)))}
        settings["data"] = {
            "folder": folder, "packing": "best_fit", "document_mask": True, "add_eos": False,
        }  # fmt: skip
        settings["lora"] = {
            "rank": shape.lora_rank, "alpha": 32.0, "targets": "all-linear",
            "base": shape.lora_base,
        }  # fmt: skip
    for change in changes:
        name, _, value = change.partition("=")
        section, key = name.split(".")
        settings[section] = {**settings.get(section, {}), key: parse(value)}
    return JobConfig.model_validate(settings)


def documents(shape: Shape, folder: Path) -> Path:
    """Random tokens in documents about as long as conversations are: half of them shorter than 300
    tokens, a few as long as a row."""
    draw = np.random.default_rng(0)
    total = 2.2 * STEPS * shape.tokens
    path = folder / "documents.jsonl"
    with path.open("w") as file:
        while total > 0:
            length = int(min(draw.lognormal(np.log(300), 0.9), shape.seq_len))
            total -= length
            file.write(json.dumps({"tokens": draw.integers(0, 512, length + 2).tolist()}) + "\n")
    return path


def draw_narrow(run: Run) -> None:
    """Gives random values to weights in 4 bits, which begin as zeros: a GPU multiplies those in
    less time than others."""
    model = run.model.parts[0]
    for name, columns in narrow_matrices(model).items():
        packed = model.get_parameter(name)
        weight = torch.randn((len(packed), columns), device=packed.device) * 0.02
        packed.data.copy_(pack(weight))


def parse(value: str) -> Any:
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        return value


def set_constant(change: str) -> None:
    """@overland.models.loss.KERNEL_CHUNK_TOKENS=4096"""
    name, _, value = change.removeprefix("@").partition("=")
    owner, _, constant = name.rpartition(".")
    setattr(pkgutil.resolve_name(owner), constant, parse(value))


def measure(
    shape: Shape, changes: list[str], profile: bool, world: World, network: str
) -> dict[str, Any]:
    if world.size > 1:
        local_world.use(network)
        group = local_world.process_group(world.size, device_type())
    else:
        group = process_group(JobConfig().comm, world, device_type())
    for change in changes:
        if change.startswith("@"):
            set_constant(change)
    with tempfile.TemporaryDirectory() as folder, group as device:
        config = job(shape, folder, [change for change in changes if not change.startswith("@")])
        run = build_run(config, world, device, log_ranks=())
        draw_narrow(run)
        recorder = Recorder(run)
        run.callbacks = [recorder]
        train(run)
        timed = recorder.records[-1]  # of the second half
        on_gpu = device.type == "cuda"
        memory = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0
        result = {
            "tokens_per_second": timed["tokens_per_second"],
            "memory_gib": memory,
            "loss": timed["loss"],
            "first_step_seconds": recorder.first_step_seconds,
        }
        if profile:
            run.config = traced = run.config.model_copy(deep=True)
            traced.training.steps += TRACED_STEPS
            try:
                result["kinds"] = device_time(lambda: train(run), TRACED_STEPS)
            except Exception as error:  # the row is worth more than its profile
                print(f"no profile: {error!r}", file=sys.stderr)
    return result


def process_seconds() -> float:
    """Since this process began, imports and all (Linux)."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--world", type=int, default=1, help="ranks, of which only one exists")
    parser.add_argument("--network", choices=local_world.NETWORKS, default="none")
    parser.add_argument("changes", nargs="*")
    args = parser.parse_intermixed_args()
    world = World(size=args.world, local_size=min(args.world, RANKS_PER_NODE))
    row = measure(SHAPES[args.shape], args.changes, args.profile, world, args.network)
    print("RESULT " + json.dumps(row))


if __name__ == "__main__":
    main()
