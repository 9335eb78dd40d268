"""What preflight prints where four ranks share one GPU over NCCL, alone and with a busy neighbor.

    python benchmarks/gpu/preflight.py [docs/evidence/gpu_preflight.md]

Start `nvidia-cuda-mps-control -d` before, or the ranks take turns.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
RANKS = 4
NEIGHBOR = """
import torch
one = torch.randn(16384, 16384, device="cuda", dtype=torch.bfloat16)  # half a GiB
print("computes", flush=True)
while True:
    one = (one @ one).clamp(-1, 1)
    torch.cuda.synchronize()
"""
HEAD = f"""\
# Preflight on a shared GPU

What `torchrun --nproc-per-node {RANKS} -m overland preflight run.toml` prints, where the config \
says `comm.ranks_per_device = {RANKS}`: device tests and the all-reduce of {RANKS} ranks on one \
GPU, over NCCL's sockets. Links are tested between nodes, of which there is one. The neighbor is \
another process that multiplies matrices all the time. \
By `python benchmarks/gpu/preflight.py`.
"""


def main() -> None:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs/evidence/gpu_preflight.md"
    text = f"{HEAD}\n## Alone\n\n{preflight()}"
    neighbor = subprocess.Popen([sys.executable, "-c", NEIGHBOR], stdout=subprocess.PIPE)
    try:
        assert neighbor.stdout is not None
        if neighbor.stdout.readline() != b"computes\n":
            sys.exit("The neighbor ended by itself.")
        text += f"\n## With a busy neighbor\n\n{preflight()}"
    finally:
        neighbor.kill()
        neighbor.wait()
    path.write_text(text)


def preflight() -> str:
    """Returns what was printed, as a block of Markdown."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "run.toml"
        config.write_text(
            f'[job]\ndump_folder = "run"\n[model]\nname = "llama3"\nflavor = "debugmodel"\n'
            f"[comm]\nranks_per_device = {RANKS}\n"
        )
        words = ["torch.distributed.run", "--nproc-per-node", str(RANKS)]
        words += ["-m", "overland", "preflight", str(config)]
        env = os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
        done = subprocess.run(
            [sys.executable, "-m", *words], cwd=folder, env=env, capture_output=True, text=True
        )
    print(done.stdout, done.stderr, sep="\n", flush=True)
    return f"```\n{done.stdout.rstrip()}\n```\n\nExit code {done.returncode}.\n"


if __name__ == "__main__":
    main()
