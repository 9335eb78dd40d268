"""A supervisor on a node that Slurm could not reach outlives its job, which runs again."""

from __future__ import annotations

from pathlib import Path

import pytest

from overland.cluster.last_words import Kind
from overland.cluster.supervise.faults import Fault
from overland.cluster.supervise.logbook import Logbook
from overland.cluster.supervise.roster import Roster
from overland.cluster.supervise.supervisor import Supervised, Supervisor


@pytest.mark.parametrize(("restarts", "action"), [(0, "stop"), (1, "next session")])
def test_it_does_not_stop_the_chain_of_what_runs_again(
    restarts: int, action: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f'#!/bin/bash\necho "JobId=7 Restarts={restarts} BatchFlag=1"\n')
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    job = Supervised(tmp_path, tmp_path / "1.toml", 100, ["srun"], num_nodes=1, tasks_per_node=1)
    roster = Roster(["n1", "n2"], wanted=1, batch_host="n1")
    supervisor = Supervisor(job, {"SLURM_JOB_ID": "7"}, roster, Logbook(tmp_path, "7"))
    fault = Fault(Kind.CODE, "KeyError: 'x'", place="KeyError at model.py:3")
    supervisor.answer(fault)
    assert supervisor.answer(fault).action == action
