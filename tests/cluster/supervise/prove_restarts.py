"""How long a chain of jobs survives when most starts fail: a simulation of the restart policy.

    python -m tests.cluster.supervise.prove_restarts --into docs/evidence

`overland.cluster.supervise.policy.decide` is asked as the supervisor asks it; only time, nodes
and faults are drawn at random. What has a page already is not done again.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from overland.cluster.supervise.policy import Answer, Failure, decide, with_failure
from overland.errors import Kind

Policy = Callable[[Sequence[Failure]], Answer]

SESSIONS, SESSION_HOURS, START_HOURS, NODES = 10, 24.0, 0.25, 640
# What fails a start, and how often of a hundred. Only the first two are known to be common on 640
# nodes; the others are there so that every branch of the policy is taken.
CAUSES = {Kind.NETWORK: 60, Kind.HANG: 20, Kind.KILLED: 10, Kind.NODE: 5, Kind.UNKNOWN: 5}
NUM_PLACES = 20


@dataclass(frozen=True)
class Rates:
    failed_starts: float
    faults_per_session: float = 0.0
    """Once it trains."""


@dataclass(frozen=True)
class Outcome:
    died: float
    """Share of the chains that were stopped before their last session was over."""
    sessions_trained: float
    """Of ten, in which at least one start worked; mean over the chains that lived or died."""
    failed_starts: float
    hours_trained: float


def old_policy(streak: Sequence[Failure]) -> Answer:
    """As it was: two attempts without a new step and without an excluded node ended the chain."""
    barren = sum(past.made_no_progress for past in streak)
    is_final = streak[-1].kind.is_of_the_program
    return Answer("stop" if barren >= 2 or is_final else "restart")


OLD: Policy = old_policy


def draw_fault(chance: random.Random, session: int) -> Failure:
    kind = chance.choices(list(CAUSES), weights=list(CAUSES.values()))[0]
    node = (f"n{chance.randrange(NODES)}",)
    is_lost = kind is Kind.NODE
    place = f"Error at line {chance.randrange(NUM_PLACES)}" if kind is Kind.UNKNOWN else ""
    nodes = () if kind in (Kind.NETWORK, Kind.HANG) else node
    return Failure(kind, place, nodes, replaced=is_lost, session=session)


def run_chain(policy: Policy, rates: Rates, chance: random.Random) -> tuple[bool, int, int, float]:
    """(died, sessions that trained, failed starts, hours trained)."""
    streak: list[Failure] = []
    trained, failed, hours = 0, 0, 0.0
    step = 0
    for session in range(1, SESSIONS + 1):
        left, has_trained = SESSION_HOURS, False
        while left > START_HOURS:
            left -= START_HOURS
            if chance.random() < rates.failed_starts:
                failure = draw_fault(chance, session)
                failed += 1
            else:
                step, has_trained = step + 1, True
                rate = rates.faults_per_session / SESSION_HOURS
                until = chance.expovariate(rate) if rate else left
                hours += min(until, left)
                left -= until
                if left <= 0:
                    streak = []
                    break
                failure = dataclasses.replace(draw_fault(chance, session), new_steps=1, step=step)
            streak = with_failure(streak, dataclasses.replace(failure, step=step))
            answer = policy(streak)
            if answer.action == "stop":
                return True, trained + has_trained, failed, hours
            if answer.action == "give back":
                break
            left -= answer.pause_seconds / 3600
        trained += has_trained
    return False, trained, failed, hours


def chains(policy: Policy, rates: Rates, count: int, seed: int) -> Outcome:
    chance = random.Random(seed)
    found = [run_chain(policy, rates, chance) for _ in range(count)]
    died, trained, failed, hours = (sum(column) / count for column in zip(*found, strict=True))
    return Outcome(died, trained, failed, hours)


def first_of_two(mistake: Failure, rates: Rates, seed: int) -> int:
    """Starts until a chain whose every working start ends in the same mistake is stopped."""
    chance = random.Random(seed)
    streak: list[Failure] = []
    starts = 0
    while True:
        starts += 1
        failed = chance.random() < rates.failed_starts
        streak = with_failure(streak, draw_fault(chance, starts) if failed else mistake)
        if decide(streak).action == "stop":
            return starts


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--chains", type=int, default=2_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--into", type=Path, required=True)
    options = parser.parse_args()
    path = options.into / "restarts.md"
    if path.exists():
        print(f"{path} is there already")
        return
    lines = []
    for failed in (0.1, 0.3, 0.5, 0.55, 0.6, 0.8):
        for faults in (0.0, 3.0):
            rates = Rates(failed, faults)
            before, after = (
                chains(policy, rates, options.chains, options.seed) for policy in (OLD, decide)
            )
            lines.append(
                f"| {failed:.0%} | {faults:.0f} | {before.died:.1%} | **{after.died:.1%}** "
                f"| {before.hours_trained:.0f} | {after.hours_trained:.0f} "
                f"| {after.sessions_trained:.2f} | {after.failed_starts:.1f} |"
            )
    text = PAGE.format(
        table="\n".join(lines),
        chains=options.chains,
        sessions=SESSIONS,
        hours=SESSION_HOURS,
        minutes=60 * START_HOURS,
        places=NUM_PLACES,
        causes=", ".join(f"{kind} {share}%" for kind, share in CAUSES.items()),
    )
    print(text)
    path.write_text(text)


PAGE = """\
# Chains that survive when most starts fail

On 640 nodes of Frontier, 4 to 5 of 10 starts worked, according to a user who tried. This is a \
simulation of {chains:,} chains of {sessions} sessions of {hours:.0f} h at such rates: with the \
policy that the supervisor consults after every failure (`overland/cluster/supervise/policy.py`), \
and with the one before it, which stopped a chain after two attempts without a new step. A start \
takes {minutes:.0f} minutes, whether it works or not. A fault is drawn from: {causes}; its node at \
random; for an unknown error, one of {places} places in the program at random.

A chain is dead when it has been stopped, so that someone has to submit it again. A session has \
trained if one of its starts worked.

| starts that fail | faults per session, later | chains dead, before | chains dead, now | hours \
trained of 240, before | now | sessions of 10 that trained, now | failed starts, now |
|---|---|---|---|---|---|---|---|
{table}

What is left are unknown errors that hit the same place twice in a row on different nodes, which \
the policy takes for a bug in the program.

By `python -m tests.cluster.supervise.prove_restarts --into docs/evidence` (part of \
`make prove-all`).
"""

if __name__ == "__main__":
    main()
