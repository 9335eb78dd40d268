"""Judges which nodes are bad, by device, disk, clock, version and link, how far below the median is
too slow, and whether collectives fall back to TCP; and pairs nodes to measure their links. Pure
functions of everything that was measured.

A fraction of the median is a bound that needs no table of expected values; it requires at least
three values of the same kind. `None` means that a value was not measured.

In two rounds each node is paired with its neighbor, and then with a node half of the list away; no
node is in two pairs at once. A bad link makes both its nodes suspects. Each suspect is paired once
more, with a node whose links were all good, and is bad if that link is bad too.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, median_high, multimode
from typing import Any

from overland.words import rounded
from overland.world.devices import refusal_to_share

Place = tuple[str, int]
"""Node and local rank of a task."""
Answers = Mapping[Place, Mapping[str, Any]]
Finding = tuple[str, str]
"""Node and reason."""
Pair = tuple[str, str]

RATES = ("_tflops", "_gb_per_s")
FEWEST = 3  # a median of fewer values means nothing
MOST_REASONS = 2  # bad links that are named, per node
TCP = "Socket"  # NCCL's name for it

# A task's own context takes up to 1 GiB, and the driver reserves another; what an earlier job left
# behind, or an unexpected neighbor, takes more.
IDLE_GIB = 4.0
# Compilers' caches alone write hundreds of MiB; a log that cannot grow ends a run.
FREE_GIB = 1.0
# The speed of shared file systems varies by factors; a broken disk is slower than any of them.
SLOW_DISK, SLOW_DISK_GB_PER_S = 0.05, 0.02
# Logs are ordered by time, and leases and certificates expire by it; NTP keeps nodes within 0.05 s.
SKEW_SECONDS = 1.0


@dataclass(frozen=True)
class Bounds:
    """Values below this fraction of the median are bad."""

    matmul: float
    memory: float
    host: float
    link: float


# Devices of the same model differ by up to 10 % in clocks under load, and hardly at all in memory;
# the path to the host depends on sockets and switches; links share switches with other jobs.
ACCELERATOR = Bounds(matmul=0.8, memory=0.85, host=0.7, link=0.5)
# CPUs and their links may be busy with other work: what counts is that they are correct.
CPU = Bounds(matmul=0.1, memory=0.1, host=0.1, link=0.1)


@dataclass(frozen=True)
class Match:
    """A measurement between two nodes. The rate, in GB/s, is that of their slowest pair of tasks
    times the number of pairs, since training waits for the slowest."""

    nodes: Pair
    round: int
    gb_per_s: float | None = None
    latency_us: float | None = None
    error: str = ""


def errors(answers: Answers, what: str) -> Iterator[Finding]:
    for (node, local), facts in answers.items():
        if "error" in facts:
            yield node, f"{what} of task {local}: {facts['error']}"


def devices(answers: Answers, ranks_per_device: int = 1) -> Iterator[Finding]:
    """Checks that every task has an idle device, of the same kind and number as most, and shares it
    with no more tasks than intended."""
    with_gpu = {place: facts for place, facts in answers.items() if facts.get("kind") == "cuda"}
    for (node, local), facts in answers.items():
        driver = facts.get("driver", "")
        if facts.get("kind") == "cpu" and (with_gpu or driver):
            where = f", although {driver} exists" if driver else ", but others have one"
            yield node, f"torch shows no accelerator to task {local}{where}"
    visible = Counter(facts["visible"] for facts in with_gpu.values())
    usual = visible.most_common(1)[0][0] if visible else 0
    owners: dict[tuple[str, str], list[int]] = defaultdict(list)
    for (node, local), facts in with_gpu.items():
        if facts["visible"] != usual:
            yield node, f"task {local} sees {facts['visible']} devices, but most see {usual}"
        if facts["in_use_gib"] > ranks_per_device * IDLE_GIB:
            yield node, f"device of task {local} is in use: {facts['in_use_gib']:.1f} GiB of memory"
        if facts["identity"]:
            owners[node, facts["identity"]].append(local)
    for (node, _), tasks in owners.items():
        if len(tasks) > ranks_per_device:
            yield node, f"tasks {', '.join(map(str, tasks))} have the same device"


def sharing(answers: Answers, ranks_per_device: int) -> str:
    """Returns why training would refuse to let ranks share devices here, or ""."""
    if ranks_per_device == 1 or any("error" in facts for facts in answers.values()):
        return ""
    if not any(facts.get("kind") == "cuda" for facts in answers.values()):
        return refusal_to_share(ranks_per_device, "only GPUs are shared, and no task sees one")
    identities = [facts.get("identity") for facts in answers.values()]
    if all(identities) and len(set(identities)) == len(identities):
        why = "no two tasks share a GPU, so each rank would leave most of its own unused"
        return refusal_to_share(ranks_per_device, why)
    return ""


def products(answers: Answers) -> Iterator[Finding]:
    """Checks that products match float64, are reproducible, and have the same bits as on all
    devices of the same name."""
    groups: dict[str, dict[Place, str]] = defaultdict(dict)
    for (node, local), facts in answers.items():
        if "matmul_digest" not in facts:
            continue
        if not facts["matmul_is_near"]:
            yield node, f"matmul of task {local} is wrong, compared with float64"
        elif not facts["matmul_is_steady"]:
            yield node, f"matmul of task {local} is not reproducible"
        else:
            groups[facts["name"]][node, local] = facts["matmul_digest"]
    for name, digests in groups.items():
        right = majority(digests)
        for (node, local), digest in digests.items():
            if len(set(digests.values())) > 1 and digest != right:
                others = "of most" if right else "of others, and it is unclear which is right"
                yield node, f"matmul of task {local} differs in bits from that {others} ({name})"


def rates(answers: Answers, bounds: Bounds) -> Iterator[Finding]:
    """Checks rates against the median. Copies between host and device are compared among tasks of
    the same local rank, which use the same switches on every node."""
    compared = [
        ("matmul_tflops", bounds.matmul, "matmul", "TFLOP/s", False),
        ("memory_gb_per_s", bounds.memory, "memory", "GB/s", False),
        ("to_device_gb_per_s", bounds.host, "host to device", "GB/s", True),
        ("to_host_gb_per_s", bounds.host, "device to host", "GB/s", True),
    ]
    for key, bound, what, unit, by_local_rank in compared:
        groups: dict[tuple[str, int], dict[Place, float]] = defaultdict(dict)
        for place, facts in answers.items():
            if key in facts:
                groups[facts["name"], place[1] if by_local_rank else 0][place] = facts[key]
        for values in groups.values():
            for (node, local), value, usual in _far_below(values, bound):
                rate = f"{rounded(value)} {unit}, median {rounded(usual)}"
                yield node, f"{what} of task {local} is slow: {rate}"


def uncompared(answers: Answers, ranks_per_device: int) -> str:
    """Returns a note if there are too few accelerators to find a slow one, or ""."""
    measured = [facts for facts in answers.values() if facts.get("kind") == "cuda"]
    count = max(1, len(measured) // ranks_per_device) if measured else 0
    if not 0 < count < FEWEST:
        return ""
    shared = f", shared by {ranks_per_device} tasks each" if ranks_per_device > 1 else ""
    return (
        f"with fewer than {FEWEST} devices (here {count}{shared}) speeds are compared with "
        "nothing; compare them with an earlier preflight"
    )


def faster(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Combines two measurements of a task: only what is slow both times is slow."""
    return {
        **first,
        **{k: max(v, first.get(k, v)) for k, v in second.items() if k.endswith(RATES)},
        **{k: v for k, v in second.items() if k == "error"},
    }


