"""Which ranks hang, are silent or are slow, judging only by heartbeats."""

from __future__ import annotations

import pytest

from overland.cluster.supervise.attempt import odd_ranks
from overland.cluster.supervise.watchdog import FIRST_TIME_SECONDS, Watchdog
from overland.world.heartbeat import Phase, Transfer

Beats = list[list[float | str]]


NO_DISK = [Transfer.NONE, 0.0, 0, 0]


def beats(
    *ranks: tuple[int, int, Phase, float],
    state: str = "S",
    disk: tuple[Transfer, float] = (Transfer.NONE, 0.0),
) -> Beats:
    """`disk`: a rank's part in a save or a load, and the seconds since its last byte."""
    return [
        [rank, step, phase, age, 0.0, 0.0, state, *disk, 0, 0] for rank, step, phase, age in ranks
    ]


def dog_after(step_seconds: float, num_ranks: int = 4, hang_seconds: float = 10.0) -> Watchdog:
    """Has seen ten steps of that length, on nodes of two ranks."""
    dog = Watchdog(hang_seconds, [f"n{i}" for i in range(num_ranks // 2)], started=0.0)
    now = 0.0
    for node in dog.nodes:
        dog.call(node, 1.0)
    for step in range(10):
        now = 2.0 + step * step_seconds
        for index, node in enumerate(dog.nodes):
            pair = (2 * index, 2 * index + 1)
            dog.hear(node, beats(*((r, step, Phase.COMPUTING, step_seconds) for r in pair)), now)
    return dog


def hear_all(dog: Watchdog, *ranks: tuple[int, int, Phase, float], now: float) -> None:
    for index, node in enumerate(dog.nodes):
        dog.hear(node, beats(*(rank for rank in ranks if rank[0] // 2 == index)), now)


def test_the_limit_is_learned_from_the_steps() -> None:
    assert dog_after(step_seconds=30.0).limit(Phase.COMPUTING) == 300.0
    assert dog_after(step_seconds=0.1).limit(Phase.COMPUTING) == 10.0, "and at least what is asked"


def test_the_first_steps_may_take_long_and_teach_nothing() -> None:
    dog = Watchdog(10.0, ["n0"], started=0.0)
    dog.call("n0", 1.0)
    dog.hear("n0", beats((0, 0, Phase.COMPUTING, 900.0)), 900.0)  # it compiles
    assert dog.limit(Phase.COMPUTING) == FIRST_TIME_SECONDS
    assert not dog.late_ranks()
    for step in range(1, 6):
        dog.hear("n0", beats((0, step, Phase.COMPUTING, 0.2)), 900.0 + step)
    assert dog.limit(Phase.COMPUTING) == 10.0


def test_a_hang_does_not_raise_its_own_limit() -> None:
    dog = dog_after(step_seconds=1.0)
    for age in range(1, 60):
        hear_all(dog, *((rank, 10, Phase.COMPUTING, float(age)) for rank in range(4)), now=age)
    assert len(dog.late_ranks()) == 4


def test_the_rank_that_is_behind_is_named_and_not_those_that_wait_for_it() -> None:
    dog = dog_after(step_seconds=0.5)
    waiting = [(rank, 10, Phase.COMPUTING, 20.0) for rank in (0, 1, 3)]
    hear_all(dog, *waiting, (2, 10, Phase.DATA, 20.5), now=30.0)
    for step in range(5):  # it has learned how long data takes, too
        dog.hear("n0", beats((0, step, Phase.DATA, 0.1)), 1.0)
    hear_all(dog, *waiting, (2, 10, Phase.DATA, 20.5), now=30.0)
    fault = dog.hang(dog.late_ranks())
    assert (fault.ranks, fault.nodes) == ((2,), ("n1",))
    assert "rank 2 on n1 hung at step 10, waiting for data, for 20 s" in fault.what


def test_a_process_that_is_stopped_is_named_in_any_phase() -> None:
    dog = Watchdog(10.0, ["n0", "n1"], started=0.0)
    dog.hear("n0", beats((0, 0, Phase.BUILDING, 11.0), (1, 0, Phase.BUILDING, 11.0)), 20.0)
    dog.hear("n1", beats((2, 0, Phase.BUILDING, 11.0)), 20.0)
    dog.hear("n1", beats((3, 0, Phase.BUILDING, 11.0), state="T"), 20.0)
    assert [rank.rank for rank in dog.late_ranks()] == [3]
    assert dog.hang(dog.late_ranks()).nodes == ("n1",)


def test_where_all_wait_alike_the_odd_stack_is_named_or_nobody() -> None:
    dog = dog_after(step_seconds=0.5)
    hear_all(dog, *((rank, 10, Phase.COMPUTING, 20.0) for rank in range(4)), now=30.0)
    assert dog.hang(dog.late_ranks(), odd=[1]).ranks == (1,)
    fault = dog.hang(dog.late_ranks())
    assert fault.ranks == ()
    assert "none stands out" in fault.what


def test_ranks_that_end_are_given_their_time_and_have_all_of_it_once_they_stopped() -> None:
    dog = dog_after(step_seconds=0.5)
    for phase, age, late in (
        (Phase.ENDING, 500.0, 0),
        (Phase.ENDING, FIRST_TIME_SECONDS + 1, 4),
        (Phase.FINISHED, FIRST_TIME_SECONDS + 1, 0),
    ):
        hear_all(dog, *((rank, 10, phase, age) for rank in range(4)), now=600.0)
        assert len(dog.late_ranks()) == late


def test_a_node_that_falls_silent_is_named() -> None:
    dog = dog_after(step_seconds=0.5)
    dog.hear("n0", beats((0, 10, Phase.COMPUTING, 0.1)), 40.0)
    assert dog.silent_nodes(40.0) == ["n1"]


def test_a_node_that_never_spoke_is_named_when_most_have() -> None:
    dog = Watchdog(10.0, ["n0", "n1", "n2"], started=0.0)
    for node in ("n0", "n1"):
        dog.call(node, 40.0)  # a slow file system
    for now, silent in ((200.0, []), (201.0, ["n2"])):
        for node in ("n0", "n1"):
            dog.hear(node, [], now)
        assert dog.silent_nodes(now) == silent


def test_long_steps_speak_for_a_node_whose_agent_is_gone_as_long_as_they_may_last() -> None:
    dog = dog_after(step_seconds=40.0)
    last = 2.0 + 9 * 40.0
    assert dog.is_advancing(last + 79.0)
    assert not dog.is_advancing(last + 81.0)
    assert not Watchdog(10.0, ["n0"], started=0.0).is_advancing(1.0), "no step is done yet"


def test_what_was_not_heard_while_nobody_listened_means_nothing() -> None:
    dog = dog_after(step_seconds=0.5)
    assert dog.silent_nodes(100.0) == ["n0", "n1"]
    dog.forgive(100.0)
    assert dog.silent_nodes(100.0) == []


MOVING, WAITING = Transfer.MOVING, Transfer.WAITING
AT_DISK = [Phase.LOADING, Phase.SAVING, Phase.ENDING]


def hear_disk(dog: Watchdog, phase: Phase, *disks: tuple[Transfer, float], age: float) -> None:
    """A disk for each rank, all in one phase."""
    for rank, disk in enumerate(disks):
        dog.hear(dog.nodes[rank // 2], beats((rank, 30, phase, age), disk=disk), now=100.0)


@pytest.mark.parametrize("phase", AT_DISK)
def test_a_save_or_a_load_may_last_as_long_as_bytes_move(phase: Phase) -> None:
    dog = dog_after(step_seconds=0.5)
    hear_disk(dog, phase, (WAITING, 3000.0), (MOVING, 9.0), (WAITING, 5.0), (MOVING, 0.1), age=9000)
    assert not dog.late_ranks()


@pytest.mark.parametrize("phase", AT_DISK)
def test_a_rank_whose_bytes_do_not_move_is_named_with_its_node(phase: Phase) -> None:
    dog = dog_after(step_seconds=0.5)
    hear_disk(dog, phase, (WAITING, 60.0), (WAITING, 60.0), (MOVING, 11.0), (MOVING, 0.1), age=70.0)
    assert [rank.rank for rank in dog.late_ranks()] == [2], "though rank 3 still writes"
    fault = dog.hang(dog.late_ranks())
    assert (fault.ranks, fault.nodes) == ((2,), ("n1",))
    assert "no bytes moved for 11 s" in fault.what


def test_of_two_ranks_the_one_whose_bytes_do_not_move_is_named() -> None:
    dog = dog_after(step_seconds=0.5, num_ranks=2)
    hear_disk(dog, Phase.SAVING, (WAITING, 60.0), (MOVING, 11.0), age=70.0)
    assert dog.hang(dog.late_ranks()).ranks == (1,)


def test_a_file_system_that_answers_nobody_is_no_nodes_fault() -> None:
    dog = dog_after(step_seconds=0.5)
    hear_disk(dog, Phase.SAVING, *[(MOVING, 20.0)] * 4, age=300.0)
    fault = dog.hang(dog.late_ranks(), odd=[1])
    assert (fault.ranks, fault.nodes) == ((), ())
    assert "4 of 4 ranks have moved no bytes for 20 s" in fault.what


def test_ranks_that_wait_for_nobody_in_a_save_hang() -> None:
    dog = dog_after(step_seconds=0.5)
    hear_disk(dog, Phase.SAVING, *[(WAITING, 9.0)] * 4, age=300.0)
    assert not dog.late_ranks()
    hear_disk(dog, Phase.SAVING, *[(WAITING, 11.0)] * 4, age=300.0)
    assert len(dog.late_ranks()) == 4


def test_a_save_that_stalls_while_training_goes_on_is_told_once_and_ends_nothing() -> None:
    dog = dog_after(step_seconds=0.5)
    for step in range(40, 43):
        stalled = beats((0, step, Phase.COMPUTING, 0.1), disk=(MOVING, 11.0))
        dog.hear("n0", stalled, float(step))
        assert not dog.late_ranks()
        assert [rank.rank for rank in dog.stalled_ranks()] == ([0] if step == 40 else [])


def test_a_process_that_is_gone_is_not_taken_for_a_stopped_one() -> None:
    dog = Watchdog(10.0, ["n0"], started=0.0)
    dog.hear("n0", beats((0, 0, Phase.BUILDING, 11.0), state=""), 20.0)
    assert not dog.late_ranks()


def test_a_rank_that_is_gone_while_others_wait_for_it_is_named() -> None:
    dog = dog_after(step_seconds=0.5)
    dog.hear("n1", beats((3, 10, Phase.COMPUTING, 1.0), state=""), 30.0)
    assert dog.gone_ranks(30.0) == {3: 30.0}
    assert dog.gone_ranks(42.0) == {3: 30.0}
    assert not dog.any_rank_waits_for([3]), "the others go on, or are about to end, too"
    dog.hear("n0", beats((0, 10, Phase.COMPUTING, 12.0)), 42.0)
    assert dog.any_rank_waits_for([3])


def test_ranks_that_end_one_after_the_other_are_not_gone() -> None:
    dog = dog_after(step_seconds=0.5)
    dog.hear("n1", beats((3, 10, Phase.FINISHED, 1.0), state=""), 30.0)
    assert not dog.gone_ranks(42.0)


def test_where_many_nodes_stand_out_none_is_blamed() -> None:
    dog = dog_after(step_seconds=0.5, num_ranks=16)
    odd = [(rank, 10, Phase.DATA if rank < 6 else Phase.COMPUTING, 20.0) for rank in range(16)]
    for step in range(5):
        dog.hear("n0", beats((0, step, Phase.DATA, 0.1)), 1.0)
    hear_all(dog, *odd, now=30.0)
    assert dog.hang(dog.late_ranks()).nodes == ()


def pace(*seconds: float, data_wait: float = 0.0) -> Beats:
    return [
        [r, 5, Phase.COMPUTING, 0.1, s, data_wait, "S", *NO_DISK] for r, s in enumerate(seconds)
    ]


def test_a_slow_rank_is_named_once_and_only_if_it_stays_slow() -> None:
    dog = Watchdog(10.0, ["n0"], started=0.0)
    for reading in range(20):
        wobble = 1e-4 * reading
        slow = 2.0 + wobble if reading != 4 else 1.0 + wobble
        dog.hear("n0", pace(1.0 + wobble, 1.0 + wobble, slow), float(reading))
        named = [(rank.rank, round(factor)) for rank, factor, _ in dog.stragglers()]
        assert named == ([(2, 2)] if reading == 9 else []), reading
    assert dog.slowest() == {"rank": 2, "node": "n0", "factor": 2.0}


def test_a_rank_that_waits_for_data_is_named() -> None:
    dog = Watchdog(10.0, ["n0", "n1"], started=0.0)
    dog.hear("n0", pace(1.0, 1.0), 1.0)
    dog.hear("n1", [[2, 5, Phase.DATA, 0.1, 1.0, 0.5, "S", *NO_DISK]], 1.0)
    [(rank, _, what)] = dog.stragglers()
    assert (rank.rank, rank.node) == (2, "n1")
    assert "spends 50% of its time waiting for data" in what


IN_COLLECTIVE = """Current thread 0x1 (most recent call first):
  File "/env/site-packages/torch/distributed/distributed_c10d.py", line 3001 in all_reduce
  File "/env/overland/parallel/comm.py", line 99 in sum_over
  File "/env/overland/training/main.py", line 120 in train_rank
"""
IN_USER_CODE = """Thread 0x2 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 320 in wait

Current thread 0x1 (most recent call first):
  File "/home/me/mine.py", line 7 in on_step
  File "/env/overland/training/run.py", line 77 in call
  File "/env/overland/training/main.py", line 120 in train_rank
"""


def test_the_odd_stack_is_the_one_that_does_not_wait() -> None:
    assert odd_ranks({0: IN_COLLECTIVE, 1: IN_COLLECTIVE, 2: IN_USER_CODE}) == [2]
    assert odd_ranks({0: IN_USER_CODE, 1: IN_USER_CODE}) == []
    elsewhere = IN_COLLECTIVE.replace("line 99", "line 12")
    assert odd_ranks({0: IN_COLLECTIVE, 1: IN_COLLECTIVE, 2: elsewhere}) == [2]
    assert odd_ranks({}) == []


def test_a_node_that_never_connects_is_measured_by_the_usual_start_and_not_by_the_slowest() -> None:
    dog = Watchdog(10.0, ["n0", "n1", "n2", "n3"], started=0.0)
    for node, seconds in (("n0", 1.0), ("n1", 1.0), ("n2", 100.0)):
        dog.call(node, seconds)
    assert "n3" not in dog.silent_nodes(now=110.0)
    assert "n3" in dog.silent_nodes(now=130.0)
