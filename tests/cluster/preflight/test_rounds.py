"""Two rounds for any number of nodes, and the right node blamed for a bad link."""

from __future__ import annotations

import random

import pytest

from overland.cluster.preflight.judge import Match, links, pairings, retrial

SLOW = 0.5


def names(count: int) -> list[str]:
    return [f"n{i:03}" for i in range(count)]


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 5, 7, 64, 639, 640])
def test_two_rounds_with_every_node_at_most_once_in_each(count: int) -> None:
    found = pairings(names(count))
    assert len(found) == min(2, max(0, count - 1))
    for pairs in found:
        playing = [node for pair in pairs for node in pair]
        assert len(playing) == len(set(playing))
    played = {node for pairs in found for pair in pairs for node in pair}
    assert len(played) == (count if count > 1 else 0)
    all_pairs = [frozenset(pair) for pairs in found for pair in pairs]
    assert len(all_pairs) == len(set(all_pairs))


def rate_of(pair: tuple[str, str], bad: set[str], rate: float) -> float:
    return rate if set(pair) & bad else 20.0


def judged(count: int, bad: set[str], rate: float = 1.0) -> tuple[dict[str, str], list[str]]:
    """Plays all rounds; links of bad nodes have another rate."""
    first = [
        Match(pair, number, rate_of(pair, bad, rate))
        for number, pairs in enumerate(pairings(names(count)), start=1)
        for pair in pairs
    ]
    again = [Match(pair, 3, rate_of(pair, bad, rate)) for pair in retrial(first, SLOW)]
    findings, notes = links(first, again, SLOW)
    return dict(findings), notes


@pytest.mark.parametrize("count", [4, 5, 7, 8, 33, 640])
@pytest.mark.parametrize("where", [0, 1, -1])
def test_one_slow_node_is_named_alone(count: int, where: int) -> None:
    bad = names(count)[where]
    findings, notes = judged(count, {bad}, rate=9.0)
    assert findings.keys() == {bad}
    assert "9 GB/s, while the median is 20" in findings[bad]
    assert notes == []


def test_five_slow_nodes_of_640_are_named_alone() -> None:
    bad = {"n000", "n001", "n100", "n333", "n639"}
    findings, notes = judged(640, bad)
    assert findings.keys() == bad
    assert notes == []


@pytest.mark.parametrize("seed", range(20))
def test_where_most_links_of_the_extra_round_are_slow_all_slow_nodes_are_named(seed: int) -> None:
    bad = set(random.Random(seed).sample(names(16), 4))
    findings, notes = judged(16, bad)
    assert findings.keys() == bad
    assert notes == []


def test_a_good_node_whose_partners_are_both_bad_is_tried_again() -> None:
    """n000 meets n001 and n004."""
    assert judged(8, {"n001", "n004"})[0].keys() == {"n001", "n004"}


def test_a_failed_link_counts_as_a_slow_one() -> None:
    first = [Match(pair, number, 20.0, error="hung" if "n002" in pair else "")
             for number, pairs in enumerate(pairings(names(8)), 1) for pair in pairs]  # fmt: skip
    assert retrial(first, SLOW)[0] == ("n002", "n000")
    again = [Match(pair, 3, 20.0, error="hung" if "n002" in pair else "")
             for pair in retrial(first, SLOW)]  # fmt: skip
    assert links(first, again, SLOW)[0] == [
        ("n002", "link with n003 in round 1: hung; link with n006 in round 2: hung")
    ]


def test_two_nodes_alone_cannot_be_told_apart() -> None:
    first = [Match(("a", "b"), 1, error="hung")]
    assert retrial(first, SLOW) == []
    words = "in round 1: hung; it is unclear which node is to blame"
    assert links(first, [], SLOW) == ([("a", f"link with b {words}"),
                                             ("b", f"link with a {words}")], [])  # fmt: skip


def test_a_link_that_was_bad_once_is_played_again_with_others() -> None:
    """n003's network failed in the last round: before, all was well."""
    first = [
        Match(("n000", "n001"), 1, 20.0),
        Match(("n002", "n003"), 1, 20.0),
        Match(("n000", "n002"), 2, 20.0),
        Match(("n001", "n003"), 2, error="hung"),
    ]
    again = retrial(first, SLOW)
    assert again == [("n001", "n000"), ("n003", "n002")]
    dead = [Match(again[0], 3, 20.0), Match(again[1], 3, error="hung")]
    assert links(first, dead, SLOW)[0] == [("n003", "link with n001 in round 2: hung")]
    well = [Match(again[0], 3, 20.0), Match(again[1], 3, 20.0)]
    note = "link between n001 and n003: hung; both did well with others"
    assert links(first, well, SLOW) == ([], [note])


def test_where_nobody_is_left_to_try_with_the_node_without_a_good_link_is_bad() -> None:
    first = [Match(("a", "b"), 1, error="hung"), Match(("a", "c"), 2, 20.0)]
    assert retrial(first, SLOW) == [("b", "c")]
    assert links(first, [], SLOW) == ([("b", "link with a in round 1: hung")], [])
