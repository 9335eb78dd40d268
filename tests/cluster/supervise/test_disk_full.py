"""A full disk: if it is a node's own, a spare takes over; if it is shared, the job waits; no chain
ends."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from overland.cluster.supervise import supervisor as supervisors
from overland.cluster.supervise.events import Logbook, read_events
from overland.cluster.supervise.faults import Fault
from overland.cluster.supervise.roster import Roster
from overland.cluster.supervise.supervised import LEAST, Supervised, has_room
from overland.cluster.supervise.supervisor import Supervisor
from overland.errors import Kind
from tests.cluster.supervise.disk import small_disk

FULL = Fault(Kind.DISK, "rank 2 on n2: OSError: [Errno 28] No space left on device", (2,), ("n2",))
QUOTA = Fault(Kind.DISK, "rank 2 on n2: OSError: [Errno 122] Disk quota exceeded", (2,), ("n2",))


def supervisor_in(run: Path, *nodes: str) -> Supervisor:
    job = Supervised(run, run / "1.toml", 100, ["srun"], num_nodes=2, tasks_per_node=2)
    roster = Roster(nodes, wanted=2, batch_host=nodes[-1])
    return Supervisor(job, {"SLURM_JOB_ID": ""}, roster, Logbook(run, "7"))


def test_a_node_whose_own_disk_is_full_is_replaced_by_a_spare(tmp_path: Path) -> None:
    supervisor = supervisor_in(tmp_path, "n1", "n2", "n3")
    assert supervisor.roster.choose() == ["n1", "n2"]
    assert supervisor.answer(FULL).action == "restart"
    assert supervisor.roster.choose() == ["n1", "n3"]
    assert list(tmp_path.glob(".room*")) == []


@pytest.mark.parametrize("fault", [FULL, QUOTA])
def test_without_a_spare_a_full_disk_ends_a_job_and_no_chain(fault: Fault, tmp_path: Path) -> None:
    supervisor = supervisor_in(tmp_path, "n1", "n2")
    answers = [supervisor.answer(fault) for _ in range(8)]
    assert [answer.action for answer in answers] == ["restart"] * 7 + ["give back"]
    assert answers[0].pause_seconds < answers[5].pause_seconds


def test_several_faults_without_a_step_between_them_are_one_recovery(tmp_path: Path) -> None:
    supervisor = supervisor_in(tmp_path, "n1", "n2")
    for fault in (QUOTA, FULL, FULL):
        supervisor.answer(fault)
    supervisor.note_new_step(3, supervisor.furthest_at + 10)
    supervisor.note_new_step(4, supervisor.furthest_at + 1)
    events = read_events(tmp_path)
    [recovered] = [event for event in events if event["event"] == "recovered"]
    assert (recovered["faults"], recovered["lost_seconds"], recovered["step"]) == (3, 10.0, 3)


def test_the_last_steps_may_fall_between_two_heartbeats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor = supervisor_in(tmp_path, "n1", "n2")
    supervisor.job = replace(supervisor.job, steps=30, preflight=False)

    def attempt(nodes: list[str]) -> str:
        supervisor.furthest = 27
        (tmp_path / "done").write_text("30\n")
        return "finished"

    monkeypatch.setattr(supervisor, "attempt", attempt)
    assert supervisor.run() == 0
    [end] = [event for event in read_events(tmp_path) if event["event"] == "end"]
    assert (end["how"], end["step"], end["what"]) == ("finished", 30, "step 30")


def test_a_quota_is_nobodys_fault(tmp_path: Path) -> None:
    supervisor = supervisor_in(tmp_path, "n1", "n2", "n3")
    supervisor.answer(QUOTA)
    supervisor.answer(QUOTA)
    assert supervisor.roster.choose() == ["n1", "n2"]


def test_a_quota_that_the_free_space_does_not_show_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit on the number of files, here, since a plain mount has no other."""
    with small_disk(tmp_path / "disk", "size=1500m,nr_inodes=8") as disk:
        if not disk.is_mount():
            pytest.skip("only root may mount a disk")
        supervisor = supervisor_in(disk / "run", "n1", "n2", "n3")
        others = [disk / str(number) for number in range(6)]
        for path in others:
            path.touch()
        assert not has_room(disk / "run", LEAST)
        supervisor.answer(FULL)
        assert supervisor.roster.choose() == ["n1", "n2"], "the node is not to blame"
        in_other_words = Fault(Kind.NETWORK, "srun ended", (), ())
        assert supervisor.job.lacks_room(in_other_words)
        monkeypatch.setattr(supervisors, "ROOM_SECONDS", 0.05)
        waiting = threading.Thread(target=supervisor.wait_for_room)
        waiting.start()
        waiting.join(0.5)
        assert waiting.is_alive()
        others[0].unlink()
        waiting.join(600)
        assert not waiting.is_alive()
        assert supervisor.job.lacks_room(FULL)
        assert not supervisor.job.lacks_room(in_other_words)


def test_room_is_looked_for_where_the_checkpoints_will_be(tmp_path: Path) -> None:
    assert has_room(tmp_path / "not" / "yet" / "there", LEAST)
    assert not has_room(tmp_path, 2**62)
