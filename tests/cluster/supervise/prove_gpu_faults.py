"""Faults over NCCL, with several ranks on one GPU: under the supervisor, on a real Slurm of virtual
nodes, and under `overland train` alone.

    python -m tests.cluster.supervise.prove_gpu_faults --into docs/evidence/gpu_faults.md

Every fault hits one run that goes on from the one before, and its last checkpoint is compared, bit
for bit, with that of a run to which nothing happened. With `--device cpu` it runs over gloo. A
fault on a device ends all processes that share it through MPS: do not start it.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from overland.processes import PYTHON
from tests.cli.processes import environment, losses, wait_for_step
from tests.cluster.slurm import Slurm
from tests.cluster.supervised import SLOW, SubmittedRun, final_state

NODES, SPARES, RANKS_PER_NODE = 2, 6, 2
RANKS = NODES * RANKS_PER_NODE
HANG_SECONDS, JOIN_SECONDS, COLLECTIVE_SECONDS = 12, 40, 20
VICTIM = 2

# A rank does to itself what cannot be done from outside, once, when it finds a file of its own.
HARM = (
    SLOW
    + """
import os, signal
import torch
from overland import files

HERE, RANK = Path(__file__).parent, os.environ.get("RANK", os.environ.get("SLURM_PROCID", ""))

def is_told(what):
    try:
        (HERE / f"{what}_{RANK}").unlink()
    except FileNotFoundError:
        return False
    return True

if is_told("absent"):
    time.sleep(3600)

@register_callback
class Harm(Callback):
    def on_step(self, run):
        if is_told("memory"):
            self.held = torch.ones(2**41, dtype=torch.uint8, device=run.device)
        if is_told("assert"):
            torch.zeros(4, device=run.device)[torch.tensor([99]).to(run.device)].sum()

def at(self, operation, path):
    if operation == "write" and is_told("save"):
        os.kill(os.getpid(), signal.SIGKILL)

files.Disk.at = at
"""
)
# `overland submit` refuses ranks that share a GPU, but these virtual nodes are one machine.
SUBMITTED = """
from overland.cli import submit

submit.refuse_sharing = lambda config: None
"""
NETWORK = """\
NCCL_SOCKET_IFNAME = "lo"
GLOO_SOCKET_IFNAME = "lo"
"""
ON_GPU = [
    f"comm.ranks_per_device={RANKS}",
    "debug.deterministic=true",
    "model.overrides={hidden_size = 256, intermediate_size = 512, num_hidden_layers = 4, "
    "num_attention_heads = 4, num_key_value_heads = 2, head_dim = 64, vocab_size = 512}",
]
SETTINGS = [
    f"health.hang_seconds={HANG_SECONDS}",
    f"comm.init_timeout_seconds={JOIN_SECONDS}",
    "parallelism.tensor_parallel_degree=2",
]

SUPERVISED, ALONE = "## Under the supervisor", "## Without a supervisor"
HEAD = """\
# Faults over NCCL

{ranks} ranks on {device}: a small Llama, dp_shard 2 × tp 2{exact}, a checkpoint every 10 steps. \
`health.hang_seconds` is {hang}, `comm.init_timeout_seconds` {join}; without the supervisor, \
`comm.train_timeout_seconds` is {collective}. By \
`python -m tests.cluster.supervise.prove_gpu_faults`.
"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--faults", default="killed stopped memory assert absent save")
    parser.add_argument("--parts", default="supervised alone")
    parser.add_argument("--into", type=Path, required=True)
    parser.add_argument("--work", type=Path, help="a folder for the runs, which stays")
    options = parser.parse_args()
    more = ON_GPU if options.device == "cuda" else ["training.device=cpu"]
    head = HEAD.format(
        ranks=RANKS, device=name_of(options.device), hang=HANG_SECONDS, join=JOIN_SECONDS,
        collective=COLLECTIVE_SECONDS, exact=", deterministic" * (options.device == "cuda"),
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.work or Path(temporary)
        parts = parts_of(options.into)
        for part in options.parts.split():
            if part == "supervised":
                parts[SUPERVISED] = prove_supervised(folder, options.faults.split(), more)
            else:
                parts[ALONE] = prove_alone(folder / "alone", more)
            text = head + "".join(f"\n{title}\n\n{body}\n" for title, body in parts.items())
            options.into.write_text(text)
            print(text)


def parts_of(page: Path) -> dict[str, str]:
    """Returns the parts that an earlier session has written, by their titles."""
    text = page.read_text() if page.exists() else ""
    parts = [part.partition("\n") for part in text.split("\n## ")[1:]]
    return {f"## {title}": body.strip() for title, _, body in parts}


def prove_supervised(folder: Path, faults: list[str], more: list[str]) -> str:
    slurm = Slurm(NODES + SPARES)
    try:
        run = SubmittedRun(
            slurm, folder / "run", 8 * len(faults) + 20, NODES, "--spares", str(SPARES),
            "--no-preflight", "--time", "01:00:00", ranks_per_node=RANKS_PER_NODE,
            module=HARM + SUBMITTED, environment=NETWORK, settings=[*SETTINGS, *more],
        )  # fmt: skip
        rows = []
        for fault in faults:
            run.wait_for_step(run.step() + 3)
            say(f"{fault} at step {run.step()}")
            begun, before = time.time(), len(run.events("recovered"))
            act(run, fault)
            run.wait_until(lambda n=before: len(run.events("recovered")) > n, f"after {fault}")
            faults_now = [one for one in run.events("fault") if one["time"] > begun]
            found = [row(fault, one, begun) for one in faults_now]
            lost = f"{run.events('recovered')[-1]['lost_seconds']:.0f}"
            rows += [f"{one} {lost if one is found[-1] else '–'} |" for one in found]
            say(rows[-1])
        run.wait()
        prepare(folder / "unbroken", step_seconds=0)
        train(folder / "unbroken", run.settings).wait()
        same = is_same(run.root, folder / "unbroken/runs/quickstart")
        return "\n".join([
            f"One job of {run.steps} steps. Final weights, moments and all losses against the "
            f"unbroken run: **{'equal' if same else 'DIFFERENT'}**. Seconds to notice count from "
            "the fault, seconds lost from the last new step to the next.", "",
            "| fault | found to be | in words | s to notice | s lost |", "|---|---|---|---|---|",
            *rows,
        ])  # fmt: skip
    finally:
        slurm.stop()


def act(run: SubmittedRun, fault: str) -> None:
    signals = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}
    if fault in signals:
        run.signal_rank(VICTIM, signals[fault])
        return
    (run.folder / f"{fault}_{VICTIM}").touch()
    if fault == "absent":  # from the start of the next attempt
        run.signal_rank(0, signal.SIGKILL)


