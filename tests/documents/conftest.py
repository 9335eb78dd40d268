from tests.cluster.conftest import slurm

__all__ = ["slurm"]
