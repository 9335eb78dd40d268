"""The masked autoencoder of `overland init --from stub` compared with transformers', on one GPU:

    python benchmarks/gpu/vit_mae.py --store docs/evidence/gpu_vit_mae.json

Hidden width 1280, 32 layers, 16 heads, images of 1920² by patches of 128, three quarters hidden;
bfloat16, AdamW, whole steps, images already in the GPU's memory. Each row runs in a process of its
own, ours and transformers' of a batch back to back. transformers' model computes under autocast
with float32 weights, or has its weights in bfloat16; it is compiled, its attention is SDPA's and
its AdamW is fused.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from kinds import device_time

from overland.config.schema import JobConfig
from overland.data.batch import Batch
from overland.models.registry import model_config
from overland.parallel.comm import process_group
from overland.training.build import build_run
from overland.training.step import train_step
from overland.world import World
from overland.world.devices import device_type

MODEL: dict[str, Any] = {
    "image_size": 1920, "patch_size": 128, "num_channels": 1, "hidden_size": 1280,
    "num_hidden_layers": 32, "num_attention_heads": 16, "intermediate_size": 5120,
}  # fmt: skip
SMALL: dict[str, Any] = {"image_size": 64, "patch_size": 16, "num_channels": 1}
BATCHES = (64, 256)
OURS, AUTOCAST, NARROW = "overland", "transformers, autocast", "transformers, bfloat16 weights"
WARM_STEPS, STEPS = 6, 10
PEAK_FLOPS = 989e12


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--row", nargs=2, metavar=("TRAINER", "BATCH"), help="one row, as JSON")
    parser.add_argument("--rows", nargs="*", default=[OURS, AUTOCAST, NARROW])
    parser.add_argument("--batches", nargs="*", type=int, default=BATCHES)
    parser.add_argument("--store", type=Path, default=Path("outputs/vit_mae.json"))
    parser.add_argument("--profile", action="store_true", help="ours by kind of kernel")
    parser.add_argument("--print", action="store_true", help="only print what is stored")
    given = parser.parse_args()
    if given.row:
        trainer, batch = given.row[0], int(given.row[1])
        measure = ours if trainer == OURS else theirs
        print(json.dumps(measure(batch, trainer, given.profile)))
        return
    rows = json.loads(given.store.read_text()) if given.store.exists() else {}
    for batch in [] if given.print else given.batches:
        for trainer in given.rows:
            words = [sys.executable, __file__, "--row", trainer, str(batch)]
            words += ["--profile"] if given.profile else []
            done = subprocess.run(words, capture_output=True, text=True, timeout=240)
            if done.returncode:
                print(done.stderr[-2000:], file=sys.stderr)
                rows[f"{trainer}, batch {batch}"] = {"error": done.stderr.splitlines()[-1][:200]}
                continue
            rows[f"{trainer}, batch {batch}"] = json.loads(done.stdout.splitlines()[-1])
            given.store.parent.mkdir(parents=True, exist_ok=True)
            given.store.write_text(json.dumps(rows, indent=1) + "\n")
    print(table(rows, given.batches))


def ours(batch: int, _: str, profile: bool) -> dict[str, Any]:
    on_gpu = torch.cuda.is_available()
    shape = MODEL if on_gpu else SMALL
    settings: dict[str, Any] = {
        "model": {"name": "vit_mae", "flavor": "debug", "overrides": shape_of(shape)},
        "training": {"dataset": "random", "local_batch_size": batch, "steps": 1000},
        "images": {"count": batch},
        "optimizer": {"lr": 1e-4},
        "compile": {"enable": True},
        "metrics": {"enable_tensorboard": False},
        "checkpoint": {"enable": False},
    }
    with (
        tempfile.TemporaryDirectory() as folder,
        process_group(JobConfig().comm, World(), device_type()) as device,
    ):
        settings["job"] = {"dump_folder": folder}
        run = build_run(JobConfig.model_validate(settings), World(), device, log_ranks=())
        numbers_B = torch.arange(batch, device=device)
        fields = {
            "pixel_values": images(batch, shape, device),
            "sample_B": numbers_B,
            "epoch_B": torch.zeros_like(numbers_B),
            "weight_B": torch.ones(batch, device=device),
        }

        def step() -> Tensor:
            return train_step(run, Batch(fields)).loss

        found = timed(step, batch)
        found["flops_per_image"] = model_config(run.config.model).flops_per_sample()
        if profile:
            found["kinds"] = device_time(lambda: [step(), step()], 2)
        return found


def theirs(batch: int, trainer: str, _: bool) -> dict[str, Any]:
    import transformers

    device = torch.device(device_type())
    shape = MODEL if torch.cuda.is_available() else SMALL
    config = transformers.ViTMAEConfig(**shape_of(shape))
    with device:
        model = transformers.ViTMAEForPreTraining._from_config(config, attn_implementation="sdpa")
    if trainer == NARROW:
        model = model.to(torch.bfloat16)
    pixels = images(batch, shape, device).to(model.dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    compiled = torch.compile(model)

    def step() -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=trainer == AUTOCAST):
            loss: Tensor = compiled(pixels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return timed(step, batch)


def shape_of(shape: dict[str, Any]) -> dict[str, Any]:
    """All sizes, those of the decoder as transformers has them where nothing is said."""
    decoder = {
        "decoder_hidden_size": 512, "decoder_num_hidden_layers": 8,
        "decoder_num_attention_heads": 16, "decoder_intermediate_size": 2048,
    }  # fmt: skip
    return {**decoder, **shape, "mask_ratio": 0.75, "norm_pix_loss": False}


def images(batch: int, shape: dict[str, Any], device: torch.device) -> Tensor:
    torch.manual_seed(0)
    size = shape["image_size"]
    return torch.randn((batch, 1, size, size), device=device)


def timed(step: Callable[[], Tensor], batch: int) -> dict[str, Any]:
    on_gpu = torch.cuda.is_available()
    for _ in range(WARM_STEPS):
        loss = step()
    first = float(loss)
    began = time.perf_counter()
    for _ in range(STEPS):
        loss = step()
    last = float(loss)  # waits for the device
    seconds = time.perf_counter() - began
    return {
        "images_per_second": batch * STEPS / seconds,
        "memory_gib": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0,
        "losses": [first, last],
    }


def table(rows: dict[str, Any], batches: list[int]) -> str:
    lines = [
        "| batch | trainer | images/s | MFU | GiB | ours ÷ theirs |",
        "|---|---|---|---|---|---|",
    ]
    for batch in batches:
        mine = rows.get(f"{OURS}, batch {batch}", {})
        for trainer in (OURS, AUTOCAST, NARROW):
            row = rows.get(f"{trainer}, batch {batch}")
            if row is None:
                continue
            if "error" in row:
                lines.append(f"| {batch} | {trainer} | {row['error']} | | | |")
                continue
            rate, flops = row["images_per_second"], mine.get("flops_per_image", 0)
            ratio = f"{mine['images_per_second'] / rate:.2f}" if mine and row is not mine else ""
            lines.append(
                f"| {batch} | {trainer} | {rate:,.0f} | {rate * flops / PEAK_FLOPS:.1%} "
                f"| {row['memory_gib']:.1f} | {ratio} |"
            )
    for key, row in rows.items():
        if kinds := row.get("kinds"):
            lines += ["", key, *(f"  {name}: {value}" for name, value in kinds.items())]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