def disks(answers: Answers) -> Iterator[Finding]:
    for name in ("run folder", "temporary folder"):
        found = {place: facts[name] for place, facts in answers.items() if name in facts}
        for (node, _), facts in found.items():
            where = f"{name} {facts['path']}"
            if "free_gib" in facts and facts["free_gib"] < FREE_GIB:
                yield node, f"{where} is nearly full: {facts['free_gib']:.2f} GiB are free"
            if "error" in facts:
                yield node, f"{where} is not writable: {facts['error']}"
            elif not facts["right"]:
                yield node, f"{where} returns different bytes than were written"
        speeds = {p: f["write_gb_per_s"] for p, f in found.items() if "write_gb_per_s" in f}
        for (node, _), value, usual in _far_below(speeds, SLOW_DISK):
            if value < SLOW_DISK_GB_PER_S:
                yield (
                    node,
                    f"{name} is slow: {rounded(value * 1000)} MB/s, median {rounded(usual * 1000)}",
                )


def clocks(answers: Answers) -> Iterator[Finding]:
    for (node, _), facts in answers.items():
        if "ahead" in facts and abs(facts["ahead"]) - facts["error_bound"] > SKEW_SECONDS:
            side = "ahead" if facts["ahead"] > 0 else "behind"
            yield node, f"clock is {abs(facts['ahead']):.1f} s {side}"


