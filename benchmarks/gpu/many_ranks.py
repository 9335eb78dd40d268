"""Every layout over NCCL, with several ranks on one GPU, and the memory of each rank.

    python benchmarks/gpu/many_ranks.py layouts resumes memory [--into docs/evidence]

Each part writes a table and skips the rows that it already has, so that several short sessions fill
it. Start `nvidia-cuda-mps-control -d` before, or the ranks take turns. Nothing is timed: the ranks
share the device, and NCCL sends through sockets.
"""

from __future__ import annotations

import argparse
import gc
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from overland.apps.proofs.evidence import Evidence
from overland.apps.proofs.layout import SPREADS
from overland.apps.proofs.layouts import WAYS, ProofLayout, parse_all
from overland.apps.proofs.pool import RankPool
from overland.config.schema import JobConfig
from overland.world import World

ROOT = Path(__file__).parents[2]
EXACT = """
    shard2 shard4:zero2 rep2xshard2 shard4:zero3_hybrid tp2 tp2xshard2:op pp2 pp2:Interleaved1F1B
    cp2 cp2+documents cp2xtp2 pp2xtp2 cp2xshard2:full shard2+lora shard2+qlora
    tp2+dpo pp2+dpo shard2+vit
"""
# Pairs of (layout, compiled or not, recompute, kind of training), so that each pair occurs.
HALF = """
    shard2 shard4:compile shard4:compile:full shard4:zero2 shard4:zero2:compile:op shard4:accumulate
    shard2:zero0:compile rep2:full rep2xshard2:compile:op shard4:zero3_hybrid:compile:full
    tp2 tp2:compile tp2:full tp2:compile:op tp4:compile:full tp2xshard2:compile tp2xshard2:op
    pp2:compile pp2:GPipe:full pp2:Interleaved1F1B:compile:op pp2xtp2:compile pp2xshard2:full
    cp2 cp2:compile cp2:full cp2:compile+documents cp2xtp2:compile cp2xshard2:compile:full
    cp2+window pp2xcp2:compile
    shard2+float8 shard4:compile+float8 rep2xshard2:compile:full+float8 tp2:compile+float8
    tp2xshard2:op+float8 pp2:compile+float8 cp2:compile:full+float8 cp2xtp2+float8
    shard4:compile+lora tp2+lora tp2xshard2:compile:full+lora pp2:compile+lora cp2:op+lora+documents
    shard2:full+dora shard4:compile+qlora pp2xshard2:full+qlora
    shard2:compile+dpo tp2+dpo pp2:full+dpo cp2:compile:op+dpo rep2xshard2+dpocopy
    shard4:compile+sft pp2xcp2+sft
    shard2+vit shard4:compile:full+vit rep2:compile+vit
    tp2xshard2+sparse tp2:compile:async tp2xshard2:compile:async
"""
SINGLE = (
    "shard4:zero2 tp2xshard2 pp2xtp2 cp2xtp2+documents rep2xshard2:compile tp2:compile:full+lora"
)
OWN = "shard2 shard4:compile rep2:full pp2:compile shard2:accumulate:op"
RESUMES = "shard4 rep2xshard2 tp2xshard2 pp2xtp2 cp2xtp2"

MEMORY = """
    shard1 shard1:compile shard4 shard4:compile shard4:full shard4:compile:full shard4:compile:op
    shard4:zero2:compile rep4:compile rep2xshard2:compile shard4:accumulate:compile
    tp4:compile tp2xshard2 tp2xshard2:compile:full pp4:compile pp2xshard2 pp2xshard2:compile
    pp2xtp2:compile cp4:compile cp2xshard2 cp2xtp2:compile shard4:compile+float8
    tp2xshard2:compile+float8 shard4:compile+lora tp2xshard2:compile+lora
"""
KINDS: dict[str, dict[str, Any]] = {
    "float8": {"training": {"float8": "tensorwise"}},
    "lora": {"lora": {"rank": 16, "targets": "all-linear"}},
}
STEPS = 3
# Rounding grows with the steps (in 20 of bfloat16, a gradient norm differs by 7 % to 44 % from that
# of one rank, whatever the layout), and a mistake shows after two.
EXACT_STEPS, ROUNDED_STEPS = 20, 5
GIB = 2**30

