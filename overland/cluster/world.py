"""Who am I among the ranks: read from whatever started this process."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from overland.cluster.errors import ClusterError


@dataclass(frozen=True)
class World:
    """This process's place. `local_` is within one node."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1

    @property
    def num_nodes(self) -> int:
        return max(1, self.size // self.local_size)

    @property
    def is_first(self) -> bool:
        return self.rank == 0


def find_world(env: Mapping[str, str] = os.environ) -> World | None:
    """The world that a launcher made for this process, or None if nobody launched it."""
    if "RANK" not in env or "WORLD_SIZE" not in env:
        return None
    size = _number(env, "WORLD_SIZE", at_least=1)
    world = World(
        rank=_number(env, "RANK"),
        size=size,
        local_rank=_number(env, "LOCAL_RANK", 0),
        local_size=_number(env, "LOCAL_WORLD_SIZE", size, at_least=1),
    )
    if world.rank >= world.size:
        raise ClusterError(f"environment RANK: {world.rank} is not below WORLD_SIZE = {world.size}")
    if world.size > 1 and not ("MASTER_ADDR" in env and "MASTER_PORT" in env):
        raise ClusterError(
            f"environment WORLD_SIZE: {world.size} ranks need MASTER_ADDR and MASTER_PORT to meet; "
            "torchrun sets them. Unset RANK and WORLD_SIZE to start the ranks from here"
        )
    return world


def _number(env: Mapping[str, str], name: str, default: int = 0, at_least: int = 0) -> int:
    text = env.get(name, str(default)).strip()
    if not text.isdecimal() or int(text) < at_least:
        raise ClusterError(
            f'environment {name}: "{text}": expected a whole number, {at_least} or more'
        )
    return int(text)
