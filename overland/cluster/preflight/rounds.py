"""Decides which nodes measure the link between them, and which node is to blame for a bad link.

In two rounds each node is paired with its neighbor, and then with a node half of the list away; no
node is in two pairs at once. A bad link makes both its nodes suspects. Each suspect is paired once
more, with a node whose links were all good, and is bad if that link is bad too.
"""

from __future__ import annotations

import secrets
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median_high

from overland.cluster.preflight.crew import GRACE, LIMITS, Crew, Task
from overland.cluster.preflight.judge import FEWEST, Finding, Place
from overland.cluster.preflight.link import TOKEN_BYTES
from overland.cluster.wire import Message

Pair = tuple[str, str]
MOST_REASONS = 2  # bad links that are named, per node


@dataclass(frozen=True)
class Match:
    """A measurement between two nodes. The rate, in GB/s, is that of their slowest pair of tasks
    times the number of pairs, since training waits for the slowest."""

    nodes: Pair
    round: int
    gb_per_s: float | None = None
    latency_us: float | None = None
    error: str = ""


@dataclass
class Rounds:
    """Runs the rounds: all pairs at once, each task with its counterpart on the other node."""

    crew: Crew
    is_bad: Callable[[str], bool]
    slow: float
    """A link below this fraction of the median is bad."""
    how: Message
    """Part of each order: how to connect. With `torch` as training does, else plainly."""
    matches: list[Match] = field(default_factory=list)

    def play(self) -> tuple[list[Finding], list[str]]:
        """Returns bad nodes, and notes."""
        plan = pairings([node for node in self.crew.nodes if not self.is_bad(node)])
        for number, pairs in enumerate(plan, start=1):
            self.matches += self._play(pairs, number, f"round {number} of the links")
        pairs = retrial(self.matches, self.slow)
        again = self._play(pairs, len(plan) + 1, "the extra round of the links")
        found = judge_links(self.matches, again, self.slow)
        self.matches += again
        return found

    def _play(self, wanted: Sequence[Pair], number: int, what: str) -> list[Match]:
        pairs = [pair for pair in wanted if not any(map(self.is_bad, pair))]
        if not pairs:
            return []
        crew, lost_before = self.crew, set(self.crew.lost)
        locals_ = range(crew.tasks_per_node)
        crew.progress.begin(what, 2 * len(pairs) * crew.tasks_per_node)
        tasks = {task.place: task for task in crew.alive()}
        orders = self._orders(pairs, tasks, what)
        limit = LIMITS["link"] + GRACE
        answers = crew.ask(orders, what, limit, patience=limit)
        partner = dict(pairs) | {b: a for a, b in pairs}
        for node in (set(crew.lost) - lost_before) & partner.keys():  # an unpaired node may end too
            crew.lost[node] += f", with {partner[node]}"
        return [
            _match(pair, number, {(n, i): answers.get((n, i), {}) for n in pair for i in locals_})
            for pair in pairs
            if not set(pair) & set(crew.lost)  # the partner is not to blame for a lost node
        ]

    def _orders(
        self, pairs: Sequence[Pair], tasks: Mapping[Place, Task], what: str
    ) -> dict[Task, Message]:
        """Asks the first of each pair to listen, and returns orders that tell both where."""
        counterparts = [
            (tasks[a, local], tasks[b, local])
            for a, b in pairs
            for local in range(self.crew.tasks_per_node)
        ]
        listen = {one: {"do": "listen"} for one, _ in counterparts}
        places = self.crew.ask(listen, what, LIMITS["listen"])
        orders: dict[Task, Message] = {}
        for one, other in counterparts:
            if {one.node, other.node} & set(self.crew.lost):
                continue
            order = {
                "do": "link",
                "at": places[one.place].get("at"),
                "token": secrets.token_hex(TOKEN_BYTES // 2),
                "seconds": LIMITS["link"],
                **self.how,
            }
            if order["at"] is not None:
                orders[one] = {**order, "listening": True}
                orders[other] = {**order, "listening": False}
        return orders


def pairings(nodes: Sequence[str]) -> list[list[Pair]]:
    """Returns the pairs of the two rounds. In a round, an odd node has no partner."""
    half = (len(nodes) + 1) // 2
    neighbors = list(zip(nodes[::2], nodes[1::2], strict=False))
    distant = list(zip(nodes[:half], nodes[half:], strict=False))
    return [neighbors, distant] if len(nodes) > 2 else [neighbors] if neighbors else []


def retrial(matches: Sequence[Match], slow: float) -> list[Pair]:
    """Pairs suspects with nodes whose links were all good, as far as there are any: first those
    without a good link."""
    faults = bad_links(matches, slow)
    suspects = dict.fromkeys(node for match in faults for node in match.nodes)
    good = {node for match in matches if match not in faults for node in match.nodes}
    ordered = sorted(suspects, key=lambda node: (node in good, node))
    return list(zip(ordered, sorted(good - suspects.keys()), strict=False))


def judge_links(
    first: Sequence[Match], again: Sequence[Match], slow: float
) -> tuple[list[Finding], list[str]]:
    """Returns bad nodes with the reason, and notes on bad links whose nodes both did well with
    others. A suspect that was tried `again` is bad if that link was bad too; one for which there
    was no good node left is bad if none of its links was good."""
    faults = bad_links(first, slow, again)
    good = {node for match in first if match not in faults for node in match.nodes}
    retried = {match.nodes[0]: match for match in again}
    reasons: dict[str, list[str]] = defaultdict(list)
    notes = []
    for match in first:
        if match not in faults:
            continue
        one, other = match.nodes
        guilty = [
            n for n in match.nodes if (retried[n] in faults if n in retried else n not in good)
        ]
        if not guilty:
            words = f"link between {one} and {other}: {faults[match]}"
            notes.append(f"{words}; both did well with others")
        is_unclear = len(guilty) > 1 and not retried.keys() & set(guilty)
        doubt = "; it is unclear which node is to blame" if is_unclear else ""
        for node in guilty:
            partner = other if node == one else one
            words = f"link with {partner} in round {match.round}: {faults[match]}"
            reasons[node].append(words + doubt)
    return [(node, "; ".join(some[:MOST_REASONS])) for node, some in reasons.items()], notes


def bad_links(first: Sequence[Match], slow: float, again: Sequence[Match] = ()) -> dict[Match, str]:
    """Returns the bad links and what is wrong with them. Rates are compared within a round, whose
    pairs are equally far apart. If a round has too few pairs for that, one bad node of five can
    spoil most links, so each node's best rate is used instead. So it is for the extra round
    (`again`), most of whose links may be those of bad nodes."""
    by_round: dict[int, list[float]] = defaultdict(list)
    best: dict[str, float] = {}
    for match in first:
        if match.gb_per_s is not None:
            by_round[match.round].append(match.gb_per_s)
            best |= {node: max(match.gb_per_s, best.get(node, 0.0)) for node in match.nodes}
    found: dict[Match, str] = {}
    usual = {
        number: median_high(rates if len(rates) >= FEWEST else best.values())
        for number, rates in by_round.items()
    }
    of_extra_round = median_high(best.values()) if best else 0.0
    for match in [*first, *again]:
        rate, median = match.gb_per_s, usual.get(match.round, of_extra_round)
        if rate is None or match.error:
            found[match] = match.error or "no result"
        elif len(best) >= FEWEST and rate < slow * median:
            found[match] = f"{rate:.3g} GB/s, while the median is {median:.3g}"
    return found


def _match(pair: Pair, number: int, answers: Mapping[Place, Message]) -> Match:
    """Combines the pairs of tasks of two nodes: as fast as the slowest, as correct as the worst."""
    errors = [
        f"task {local} of {node}: {facts.get('error', 'could not listen')}"
        for (node, local), facts in answers.items()
        if "gb_per_s" not in facts
    ]
    if errors:
        return Match(pair, number, error=errors[0])
    if not all(facts["right"] for facts in answers.values()):
        return Match(pair, number, error="received other bytes than were sent")
    slowest = min(facts["gb_per_s"] for facts in answers.values())
    latency = max(facts["latency_us"] for facts in answers.values())
    return Match(pair, number, slowest * len(answers) / 2, latency)
