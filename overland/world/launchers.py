"""Who started this process, and which place that gives it among the ranks.

Every launcher tells a process its place in variables of its own. They are asked from the inside
out: torchrun may run under srun or mpirun, and mpirun starts its daemons by srun inside a Slurm
job, so that what a process finds of Slurm may be about those.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping

from overland.errors import ClusterError
from overland.world.mpi import from_mpich, from_open_mpi
from overland.world.rendezvous import Meeting
from overland.world.srun import from_srun
from overland.world.variables import number
from overland.world.world import World


def find_world(env: Mapping[str, str] = os.environ) -> World | None:
    """The world that a launcher made for this process, or None if nobody launched it."""
    for read in (from_torchrun, from_open_mpi, from_mpich, from_srun):
        world = read(env)
        if world is not None:
            return world
    if number(env, "PMI_SIZE", 1) > 1:  # of these, each would start ranks of its own
        raise ClusterError(
            f"environment PMI_SIZE: one of {env['PMI_SIZE']} processes, but nothing tells how many "
            "of them are on this node; set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, "
            "MASTER_ADDR and MASTER_PORT for each"
        )
    return None


def tell(world: World, env: MutableMapping[str, str] = os.environ) -> None:
    """Puts the place where libraries and user code look for it: under torchrun's names."""
    env["RANK"], env["WORLD_SIZE"] = str(world.rank), str(world.size)
    env["LOCAL_RANK"], env["LOCAL_WORLD_SIZE"] = str(world.local_rank), str(world.local_size)


def from_torchrun(env: Mapping[str, str]) -> World | None:
    """torchrun's names, which our own launcher sets too, and scripts that do its work by hand."""
    if "RANK" not in env or "WORLD_SIZE" not in env:
        return None
    size = number(env, "WORLD_SIZE", at_least=1)
    local_size = number(env, "LOCAL_WORLD_SIZE", _local_size(env, size), at_least=1)
    world = World(
        rank=number(env, "RANK"),
        size=size,
        local_rank=number(env, "LOCAL_RANK", number(env, "RANK") % local_size),
        local_size=local_size,
        meeting=_given_meeting(env, size),
    )
    if world.rank >= world.size:
        raise ClusterError(f"environment RANK: {world.rank} is not below WORLD_SIZE = {world.size}")
    num_nodes = number(env, "GROUP_WORLD_SIZE", world.num_nodes, at_least=1)
    if num_nodes * world.local_size != world.size:
        raise ClusterError(
            f"environment LOCAL_WORLD_SIZE: {world.local_size} ranks here, but {world.size} on "
            f"{num_nodes} nodes; give every torchrun the same --nproc-per-node"
        )
    return world


def _local_size(env: Mapping[str, str], size: int) -> int:
    """Scripts that set the variables by hand often leave this one out; under srun it is known."""
    if "LOCAL_WORLD_SIZE" in env:
        return 1
    step = from_srun(env)
    return step.local_size if step is not None and step.size == size else size


def _given_meeting(env: Mapping[str, str], size: int) -> Meeting | None:
    """torchrun opens the meeting point itself, and torch knows how to find it."""
    if size == 1 or "TORCHELASTIC_RUN_ID" in env:
        return None
    if not ("MASTER_ADDR" in env and "MASTER_PORT" in env):
        raise ClusterError(
            f"environment WORLD_SIZE: {size} ranks need MASTER_ADDR and MASTER_PORT to meet; "
            "torchrun sets them. Unset RANK and WORLD_SIZE to start the ranks from here"
        )
    name = "-".join(["ranks", *env.get("SLURM_JOB_ID", "").split()])
    return Meeting.at(env, address="", port=0, name=name)
