"""How long until the first step is done, from the start of the process: cold, and warm.

    python benchmarks/gpu/start.py 8B [key=value …]
    python benchmarks/gpu/start.py 1B comm.ranks_per_device=2 parallelism.context_parallel_degree=2

Three starts in one run folder, each a process of its own:
cold:      nothing compiled yet, anywhere
elsewhere: what the run folder keeps, `compiled.bin`, in a job that has nothing else, as after a
           cluster has emptied its nodes
here:      the node's own caches too
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from shapes import SHAPES

STARTS = ("cold", "elsewhere", "here")
RANKS = "comm.ranks_per_device="


def main() -> None:
    name, *changes = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        node = Path(folder) / "node"
        caches = {
            "TORCHINDUCTOR_CACHE_DIR": str(node),
            "TRITON_HOME": str(Path(folder) / "home"),
        }
        for start in STARTS:
            if start != "here":
                shutil.rmtree(node, ignore_errors=True)
                shutil.rmtree(caches["TRITON_HOME"], ignore_errors=True)
            words = [__file__, "--once", name, f"{folder}/run", *changes]
            if sharing := [change for change in changes if change.startswith(RANKS)]:
                ranks = sharing[-1].partition("=")[2]
                words = ["-m", "torch.distributed.run", "--nproc-per-node", ranks, *words]
            done = subprocess.run(
                [sys.executable, *words],
                env={**os.environ, **caches},
                capture_output=True,
                text=True,
            )
            lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
            print(f"{start}: {lines[-1][7:] if lines else done.stderr[-2000:]}", flush=True)


def once(name: str, folder: str, changes: list[str]) -> None:
    from ours import job, process_seconds

    from overland.parallel.comm import process_group
    from overland.training.build import build_run
    from overland.training.callbacks import Callback, Record
    from overland.training.loop import train
    from overland.training.run import Run
    from overland.world import World
    from overland.world.devices import device_type
    from overland.world.launchers import find_world

    class FirstStep(Callback):
        def on_log(self, run: Run, record: Record) -> None:
            seconds.setdefault("first step", process_seconds())

    seconds = {"imports": process_seconds()}
    config, world = job(SHAPES[name], folder, [*changes, "training.steps=2"]), find_world()
    world = world or World()
    with process_group(config.comm, world, device_type()) as device:
        seconds["joined"] = process_seconds()
        run = build_run(config, world, device, log_ranks=())
        seconds["model"] = process_seconds()
        run.callbacks.append(FirstStep(run))
        train(run)
    if world.is_first:
        print("RESULT " + json.dumps({part: round(n, 1) for part, n in seconds.items()}))


if __name__ == "__main__":
    if sys.argv[1] == "--once":
        once(sys.argv[2], sys.argv[3], sys.argv[4:])
    else:
        main()
