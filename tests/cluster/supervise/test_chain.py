"""Chains of jobs on the real Slurm: they cross time limits, and stop when continuing is
pointless."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from overland.checkpoint.folder import latest_checkpoint
from tests.cli.processes import environment, losses, overland, wait_for_step
from tests.cluster.slurm import Slurm
from tests.cluster.supervised import SubmittedRun, final_state, train_unbroken


@pytest.mark.long
def test_a_chain_crosses_walltime_limits_with_the_bits_of_one_run(
    slurm: Slurm, tmp_path: Path
) -> None:
    """Jobs of two minutes that stop a minute before their end, with work for more than that."""
    flags = ["--sessions", "3", "--no-preflight"]
    run = SubmittedRun(
        slurm, tmp_path / "chain", 130, 2, *flags, "--time", "00:02:00", step_seconds=0.5,
        settings=["checkpoint.walltime_margin_minutes=1", "health.hang_seconds=600"],
    )  # fmt: skip
    for shown in run.finish_chain(*flags, minutes=2):
        assert state_of(shown) == "COMPLETED", run.events()
    ends = [event["how"] for event in run.events("end")]
    assert ends == ["stopped"] * (len(ends) - 1) + ["finished"]
    assert len(ends) >= 2
    assert "stopping after step" in run.log(run.jobs[0])
    assert "already finished" in run.log(run.jobs[len(ends)]), "a surplus link ends at once"
    assert not run.events("fault")
    step = 0
    for event in run.events():
        if event["event"] == "attempt":
            assert event["from_step"] == step, "no step done twice"
        elif event["event"] == "end":
            step = event["step"]

    unbroken = train_unbroken(run, tmp_path / "unbroken")
    assert final_state(run.root) == final_state(unbroken)
    assert losses(run.root / "metrics.jsonl") == losses(unbroken / "metrics.jsonl")


def state_of(shown: str) -> str:
    return shown.partition("JobState=")[2].split()[0]


BROKEN = """\
import os
from overland.training.callbacks import Callback, register_callback

@register_callback
class Broken(Callback):
    def on_step(self, run):
        if run.world.rank == 1 and run.progress.step == 7:
            {act}
"""


def submit_broken(slurm: Slurm, folder: Path, act: str, tries: int = 8) -> SubmittedRun:
    folder.mkdir()
    (folder / "broken.py").write_text(BROKEN.format(act=act))
    return SubmittedRun(
        slurm, folder, 50, 1, "--time", "00:10:00", "--no-preflight", "--sessions", "2",
        "--name", folder.name,  # jobs of one name wait for each other
        settings=["job.custom_import=broken", "checkpoint.interval=5",
                  f"health.max_failed_starts={tries}"],
    )  # fmt: skip


@pytest.fixture(scope="module")
def mistaken_and_killed(
    slurm: Slurm, tmp_path_factory: pytest.TempPathFactory
) -> tuple[SubmittedRun, SubmittedRun]:
    """Two chains side by side. One has a mistake in its code. The other is killed at every seventh
    step: its first job tries twice in vain, the second one once. Not before the other rank has
    been seen to be that far: else a later attempt seems to get further."""
    folder = tmp_path_factory.mktemp("broken")
    kill = "__import__('time').sleep(3); os.kill(os.getpid(), 9)"
    mistake = "raise KeyError('embedding')"
    return (
        submit_broken(slurm, folder / "mistaken", mistake),
        submit_broken(slurm, folder / "killed", kill, tries=2),
    )


@pytest.mark.long
def test_a_mistake_in_the_code_is_tried_once_more_and_then_ends_the_chain(
    slurm: Slurm, mistaken_and_killed: tuple[SubmittedRun, SubmittedRun]
) -> None:
    run, _ = mistaken_and_killed
    states = [slurm.wait_for(job) for job in run.jobs]
    assert [state_of(shown) for shown in states] == ["FAILED", "FAILED"]
    assert len(run.events("attempt")) == 2
    for fault, action in zip(run.events("fault"), ["restart", "stop"], strict=True):
        assert (fault["kind"], fault["action"], fault["ranks"]) == ("code error", action, [1])
        assert "KeyError: 'embedding'" in fault["what"]
        assert re.search(r"KeyError at .*/broken\.py:8$", fault["place"])
    assert "Traceback" in run.log(run.jobs[0])
    assert "not started, because this run was stopped: code error" in run.log(run.jobs[1])
    assert "the same error at the same place twice" in (run.root / "stopped").read_text()
    assert (run.root / "stopped").stat().st_mode & 0o777 == 0o600


@pytest.mark.long
def test_a_job_that_gets_to_no_new_step_leaves_the_rest_to_the_next(
    slurm: Slurm, mistaken_and_killed: tuple[SubmittedRun, SubmittedRun]
) -> None:
    _, run = mistaken_and_killed
    states = [slurm.wait_for(job) for job in run.jobs]
    assert [state_of(shown) for shown in states] == ["FAILED", "FAILED"]
    faults = run.events("fault")
    assert {fault["kind"] for fault in faults} == {"rank killed"}
    given_back = [fault["action"] for fault in faults].index("give back")
    assert [fault["new_steps"] > 0 for fault in faults[given_back - 1 :]] == [False] * 3
    assert len(faults) == given_back + 2
    ends = run.events("end")
    assert [end["how"] for end in ends] == ["stopped", "stopped"]
    assert "2 attempts without a new step; giving the nodes back" in ends[0]["what"]
    assert "1 attempt without a new step" in ends[1]["what"]
    assert not (run.root / "stopped").exists()


def test_a_folder_takes_the_jobs_of_one_name(slurm: Slurm, tmp_path: Path) -> None:
    """While they are not over."""
    flags = ["--time", "00:10:00", "--sbatch", "--hold", "--name"]
    run = SubmittedRun(slurm, tmp_path / "run", 5, 1, *flags, "first")
    words = ["submit", "quickstart", *run.settings, "--site", "site.toml", *flags, "second"]
    env = slurm.environment(environment())
    refused = overland(*words, cwd=run.folder, code=2, **env)
    assert f"is in use by job {run.jobs[0]} (first), which has not ended" in refused.stderr
    slurm.run("scancel", str(run.jobs[0]))
    assert "as second" in overland(*words, cwd=run.folder, **env).stdout
    slurm.run("scancel", "--me", "--name=second")


@pytest.mark.long
def test_cancelling_a_chain_saves_first(slurm: Slurm, tmp_path: Path) -> None:
    flags = ["--time", "00:10:00", "--no-preflight", "--sessions", "2", "--name", "cancelled"]
    run = SubmittedRun(slurm, tmp_path / "run", 5000, 1, *flags)
    wait_for_step(run.root / "metrics.jsonl", 4)
    slurm.run("scancel", "--me", "--name=cancelled")
    states = [state_of(slurm.wait_for(job)) for job in run.jobs]
    assert states == ["CANCELLED", "CANCELLED"]
    saved = latest_checkpoint(run.root / "checkpoint")
    assert saved is not None
    assert saved.name.endswith(".preempt")
    assert f"no job of the chain is left; to resume: sbatch {run.root}" in run.log(run.jobs[0])
