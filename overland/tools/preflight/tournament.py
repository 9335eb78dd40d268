"""Who measures the link with whom, and whose fault a bad link is.

In round k node i meets node i XOR 2^k, so that ⌈log₂ N⌉ rounds lead from every node to every other,
640 nodes take ten, and no node is in two pairs at once. A bad link makes both its nodes suspects.
Most of the time the other rounds tell which: a bad node's links are all bad, a good node's only
those with bad ones. If they do not, each suspect meets a node without fault once more.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_high

Pair = tuple[str, str]
FEWEST = 3  # of fewer values, a median says nothing


@dataclass(frozen=True)
class Match:
    """What two nodes measured. The rate is that of their slowest pair of tasks, in GB/s, times the
    number of pairs: training waits for the slowest."""

    nodes: Pair
    round: int
    gb_per_s: float | None = None
    latency_us: float | None = None
    error: str = ""


@dataclass(frozen=True)
class Verdict:
    bad: dict[str, str]
    """Node to reason."""
    unclear: dict[Match, str]
    """Bad links of which it cannot be told whose fault they are, and what is wrong."""


def rounds(nodes: Sequence[str]) -> list[list[Pair]]:
    num_rounds = max(0, len(nodes) - 1).bit_length()
    return [
        [
            (nodes[i], nodes[i ^ 2**k])
            for i in range(len(nodes))
            if i < i ^ 2**k < len(nodes)  # a node without a partner rests
        ]
        for k in range(num_rounds)
    ]


def retrial(suspects: Sequence[str], faultless: Sequence[str]) -> list[Pair]:
    """Each suspect with a node that did well everywhere, as far as there are any."""
    return list(zip(suspects, faultless, strict=False))


def judge(matches: Sequence[Match], slow: float, fewest_bad: int = 1) -> Verdict:
    """Who is at fault, the clearest case first; what its links did is then nobody else's fault.

    Args:
        matches: All that were played so far.
        slow: A link below this fraction of the median of its round is bad.
        fewest_bad: Bad links that a node must have before it is called bad.
    """
    fault = faults(matches, slow)
    innocent = list(matches)  # without those of nodes that are found bad
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
            return Verdict(bad, {match: fault[match] for match in unclear})
        worst = max(sorted(worse), key=lambda node: score[node])
        reasons = [describe(m, worst, fault[m]) for m in unclear if worst in m.nodes]
        bad[worst] = "; ".join(reasons[:2])
        innocent = [match for match in innocent if worst not in match.nodes]


def describe(match: Match, node: str, fault: str) -> str:
    other = match.nodes[match.nodes[0] == node]
    return f"link with {other} in round {match.round}: {fault}"


def suspects(verdict: Verdict) -> list[str]:
    return sorted({node for match in verdict.unclear for node in match.nodes})


def faultless(matches: Sequence[Match], slow: float) -> list[str]:
    """Nodes whose links were all good."""
    at_fault = {node for match in faults(matches, slow) for node in match.nodes}
    played = dict.fromkeys(node for match in matches for node in match.nodes)
    return [node for node in played if node not in at_fault]


def faults(matches: Sequence[Match], slow: float) -> dict[Match, str]:
    """The bad links, with what is wrong with them. A round is compared with itself: its pairs are
    equally far apart. Where it has too few pairs for that, one bad node of five can spoil most of
    all links; so there each node's best counts."""
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
            found[match] = f"{rate:.3g} GB/s, where the median is {usual[match.round]:.3g}"
    return found
