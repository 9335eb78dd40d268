"""An attempt that is under way: its ranks, and all that comes from its nodes."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from overland.tools.jobs.supervise.attempt import Attempt
from overland.tools.jobs.supervise.watchdog import GONE_SECONDS, Watchdog
from overland.world.heartbeat import Phase
from overland.world.wire import Message, Switchboard, Wire

WORD_SECONDS = 10.0  # from the first rank's last words to the end of all
HANG_UP_SECONDS = 5.0  # from the end of a node's agent to srun's word on its tasks


@dataclass
class Watched:
    attempt: Attempt
    dog: Watchdog
    board: Switchboard
    here: str = ""
    """The node of this process."""
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
                node = message["node"]
                # It may call again before the end of its last connection is noticed.
                self.wires = {w: other for w, other in self.wires.items() if other != node}
                self.wires[wire] = node
                self.hung_up.pop(node, None)
                self.attempt.step_id = self.attempt.step_id or message["step"]
                self.dog.call(node, now)
            elif "beats" in message and wire in self.wires:
                self.dog.hear(self.wires[wire], message["beats"], now)
            elif "stacks" in message:
                self.stacks.update({int(rank): text for rank, text in message["stacks"].items()})

    def silent_nodes(self) -> list[str]:
        """Nodes whose agents say nothing, of which srun has nothing to say either and whose ranks
        had not ended."""
        now = time.monotonic()
        hung_up = [n for n, since in self.hung_up.items() if now - since > HANG_UP_SECONDS]
        ended = self._nodes_that_ended()
        silent = dict.fromkeys([*hung_up, *self.dog.silent_nodes(now)])
        return [node for node in silent if node not in ended]

    def lost_nodes(self) -> list[str]:
        """Silent nodes, once nothing else speaks for them: ranks wait for one another, so that a
        step that is done was done on every node; and this process runs on one of them."""
        if self.dog.is_advancing(time.monotonic()):
            return []
        return [node for node in self.silent_nodes() if node != self.here]

    def undecided_nodes(self, since: float) -> list[str]:
        """Nodes that have not been heard of since then, and may be lost or not."""
        decided = {*self.attempt.findings.lost, *self._nodes_that_ended(), self.here}
        return [node for node in self.dog.quiet_nodes(since) if node not in decided]

    def _nodes_that_ended(self) -> set[str]:
        """Their ranks did, or srun tells of one."""
        findings, ranks = self.attempt.findings, self.dog.ranks.values()
        ended = {node for end in findings.ends for node in end.nodes}
        ended |= {said.node for said in findings.said}
        ended |= {rank.node for rank in ranks if rank.is_over or not rank.state}
        return ended | {node for node, _ in findings.ended.values()}

    def gone_ranks(self) -> dict[int, float]:
        """Ranks that ended in the middle of training before anyone said a word, and since when
        that is known. One that fails takes others with it, and srun does, too: those are gone
        after it."""
        findings = self.attempt.findings
        gone = dict(self.dog.gone_ranks(time.monotonic()))
        for rank, (_, since) in findings.ended.items():
            known = self.dog.ranks.get(rank)
            if known is None or known.phase < Phase.ENDING:
                gone.setdefault(rank, since)
        spoke = {said.rank for said in findings.said}
        word = findings.first_word
        return {
            rank: since
            for rank, since in gone.items()
            if rank not in spoke and (word is None or since < word)
        }

    def is_to_end(self) -> bool:
        """Whether a rank has failed and the others are still there. srun should have ended them,
        but has to ask Slurm's controller for it, which may be slow; else they look as if they
        hung."""
        now, word = time.monotonic(), self.attempt.findings.first_word
        if word is not None and now - word > WORD_SECONDS:
            return True
        gone = self.gone_ranks()
        is_known = any(now - since > GONE_SECONDS for since in gone.values())
        return is_known and self.dog.wait_in_vain(gone)

    def close(self) -> None:
        """What becomes of the ranks from now on is no cause."""
        findings = self.attempt.findings
        for rank in self.gone_ranks():
            known = self.dog.ranks.get(rank)
            findings.gone[rank] = known.node if known else findings.ended[rank][0]
        findings.is_closed = True

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
