from collections.abc import Iterator

import pytest

from tests.cluster.packages import need
from tests.cluster.slurm import PROGRAMS, Slurm


@pytest.fixture(scope="session")
def slurm() -> Iterator[Slurm]:
    """Four nodes, n1 to n4, with eight cores each by their own account."""
    need(*PROGRAMS)
    cluster = Slurm()
    yield cluster
    cluster.stop()
