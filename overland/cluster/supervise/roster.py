"""Decides which nodes of an allocation train and which are spares, and after how many faults
(strikes) a node is excluded, here and from the chain's waiting jobs.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from overland.cluster.slurm_jobs import shun
from overland.cluster.supervise.events import Event, bad_nodes, read_events, tell
from overland.cluster.supervise.faults import HARDWARE, Fault
from overland.errors import Kind

BAD_SECONDS = 24 * 3600.0  # by then someone has fixed a bad node, or it was fine after all
STRIKES = 2  # a node where ranks hung or were killed this often is excluded, if there is a spare


class Roster:
    def __init__(self, nodes: Sequence[str], wanted: int, batch_host: str) -> None:
        self.nodes, self.wanted, self.batch_host = list(nodes), wanted, batch_host
        self.out: dict[str, str] = {}
        """Nodes that are no longer used, and why."""
        self._strikes: Counter[str] = Counter()
        self._suspicions: Counter[str] = Counter()
        self._chosen: list[str] = []

    @property
    def good(self) -> list[str]:
        return [node for node in self.nodes if node not in self.out]

    def choose(self) -> list[str] | None:
        """Returns the nodes to train on, if there are enough. The batch host is chosen last: the
        job ends with it in any case, and if it is not used, losing rank 0 does not end the job."""
        order = {node: number for number, node in enumerate(self.nodes)}

        def doubt(node: str) -> tuple[int, int, bool, int]:
            is_host = node == self.batch_host
            return self._strikes[node], self._suspicions[node], is_host, order[node]

        best = sorted(self.good, key=doubt)
        if len(best) < self.wanted:
            return None
        self._chosen = sorted(best[: self.wanted], key=order.__getitem__)
        return self._chosen

    def exclude(self, node: str, reason: str) -> None:
        if node in self.nodes:
            self.out.setdefault(node, reason)

    def leave_out(self, fault: Fault) -> list[str]:
        """Excludes nodes that caused this fault, and returns those that are now excluded."""
        excluded = []
        for node in fault.nodes:
            broken = fault.kind is Kind.DEVICE and re.search(HARDWARE, fault.what)
            if fault.kind is Kind.NODE or broken:
                self.exclude(node, f"{fault.kind}: {fault.what}")
                excluded.append(node)
            elif self.strike(node, fault.what):
                excluded.append(node)
        if not fault.nodes:
            self.suspect_all()
        return excluded

    def strike(self, node: str, reason: str) -> bool:
        """Counts a strike and returns whether the node is now excluded. A node that may be innocent
        is only given up if there is a spare."""
        self._strikes[node] += 1
        spared = len(self.good) > self.wanted
        if self._strikes[node] >= STRIKES and spared and node in self.good:
            self.out[node] = reason
            return True
        return False

    def avoid_bad_nodes(self, events: list[Event]) -> None:
        """Uses recently bad nodes last. A job that Slurm itself requeued, or that was queued before
        they went bad, may have received them again."""
        bad = bad_nodes(events, time.time() - BAD_SECONDS)
        for node in self.nodes:
            if node in bad:
                tell(f"{node} was bad recently and is used last: {bad[node]}")
                self._strikes[node] += 1

    def suspect_all(self) -> None:
        """Suspects all chosen nodes, because it is unknown which is at fault: the next attempt
        replaces as many of them with spares as it can."""
        self._suspicions.update(self._chosen)


def shun_bad_nodes(run: Path, env: Mapping[str, str]) -> None:
    """Keeps the queued jobs of this chain away from recently bad nodes."""
    events = read_events(run)
    if ever := bad_nodes(events, since=0):
        shun(list(bad_nodes(events, time.time() - BAD_SECONDS)), ever, env)