LAYOUTS = """\
# Layouts over NCCL

Each row is a small model, trained from the same seed by several ranks on one GPU over NCCL, with \
the largest relative differences from one rank ({exact} steps in float64, {rounded} in the \
others): in the loss, in the gradient norm and in the loss on held-out data. Next to the number \
format are the bounds for the losses and for the norm: {spreads} times what one rank differs from \
itself, row by row and in the next wider format. `compile` is a real run's compiler, inductor. The \
names are explained in `overland/apps/proofs/layouts.py`. {whose}By \
`python benchmarks/gpu/many_ranks.py layouts`.

| layout | ranks | number format | loss | gradient norm | validation loss | verdict |
|---|---|---|---|---|---|---|
"""
RESUMED = """\
# Checkpoints that resume in any layout, over NCCL

In each row, a small model is trained for 6 steps under the first layout by ranks on one GPU, and \
its checkpoint of step 3, written while it continues with step 4, is resumed for 3 steps under the \
second, in float64 and `deterministic`. The numbers are the largest relative differences from one \
rank. If both layouts are the same, every bit is compared with what the first run computed in \
steps 4 to 6. By \
`python benchmarks/gpu/many_ranks.py resumes`.

| saved by | resumed by | loss | gradient norm | verdict |
|---|---|---|---|---|
"""
HEAD = """\
# Memory of each rank, estimated and measured

Llama 3 of the given size, four ranks on one GPU over NCCL, 1 × 2048 tokens per pass. Measured is \
the most that tensors took on any rank in three steps (`torch.cuda.max_memory_allocated`), \
estimated is what a run prints at its start; both in GiB. By \
`python benchmarks/gpu/many_ranks.py memory`.

| layout | model | state, estimated | measured | peak, estimated | measured | ratio | |
|---|---|---|---|---|---|---|---|
"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="+", choices=["layouts", "resumes", "memory"])
    parser.add_argument("--into", type=Path, default=ROOT / "docs/evidence")
    parser.add_argument("--flavor", default="1B")
    parser.add_argument("--device", default="cuda", help="cpu only tries the script")
    parser.add_argument("--only", default="", help="the rows whose name contains this")
    args = parser.parse_args()
    # For `async`, or torch refuses ranks that share a device.
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    if "layouts" in args.parts:
        prove_layouts(args)
    if "resumes" in args.parts:
        prove("resume", RESUMES, args, "gpu_resume.md", head=RESUMED)
    if "memory" in args.parts:
        if args.device == "cpu":
            parser.error("memory is measured on a GPU only")
        measure_all(args)


def prove_layouts(args: argparse.Namespace) -> None:
    for dtype, names in (("float64", EXACT), ("float32", SINGLE), ("bfloat16", HALF)):
        steps = EXACT_STEPS if dtype == "float64" else ROUNDED_STEPS
        more = "--dtype", dtype, "--steps", str(steps)
        prove("layout", names, args, "gpu_layouts.md", *more, head=head_of())
    with tempfile.TemporaryDirectory() as folder:
        own = Path(folder) / "experts.toml"
        own.write_text(
            '[job]\ncustom_import = "docs.examples.experts"\n'
            '[model]\nname = "experts"\nflavor = "tiny"\n[training]\ndataset = "random"\n'
        )
        # A table of its own: the layouts have the same names.
        more = "--dtype", "bfloat16", "--steps", str(ROUNDED_STEPS)
        head = head_of("The model is docs/examples/experts.py. ")
        prove("layout", OWN, args, "gpu_layouts_own_model.md", *more, config=own, head=head)


def head_of(whose: str = "") -> str:
    steps = {"exact": EXACT_STEPS, "rounded": ROUNDED_STEPS}
    return LAYOUTS.format(**steps, spreads=SPREADS, whose=whose)


def prove(
    verb: str,
    names: str,
    args: argparse.Namespace,
    table: str,
    *more: str,
    head: str,
    config: Path | None = None,
) -> None:
    chosen = " ".join(name for name in names.split() if args.only in name)
    if not chosen:
        return
    Evidence(args.into / table, head, keys=(0,))  # begins the table
    words = [sys.executable, "-m", "overland", "prove", verb, *([str(config)] if config else [])]
    words += [
        "--layouts",
        chosen,
        "--device",
        args.device,
        "--table",
        str(args.into / table),
        *more,
    ]
    subprocess.run(words, cwd=ROOT, check=False)  # what differs is in the table


def measure_all(args: argparse.Namespace) -> None:
    evidence = Evidence(args.into / "gpu_memory.md", HEAD, keys=(0, 1))
    pool = RankPool(args.device)
    try:
        for layout in parse_all(MEMORY):
            if args.only not in layout.name or evidence.holds(layout.name, args.flavor):
                continue
            with tempfile.TemporaryDirectory() as folder:
                try:
                    found = pool.run(layout.num_ranks, measure, job_of(layout, args, folder))
                except AssertionError as error:
                    cells = ["–"] * 5
                    verdict = str(error).strip().splitlines()[-1][:100]
                else:
                    (state, peak), real_state, real_peak = found[0][:2], *map(max, zip(*(
                        (one[2], one[3]) for one in found), strict=True))  # fmt: skip
                    ratio = peak / real_peak
                    values = (state, real_state, peak, real_peak)
                    cells = [*(f"{value / GIB:.2f}" for value in values), f"{ratio:.3f}"]
                    verdict = "equal within 3 %" if abs(ratio - 1) <= 0.03 else "off"
            evidence.add(f"`{layout.name}`", args.flavor, *cells, verdict)
            print(layout.name, *cells, verdict, flush=True)
    finally:
        pool.close()


def job_of(layout: ProofLayout, args: argparse.Namespace, folder: str) -> JobConfig:
    settings: dict[str, dict[str, Any]] = {
        "job": {"dump_folder": folder},
        "model": {"name": "llama3", "flavor": args.flavor},
        "training": {"dataset": "random", "seq_len": 2048, "local_batch_size": 1, "steps": STEPS},
        "metrics": {"log_freq": 1, "enable_tensorboard": False},
        "checkpoint": {"enable": False},
        "compile": {"enable": False},
        "activation_checkpoint": {"mode": "none"},
        "comm": {"ranks_per_device": layout.num_ranks},
    }
    changes = [WAYS[way] for way in layout.ways] + [KINDS[kind] for kind in layout.kinds]
    for change in [*changes, {"parallelism": layout.parallelism}]:
        for section, values in change.items():
            settings[section] = {**settings.get(section, {}), **values}
    if "compile" in layout.ways:
        settings["compile"] = {"enable": True}
    if "accumulate" in layout.ways:
        settings["training"]["global_batch_size"] = 2 * layout.num_ranks
    if layout.degrees.get("pp", 1) > 1:
        settings["training"]["local_batch_size"] = 2 * layout.degrees["pp"]
    return JobConfig.model_validate(settings)


def measure(world: World, config: JobConfig) -> tuple[float, float, int, int]:
    """Returns the bytes of state and at the peak, as estimated and as this rank has them."""
    import torch

    from overland.config.derived import resolve_degrees
    from overland.training.build import build_run
    from overland.training.callbacks import Callback, Record
    from overland.training.fit import estimate
    from overland.training.loop import train
    from overland.training.run import Run
    from overland.world.devices import device_type

    state = 0

    class AfterSteps(Callback):
        def on_log(self, run: Run, record: Record) -> None:
            nonlocal state
            state = allocated() if on_gpu else 0

    kind = device_type()
    on_gpu = kind == "cuda"
    allocated = torch.cuda.memory_allocated
    device = torch.device(kind, torch.cuda.current_device()) if on_gpu else torch.device(kind)
    run = build_run(config, world, device, log_ranks=())
    run.callbacks = [AfterSteps(run)]
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    train(run)
    peak = torch.cuda.max_memory_allocated() if on_gpu else 0
    degrees = resolve_degrees(config.parallelism, world.size, world.local_size)
    memory = estimate(run.config, run.model_config, degrees, device)
    del run
    gc.collect()
    if on_gpu:
        torch._dynamo.reset()
        torch.cuda.empty_cache()
    return memory.state, memory.peak, state, peak


if __name__ == "__main__":
    main()
