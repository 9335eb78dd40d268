"""An attempt that is under way: its ranks, and all that comes from its nodes."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from overland.cluster.supervise.attempt import Attempt
from overland.cluster.supervise.watchdog import Watchdog
from overland.cluster.wire import Message, Switchboard, Wire

HANG_UP_SECONDS = 5.0  # from the end of a node's agent to srun's word on its tasks


@dataclass
class Watched:
    attempt: Attempt
    dog: Watchdog
    board: Switchboard
    wires: dict[Wire, str] = field(default_factory=dict)
    hung_up: dict[str, float] = field(default_factory=dict)
    stacks: dict[int, str] = field(default_factory=dict)

    def hear(self) -> None:
        self.attempt.listen()
        now = time.monotonic()
        while not self.board.inbox.empty():
            wire, message = self.board.inbox.get()
            if message is None:
                node = self.wires.pop(wire, "")
                if node:
                    self.hung_up[node] = now
            elif "node" in message:
                self.wires[wire] = message["node"]
                self.attempt.step_id = self.attempt.step_id or message["step"]
                self.dog.call(message["node"], now)
            elif "beats" in message and wire in self.wires:
                self.dog.hear(self.wires[wire], message["beats"], now)
            elif "stacks" in message:
                self.stacks.update({int(rank): text for rank, text in message["stacks"].items()})

    def lost_nodes(self) -> list[str]:
        """Nodes that are silent, of which srun has nothing to say and whose ranks had not ended."""
        now = time.monotonic()
        hung_up = [n for n, since in self.hung_up.items() if now - since > HANG_UP_SECONDS]
        ended = {node for end in self.attempt.findings.ends for node in end.nodes}
        ended |= {said.node for said in self.attempt.findings.said}
        ended |= {rank.node for rank in self.dog.ranks.values() if rank.is_over}
        return [node for node in [*hung_up, *self.dog.silent_nodes(now)] if node not in ended]

    def forgive(self) -> None:
        """Nobody listened for a while."""
        now = time.monotonic()
        self.dog.forgive(now)
        self.hung_up = dict.fromkeys(self.hung_up, now)

    def ask_all(self, order: Message) -> None:
        for wire in list(self.wires):
            try:
                wire.send(order)
            except OSError:
                continue  # its end is in the inbox
