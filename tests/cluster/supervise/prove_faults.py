"""The long proofs of `make prove-all` on a real Slurm of virtual nodes: twenty faults, at random,
in one job with spares, and a chain of six sessions or more.

    python -m tests.cluster.supervise.prove_faults --into docs/evidence

Each ends by itself, and its last checkpoint is compared, bit for bit, with that of a plain
`overland train` to which nothing happened. What has a page already is not done again.
"""

from __future__ import annotations

import argparse
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from tests.cli.processes import losses
from tests.cluster.slurm import Slurm
from tests.cluster.supervise.disk import fill_for_a_while, kill_while_full, small_disk
from tests.cluster.supervised import SubmittedRun, final_state, train_unbroken

NODES, SPARES, RANKS_PER_NODE = 4, 6, 2
BATCH_HOST = "n1"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--sessions", type=int, default=6)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--into", type=Path, required=True)
    options = parser.parse_args()
    proofs = {
        "faults.md": lambda: prove_faults(options.faults, options.seed),
        "chain.md": lambda: prove_chain(options.sessions),
    }
    for name, prove in proofs.items():
        path = options.into / name
        if path.exists():
            say(f"{path} is there already")
            continue
        text = f"{prove()}\n\n{HOW}\n"
        print(text)
        path.write_text(text)


HOW = """\
By `python -m tests.cluster.supervise.prove_faults` (part of `make prove-all`), on a real Slurm \
whose nodes are all on one machine of two cores. Seconds are that machine's: it starts eight ranks \
in about ten."""


def prove_faults(count: int, seed: int) -> str:
    """One job, `count` faults, each after the run has gone on from the one before."""
    chance = random.Random(seed)
    while_full: list[int] = []
    slurm = Slurm(NODES + SPARES)
    with tempfile.TemporaryDirectory() as folder, small_disk(Path(folder) / "disk") as disk:
        try:
            run = SubmittedRun(
                slurm, disk, 30 * count, NODES, "--spares", str(SPARES), "--time", "03:00:00",
                ranks_per_node=RANKS_PER_NODE,
            )  # fmt: skip
            for number in range(1, count + 1):
                run.wait_for_step(run.step() + 3)
                time.sleep(chance.uniform(0, 3))
                name, kind, act = chance.choice(possible(run, disk, chance))
                say(f"{number}/{count} at step {run.step()}: {name}")
                run.survives(kind, act)
                if disk.is_mount() and number % 5 == 0:
                    say(f"the disk is full for a while at step {run.step()}")
                    before = len(run.events("fault"))
                    fill_for_a_while(disk, run)
                    while_full.append(len(run.events("fault")) - before)
            run.wait()
            return table_of_faults(run, verdict(run, Path(folder) / "unbroken"), while_full)
        finally:
            slurm.stop()


Act = tuple[str, str, Callable[[], object]]
"""What is done, what it is to be found to be, and how it is done."""


def possible(run: SubmittedRun, disk: Path, chance: random.Random) -> list[Act]:
    """What can be survived now: a node can only be lost while there are more good ones than are
    needed, and the job ends with the batch host."""
    ranks = run.ranks()
    one = chance.choice(sorted(ranks))
    acts: list[Act] = [
        (f"SIGKILL to rank {one}", "rank killed", lambda: run.signal_rank(one, signal.SIGKILL)),
        (f"SIGSEGV to rank {one}", "rank killed", lambda: run.signal_rank(one, signal.SIGSEGV)),
        (f"SIGSTOP to rank {one}", "hang", lambda: run.signal_rank(one, signal.SIGSTOP)),
    ]
    if disk.is_mount():
        name = f"SIGKILL to rank {one} while the disk is full"
        acts.append((name, "rank killed", lambda: kill_while_full(disk, run, one)))
    out = {node for event in run.events("fault") for node in event["excluded"]}
    used = sorted({node for _, node in ranks.values()} - {BATCH_HOST})
    if NODES + SPARES - len(out) > NODES and used:
        node, first = chance.choice(used), ranks[0][1]
        acts.append((f"node {node} lost", "node lost", lambda: run.kill_node(node)))
        if first != BATCH_HOST:
            acts.append((f"rank 0's node {first} lost", "node lost", lambda: run.kill_node(first)))
    return acts


