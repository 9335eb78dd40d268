"""The walkthrough for Frontier, with few conversations and ranks; `make prove-all` takes all."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.slurm import Slurm
from tests.cluster.walkthrough import Walk


@pytest.mark.long
def test_the_walkthrough_can_be_walked_from_end_to_end(slurm: Slurm, tmp_path: Path) -> None:
    Walk(slurm, tmp_path, 40, 1, "--no-preflight").all()
