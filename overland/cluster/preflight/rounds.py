"""Decides which nodes measure the link between them, which links are bad (slow against the median
of their round), and which node is to blame.

In two rounds each node is paired with its neighbor, and then with a node half of the list away; no
node is in two pairs at once. A bad link makes both its nodes suspects. Each suspect is paired once
more, with a node whose links were all good, and is bad if that link is bad too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_high

from overland.cluster.preflight.judge import FEWEST, Answers, Finding

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


def match_of(pair: Pair, number: int, answers: Answers) -> Match:
    """Combines the pairs of tasks of two nodes: as fast as the slowest, as correct as the worst."""
    for (node, local), facts in answers.items():
        if "gb_per_s" not in facts:
            error = facts.get("error", "could not listen")
            return Match(pair, number, error=f"task {local} of {node}: {error}")
    if not all(facts["right"] for facts in answers.values()):
        return Match(pair, number, error="received other bytes than were sent")
    slowest = min(facts["gb_per_s"] for facts in answers.values())
    latency = max(facts["latency_us"] for facts in answers.values())
    return Match(pair, number, slowest * len(answers) / 2, latency)