def verdict(run: SubmittedRun, folder: Path) -> str:
    [*_, end] = run.events("end") or [{"how": "not ended"}]
    if end["how"] != "finished":
        return f"NOT FINISHED: {end}"
    unbroken = train_unbroken(run, folder)
    same = final_state(run.root) == final_state(unbroken)
    same &= losses(run.root / "metrics.jsonl") == losses(unbroken / "metrics.jsonl")
    return "equal" if same else "DIFFERENT"


def table_of_faults(run: SubmittedRun, end: str, while_full: list[int]) -> str:
    """With the number of faults that came of each time when the disk was full."""
    recovered = run.events("recovered")
    backs = [back for back in recovered for _ in range(back["faults"])]
    rows = [
        f"| {number} | {fault['step']} | {fault['kind']} | {fault['what'][:100]} | "
        f"{', '.join(fault['excluded']) or '–'} | {fault['seconds_to_notice']:.0f} | "
        f"{back['lost_seconds']:.0f} |"
        for number, (fault, back) in enumerate(zip(run.events("fault"), backs, strict=False), 1)
    ]
    kinds = Counter(fault["kind"] for fault in run.events("fault"))
    lost = [back["lost_seconds"] for back in recovered]
    [tested] = run.events("preflight")[:1] or [{"seconds": 0}]
    return "\n".join(
        [
            f"# {len(rows)} faults in one job",
            "",
            f"{NODES} nodes × {RANKS_PER_NODE} ranks and {SPARES} spares, {run.steps} steps, a "
            f"checkpoint every 10; preflight {tested['seconds']:.0f} s. Final weights, moments and "
            f"all losses against the unbroken run: **{end}**.",
            "",
            "Seconds to notice count from the last new step before the fault to the decision; "
            "seconds lost, to the first new step after it, including starting the ranks and "
            f"repeating steps: median {statistics.median(lost):.0f}, at most {max(lost):.0f}. "
            "For a hang `health.hang_seconds` is 12 here.",
            "",
            f"{len(while_full)} times the disk was full for a while, a save included: "
            f"{while_full.count(0)} times training continued without interruption and saved once "
            f"there was room; {sum(while_full)} attempts ended because of it and were restarted "
            "once there was. Where a rank was killed while the disk was full, the seconds lost "
            "include the wait for room.",
            "",
            "| | step | found to be | in words | left out | s to notice | s lost |",
            "|---|---|---|---|---|---|---|",
            *rows,
            "",
            ", ".join(f"{kind} {number} ×" for kind, number in kinds.items()) + ".",
        ]
    )


def prove_chain(sessions: int) -> str:
    """Jobs of two minutes that stop a minute before their end, after 50 to 60 steps, with work for
    `sessions` at least. A slow machine takes more jobs, and longer ones."""
    slurm, flags = Slurm(4), ["--sessions", str(sessions + 1), "--no-preflight"]
    with tempfile.TemporaryDirectory() as folder:
        try:
            run = SubmittedRun(
                slurm, Path(folder) / "chain", 62 * (sessions - 1) + 10, 4, *flags,
                "--time", "00:02:00", step_seconds=0.5,
                settings=["checkpoint.walltime_margin_minutes=0.9", "health.hang_seconds=600"],
            )  # fmt: skip
            run.finish_chain(*flags, minutes=2)
            ends = run.events("end")
            say(f"chain: {len(ends)} sessions")
            end = verdict(run, Path(folder) / "unbroken")
            return "\n".join(
                [
                    f"# A chain of {len(ends)} sessions",
                    "",
                    f"4 nodes × 2 ranks, {run.steps} steps, jobs of two minutes or more; stopped "
                    f"by the walltime at step {', '.join(str(e['step']) for e in ends[:-1])}; "
                    f"{len(run.jobs) - len(ends)} surplus jobs ended immediately. Final weights, "
                    f"moments and all losses against the unbroken run: **{end}**.",
                ]
            )
        finally:
            slurm.stop()


def say(words: str) -> None:
    print(f"{time.strftime('%T')} {words}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