def row(name: str, fault: dict[str, object], begun: float) -> str:
    noticed = float(str(fault["time"])) - begun
    return f"| {name} | {fault['kind']} | {fault['what']} | {noticed:.0f} |"


def prove_alone(folder: Path, more: list[str]) -> str:
    """Under our launcher, which ends the ranks and names the one that the others waited for."""
    settings = [*SubmittedRun.settings_of(40), *SETTINGS, *more,
                f"comm.train_timeout_seconds={COLLECTIVE_SECONDS}"]  # fmt: skip
    unbroken = folder / "unbroken"
    prepare(unbroken, step_seconds=0)
    train(unbroken, settings).wait()
    rows = [alone(folder, name, settings) for name in ("killed", "stopped", "absent")]
    return "\n".join([
        "`overland train` on this machine: what it says, the seconds from the fault to its end, "
        "and whether the same command then reaches the losses of a run to which nothing happened, "
        "bit for bit.", "",
        "| fault | s to its end | it says | resumed |", "|---|---|---|---|", *rows,
    ])  # fmt: skip


def alone(runs: Path, fault: str, settings: list[str]) -> str:
    folder = runs / fault
    prepare(folder, step_seconds=0.1)
    if fault == "absent":
        (folder / f"absent_{VICTIM}").touch()
    begun = time.monotonic()
    process = train(folder, settings)
    if fault != "absent":
        wait_for_step(folder / "runs/quickstart/metrics.jsonl", 15)
        begun = time.monotonic()
        number = signal.SIGKILL if fault == "killed" else signal.SIGSTOP
        os.kill(rank_of(process.pid, VICTIM), number)
    process.wait()
    say(f"{fault} alone")
    printed = (folder / "log").read_text()
    seconds = time.monotonic() - begun
    said = [line for line in printed.splitlines() if re.search(rf"rank {VICTIM}\b", line)]
    train(folder, settings).wait()
    same = is_same(folder / "runs/quickstart", runs / "unbroken/runs/quickstart")
    shown = " · ".join(dict.fromkeys(map(str.strip, said))) or "nothing"
    return f"| {fault} | {seconds:.0f} | {shown} | {'equal' if same else 'DIFFERENT'} |"


def prepare(folder: Path, step_seconds: float) -> None:
    folder.mkdir(parents=True)
    (folder / "slow.py").write_text(HARM)
    (folder / "step_seconds").write_text(str(step_seconds))


def train(folder: Path, settings: list[str]) -> subprocess.Popen[str]:
    words = [*PYTHON, "-m", "overland", "train", "quickstart", *settings]
    env = environment(NGPU=str(RANKS))
    with (folder / "log").open("a") as log:
        return subprocess.Popen(words, cwd=folder, env=env, stdout=log, stderr=log, text=True)


def is_same(run: Path, other: Path) -> bool:
    same = losses(run / "metrics.jsonl") == losses(other / "metrics.jsonl")
    return same and final_state(run) == final_state(other)


def rank_of(launcher: int, rank: int) -> int:
    """The process of a rank."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            env = (path / "environ").read_bytes().split(b"\0")
            status = (path / "status").read_text()
        except OSError:
            continue
        if f"RANK={rank}".encode() in env and f"PPid:\t{launcher}\n" in status:
            return int(path.name)
    raise LookupError(f"rank {rank} of {launcher}")


def name_of(device: str) -> str:
    import torch

    return f"one {torch.cuda.get_device_name()}" if device == "cuda" else "a CPU, over gloo"


def say(words: str) -> None:
    print(f"{time.strftime('%T')} {words}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
