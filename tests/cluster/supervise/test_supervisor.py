"""One job on four real (virtual) nodes, two of them spares, that suffers one fault after another
(in the long version, every kind, with two ranks on each node): it resumes by itself each time, and
ends with the bits of an undisturbed run."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.processes import losses, overland
from tests.cluster.packages import need
from tests.cluster.slurm import PROGRAMS, Slurm
from tests.cluster.supervised import SubmittedRun, final_state, train_unbroken

STEPS = 60  # of a quarter of a second, until the last fault: all of them hit it before its end
LONG_STEPS = 150
SLOW_RANK, LONG_RANKS_PER_NODE = 2, 2
LONG = pytest.param("long", marks=pytest.mark.long)


@pytest.fixture(scope="module")
def nodes() -> Iterator[Slurm]:
    """Of their own, since some of them are killed."""
    need(*PROGRAMS)
    slurm = Slurm()
    yield slurm
    slurm.stop()


@pytest.fixture(scope="module", params=["short", LONG])
def story(
    request: pytest.FixtureRequest, nodes: Slurm, tmp_path_factory: pytest.TempPathFactory
) -> SubmittedRun:
    """Rank 0's node is lost; then a rank is stopped. In the long story much else happens before
    and after: see below. Each time it has gone on before the next. (A full disk does not end a
    run: tests/training/test_metrics_file.py.)"""
    is_long = request.param == "long"
    run = SubmittedRun(
        nodes, tmp_path_factory.mktemp("story"), LONG_STEPS if is_long else STEPS, 2,
        "--spares", "2", "--time", "00:20:00", "--no-preflight", step_seconds=0.25,
        ranks_per_node=LONG_RANKS_PER_NODE if is_long else 1,
    )  # fmt: skip
    run.wait_for_step(5)
    if is_long:
        replace_agents_and_slow_down(run)
    run.survives("node lost", lambda: run.kill_node(run.ranks()[0][1]))
    if is_long:
        run.survives("rank killed", lambda: run.signal_rank(3, signal.SIGKILL))
    run.wait_for_step(run.step() + 3)  # the watchdog has seen how long a step takes
    run.survives("hang", lambda: run.signal_rank(1, signal.SIGSTOP))
    if is_long:
        batch_host = "n1"
        others = [node for _, node in run.ranks().values() if node != batch_host]
        run.survives("node lost", lambda: run.kill_node(others[0]))
    run.set_pace(0)
    run.wait()
    return run


def replace_agents_and_slow_down(run: SubmittedRun) -> None:
    """One node's agent is killed and another's stopped; one rank is slow for a while."""
    killed, stopped = run.agents()
    os.kill(killed, signal.SIGKILL)
    os.kill(stopped, signal.SIGSTOP)
    run.wait_until(
        lambda: len(run.agents()) == 2 and not {killed, stopped} & {*run.agents()},
        "both agents have been replaced",
    )
    run.slow_until(SLOW_RANK, lambda: named_slow(run), f"rank {SLOW_RANK} is named as slow")
    run.wait_for_step(12)


def named_slow(run: SubmittedRun) -> bool:
    return any(event["rank"] == SLOW_RANK for event in run.events("straggler"))


def test_it_ends_by_itself_with_the_right_bits(story: SubmittedRun, tmp_path: Path) -> None:
    [end] = story.events("end")
    steps = story.steps
    assert (end["how"], end["step"]) == ("finished", steps), story.log()[-5000:]
    assert (story.root / "done").read_text() == f"{steps}\n"
    unbroken = train_unbroken(story, tmp_path)
    assert final_state(story.root) == final_state(unbroken)
    assert losses(story.root / "metrics.jsonl") == losses(unbroken / "metrics.jsonl")


def test_each_fault_is_told_by_its_name(story: SubmittedRun) -> None:
    kinds = [fault["kind"] for fault in story.events("fault") if fault["kind"] != "hang"]
    is_long = story.steps == LONG_STEPS
    assert kinds == (["node lost", "rank killed", "node lost"] if is_long else ["node lost"])


def test_the_rank_that_stopped_is_named_with_its_node(story: SubmittedRun) -> None:
    [hang] = [fault for fault in story.events("fault") if fault["ranks"] == [1]]
    assert hang["kind"] == "hang"
    assert "stopped at step" in hang["what"]
    assert len(hang["nodes"]) == 1
    [stacks] = story.root.glob(f"faults/*-{hang['attempt']}/stacks.txt")
    text = stacks.read_text()
    assert "is stopped (SIGSTOP)" in text
    assert text.count("in train_rank") == story.num_ranks - 1, (
        "the stacks of all others show where they wait"
    )


@pytest.mark.parametrize("story", [LONG], indirect=True)
def test_a_slow_rank_is_named_with_its_node_and_goes_on(story: SubmittedRun) -> None:
    [slow, *_] = [event for event in story.events("straggler") if event["rank"] == SLOW_RANK]
    attempts = {event["attempt"]: event["nodes"] for event in story.events("attempt")}
    assert slow["node"] == attempts[slow["attempt"]][SLOW_RANK // LONG_RANKS_PER_NODE]
    assert slow["factor"] > 1.5
    assert f"rank {SLOW_RANK} on {slow['node']} is slow: it computes" in story.log()


def test_watch_tells_the_story(story: SubmittedRun) -> None:
    told = json.loads(overland("watch", str(story.root), "--json", cwd=story.folder).stdout)
    assert told["state"] == "finished"
    assert [fault["kind"] for fault in told["faults"]] == [
        fault["kind"] for fault in story.events("fault")
    ]


def test_a_lost_node_is_not_used_again(story: SubmittedRun) -> None:
    lost = [fault["nodes"][0] for fault in story.events("fault") if fault["kind"] == "node lost"]
    assert len(set(lost)) == len(lost)
    assert lost[0] in story.events("attempt")[0]["nodes"]
    assert not any(lost[0] in attempt["nodes"] for attempt in story.events("attempt")[1:])
    assert lost[-1] not in story.events("attempt")[-1]["nodes"]


def test_the_time_lost_is_told_for_each_fault(story: SubmittedRun) -> None:
    recovered, faults = story.events("recovered"), story.events("fault")
    assert sum(event["faults"] for event in recovered) == len(faults)
    assert {event["kind"] for event in recovered} <= {fault["kind"] for fault in faults}
    assert all(event["lost_seconds"] > 0 for event in recovered)


def test_nothing_is_left_behind(story: SubmittedRun) -> None:
    assert not story.ranks()
