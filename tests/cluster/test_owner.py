"""Who owns a run folder, when Slurm has to be asked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from overland.errors import TrainingError
from overland.run_folder import OWNER
from overland.training.owner import slurm_state, take, this_owner
from tests.cluster.slurm import Slurm


def test_a_job_elsewhere_holds_its_folder_until_slurm_has_ended_it(
    slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CONF", str(slurm.config))
    job = slurm.run("sbatch", "--parsable", "--output=/dev/null", "--wrap=sleep 60").strip()
    other = {**this_owner({"SLURM_JOB_ID": job}), "host": "elsewhere-1"}
    (tmp_path / OWNER).write_text(json.dumps(other))
    while slurm_state(job) == "PENDING":
        pass
    with pytest.raises(TrainingError, match=f"in use by job {job}.*`scancel {job}`"):
        take(tmp_path)
    slurm.run("scancel", job)
    take(tmp_path).release()
    assert slurm_state("4000000") == ""


def test_a_slurm_that_does_not_answer_says_nothing_about_a_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert slurm_state("1") is None
