"""Which launcher started this process, and its place among the ranks.

Every launcher tells a process its place in environment variables of its own. They are checked from
the inside out: torchrun may run under srun or mpirun, and mpirun starts its daemons with srun
inside a Slurm job, so Slurm's variables may describe those. MPI is used only to launch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from dataclasses import replace
from pathlib import Path

from overland.errors import ClusterError
from overland.processes import facts_of
from overland.slurm import expand_counts, expand_hosts
from overland.world import Rendezvous, World
from overland.world.rendezvous import LOOPBACK, port_of_job, port_of_name

FIRST_SPECIAL_STEP = 0xFFFFFFF0  # slurm.h numbers batch, interactive and extern steps from the top


def find_world(env: Mapping[str, str] = os.environ) -> World | None:
    """Returns the world that a launcher created for this process, or None if there is no
    launcher."""
    for read in (from_torchrun, from_open_mpi, from_mpich, from_srun):
        world = read(env)
        if world is not None:
            return world
    if number(env, "PMI_SIZE", 1) > 1:  # otherwise each would start its own ranks
        raise ClusterError(
            f"environment PMI_SIZE: one of {env['PMI_SIZE']} processes, but it is unknown how many "
            "of them are on this node; set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, "
            "MASTER_ADDR and MASTER_PORT for each"
        )
    return None


def export_world(world: World, env: MutableMapping[str, str] = os.environ) -> None:
    """Exports the place where libraries and user code look for it: under torchrun's names."""
    env["RANK"], env["WORLD_SIZE"] = str(world.rank), str(world.size)
    env["LOCAL_RANK"], env["LOCAL_WORLD_SIZE"] = str(world.local_rank), str(world.local_size)


def from_torchrun(env: Mapping[str, str]) -> World | None:
    """Reads torchrun's variables, which are also set by our own launcher and by scripts that
    replace torchrun."""
    if "RANK" not in env or "WORLD_SIZE" not in env:
        return None
    size = number(env, "WORLD_SIZE", at_least=1)
    step = from_srun(env) if "LOCAL_WORLD_SIZE" not in env else None  # scripts often leave it out
    known = step.local_size if step is not None and step.size == size else size
    local_size = number(env, "LOCAL_WORLD_SIZE", known, at_least=1)
    world = World(
        rank=number(env, "RANK"),
        size=size,
        local_rank=number(env, "LOCAL_RANK", number(env, "RANK") % local_size),
        local_size=local_size,
        rendezvous=_given_rendezvous(env, size),
    )
    if world.rank >= world.size:
        raise ClusterError(
            f"environment RANK: {world.rank} must be below WORLD_SIZE = {world.size}"
        )
    num_nodes = number(env, "GROUP_WORLD_SIZE", world.num_nodes, at_least=1)
    if num_nodes * world.local_size != world.size:
        raise ClusterError(
            f"environment LOCAL_WORLD_SIZE: {world.local_size} ranks here, but {world.size} on "
            f"{num_nodes} nodes; give every torchrun the same --nproc-per-node"
        )
    return world


def _given_rendezvous(env: Mapping[str, str], size: int) -> Rendezvous | None:
    """Returns the rendezvous from the environment; None under torchrun, which opens its own."""
    if size == 1 or "TORCHELASTIC_RUN_ID" in env:
        return None
    if not ("MASTER_ADDR" in env and "MASTER_PORT" in env):
        raise ClusterError(
            f"environment WORLD_SIZE: {size} ranks need MASTER_ADDR and MASTER_PORT to find each "
            "other; torchrun sets them. Unset RANK and WORLD_SIZE to start the ranks from here"
        )
    name = "-".join(["ranks", *env.get("SLURM_JOB_ID", "").split()])
    return _rendezvous(env, address="", port=0, name=name)


