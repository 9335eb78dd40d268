"""The same losses, whoever starts the ranks. Bit for bit: ranks reduce in the order of their
numbers, and a launcher changes nothing but how they learn those."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from overland.world.launch import free_port
from tests.cli.processes import TINY, environment, losses, overland, read_metrics, wait_for_step
from tests.cluster.packages import need
from tests.cluster.slurm import Slurm
from tests.waiting import LIMIT_SECONDS, wait_until

OVERLAND = [sys.executable, "-m", "overland"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
STEPS = 3
WORDS = [
    "train",
    "quickstart",
    *TINY,
    f"training.steps={STEPS}",
    "training.dataset=random",
    "metrics.sample_prompt=",
    "metrics.enable_tensorboard=false",
    "validation.enable=false",
    "checkpoint.enable=false",
]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], dict[int, float]]:
    """The losses of a plain `overland train` with that many ranks."""

    @cache
    def run(num_ranks: int) -> dict[int, float]:
        folder = tmp_path_factory.mktemp("alone")
        overland(*WORDS, cwd=folder, NGPU=str(num_ranks))
        return losses_in(folder)

    return run


def losses_in(folder: Path, name: str = "quickstart") -> dict[int, float]:
    found = losses(folder / "runs" / name / "metrics.jsonl")
    assert list(found) == list(range(1, STEPS + 1))
    return found


@pytest.mark.long
def test_four_nodes_under_srun_train_as_one_machine_does(
    slurm: Slurm, tmp_path: Path, alone: Callable[[int], dict[int, float]]
) -> None:
    words = ["srun", "-N4", "--ntasks-per-node=2", "--kill-on-bad-exit=1", *OVERLAND, *WORDS]
    output = slurm.run(*words, env=environment(), cwd=tmp_path)
    assert losses_in(tmp_path) == alone(8)
    assert output.count("Finished: 3 steps") == 1
    assert "8 × " in (tmp_path / "runs" / "quickstart" / "README.md").read_text()


def test_mpirun_trains_as_overland_alone(
    tmp_path: Path, alone: Callable[[int], dict[int, float]]
) -> None:
    need("mpirun")
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    words = ["mpirun", "--oversubscribe", "-n", "2", *OVERLAND, *WORDS]
    output = run(words, tmp_path, environment(**root))
    assert losses_in(tmp_path) == alone(2)
    assert f"step 1/{STEPS}  loss" in output
    assert "\x1b" not in output, "a bar was drawn on the terminal that mpirun gives its ranks"


@pytest.mark.long
def test_torchrun_trains_as_overland_alone(
    tmp_path: Path, alone: Callable[[int], dict[int, float]]
) -> None:
    run([*TORCHRUN, "--nproc-per-node=2", "-m", "overland", *WORDS], tmp_path, environment())
    assert losses_in(tmp_path) == alone(2)
    text = (tmp_path / "runs" / "quickstart" / "README.md").read_text()
    assert "sharded over 2 devices" in text


def test_two_jobs_at_once_on_a_node_do_not_meet(slurm: Slurm, tmp_path: Path) -> None:
    """Both have ranks 0 and 1, on one node. `--immediate` lets neither wait for the other."""
    srun = ["srun", "--immediate=5", "--nodelist=n1", "-n2", "--kill-on-bad-exit=1"]
    jobs = [
        start([*srun, *OVERLAND, *WORDS, f"job.dump_folder=runs/{name}"], tmp_path / name, slurm)
        for name in ("a", "b")
    ]
    for job, name in zip(jobs, ("a", "b"), strict=True):
        assert job.wait(timeout=LIMIT_SECONDS) == 0, (tmp_path / name / "log").read_text()
    assert losses_in(tmp_path / "a", "a") == losses_in(tmp_path / "b", "b")


@pytest.mark.long
def test_torchruns_world_grows_between_restarts(tmp_path: Path) -> None:
    """A second torchrun joins: the first one's rank saves, and both continue from there."""
    words = [*TORCHRUN, "--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3",
             "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{free_port()}",
             "--rdzv-conf=last_call_timeout=1", "-m", "overland", *WORDS,
             "training.steps=1000000", "training.global_batch_size=4", "checkpoint.enable=true",
             f"job.dump_folder={tmp_path}/run"]  # fmt: skip
    metrics, readme = tmp_path / "run" / "metrics.jsonl", tmp_path / "run" / "README.md"
    agents = [start(words, tmp_path / "a")]
    try:
        wait_for_step(metrics, 5)
        agents.append(start(words, tmp_path / "b"))
        wait_until(
            lambda: "Hardware: 2 × " in readme.read_text(), "there are two",
            (tmp_path / "a" / "log").read_text,
        )  # fmt: skip
        wait_for_step(metrics, max(losses(metrics)) + 5)
    finally:
        for agent in agents:
            agent.terminate()
        for agent in agents:
            agent.wait(timeout=LIMIT_SECONDS)
    seen = [record["step"] for record in read_metrics(metrics) if "loss" in record]
    assert seen == list(range(1, len(seen) + 1)), "a step was lost or done twice"


def start(words: list[str], folder: Path, slurm: Slurm | None = None) -> subprocess.Popen[bytes]:
    """torchrun shares its store with the ranks unless told not to, and then an agent that joins
    later waits for an address that nobody sends (torch 2.13)."""
    folder.mkdir()
    env = environment(TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(
            words,
            cwd=folder,
            env=slurm.environment(env) if slurm else env,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def run(words: list[str], cwd: Path, env: dict[str, str]) -> str:
    done = subprocess.run(
        words, cwd=cwd, env=env, capture_output=True, text=True, timeout=LIMIT_SECONDS
    )
    assert done.returncode == 0, f"exit {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr
