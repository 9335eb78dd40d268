"""What a longer sequence and a deeper model cost: tokens/s of the 1B shape on one GPU.

    python benchmarks/gpu/growth.py --folder docs/evidence

Each point is a few steps of the real loop; the sequence grows at 16,384 tokens per step, and beyond
that one row is a step. The prediction is a sum of what the parts cost at the rates that were
measured at 8192 tokens: no fit. Writes gpu_growth.json and two .svg into the folder.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from overland.apps.report.plot import line_chart
from overland.config.schema import JobConfig
from overland.models.flops import causal_flops_per_token, count_parameters
from overland.parallel.comm import process_group
from overland.training.build import build_run
from overland.training.callbacks import Callback, Record
from overland.training.loop import train
from overland.training.run import Run
from overland.world import World
from overland.world.devices import device_type

LENGTHS = [2048, 4096, 8192, 16384, 32768, 65536, 131072]
DEPTHS = [4, 8, 16, 32]
TOKENS = 16384
# Of the 1B profile at 8192 tokens: FLOP/s of matrix products and of causal attention; seconds per
# token and layer of all else in a block; bytes/s and bytes per parameter of norm and update.
MATMUL, ATTENTION, BLOCK_REST, MEMORY, UPDATE_BYTES = 745e12, 370e12, 1.0e-7, 4.1e12, 28


class Rates(Callback):
    def __init__(self, run: Run) -> None:
        self.values: list[float] = []

    def on_log(self, run: Run, record: Record) -> None:
        self.values.append(record["tokens_per_second"])


def job(folder: str, seq_len: int, layers: int) -> JobConfig:
    steps = 8 if seq_len <= TOKENS else 4 if seq_len < 131072 else 2
    recompute = "full" if seq_len * layers > 65536 * 16 else "none"
    settings: dict[str, dict[str, Any]] = {
        "job": {"dump_folder": folder},
        "model": {"name": "llama3", "flavor": "1B", "overrides": {"num_hidden_layers": layers}},
        "training": {
            "dataset": "random",
            "seq_len": seq_len,
            "local_batch_size": max(1, TOKENS // seq_len),
            "steps": steps,
        },
        "lr_scheduler": {"warmup_steps": 2},
        "compile": {"enable": True},
        "activation_checkpoint": {"mode": recompute},
        "metrics": {"log_freq": steps // 2, "enable_tensorboard": False},
        "checkpoint": {"enable": False},
    }
    return JobConfig.model_validate(settings)


def predicted(run: Run, seq_len: int, layers: int) -> float:
    """Tokens per second."""
    counts = count_parameters(run.model_config)
    dense = 6 * counts.in_matmuls
    attention = causal_flops_per_token(run.model_config, seq_len) - dense
    again = 4 / 3 if run.config.activation_checkpoint.mode == "full" else 1.0
    # Backward attention computes the scores again: 3.5 products for each forward one, not 3.
    block = again * (dense / MATMUL + attention * 3.5 / 3 / ATTENTION + layers * BLOCK_REST)
    update = counts.total * UPDATE_BYTES / MEMORY / max(TOKENS, seq_len)
    return 1 / (block + update)


def measure(seq_len: int, layers: int, device: torch.device) -> dict[str, float]:
    torch._dynamo.reset()
    torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as folder:
        run = build_run(job(folder, seq_len, layers), World(), device, log_ranks=())
        rates = Rates(run)
        run.callbacks = [rates]
        train(run)
    point = {
        "seq_len": seq_len,
        "layers": layers,
        "tokens_per_second": rates.values[-1],
        "predicted": predicted(run, seq_len, layers),
        "gib": torch.cuda.max_memory_allocated() / 2**30,
        "recomputed": float(run.config.activation_checkpoint.mode == "full"),
    }
    print(point, flush=True)
    return point


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, default=Path("docs/evidence"))
    args = parser.parse_args()
    points: list[dict[str, float]] = []
    with process_group(JobConfig().comm, World(), device_type()) as device:
        for seq_len, layers in [(s, 16) for s in LENGTHS] + [(8192, d) for d in DEPTHS if d != 16]:
            try:
                points.append(measure(seq_len, layers, device))
            except torch.OutOfMemoryError as error:
                print(f"{seq_len} tokens, {layers} layers: {str(error)[:80]}")
            gc.collect()
            torch.cuda.empty_cache()
            write(points, args.folder)


def write(points: list[dict[str, float]], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "gpu_growth.json").write_text(json.dumps(points, indent=1))
    by_length = [p for p in points if p["layers"] == 16]
    by_depth = sorted((p for p in points if p["seq_len"] == 8192), key=lambda p: p["layers"])
    for key, some in (("seq_len", by_length), ("layers", by_depth)):
        lines = {
            name: [(p[key], 1e6 / p[name]) for p in some]
            for name in ("tokens_per_second", "predicted")
        }
        lines = {"measured": lines["tokens_per_second"], "predicted": lines["predicted"]}
        label = {"seq_len": "tokens in a sequence", "layers": "layers"}[key]
        chart = line_chart(lines, "microseconds per token, Llama 3 1B", label)
        (folder / f"gpu_growth_{key}.svg").write_text(chart)


if __name__ == "__main__":
    main()
