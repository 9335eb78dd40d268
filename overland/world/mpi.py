"""The place of a process that mpirun or mpiexec started. Nothing of MPI itself is used."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from overland.errors import ClusterError
from overland.slurm import expand_hosts
from overland.world.rendezvous import LOOPBACK, Meeting, port_of_name
from overland.world.variables import first_set, number
from overland.world.world import World


def is_under_mpi(env: Mapping[str, str] = os.environ) -> bool:
    """Whether mpirun or mpiexec started this process. Its terminal is then one that they made up,
    and what it prints is passed on line by line."""
    names = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PALS_RANKID", "MPI_LOCALRANKID")
    return any(name in env for name in names)


def from_open_mpi(env: Mapping[str, str]) -> World | None:
    if "OMPI_COMM_WORLD_RANK" not in env or "OMPI_COMM_WORLD_SIZE" not in env:
        return None
    size = number(env, "OMPI_COMM_WORLD_SIZE", at_least=1)
    local_size = number(env, "OMPI_COMM_WORLD_LOCAL_SIZE", at_least=1)
    launch = first_set(env, "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")
    world = World(
        rank=number(env, "OMPI_COMM_WORLD_RANK"),
        size=size,
        local_rank=number(env, "OMPI_COMM_WORLD_LOCAL_RANK"),
        local_size=local_size,
        meeting=_meeting(env, size, local_size, f"openmpi-{env[launch]}" if launch else None),
    )
    _check(world)
    return world


def from_mpich(env: Mapping[str, str]) -> World | None:
    """MPICH and Intel MPI (`MPI_LOCAL…`), and Cray's PALS (`PALS_…`). srun sets some of these too
    (`--mpi=pmi2`, `cray_shasta`), but says more about its tasks by its own names."""
    rank = first_set(env, "PMI_RANK", "PALS_RANKID")
    local_rank = first_set(env, "MPI_LOCALRANKID", "PALS_LOCAL_RANKID", "PMI_LOCAL_RANK")
    local_size = first_set(env, "MPI_LOCALNRANKS", "PALS_LOCAL_SIZE", "PMI_LOCAL_SIZE")
    if not (rank and local_rank and local_size and "PMI_SIZE" in env):
        return None
    if local_rank != "MPI_LOCALRANKID" and "SLURM_STEP_ID" in env:
        return None
    size = number(env, "PMI_SIZE", at_least=1)
    num_local = number(env, local_size, at_least=1)
    world = World(
        rank=number(env, rank),
        size=size,
        local_rank=number(env, local_rank),
        local_size=num_local,
        meeting=_meeting(env, size, num_local, _mpich_launch(env, size == num_local)),
    )
    _check(world)
    return world


def _mpich_launch(env: Mapping[str, str], is_local: bool) -> str | None:
    """A name for this launch that all its ranks know and no other has. MPICH gives none: on one
    node its process above the ranks serves, on several the step that started those."""
    if "PALS_APID" in env:
        return f"pals-{env['PALS_APID']}"
    if is_local:
        return f"mpich-{_proxy()}"
    if "SLURM_JOB_ID" in env:
        return f"mpich-{env['SLURM_JOB_ID']}.{env.get('SLURM_STEP_ID', '')}"
    return f"mpich-{env['PBS_JOBID']}" if "PBS_JOBID" in env else None


def _check(world: World) -> None:
    """mpirun ends all ranks when one of them ends with an error, so one that sees it is enough."""
    if world.size % world.local_size:
        raise ClusterError(
            f"{world.local_size} ranks on this node and {world.size} in all: every node needs as "
            "many as the others; start mpirun with --npernode (Open MPI) or -ppn (MPICH, Cray)"
        )
    if world.rank % world.local_size != world.local_rank:
        raise ClusterError(
            f"rank {world.rank} is number {world.local_rank} of {world.local_size} on its node: "
            "ranks must fill one node after the other; start mpirun with --map-by slot"
        )


def _meeting(
    env: Mapping[str, str], size: int, local_size: int, name: str | None
) -> Meeting | None:
    if size == 1:
        return None
    if name is None and not env.get("MASTER_PORT"):
        raise ClusterError(
            f"{size} ranks on several nodes, and this mpirun gives its job no name to choose a "
            "port by: set MASTER_ADDR to the host of rank 0 and MASTER_PORT to a free port there"
        )
    name = name or "mpi"
    address = LOOPBACK if size == local_size else _first_host(env)
    return Meeting.at(env, address=address, port=port_of_name(name), name=name)


def _first_host(env: Mapping[str, str]) -> str:
    """mpirun names no host of the others, but the batch system may: it fills the first one first.
    Where that is not so, rank 0 says it (meeting.py)."""
    if env.get("MASTER_ADDR"):
        return env["MASTER_ADDR"]
    if env.get("SLURM_JOB_NODELIST"):
        return expand_hosts(env["SLURM_JOB_NODELIST"])[0]
    nodes = Path(env.get("PBS_NODEFILE", ""))
    if nodes.is_file() and (hosts := nodes.read_text().split()):
        return hosts[0]
    raise ClusterError(
        "ranks on several nodes need MASTER_ADDR to meet, and mpirun does not tell the host of "
        "rank 0: add -x MASTER_ADDR=HOST to Open MPI's mpirun, -genv MASTER_ADDR HOST to MPICH's"
    )


def _proxy() -> int:
    """Each rank leads a session of its own, whatever scripts lie between; above it is the proxy."""
    try:
        leader = Path(f"/proc/{os.getsid(0)}/stat").read_text()
    except OSError:
        return os.getppid()
    return int(leader.rpartition(")")[2].split()[1])
