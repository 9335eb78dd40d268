"""Us and our peers on the same work, one after the other on the same GPU:

    python benchmarks/gpu/compare.py 1B 8B-fp8 --store results.json [--peers FOLDER] [--profile]

Each trainer runs in a process of its own, and our rows of a shape and the peer's are always taken
back to back. Rows are kept in the store, so that a table can be filled over several short runs;
`--print` shows what is there and runs nothing. FOLDER holds the peers:

    pip install --no-deps --target FOLDER torchtitan==0.2.2 torchdata==0.11.0 tyro typeguard \
        docstring-parser shtab torchao==0.17.0 liger-kernel==0.8.5

Adapters (8B-lora and others) are compared with PEFT in place of torchtitan. With --world 8 each
trainer runs one rank of eight, alone on the GPU, with local collectives; --network nvlink makes
these take as long as they would (local_world.py).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from shapes import PEAK_FLOPS, SHAPES, Shape

HERE = Path(__file__).parent
NARROW = "overland, bf16 moments"
TITAN, LIGER, PEFT = "torchtitan", "PEFT, Liger's kernels", "PEFT"
OF_ANY_WORLD = (TITAN, NARROW)
Rows = dict[str, dict[str, Any]]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "shapes", nargs="*", default=["1B", "3B", "8B", "1B-fp8", "3B-fp8", "8B-fp8"]
    )
    parser.add_argument("--store", type=Path, default=Path("outputs/compare.json"))
    parser.add_argument("--peers", type=Path, default=Path("vendor/peers"))
    parser.add_argument("--profile", action="store_true", help="also the time by kind of kernel")
    parser.add_argument("--world", type=int, default=1)
    parser.add_argument("--network", default="none")
    parser.add_argument("--seconds", type=int, default=240, help="longest wait for one row")
    parser.add_argument("--print", action="store_true", help="only print what is stored")
    args = parser.parse_intermixed_args()
    rows: Rows = json.loads(args.store.read_text()) if args.store.exists() else {}
    more = ["--profile"] if args.profile else []
    where = ""
    if args.world > 1:
        more += ["--world", str(args.world), "--network", args.network]
        where = f" {args.world} {args.network}"
    for name in [] if args.print else args.shapes:
        rows[f"{name}{where} overland"] = run([HERE / "ours.py", name, *more], args.seconds)
        for peer, command in others(SHAPES[name]).items():
            path = None if peer == NARROW else args.peers
            rows[f"{name}{where} {peer}"] = run(
                [HERE / command[0], name, *command[1:], *(more if peer in OF_ANY_WORLD else [])],
                args.seconds,
                path,
            )
        args.store.parent.mkdir(parents=True, exist_ok=True)
        args.store.write_text(json.dumps(rows, indent=1))
        print(table(rows, [name], where), flush=True)
    print(table(rows, args.shapes, where))
    for name in args.shapes:
        for trainer in ("overland", TITAN):
            if kinds := rows.get(f"{name}{where} {trainer}", {}).get("kinds"):
                print(
                    f"\n{name} {trainer}, milliseconds per step: {kinds['per_step_ms']}, idle "
                    f"{kinds['idle_ms']}, exposed communication {kinds['exposed_ms']}"
                )


def others(shape: Shape) -> dict[str, list[str]]:
    """What is compared with our row, and the command of each."""
    if not shape.peer_recompute:
        return {}
    if shape.lora_rank:
        return {LIGER: ["peer_peft.py"], PEFT: ["peer_peft.py", "--plain"]}
    return {
        TITAN: ["peer_torchtitan.py"],
        NARROW: ["ours.py", "optimizer.bf16_moments=true"],
    }


def run(command: list[Any], seconds: int, path: Path | None = None) -> dict[str, Any]:
    """The row that a trainer's process prints, or what went wrong."""
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    if path is not None:
        earlier = os.environ.get("PYTHONPATH", "")
        environment["PYTHONPATH"] = f"{path.resolve()}{os.pathsep}{earlier}"
    words = [sys.executable, *map(str, command)]
    try:
        done = subprocess.run(
            words, env=environment, capture_output=True, text=True, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {seconds} s"}
    for line in reversed(done.stdout.splitlines()):
        if line.startswith("RESULT "):
            return dict(json.loads(line.removeprefix("RESULT ")))
    print(done.stderr[-3000:], file=sys.stderr)
    return {"error": (done.stderr.strip().splitlines() or ["no output"])[-1][:200]}


def table(rows: Rows, names: list[str], where: str) -> str:
    lines = [
        "| work | trainer | tokens/s | MFU | GiB | ours ÷ peer | of the limit | goal |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in names:
        shape = SHAPES[name]
        ours = rows.get(f"{name}{where} overland", {})
        # transformers has a script of its own
        for trainer in ("overland", NARROW, TITAN, "transformers", LIGER, PEFT):
            row = rows.get(f"{name}{where} {trainer}")
            if row is not None:
                lines.append(line(shape, trainer, row, ours))
    return "\n".join(lines)


def line(shape: Shape, trainer: str, row: dict[str, Any], ours: dict[str, Any]) -> str:
    work = f"{shape.name}, {shape.rows} × {shape.seq_len}"
    if "error" in row:
        return f"| {work} | {trainer} | {row['error']} | | | | | |"
    rate = row["tokens_per_second"]
    mfu = rate * shape.flops_per_token() / PEAK_FLOPS
    ratio = goal = ""
    share = f"{rate / shape.limit:.1%}" if shape.limit else ""
    is_ours = trainer.startswith("overland")
    if is_ours and shape.goal:
        goal = f"{rate / shape.goal:.1%} of {shape.goal:,}"
    if not is_ours and "tokens_per_second" in ours:
        ratio = f"{ours['tokens_per_second'] / rate:.3f}"
    return (
        f"| {work} | {trainer} | {rate:,.0f} | {mfu:.1%} | {row['memory_gib']:.1f} | {ratio} "
        f"| {share} | {goal} |"
    )


if __name__ == "__main__":
    main()
