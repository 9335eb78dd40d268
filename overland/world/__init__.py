"""How ranks start, find each other and report their state.

A `World` is the place of a process among the ranks; a `Rendezvous` is where they find each other.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rendezvous:
    """The store that rank 0 opens, and the prefix of this world's keys in it."""

    address: str
    port: int
    name: str


@dataclass(frozen=True)
class World:
    """The place of this process. `local_` means within one node; nodes are filled one after the
    other, each with the same number of ranks. Without a rendezvous, torch knows where the ranks
    meet."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    rendezvous: Rendezvous | None = None

    @property
    def num_nodes(self) -> int:
        return max(1, self.size // self.local_size)

    @property
    def is_first(self) -> bool:
        return self.rank == 0
