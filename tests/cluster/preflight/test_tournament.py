"""Ten rounds for 640 nodes, and the right node blamed for a bad link."""

from __future__ import annotations

import pytest

from overland.cluster.preflight.tournament import (
    Match,
    conclude_rounds,
    faultless,
    judge_links,
    pairings,
    retrial,
    suspects,
)

SLOW = 0.5


def names(count: int) -> list[str]:
    return [f"n{i:03}" for i in range(count)]


@pytest.mark.parametrize(
    ("count", "expected"),
    [(0, 0), (1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (7, 3), (64, 6), (639, 10), (640, 10)],
)
def test_log2_rounds_with_every_node_at_most_once_in_each(count: int, expected: int) -> None:
    found = pairings(names(count))
    assert len(found) == expected
    for pairs in found:
        playing = [node for pair in pairs for node in pair]
        assert len(playing) == len(set(playing))
    played = {node for pairs in found for pair in pairs for node in pair}
    assert len(played) == (count if count > 1 else 0)
    all_pairs = [frozenset(pair) for pairs in found for pair in pairs]
    assert len(all_pairs) == len(set(all_pairs))


def play(count: int, bad: set[str], rate: float = 1.0) -> list[Match]:
    """All rounds; links of bad nodes have another rate."""
    return [
        Match(pair, number, rate if set(pair) & bad else 20.0)
        for number, pairs in enumerate(pairings(names(count)), start=1)
        for pair in pairs
    ]


@pytest.mark.parametrize("count", [4, 5, 7, 8, 33, 640])
@pytest.mark.parametrize("where", [0, 1, -1])
def test_one_slow_node_is_named_alone(count: int, where: int) -> None:
    bad = names(count)[where]
    verdict = judge_links(play(count, {bad}, rate=9.0), SLOW)
    assert verdict.bad.keys() == {bad}
    assert not verdict.unclear
    assert "9 GB/s, while the median is 20" in verdict.bad[bad]


def test_five_slow_nodes_of_640_are_named_alone() -> None:
    bad = {"n000", "n001", "n100", "n333", "n639"}
    assert judge_links(play(640, bad), SLOW).bad.keys() == bad


def test_a_failed_link_counts_as_a_slow_one() -> None:
    matches = [Match(m.nodes, m.round, error="hung" if "n002" in m.nodes else "", gb_per_s=20.0)
               for m in play(8, set())]  # fmt: skip
    assert judge_links(matches, SLOW).bad == {
        "n002": "link with n003 in round 1: hung; link with n000 in round 2: hung"
    }


def test_after_one_round_nobody_is_named_yet() -> None:
    first = [match for match in play(8, {"n003"}) if match.round == 1]
    verdict = judge_links(first, SLOW, fewest_bad=2)
    assert verdict.bad == {}
    assert suspects(verdict) == ["n002", "n003"]
    two = [match for match in play(8, {"n003"}) if match.round <= 2]
    assert judge_links(two, SLOW, fewest_bad=2).bad.keys() == {"n003"}


def test_two_nodes_alone_cannot_be_told_apart() -> None:
    verdict = judge_links([Match(("a", "b"), 1, error="hung")], SLOW)
    assert verdict.bad == {}
    assert suspects(verdict) == ["a", "b"]
    assert retrial(suspects(verdict), faultless([Match(("a", "b"), 1, error="hung")], SLOW)) == []


def test_a_link_that_was_bad_once_is_played_again_with_others() -> None:
    """n4's network failed in the last round: before, all was well."""
    matches = play(4, set())
    matches[-1] = Match(("n001", "n003"), 2, error="hung")
    verdict = judge_links(matches, SLOW)
    assert suspects(verdict) == ["n001", "n003"]
    assert faultless(matches, SLOW) == ["n000", "n002"]
    again = retrial(suspects(verdict), faultless(matches, SLOW))
    assert again == [("n001", "n000"), ("n003", "n002")]
    dead = [*matches, Match(again[0], 3, 20.0), Match(again[1], 3, error="hung")]
    assert judge_links(dead, SLOW).bad.keys() == {"n003"}
    well = [*matches, Match(again[0], 3, 20.0), Match(again[1], 3, 20.0)]
    assert judge_links(well, SLOW).bad == {}


def test_what_is_made_of_a_link_that_was_bad_once() -> None:
    bad = Match(("a", "b"), 1, error="hung")
    alone = judge_links([bad], SLOW, fewest_bad=2)
    findings, notes = conclude_rounds(alone, [bad], SLOW, tried=set())
    assert [node for node, _ in findings] == ["a", "b"]
    assert findings[0][1] == "link with b in round 1: hung; it is unclear which node is to blame"
    assert notes == []
    findings, notes = conclude_rounds(alone, [bad], SLOW, tried={"a", "b"})
    assert findings == []
    assert notes == ["link between a and b: hung; both did well with others since"]
    assert conclude_rounds(alone, [bad], SLOW, tried={"a"})[0] == [
        ("b", "link with a in round 1: hung")
    ]
    three = [bad, Match(("a", "c"), 2, 20.0)]  # nobody was left to try with
    verdict = judge_links(three, SLOW, fewest_bad=2)
    assert conclude_rounds(verdict, three, SLOW, tried=set())[0] == [
        ("b", "link with a in round 1: hung")
    ]
