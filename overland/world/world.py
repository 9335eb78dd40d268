"""A process's place among the ranks."""

from __future__ import annotations

from dataclasses import dataclass

from overland.world.rendezvous import Meeting


@dataclass(frozen=True)
class World:
    """This process's place. `local_` is within one node; nodes are filled one after the other, each
    with as many ranks. Without a meeting, torch itself knows where the ranks meet."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    meeting: Meeting | None = None

    @property
    def num_nodes(self) -> int:
        return max(1, self.size // self.local_size)

    @property
    def is_first(self) -> bool:
        return self.rank == 0