def interfaces(answers: Answers) -> Iterator[Finding]:
    for (node, _), facts in answers.items():
        for problem in facts.get("interfaces", {}).get("problems", []):
            yield node, problem


def versions(answers: Answers, own: Mapping[str, str]) -> tuple[list[Finding], list[str]]:
    """Returns nodes whose versions or config differ from most, and notes where it is unclear which
    are right. The conductor's own versions have the casting vote."""
    findings: list[Finding] = []
    notes: list[str] = []
    found = {p: facts["versions"] for p, facts in answers.items() if "versions" in facts}
    names = dict.fromkeys(name for version in found.values() for name in version)
    for name in names:
        values = {place: version.get(name, "none") for place, version in found.items()}
        if len(set(values.values())) == 1:
            continue
        right = majority(values, own.get(name))
        if right is None:
            told = ", ".join(f"{node} has {value}" for (node, _), value in sorted(values.items()))
            notes.append(f"{name} differs: {told}")
            continue
        for (node, _), value in values.items():
            if value != right:
                findings.append((node, f"{name} is {value}, but {right} on most nodes"))
    return findings, notes


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


def links(
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
        rate, typical = match.gb_per_s, usual.get(match.round, of_extra_round)
        if rate is None or match.error:
            found[match] = match.error or "no result"
        elif len(best) >= FEWEST and rate < slow * typical:
            found[match] = f"{rounded(rate)} GB/s, while the median is {rounded(typical)}"
    return found


def match_of(pair: Pair, number: int, answers: Answers) -> Match:
    """Combines the pairs of tasks of two nodes: as fast as the slowest, as correct as the worst."""
    for (node, local), facts in answers.items():
        if "gb_per_s" not in facts:
            error = facts.get("error", "could not listen")
            return Match(pair, number, error=f"task {local} of {node}: {error}")
    if not all(facts["right"] for facts in answers.values()):
        return Match(pair, number, error="received different bytes than were sent")
    slowest = min(facts["gb_per_s"] for facts in answers.values())
    latency = max(facts["latency_us"] for facts in answers.values())
    return Match(pair, number, slowest * len(answers) / 2, latency)


def all_reduce(asked: Sequence[Place], answers: Answers) -> tuple[dict[str, Any], str]:
    """Returns the measurements, and what failed: a failed all-reduce is no single node's fault."""
    whole = "the all-reduce of all good nodes"
    found = {place: answers.get(place, {}) for place in asked}
    unfinished = [
        f"{node}/{local} ({facts.get('error', 'no answer')})"
        for (node, local), facts in found.items()
        if "right" not in facts
    ]
    if unfinished:
        some = ", ".join(unfinished[:8]) + (", …" if len(unfinished) > 8 else "")
        return {}, f"{whole} failed on {len(unfinished)} of {len(asked)} tasks: {some}"
    wrong = [f"{node}/{local}" for (node, local), facts in found.items() if not facts["right"]]
    if wrong:
        return {}, f"{whole} gave a wrong sum on {', '.join(wrong)}"
    rate = min(facts["gb_per_s"] for facts in found.values())
    used = {str(facts["transport"]) for facts in found.values() if facts.get("transport")}
    network = ", ".join(sorted(used)) or None
    return {"gb_per_s": rate, "tasks": len(asked), "transport": network}, transport(found)


def transport(answers: Answers) -> str:
    """Returns the problem with what collectives are sent over, or "" if there is none."""
    slow = {
        node: " and ".join(facts["fabrics"])
        for (node, _), facts in answers.items()
        if facts.get("transport") == TCP and facts.get("fabrics")
    }
    if not slow or len({node for node, _ in answers}) < 2:  # a single node uses no network
        return ""
    node, fabric = next(iter(slow.items()))
    where = f"{len(slow)} nodes, such as {node}," if len(slow) > 1 else node
    return (
        f"collectives of {where} use TCP (NET/Socket) although there is {fabric}, which is "
        "several times faster: NCCL or RCCL did not find the network plugin; load the cluster's "
        "module for it, or add its folder to LD_LIBRARY_PATH (NCCL_DEBUG=INFO logs what is tried)"
    )


def majority(values: Mapping[Place, str], casting_vote: str | None = None) -> str | None:
    """Returns the most frequent value; None if there is a tie."""
    top = multimode(values.values())
    if len(top) == 1:
        return top[0]
    return casting_vote if casting_vote in top else None


def _far_below(values: Mapping[Place, float], bound: float) -> Iterator[tuple[Place, float, float]]:
    if len(values) >= FEWEST:
        usual = median(values.values())
        yield from ((place, v, usual) for place, v in values.items() if v < bound * usual)
