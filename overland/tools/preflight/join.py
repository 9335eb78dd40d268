"""Tasks that a launcher has started already: the first one conducts, the others find it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from overland.slurm import expand_hosts
from overland.tools.preflight.conduct import Job, conduct
from overland.tools.preflight.report import Report
from overland.tools.preflight.start import first_task
from overland.tools.preflight.task import run_task
from overland.world.heartbeat import node_name
from overland.world.rendezvous import open_store, reachable
from overland.world.wire import Switchboard
from overland.world.world import World

if TYPE_CHECKING:
    from torch.distributed import Store

START_SECONDS = 300
NAME = "preflight"


def join(world: World, job: Job, env: Mapping[str, str] = os.environ) -> Report | None:
    """The report on the first rank; None on the others. Where to call, and the key, go through the
    store of the world, which trusts its network as training does."""
    store = _store(world)
    if not world.is_first:
        os.environ.update(json.loads(store.get(NAME)))
        run_task()
        return None
    nodes = _nodes(world, env)
    board = Switchboard(_others(world, nodes, env), env)
    try:
        store.set(NAME, json.dumps(board.environment()))
        started = first_task({**env, **board.environment()})
        return conduct(board, started, nodes, world.local_size, job)
    finally:
        board.close()


def _store(world: World) -> Store:
    store = open_store(world, START_SECONDS)
    if store is not None:
        return store
    from torch.distributed import PrefixStore, rendezvous  # torchrun has opened one

    opened, _, _ = next(rendezvous("env://", world.rank, world.size))
    return PrefixStore(NAME, opened)


def _nodes(world: World, env: Mapping[str, str]) -> list[str] | int:
    """By name under srun; elsewhere their number: they tell their names when they call."""
    names = expand_hosts(env["SLURM_STEP_NODELIST"]) if "SLURM_STEP_NODELIST" in env else []
    return names if len(names) == world.num_nodes else world.num_nodes


def _others(world: World, nodes: list[str] | int, env: Mapping[str, str]) -> list[str]:
    """A host whose way leads over the network that all share."""
    if world.num_nodes == 1:
        return []
    if not isinstance(nodes, int):
        return [node for node in nodes if node != node_name(env)]
    address = world.rendezvous.address if world.rendezvous else env["MASTER_ADDR"]
    return [reachable(address)]
