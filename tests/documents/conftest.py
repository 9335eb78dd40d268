from tests.cluster.conftest import slurm
from tests.hub.conftest import hub

__all__ = ["hub", "slurm"]
