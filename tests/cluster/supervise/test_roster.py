"""Which nodes train, and the logbook of what happened."""

from __future__ import annotations

import time
from pathlib import Path

from overland.cluster.supervise.events import (
    Event,
    Logbook,
    bad_nodes,
    furthest_step,
    of_submission,
    read_events,
)
from overland.cluster.supervise.roster import Roster


def test_the_batch_host_is_taken_last() -> None:
    roster = Roster(["n1", "n2", "n3"], wanted=2, batch_host="n1")
    assert roster.choose() == ["n2", "n3"]
    roster.exclude("n2", "lost")
    assert roster.choose() == ["n1", "n3"]
    roster.exclude("n3", "lost")
    assert roster.choose() is None


def test_a_node_with_a_strike_is_avoided_and_with_two_left_out() -> None:
    roster = Roster(["n1", "n2", "n3", "n4"], wanted=2, batch_host="n1")
    assert not roster.strike("n2", "killed")
    assert roster.choose() == ["n3", "n4"]
    assert roster.strike("n2", "killed")
    assert roster.out == {"n2": "killed"}


def test_a_node_that_may_be_innocent_is_not_given_up_without_another() -> None:
    roster = Roster(["n1", "n2"], wanted=2, batch_host="n1")
    assert not any(roster.strike("n2", "hang") for _ in range(5))
    assert roster.choose() == ["n1", "n2"]


def test_after_a_fault_of_nobody_in_particular_spares_take_the_place_of_others() -> None:
    roster = Roster(["n1", "n2", "n3", "n4", "n5"], wanted=3, batch_host="n1")
    assert roster.choose() == ["n2", "n3", "n4"]
    roster.suspect_all()
    assert roster.choose() == ["n1", "n2", "n5"]
    roster.suspect_all()
    assert roster.choose() == ["n3", "n4", "n5"]


def test_a_node_that_was_bad_not_long_ago_is_used_last() -> None:
    roster = Roster(["n1", "n2", "n3"], wanted=2, batch_host="n1")
    roster.avoid_bad_nodes(
        [{"event": "preflight", "time": time.time(), "bad": {"n2": "", "n9": ""}}]
    )
    assert roster.choose() == ["n1", "n3"]
    roster.exclude("n3", "lost")
    assert roster.choose() == ["n1", "n2"], "it may have been repaired"


def test_bad_nodes_are_remembered_for_a_time_the_last_one_first() -> None:
    events: list[Event] = [
        {"event": "preflight", "time": 10.0, "bad": {"n1": "slow", "n2": "no GPU"}},
        {"event": "fault", "time": 20.0, "what": "n3 fell silent", "excluded": ["n3"]},
        {"event": "fault", "time": 30.0, "what": "network"},
        {"event": "end", "time": 40.0, "what": "gave up", "suspects": ["n1"]},
        {"event": "end", "time": 50.0, "what": "of an older version"},
    ]
    assert list(bad_nodes(events, since=0)) == ["n1", "n3", "n2"]
    assert bad_nodes(events, since=15) == {"n1": "gave up", "n3": "n3 fell silent"}
    assert bad_nodes(events, since=60) == {}


def fault(new_steps: int, step: int = 0) -> Event:
    return {"event": "fault", "new_steps": new_steps, "step": step}


def test_only_the_last_submission_counts() -> None:
    first: Event = {"event": "session", "config": "1.toml"}
    second: Event = {"event": "session", "config": "2.toml"}
    events = [first, fault(9, step=900), second, fault(0, step=7), second]
    assert of_submission(events, "2.toml") == events[2:]
    assert of_submission(events, "3.toml") == []
    assert furthest_step(of_submission(events, "2.toml")) == 7


def test_the_furthest_step_is_remembered() -> None:
    assert furthest_step([fault(1, step=7), {"event": "end", "step": None}, fault(0, step=3)]) == 7


def test_what_a_full_disk_refused_is_written_later(tmp_path: Path) -> None:
    logbook = Logbook(tmp_path / "run", "12")
    logbook.write("session", wanted=2)
    path = tmp_path / "run" / "attempts.jsonl"
    path.rename(tmp_path / "aside")
    path.mkdir()  # nothing can be written there
    logbook.write("fault", step=3)
    path.rmdir()
    (tmp_path / "aside").rename(path)
    with path.open("a") as file:
        file.write('{"time": 1, "eve')  # what the failed write left
    logbook.write("end", how="stopped")
    events = read_events(tmp_path / "run")
    assert [event["event"] for event in events] == ["session", "fault", "end"]
    assert {event["job"] for event in events} == {"12"}


def test_live_is_replaced_as_a_whole_and_not_too_often(tmp_path: Path) -> None:
    logbook = Logbook(tmp_path, "12")
    logbook.live(state="training", attempt=1, step=1)
    first = (tmp_path / "live.json").read_text()
    logbook.live(state="training", attempt=1, step=2)
    assert (tmp_path / "live.json").read_text() == first
    logbook.live(state="restarting", attempt=1, step=2)
    assert '"restarting"' in (tmp_path / "live.json").read_text()
