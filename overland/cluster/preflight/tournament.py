"""Decides which nodes measure the link between them, and which node is to blame for a bad link.

In round k node i is paired with node i XOR 2^k, so that ⌈log₂ N⌉ rounds connect every node to every
other (ten for 640 nodes), and no node is in two pairs at once. A bad link makes both its nodes
suspects. Usually the other rounds show which it is: a bad node's links are all bad, a good node's
only those to bad nodes. If not, each suspect is paired with a faultless node once more.
"""

from __future__ import annotations

import secrets
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median_high

from overland.cluster.preflight.crew import GRACE, LIMITS, Crew, Task
from overland.cluster.preflight.judge import Finding, Place
from overland.cluster.preflight.link import TOKEN_BYTES
from overland.cluster.wire import Message

Pair = tuple[str, str]
MOST_RETRIALS = 2
FEWEST = 3  # a median of fewer values means nothing


@dataclass(frozen=True)
class Match:
    """A measurement between two nodes. The rate, in GB/s, is that of their slowest pair of tasks
    times the number of pairs, since training waits for the slowest."""

    nodes: Pair
    round: int
    gb_per_s: float | None = None
    latency_us: float | None = None
    error: str = ""


@dataclass(frozen=True)
class LinkVerdict:
    bad: dict[str, str]
    """Reason by node."""
    unclear: dict[Match, str]
    """Bad links for which it is unclear which node is to blame, and what is wrong."""


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
        """Returns bad nodes, and notes. A node found bad on the way is left out of later rounds,
        since its partners would wait for it."""
        plan = pairings([node for node in self.crew.nodes if not self.is_bad(node)])
        for number, pairs in enumerate(plan, start=1):
            bad = self._judge().bad
            playing = [p for p in pairs if not any(n in bad or self.is_bad(n) for n in p)]
            self._play(playing, number, f"round {number} of the links")
        tried: set[str] = set()
        for number in range(len(plan) + 1, len(plan) + 1 + MOST_RETRIALS):
            doubtful = suspects(self._judge())
            clean = faultless(self.matches, self.slow)
            pairs = retrial(
                [node for node in doubtful if node not in tried and not self.is_bad(node)],
                [node for node in clean if not self.is_bad(node)],
            )
            self._play(pairs, number, f"extra round {number} of the links")
            tried |= {suspect for suspect, _ in pairs}
        return conclude_rounds(self._judge(), self.matches, self.slow, tried)

    def _judge(self) -> LinkVerdict:
        """Judges the links so far; a single bad link may be chance, or the partner's fault."""
        return judge_links(self.matches, self.slow, fewest_bad=2)

    def _play(self, pairs: Sequence[Pair], number: int, what: str) -> None:
        if not pairs:
            return
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
        self.matches += [
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


def conclude_rounds(
    verdict: LinkVerdict, matches: Sequence[Match], slow: float, tried: set[str]
) -> tuple[list[Finding], list[str]]:
    """Decides unclear cases. If both nodes of a bad link did well with others since, neither is to
    blame. If there was no one to retry with, the node that did worse is; or both are suspects, and
    training should use neither."""
    findings: list[Finding] = list(verdict.bad.items())
    notes: list[str] = []
    worse = judge_links(matches, slow).bad
    for match, fault in verdict.unclear.items():
        one, other = match.nodes
        untried = [node for node in match.nodes if node not in tried]
        guilty = [node for node in untried if node in worse] or untried
        if not guilty:
            notes.append(
                f"link between {one} and {other}: {fault}; both did well with others since"
            )
        doubt = "; it is unclear which node is to blame" if len(guilty) > 1 else ""
        findings += [(node, describe_link(match, node, fault) + doubt) for node in guilty]
    return findings, notes


def pairings(nodes: Sequence[str]) -> list[list[Pair]]:
    num_rounds = max(0, len(nodes) - 1).bit_length()
    return [
        [
            (nodes[i], nodes[i ^ 2**k])
            for i in range(len(nodes))
            if i < i ^ 2**k < len(nodes)  # a node without a partner is skipped
        ]
        for k in range(num_rounds)
    ]


def retrial(suspects: Sequence[str], faultless: Sequence[str]) -> list[Pair]:
    """Pairs each suspect with a faultless node, as far as there are any."""
    return list(zip(suspects, faultless, strict=False))


def judge_links(matches: Sequence[Match], slow: float, fewest_bad: int = 1) -> LinkVerdict:
    """Returns which nodes are to blame, the clearest case first; links of a bad node no longer
    count against others.

    Args:
        matches: All measurements so far.
        slow: A link below this fraction of the median of its round is bad.
        fewest_bad: Bad links that a node must have before it is called bad.
    """
    fault = bad_links(matches, slow)
    innocent = list(matches)  # without those of nodes found bad
    bad: dict[str, str] = {}
    while True:
        unclear = [match for match in innocent if match in fault]
        num_played = Counter(node for match in innocent for node in match.nodes)
        num_bad = Counter(node for match in unclear for node in match.nodes)
        score = {n: (count / num_played[n], count) for n, count in num_bad.items()}
        worse = {
            node
            for one, other in (match.nodes for match in unclear)
            for node, partner in ((one, other), (other, one))
            if score[node] > score[partner] and num_bad[node] >= fewest_bad
        }
        if not worse:
            return LinkVerdict(bad, {match: fault[match] for match in unclear})
        worst = max(sorted(worse), key=lambda node: score[node])
        reasons = [describe_link(m, worst, fault[m]) for m in unclear if worst in m.nodes]
        bad[worst] = "; ".join(reasons[:2])
        innocent = [match for match in innocent if worst not in match.nodes]


def describe_link(match: Match, node: str, fault: str) -> str:
    other = match.nodes[match.nodes[0] == node]
    return f"link with {other} in round {match.round}: {fault}"


def suspects(verdict: LinkVerdict) -> list[str]:
    return sorted({node for match in verdict.unclear for node in match.nodes})


def faultless(matches: Sequence[Match], slow: float) -> list[str]:
    """Returns nodes whose links were all good."""
    at_fault = {node for match in bad_links(matches, slow) for node in match.nodes}
    played = dict.fromkeys(node for match in matches for node in match.nodes)
    return [node for node in played if node not in at_fault]


def bad_links(matches: Sequence[Match], slow: float) -> dict[Match, str]:
    """Returns the bad links and what is wrong with them. Rates are compared within a round, whose
    pairs are equally far apart. If a round has too few pairs for that, one bad node of five can
    spoil most links, so each node's best rate is used instead."""
    by_round: dict[int, list[float]] = defaultdict(list)
    best: dict[str, float] = {}
    for match in matches:
        if match.gb_per_s is not None:
            by_round[match.round].append(match.gb_per_s)
            best |= {node: max(match.gb_per_s, best.get(node, 0.0)) for node in match.nodes}
    found: dict[Match, str] = {}
    usual = {
        number: median_high(rates if len(rates) >= FEWEST else best.values())
        for number, rates in by_round.items()
    }
    for match in matches:
        rate = match.gb_per_s
        if rate is None or match.error:
            found[match] = match.error or "no result"
        elif len(best) >= FEWEST and rate < slow * usual[match.round]:
            found[match] = f"{rate:.3g} GB/s, while the median is {usual[match.round]:.3g}"
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