def from_open_mpi(env: Mapping[str, str]) -> World | None:
    if "OMPI_COMM_WORLD_RANK" not in env or "OMPI_COMM_WORLD_SIZE" not in env:
        return None
    launch = first_set(env, "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    place = _place(env, *(f"OMPI_COMM_WORLD_{name}" for name in names))
    return _mpi_world(env, place, f"openmpi-{env[launch]}" if launch else None)


def from_mpich(env: Mapping[str, str]) -> World | None:
    """Reads the variables of MPICH and Intel MPI (`MPI_LOCAL…`), and of Cray's PALS (`PALS_…`).
    srun also sets some of these (`--mpi=pmi2`, `cray_shasta`), but its own variables say more about
    its tasks."""
    rank = first_set(env, "PMI_RANK", "PALS_RANKID")
    local_rank = first_set(env, "MPI_LOCALRANKID", "PALS_LOCAL_RANKID", "PMI_LOCAL_RANK")
    local_size = first_set(env, "MPI_LOCALNRANKS", "PALS_LOCAL_SIZE", "PMI_LOCAL_SIZE")
    if not (rank and local_rank and local_size and "PMI_SIZE" in env):
        return None
    if local_rank != "MPI_LOCALRANKID" and "SLURM_STEP_ID" in env:
        return None
    place = _place(env, rank, "PMI_SIZE", local_rank, local_size)
    return _mpi_world(env, place, _mpich_launch(env, place.num_nodes == 1))


def _place(env: Mapping[str, str], rank: str, size: str, local_rank: str, local_size: str) -> World:
    """Returns the place that these variables describe."""
    return World(
        number(env, rank),
        number(env, size, at_least=1),
        number(env, local_rank),
        number(env, local_size, at_least=1),
    )


def _mpich_launch(env: Mapping[str, str], is_local: bool) -> str | None:
    """Returns a name for this launch that all its ranks know and no other launch has. MPICH
    provides none: on one node we use the process above the ranks, on several the Slurm step that
    started them."""
    if "PALS_APID" in env:
        return f"pals-{env['PALS_APID']}"
    if is_local:
        return f"mpich-{_proxy()}"
    if "SLURM_JOB_ID" in env:
        return f"mpich-{env['SLURM_JOB_ID']}.{env.get('SLURM_STEP_ID', '')}"
    return f"mpich-{env['PBS_JOBID']}" if "PBS_JOBID" in env else None


def _mpi_world(env: Mapping[str, str], place: World, name: str | None) -> World:
    """Returns the place of a rank with a rendezvous, given the name of its launch. mpirun ends all
    ranks when one fails, so it is enough if one notices that they are placed wrongly."""
    size, local_size = place.size, place.local_size
    if size > 1 and name is None and not env.get("MASTER_PORT"):
        raise ClusterError(
            f"{size} ranks on several nodes, but this mpirun gives no job name to derive a port "
            "from: set MASTER_ADDR to the host of rank 0 and MASTER_PORT to a free port there"
        )
    rendezvous = None
    if size > 1:
        name = name or "mpi"
        address = LOOPBACK if size == local_size else _mpi_first_host(env)
        rendezvous = _rendezvous(env, address=address, port=port_of_name(name), name=name)
    if size % local_size:
        raise ClusterError(
            f"{local_size} ranks on this node and {size} in total: every node needs "
            "the same number; start mpirun with --npernode (Open MPI) or -ppn (MPICH, Cray)"
        )
    if place.rank % local_size != place.local_rank:
        raise ClusterError(
            f"rank {place.rank} is number {place.local_rank} of {local_size} on its node: "
            "ranks must fill one node after the other; start mpirun with --map-by slot"
        )
    return replace(place, rendezvous=rendezvous)


def _mpi_first_host(env: Mapping[str, str]) -> str:
    """Returns the host of rank 0. mpirun does not provide it, but the batch system may: it fills
    the first host first. If that is wrong, rank 0 reports it (rendezvous.py)."""
    if env.get("MASTER_ADDR"):
        return env["MASTER_ADDR"]
    if env.get("SLURM_JOB_NODELIST"):
        return expand_hosts(env["SLURM_JOB_NODELIST"])[0]
    nodes = Path(env.get("PBS_NODEFILE", ""))
    if nodes.is_file() and (hosts := nodes.read_text().split()):
        return hosts[0]
    raise ClusterError(
        "ranks on several nodes need MASTER_ADDR, and mpirun does not provide the host of rank 0: "
        "add -x MASTER_ADDR=HOST to Open MPI's mpirun, or -genv MASTER_ADDR HOST to MPICH's"
    )


def _proxy() -> int:
    """Returns the proxy process above a rank: each rank leads its own session, whatever scripts are
    in between."""
    leader = facts_of(os.getsid(0))
    return int(leader[1]) if leader else os.getppid()


def from_srun(env: Mapping[str, str]) -> World | None:
    """Returns the place of a task that srun started, with any `--mpi`.

    A batch script and the shell of `salloc` also have most of these variables, describing what the
    *allocation* could run: SLURM_PROCID is 0 and SLURM_NTASKS is 8 for a single process. They are
    distinguished from a task by the step: it has no number there, or one that Slurm reserves for
    shells. A step of one task is not a world: `srun --pty bash` is one, and its user wants to use
    all of its devices, so ranks are started from there.
    """
    step = srun_step(env)
    if step is None:
        return None
    size_name = first_set(env, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS") or ""
    size = number(env, size_name, at_least=1)
    if size == 1:
        return None
    here = env.get("SLURM_GTIDS", "").split(",") if env.get("SLURM_GTIDS") else None
    lists = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    advice = f"not set in a step of {size} tasks; start it with srun"
    counts = expand_counts(_needed(env, advice, *lists))
    node = number(env, "SLURM_NODEID", 0)
    if node >= len(counts) or (here is not None and len(here) != counts[node]):
        return None  # a batch script submitted by a task: the step is its parent's
    _check_srun(env, counts, here)
    job = number(env, "SLURM_JOB_ID" if "SLURM_JOB_ID" in env else "SLURM_JOBID")
    return World(
        rank=number(env, "SLURM_PROCID"),
        size=size,
        local_rank=number(env, "SLURM_LOCALID"),
        local_size=counts[node],
        rendezvous=_rendezvous(
            env,
            address=LOOPBACK if len(counts) == 1 else _srun_first_host(env),
            port=port_of_job(job, step),
            name=f"slurm-{job}.{step}",
        ),
    )


def srun_step(env: Mapping[str, str]) -> int | None:
    """Returns the number of the step if srun started this process, unlike a batch script."""
    name = first_set(env, "SLURM_STEP_ID", "SLURM_STEPID")
    if name is None or "SLURM_PROCID" not in env:
        return None
    tasks = env.get("SLURM_STEP_NUM_TASKS", "")
    if tasks and env.get("SLURM_NTASKS", tasks) != tasks:  # a batch script that a task submitted
        return None
    step = number(env, name)
    return step if step < FIRST_SPECIAL_STEP else None


def _srun_first_host(env: Mapping[str, str]) -> str:
    lists = ("SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST")
    advice = "not set; set MASTER_ADDR to the host of rank 0"
    return expand_hosts(_needed(env, advice, *lists))[0]


def _needed(env: Mapping[str, str], advice: str, *names: str) -> str:
    """Returns the value of the first of these variables that is set."""
    if (name := first_set(env, *names)) is None:
        raise ClusterError(f"environment {names[0]}: {advice}")
    return env[name]


def _check_srun(env: Mapping[str, str], counts: list[int], here: list[str] | None) -> None:
    """Checks what every task of the step sees alike, so that all end with this error and none
    waits."""
    if len(set(counts)) > 1:
        raise ClusterError(
            f"environment SLURM_STEP_TASKS_PER_NODE: {','.join(map(str, counts))}: every node "
            "needs the same number of ranks; start srun with --ntasks-per-node"
        )
    if here is not None and [int(i) - int(here[0]) for i in here] != list(range(len(here))):
        raise ClusterError(
            f"environment SLURM_GTIDS: ranks {','.join(here)} share a node: ranks must fill one "
            "node after the other; start srun with --distribution=block"
        )


def _rendezvous(env: Mapping[str, str], address: str, port: int, name: str) -> Rendezvous:
    """Returns a rendezvous; MASTER_ADDR and MASTER_PORT take precedence. They are often set from
    `hostname -i`, which may print several addresses."""
    given = env.get("MASTER_ADDR", "").split()
    return Rendezvous(
        given[0] if given else address,
        number(env, "MASTER_PORT", port, at_least=1),
        name,
    )


def number(env: Mapping[str, str], name: str, default: int | None = None, at_least: int = 0) -> int:
    text = env.get(name, "" if default is None else str(default)).strip()
    if not text.isdecimal() or int(text) < at_least:
        raise ClusterError(
            f'environment {name}: "{text}": expected a whole number, {at_least} or more'
        )
    return int(text)


def first_set(env: Mapping[str, str], *names: str) -> str | None:
    """Returns the first of these variables that is set."""
    return next((name for name in names if env.get(name, "").strip()), None)
