"""Plays the tournament: every pair at once, each task with its counterpart on the other node."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from overland.tools.preflight import limits, tournament
from overland.tools.preflight.crew import Crew, Task
from overland.tools.preflight.judge import Finding, Place
from overland.tools.preflight.link import TOKEN_BYTES
from overland.tools.preflight.tournament import Match, Pair, Verdict
from overland.world.wire import Message

MOST_RETRIALS = 2


@dataclass
class Rounds:
    crew: Crew
    is_bad: Callable[[str], bool]
    slow: float
    """A link below this fraction of the median is bad."""
    backend: str
    torch: bool
    """Through the backend of training; else through plain connections."""
    matches: list[Match] = field(default_factory=list)

    def play(self) -> tuple[list[Finding], list[str]]:
        """Who is bad, and what should be known. A node that is found bad on the way plays no more:
        its partners would wait for it."""
        plan = tournament.rounds([node for node in self.crew.nodes if not self.is_bad(node)])
        for number, pairs in enumerate(plan, start=1):
            bad = self._judge().bad
            playing = [p for p in pairs if not any(n in bad or self.is_bad(n) for n in p)]
            self._play(playing, number, f"round {number} of the links")
        tried: set[str] = set()
        for number in range(len(plan) + 1, len(plan) + 1 + MOST_RETRIALS):
            suspects = tournament.suspects(self._judge())
            clean = tournament.faultless(self.matches, self.slow)
            pairs = tournament.retrial(
                [node for node in suspects if node not in tried and not self.is_bad(node)],
                [node for node in clean if not self.is_bad(node)],
            )
            self._play(pairs, number, f"extra round {number} of the links")
            tried |= {suspect for suspect, _ in pairs}
        return conclude(self._judge(), self.matches, self.slow, tried)

    def _judge(self) -> Verdict:
        """One bad link alone may be chance, or the partner's fault."""
        return tournament.judge(self.matches, self.slow, fewest_bad=2)

    def _play(self, pairs: Sequence[Pair], number: int, what: str) -> None:
        if not pairs:
            return
        crew, lost_before = self.crew, set(self.crew.lost)
        locals_ = range(crew.tasks_per_node)
        crew.progress.begin(what, 2 * len(pairs) * crew.tasks_per_node)
        tasks = {task.place: task for task in crew.alive()}
        orders = self._orders(pairs, tasks, what)
        limit = limits.LIMITS["link"] + limits.GRACE
        answers = crew.ask(orders, what, limit, patience=limit)
        partner = dict(pairs) | {b: a for a, b in pairs}
        for node in (set(crew.lost) - lost_before) & partner.keys():  # one that rests may end too
            crew.lost[node] += f", with {partner[node]}"
        self.matches += [
            _match(pair, number, {(n, i): answers.get((n, i), {}) for n in pair for i in locals_})
            for pair in pairs
            if not set(pair) & set(crew.lost)  # for that, its partner is not to blame
        ]

    def _orders(
        self, pairs: Sequence[Pair], tasks: Mapping[Place, Task], what: str
    ) -> dict[Task, Message]:
        """The first of each pair is asked to listen; then both are told where."""
        counterparts = [
            (tasks[a, local], tasks[b, local])
            for a, b in pairs
            for local in range(self.crew.tasks_per_node)
        ]
        listen = {one: {"do": "listen"} for one, _ in counterparts}
        places = self.crew.ask(listen, what, limits.LIMITS["listen"], limits.PATIENCE)
        orders: dict[Task, Message] = {}
        for one, other in counterparts:
            if {one.node, other.node} & set(self.crew.lost):
                continue
            order = {
                "do": "link",
                "at": places[one.place].get("at"),
                "token": secrets.token_hex(TOKEN_BYTES // 2),
                "backend": self.backend,
                "torch": self.torch,
                "seconds": limits.LIMITS["link"],
            }
            if order["at"] is not None:
                orders[one] = {**order, "listening": True}
                orders[other] = {**order, "listening": False}
        return orders


def _match(pair: Pair, number: int, answers: Mapping[Place, Message]) -> Match:
    """The pairs of tasks of two nodes as one: as fast as the slowest, as right as the worst."""
    errors = [
        f"task {local} of {node}: {facts.get('error', 'could not listen')}"
        for (node, local), facts in answers.items()
        if "gb_per_s" not in facts
    ]
    if errors:
        return Match(pair, number, error=errors[0])
    if not all(facts["right"] for facts in answers.values()):
        return Match(pair, number, error="other bytes arrive than were sent")
    slowest = min(facts["gb_per_s"] for facts in answers.values())
    latency = max(facts["latency_us"] for facts in answers.values())
    return Match(pair, number, slowest * len(answers) / 2, latency)


def conclude(
    verdict: Verdict, matches: Sequence[Match], slow: float, tried: set[str]
) -> tuple[list[Finding], list[str]]:
    """A link that was bad once is the fault of neither if both have done well since. If there was
    nobody to try that with, it is that of the node that did worse; or both are suspects, and
    training should have neither."""
    findings: list[Finding] = list(verdict.bad.items())
    notes: list[str] = []
    worse = tournament.judge(matches, slow).bad
    for match, fault in verdict.unclear.items():
        one, other = match.nodes
        untried = [node for node in match.nodes if node not in tried]
        guilty = [node for node in untried if node in worse] or untried
        if not guilty:
            notes.append(f"link of {one} and {other}: {fault}; both did well with others since")
        doubt = "; it is unclear whose fault that is" if len(guilty) > 1 else ""
        findings += [(node, tournament.describe(match, node, fault) + doubt) for node in guilty]
    return findings, notes
