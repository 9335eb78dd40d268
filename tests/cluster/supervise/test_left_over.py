"""What Slurm does with a job under its supervisor: runs it again elsewhere, cancels it, ends it."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from overland.cluster.supervise.events import Logbook, read_events
from overland.cluster.supervise.faults import Fault
from overland.cluster.supervise.roster import Roster
from overland.cluster.supervise.supervised import Supervised
from overland.cluster.supervise.supervisor import Supervisor
from overland.errors import Kind


@pytest.mark.parametrize(("restarts", "action"), [(0, "stop"), (1, "next session")])
def test_it_does_not_stop_the_chain_of_what_runs_again(
    restarts: int, action: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scontrol_says(f"Restarts={restarts}", tmp_path, monkeypatch)
    job = Supervised(tmp_path, tmp_path / "1.toml", 100, ["srun"], num_nodes=1, tasks_per_node=1)
    roster = Roster(["n1", "n2"], wanted=1, batch_host="n1")
    supervisor = Supervisor(job, {"SLURM_JOB_ID": "7"}, roster, Logbook(tmp_path, "7"))
    fault = Fault(Kind.CODE, "KeyError: 'x'", place="KeyError at model.py:3")
    supervisor.answer(fault)
    assert supervisor.answer(fault).action == action


def scontrol_says(text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "scontrol").write_text(f'#!/bin/bash\necho "JobId=7 {text} BatchFlag=1"\n')
    (folder / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


@pytest.mark.parametrize(("requeue", "action"), [(True, "requeue"), (False, "next session")])
def test_a_fault_that_leaves_too_few_nodes_is_not_called_a_restart(
    requeue: bool, action: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scontrol_says("Restarts=0", tmp_path, monkeypatch)
    job = Supervised(tmp_path, tmp_path / "1.toml", 100, ["srun"], 2, 1, requeue=requeue)
    roster = Roster(["n1", "n2"], wanted=2, batch_host="n1")
    supervisor = Supervisor(job, {"SLURM_JOB_ID": "7"}, roster, Logbook(tmp_path, "7"))
    lost = Fault(Kind.NODE, "n2 fell silent", nodes=("n2",))
    assert supervisor.answer(lost).action == action
    [event] = read_events(tmp_path)
    assert (event["action"], event["excluded"]) == (action, ["n2"])


@pytest.mark.parametrize(
    ("state", "ends", "words"),
    [
        ("CANCELLED", "", "the job was cancelled (scancel, or preemption)"),
        ("TIMEOUT", "", "the job has reached its time limit"),
        ("COMPLETING", "99999999999", "the job was cancelled (scancel, or preemption)"),
        ("COMPLETING", "1000", "the job has reached its time limit"),
        ("RUNNING", "", "received SIGTERM while Slurm reports the job as RUNNING"),
    ],
)
def test_who_ended_a_job_from_outside_is_written_at_once(
    state: str, ends: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scontrol_says(f"JobState={state} Reason=None", tmp_path, monkeypatch)
    job = Supervised(tmp_path, tmp_path / "1.toml", 100, ["srun"], num_nodes=1, tasks_per_node=1)
    env = {"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": ends}
    roster = Roster(["n1"], wanted=1, batch_host="n1")
    supervisor = Supervisor(job, env, roster, Logbook(tmp_path, "7"))
    supervisor.asked_to_end = signal.SIGTERM
    for _ in range(2):
        assert supervisor.reason_to_end() == f"{words}; the last checkpoint is kept"
    [event] = read_events(tmp_path)
    assert (event["event"], event["signal"], event["what"]) == ("signal", "SIGTERM", words)


@pytest.mark.parametrize(
    ("queued", "words"),
    [
        ("8\n9", "the next job of the chain, 8, resumes it"),
        ("", "no job of the chain is left; to resume: sbatch {run}/submit/1.sh"),
    ],
)
def test_a_job_that_stops_early_says_how_the_run_is_resumed(
    queued: str,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    scontrol_says("Restarts=0", tmp_path, monkeypatch)
    (tmp_path / "squeue").write_text(f'#!/bin/bash\necho -n "{queued}"\n')
    (tmp_path / "squeue").chmod(0o755)
    job = Supervised(tmp_path, tmp_path / "submit" / "1.toml", 100, ["srun"], 1, 1)
    roster = Roster(["n1"], wanted=1, batch_host="n1")
    supervisor = Supervisor(job, {"SLURM_JOB_ID": "7"}, roster, Logbook(tmp_path, "7"))
    assert supervisor.stop("step 50") == 0
    assert words.format(run=tmp_path) in capsys.readouterr().out
