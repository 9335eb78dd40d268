"""If the supervisor's own node is lost, a guard on another node gives the job back to Slurm, which
runs it again on good nodes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.processes import losses
from tests.cluster.packages import need
from tests.cluster.slurm import PROGRAMS, Slurm
from tests.cluster.supervised import SubmittedRun, final_state, train_unbroken


@pytest.fixture
def nodes() -> Iterator[Slurm]:
    need(*PROGRAMS)
    slurm = Slurm(3)
    yield slurm
    slurm.stop()


@pytest.mark.long
def test_a_job_without_its_batch_host_is_run_again(nodes: Slurm, tmp_path: Path) -> None:
    run = SubmittedRun(nodes, tmp_path / "run", 60, 2, "--time", "00:20:00", "--no-preflight")
    saved = run.root / "checkpoint" / "step_10"
    run.wait_until(lambda: (saved / "COMMITTED").exists(), "step 10 is saved")
    [session] = run.events("session")
    batch_host = session["nodes"][0]
    run.kill_node(batch_host)
    run.wait()
    assert run.events("session")[-1]["restart"] >= 1
    last = run.events("attempt")[-1]
    assert batch_host not in last["nodes"]
    assert last["from_step"] >= 10
    assert run.events("end")[-1]["how"] == "finished", run.log()[-5000:]
    unbroken = train_unbroken(run, tmp_path / "unbroken")
    assert final_state(run.root) == final_state(unbroken)
    assert losses(run.root / "metrics.jsonl") == losses(unbroken / "metrics.jsonl")
