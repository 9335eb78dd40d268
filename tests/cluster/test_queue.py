"""`overland watch` and a real squeue."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from overland.apps.watch.status import RunStatus, Watch
from tests.cluster.slurm import Slurm


def test_the_links_of_a_chain_are_seen_by_their_name(
    slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CONF", str(slurm.config))
    script = tmp_path / "submit" / "1.sh"
    script.parent.mkdir()
    script.write_text(
        "#!/bin/bash\n#SBATCH --job-name=chain-to-watch\n#SBATCH --dependency=singleton\n"
        "#SBATCH --output=/dev/null\n#SBATCH --time=5\nsleep 60\n"
    )
    first, second = (slurm.run("sbatch", "--parsable", str(script)).strip() for _ in range(2))
    try:
        seen = look_until(tmp_path, "starting")
        assert seen.queue is not None
        assert [job.id for job in seen.queue] == [first, second]
        assert (seen.queue[0].state, seen.queue[1].state) == ("RUNNING", "PENDING")
        assert re.fullmatch(r"[0-5]:[0-5]\d", seen.queue[0].left)
        assert seen.queue[1].reason == "Dependency"
        slurm.run("scontrol", "hold", second)
        slurm.run("scancel", first)
        assert look_until(tmp_path, "waiting").because.startswith("JobHeld")
    finally:
        slurm.run("scancel", "--name=chain-to-watch")
    assert look_until(tmp_path, "silent").queue == []


def look_until(run: Path, state: str) -> RunStatus:
    deadline = time.monotonic() + 180
    while (seen := Watch(run).look(patience=20.0)).state != state:
        assert time.monotonic() < deadline, seen
        time.sleep(0.2)
    return seen
