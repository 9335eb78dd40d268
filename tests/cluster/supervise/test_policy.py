"""What follows a failed attempt, decided only from the attempts before it."""

from __future__ import annotations

import dataclasses

import pytest

from overland.cluster.supervise.events import Event
from overland.cluster.supervise.policy import (
    LONGEST_PAUSE_SECONDS,
    MAX_FAILED_STARTS,
    Answer,
    Failure,
    decide,
    read_streak,
    with_failure,
)
from overland.config.schema import Health
from overland.errors import Kind
from tests.cluster.supervise.prove_restarts import OLD, Rates, chains, first_of_two

NETWORK = Failure(Kind.NETWORK)
MISTAKE = Failure(Kind.CODE, "KeyError at mine/model.py:7", ("n1",))
STRANGE = Failure(Kind.UNKNOWN, "WeirdError at mine/model.py:7", ("n1",))


def answers(*failures: Failure, tries: int = MAX_FAILED_STARTS) -> list[str]:
    """To each of these in turn."""
    streak: list[Failure] = []
    found = []
    for failure in failures:
        streak = with_failure(streak, failure)
        found.append(decide(streak, tries).action)
    return found


def test_the_default_is_that_of_the_config() -> None:
    assert Health().max_failed_starts == MAX_FAILED_STARTS


@pytest.mark.parametrize("kind", [kind for kind in Kind if kind is not Kind.TAKEN])
def test_no_error_of_any_kind_stops_a_chain_the_first_time(kind: Kind) -> None:
    assert answers(Failure(kind, "somewhere", ("n1",))) == ["restart"]
    assert answers(Failure(kind)) == ["restart"]


def test_a_mistake_in_the_code_that_comes_twice_stops_the_chain() -> None:
    assert answers(MISTAKE, MISTAKE) == ["restart", "stop"]
    in_between = [MISTAKE, NETWORK, MISTAKE]
    assert answers(*in_between) == ["restart", "restart", "stop"]
    elsewhere = dataclasses.replace(MISTAKE, place="KeyError at mine/model.py:9")
    assert answers(MISTAKE, elsewhere) == ["restart", "restart"]


def test_new_steps_make_good_what_was_before() -> None:
    ahead = dataclasses.replace(MISTAKE, new_steps=5, step=12)
    assert answers(MISTAKE, ahead, ahead) == ["restart"] * 3
    again = dataclasses.replace(MISTAKE, step=12)
    assert answers(ahead, again) == ["restart", "stop"], "it failed at that very step before"


def test_an_unknown_error_stops_a_chain_only_where_no_node_can_be_to_blame() -> None:
    other = dataclasses.replace(STRANGE, nodes=("n2",))
    everywhere = dataclasses.replace(STRANGE, nodes=())
    assert answers(STRANGE, other)[-1] == "stop"
    assert answers(everywhere, everywhere)[-1] == "stop"
    assert answers(STRANGE, STRANGE)[-1] == "give back", "without a spare, other nodes may help"
    replaced = dataclasses.replace(STRANGE, replaced=True)
    assert answers(STRANGE, replaced)[-1] == "restart", "with one, that is tried first"


def test_network_faults_and_kills_on_other_nodes_are_tried_again_then_on_other_nodes() -> None:
    kills = [Failure(Kind.KILLED, nodes=(f"n{i}",)) for i in range(8)]
    for failures in ([NETWORK] * 8, kills):
        assert answers(*failures) == ["restart"] * 7 + ["give back"]
    assert answers(*kills, tries=3)[2] == "give back"


def test_a_node_that_was_replaced_costs_no_try() -> None:
    lost = Failure(Kind.NODE, nodes=("n3",), replaced=True)
    assert set(answers(*[lost] * 30)) == {"restart"}


def test_the_pause_grows_and_ends() -> None:
    streak: list[Failure] = []
    pauses = []
    for _ in range(9):
        streak = with_failure(streak, NETWORK)
        pauses.append(decide(streak, 10).pause_seconds)
    assert pauses[:3] == [15.0, 30.0, 60.0]
    assert pauses[-1] == LONGEST_PAUSE_SECONDS
    assert decide([NETWORK] * 3000, 10_000).pause_seconds == LONGEST_PAUSE_SECONDS
    assert decide([Failure(Kind.KILLED, nodes=("n1",))]).pause_seconds == 0
    assert decide([dataclasses.replace(NETWORK, new_steps=3)]).pause_seconds == 0


def test_what_never_passes_costs_each_further_job_less() -> None:
    tries = []
    streak: list[Failure] = []
    for session in range(1, 8):
        count = 0
        answer = Answer("restart")
        while answer.action == "restart":
            count += 1
            streak = with_failure(streak, dataclasses.replace(NETWORK, session=session))
            answer = decide(streak)
        assert answer.action == "give back"
        tries.append(count)
    assert tries == [8, 4, 2, 1, 1, 1, 1]


def fault(kind: str = "network", new_steps: int = 0, **facts: object) -> Event:
    return {"event": "fault", "kind": kind, "new_steps": new_steps, **facts}


def test_the_streak_is_read_across_sessions_from_the_logbook() -> None:
    session: Event = {"event": "session"}
    stopped: Event = {"event": "end", "how": "stopped", "step": 7}
    streak, sessions = read_streak(
        [session, fault(new_steps=3, step=7), fault(step=7), stopped, session, fault(step=7)]
    )
    assert sessions == 2
    assert [(past.new_steps, past.session) for past in streak] == [(3, 1), (0, 1), (0, 2)]
    ahead: Event = {"event": "end", "how": "stopped", "step": 8}
    assert read_streak([session, fault(step=7), ahead])[0] == [], "a later session got further"
    failed: Event = {"event": "end", "how": "failed", "step": 7}
    assert read_streak([session, fault(step=7), failed])[0] == []
    assert read_streak([]) == ([], 0)


def test_a_logbook_of_another_version_is_read() -> None:
    [past], _ = read_streak([{"event": "fault", "kind": "from the future", "step": None}])
    assert (past.kind, past.place) == (Kind.UNKNOWN, "")


def test_at_the_rates_of_640_nodes_a_chain_of_ten_sessions_lives() -> None:
    rates = Rates(failed_starts=0.55)
    before, after = (chains(policy, rates, count=300, seed=1) for policy in (OLD, decide))
    assert before.died > 0.9
    assert after.died < 0.01
    assert after.sessions_trained > 9.5


def test_at_those_rates_a_mistake_in_the_code_still_ends_the_chain_soon() -> None:
    starts = first_of_two(MISTAKE, Rates(failed_starts=0.55), seed=1)
    assert starts < 15
