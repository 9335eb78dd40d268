"""Who am I among the ranks: read from whatever started this process."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass


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
    if "RANK" in env and "WORLD_SIZE" in env:
        size = int(env["WORLD_SIZE"])
        return World(
            rank=int(env["RANK"]),
            size=size,
            local_rank=int(env.get("LOCAL_RANK", 0)),
            local_size=int(env.get("LOCAL_WORLD_SIZE", size)),
        )
    return None
