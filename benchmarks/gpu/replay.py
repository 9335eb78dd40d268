"""A replayed step gives the bits of a plain one: `python benchmarks/gpu/replay.py`.

Short deterministic runs with `compile.cuda_graphs` off and on, validated and saved on the way, must
log the same losses and norms and end with the same weights: in bfloat16 and in 8 bits, with a
checkpoint that is loaded in the middle (parameters move), and in two sessions.
"""

from __future__ import annotations

import gc
import hashlib
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from overland.config.schema import JobConfig
from overland.parallel.comm import process_group
from overland.parallel.whole import Replayed
from overland.training.build import build_run
from overland.training.callbacks import Callback, Record
from overland.training.loop import train
from overland.training.resume import restore
from overland.training.run import Run
from overland.world import World
from overland.world.devices import device_type

STEPS, SAVED = 14, 7
MODEL = {"num_hidden_layers": 4, "vocab_size": 4096, "hidden_size": 1024, "head_dim": 32}
Sections = dict[str, dict[str, Any]]


class Log(Callback):
    def __init__(self, run: Run, loads: bool) -> None:
        self.seen: list[Any] = []
        self.loads = loads

    def on_log(self, run: Run, record: Record) -> None:
        self.seen.append((record["step"], record["loss"], record["grad_norm"]))

    def on_validation(self, run: Run, record: Record) -> None:
        self.seen.append(record)

    def on_step(self, run: Run) -> None:
        if self.loads and run.progress.step == SAVED + 4:
            run.store.wait()
            self.loads = False
            restore(run, run.folder.checkpoints / f"step_{SAVED}")


def job(folder: str, graphs: bool, changes: Sections, steps: int) -> JobConfig:
    settings: Sections = {
        "job": {"dump_folder": folder},
        "model": {"name": "llama3", "flavor": "1B", "overrides": MODEL},
        "training": {
            "dataset": "random",
            "seq_len": 1024,
            "local_batch_size": 4,
            "global_batch_size": 4,
            "steps": steps,
        },
        "lr_scheduler": {"warmup_steps": 2, "total_steps": STEPS},
        "validation": {"enable": True, "dataset": "random", "freq": 5, "steps": 2},
        "checkpoint": {"interval": SAVED},
        "metrics": {"log_freq": 1, "enable_tensorboard": False},
        "compile": {"cuda_graphs": graphs},
        "debug": {"deterministic": True},
    }
    for section, values in changes.items():
        settings[section] = {**settings[section], **values}
    return JobConfig.model_validate(settings)


def outcome(
    device: torch.device, graphs: bool, changes: Sections, loads: bool = False, sessions: int = 1
) -> tuple[list[Any], str, bool]:
    """All that was logged, a hash of the weights, and whether the last steps were replayed."""
    seen: list[Any] = []
    with tempfile.TemporaryDirectory() as folder:
        for session in range(sessions, 0, -1):
            torch._dynamo.reset()
            steps = STEPS if session == 1 else SAVED
            run = build_run(job(folder, graphs, changes, steps), World(), device, log_ranks=())
            log = Log(run, loads)
            run.callbacks = [log]
            train(run)
            seen += log.seen
        weights = hashlib.sha256()
        for parameter in run.model.parts[0].parameters():
            weights.update(parameter.detach().view(torch.int16).cpu().numpy().tobytes())
        replayed = isinstance(run.model, Replayed) and run.model._recording is not None
    del run
    gc.collect()
    torch.cuda.empty_cache()
    return seen, weights.hexdigest()[:12], replayed


def main() -> None:
    with process_group(JobConfig().comm, World(), device_type()) as device:
        runs: dict[str, dict[str, Any]] = {
            "compiled": {"changes": {}},
            "8 bits": {"changes": {"training": {"float8": "tensorwise"}}},
            "a checkpoint loaded on the way": {"changes": {}, "loads": True},
            "two sessions": {"changes": {}, "sessions": 2},
        }
        for name, settings in runs.items():
            plain = outcome(device, False, **settings)
            replayed = outcome(device, True, **settings)
            verdict = "same bits" if plain[:2] == replayed[:2] else "NOT THE SAME"
            how = "replayed" if replayed[2] and not plain[2] else "NOT REPLAYED"
            print(f"{name}: {verdict} ({how}), weights {plain[1]} {replayed[1]}", flush=True)


if __name__ == "__main__":
    main()
