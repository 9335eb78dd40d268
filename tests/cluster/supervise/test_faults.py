"""What ended an attempt, judging by ranks, srun and silence."""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Callable

import pytest
import torch

from overland.cluster.error_kinds import error_kind, error_place
from overland.cluster.supervise.faults import (
    Fault,
    Findings,
    with_recorded_ranks,
)
from overland.config.errors import ConfigError
from overland.errors import (
    CheckpointError,
    ClusterError,
    DataError,
    Kind,
    TakenError,
    TrainingError,
)
from overland.world.flight_recorder import Wait
from overland.world.signals import ENDED, SAYS, say


def caused_by(cause: Exception, error: Exception) -> Exception:
    try:
        try:
            raise cause
        except OSError:
            raise error from None
    except Exception as raised:
        return raised


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), Kind.MEMORY),
        (RuntimeError("HIP out of memory"), Kind.MEMORY),
        (MemoryError(), Kind.MEMORY),
        (OSError(errno.ENOSPC, "No space left on device"), Kind.DISK),
        (CheckpointError("step_3 is not there: Disk quota exceeded"), Kind.DISK),
        (CheckpointError("none of the 3 checkpoints can be read"), Kind.TRAINING),
        (TrainingError("the loss was not finite in 10 steps"), Kind.TRAINING),
        (TakenError("runs/x is being trained by job 7"), Kind.TAKEN),
        (DataError("x.jsonl, line 3: no connection closed here"), Kind.DATA),
        (ConfigError([]), Kind.CONFIG),
        (ClusterError("rank 3 did not find rank 0"), Kind.NETWORK),
        (torch.AcceleratorError("CUDA error: an illegal memory access"), Kind.DEVICE),
        (RuntimeError("CUDA error: uncorrectable ECC error encountered"), Kind.DEVICE),
        (RuntimeError("HIP error: hipErrorLaunchFailure"), Kind.DEVICE),
        (RuntimeError("CUDA error: device-side assert triggered"), Kind.CODE),
        (torch.distributed.DistBackendError("NCCL error: remote process exited"), Kind.NETWORK),
        (RuntimeError("[gloo/pair.cc:553] Connection closed by peer [10.0.0.1]"), Kind.NETWORK),
        (ConnectionResetError("reset"), Kind.NETWORK),
        (KeyError("embedding"), Kind.CODE),
        (RuntimeError("HSA_STATUS_ERROR_OF_TOMORROW"), Kind.UNKNOWN),
        (type("LibraryError", (Exception,), {})("who knows"), Kind.UNKNOWN),
        (OSError(errno.ESTALE, "Stale file handle"), Kind.UNKNOWN),
        (caused_by(OSError(errno.EIO, "Input/output error"), DataError("x: cannot be read")),
         Kind.UNKNOWN),
    ],
)  # fmt: skip
def test_an_error_has_a_kind(error: BaseException, kind: Kind) -> None:
    assert error_kind(error) is kind


def raised(act: Callable[[], object]) -> Exception:
    try:
        act()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def test_a_place_is_the_type_of_an_error_and_a_line_outside_of_torch() -> None:
    shapes = raised(lambda: torch.nn.Linear(2, 3)(torch.ones(1, 5)))
    assert re.fullmatch(r"RuntimeError at .*supervise/test_faults\.py:\d+", error_place(shapes))
    missing = raised(lambda: {}["embedding"])
    assert re.fullmatch(r"KeyError at .*supervise/test_faults\.py:\d+", error_place(missing))
    assert error_place(shapes) != error_place(missing)


def test_an_error_of_the_file_system_has_no_place() -> None:
    """Whatever reads next fails."""
    assert error_place(OSError(errno.ESTALE, "Stale file handle")) == ""
    stale = caused_by(OSError(errno.ESHUTDOWN, "endpoint"), DataError("x: cannot be read"))
    assert error_place(stale) == ""
    assert error_place(FileNotFoundError(errno.ENOENT, "no such file")) == "FileNotFoundError"


def test_an_unknown_error_out_of_a_collective_is_the_networks() -> None:
    """Whatever its words are."""
    where = "/env/lib/site-packages/torch/distributed/distributed_c10d.py"
    scope: dict[str, Callable[[], object]] = {}
    exec(compile("def all_reduce():\n raise RuntimeError('code -6')", where, "exec"), scope)
    assert error_kind(raised(scope["all_reduce"])) is Kind.NETWORK


def findings(*lines: str) -> Findings:
    found = Findings()
    for line in lines:
        found.read(line)
    return found


def said(rank: int, kind: Kind, what: str, time: float) -> str:
    told = {"rank": rank, "node": f"n{rank // 2}", "kind": kind, "what": what, "time": time}
    return f"{rank}: {SAYS}{json.dumps(told)}"


def test_last_words_are_heard_and_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    say(3, Kind.DEVICE, "two\nlines")
    found = Findings()
    assert found.read(f"3: {capsys.readouterr().out.strip()}")
    assert (found.said[0].rank, found.said[0].what) == (3, "two lines")
    assert found.said[0].kind is Kind.DEVICE
    assert not found.read("3: overland says: nonsense")
    assert not found.read("3: step 12  loss 3.1")


def test_the_cause_is_blamed_and_not_who_failed_because_of_it() -> None:
    fault = findings(
        said(0, Kind.NETWORK, "Connection closed by peer", 1.0),
        said(5, Kind.DEVICE, "uncorrectable ECC error", 1.4),
        said(1, Kind.NETWORK, "Connection closed by peer", 1.1),
        "srun: error: n2: task 5: Exited with exit code 1",
        "srun: error: n0: tasks 0-1: Exited with exit code 1",
    ).fault()
    assert (fault.kind, fault.ranks, fault.nodes) == (Kind.DEVICE, (5,), ("n2",))


def test_a_broken_connection_is_nobodys_fault() -> None:
    fault = findings(said(0, Kind.NETWORK, "NCCL error", 1.0)).fault()
    assert (fault.kind, fault.ranks, fault.nodes) == (Kind.NETWORK, (), ())
    assert "rank 0" in fault.what


def test_last_words_on_the_network_are_short(capsys: pytest.CaptureFixture[str]) -> None:
    say(0, Kind.NETWORK, "RuntimeError: [/x/gloo/pair.cc:5] Connection closed. This is typically")
    assert findings(capsys.readouterr().out.strip()).said[0].what == (
        "RuntimeError: Connection closed"
    )


def test_of_equal_causes_the_first_counts() -> None:
    fault = findings(
        said(4, Kind.CODE, "KeyError: later", 2.0), said(2, Kind.CODE, "KeyError: first", 1.0)
    ).fault()
    assert fault.ranks == (2,)
    assert fault.kind.is_of_the_program


@pytest.mark.parametrize("how", ["Killed", "Exited with exit code 137", "Segmentation fault",
                                 "Exited with exit code 139"])  # fmt: skip
def test_a_rank_that_was_killed_is_named(how: str) -> None:
    fault = findings(
        said(0, Kind.NETWORK, "Connection closed by peer", 1.0),
        f"srun: error: frontier00012: task 5: {how}",
        "srun: error: frontier00011: tasks 0-3: Terminated",
    ).fault()
    assert (fault.kind, fault.ranks, fault.nodes) == (Kind.KILLED, (5,), ("frontier00012",))


def test_those_that_srun_ended_are_no_cause() -> None:
    fault = findings(
        "srun: error: n1: tasks 0-1: Terminated",
        "srun: error: n2: task 3: Exited with exit code 143",
        said(2, Kind.CODE, "ValueError: x", 1.0),
    ).fault()
    assert fault.kind is Kind.CODE


def test_the_nodes_memory_is_told_from_a_kill() -> None:
    assert findings("srun: error: n1: task 0: Out Of Memory").fault().kind is Kind.MEMORY


def test_a_lost_node_comes_before_all_else() -> None:
    fault = findings(
        said(0, Kind.NETWORK, "Connection closed", 1.0), "srun: error: Node failure on n7"
    ).fault()
    assert (fault.kind, fault.nodes) == (Kind.NODE, ("n7",))


def test_a_sentence_before_the_ranks_meet_is_a_config_error() -> None:
    fault = findings(
        "0: run.toml:3: training.stepz: no such key; did you mean steps?",
        "srun: error: n1: tasks 0-1: Exited with exit code 2",
    ).fault()
    assert fault.kind is Kind.CONFIG
    assert "did you mean steps?" in fault.what


def test_a_trace_without_last_words_is_a_code_error_and_silence_is_not() -> None:
    trace = findings(
        "2: Traceback (most recent call last):",
        "2: ImportError: no module named flax",
        "srun: error: n1: task 2: Exited with exit code 1",
    ).fault()
    assert trace.kind is Kind.CODE
    assert "no module named flax" in trace.what
    silent = findings("srun: error: n1: task 2: Exited with exit code 1").fault()
    assert silent.kind is Kind.UNKNOWN
    assert findings().fault().kind is Kind.UNKNOWN


def test_an_attempt_that_stopped_is_told_from_one_that_failed() -> None:
    assert findings(said(0, Kind.STOPPED, "step 3", 1.0)).stopped()
    assert not findings().stopped()
    both = findings(said(0, Kind.STOPPED, "step 3", 1.0), said(1, Kind.CODE, "KeyError", 1.0))
    assert not both.stopped()
    assert both.fault().kind is Kind.CODE


def test_a_node_where_srun_could_not_start_is_lost_and_no_other() -> None:
    fault = findings(
        "srun: error: Task launch for StepId=12.0 failed on node n3: Connection failure",
        "srun: error: Application launch failed: Communication connection failure",
        "srun: error: n2: tasks 0-1: Killed",
    ).fault()
    assert (fault.kind, fault.nodes) == (Kind.NODE, ("n3",))


def test_lists_of_nodes_are_written_out() -> None:
    found = findings(
        "srun: error: Node failure on n[2-3]", "srun: error: n[1-2]: tasks 0-3: Killed"
    )
    found.num_nodes = 8
    assert found.fault().nodes == ("n2", "n3")
    assert found.ends[0].nodes == ("n1", "n2")


def test_if_most_nodes_fall_silent_at_once_none_is_to_blame() -> None:
    for lost, kind in ((["n1"], Kind.NODE), (["n1", "n2"], Kind.NETWORK)):
        found = Findings(num_nodes=2, lost=lost)
        assert found.fault().kind is kind


def test_a_rank_killed_while_the_others_start_is_no_stop() -> None:
    """srun's SIGTERM, which follows, is a wish to stop for ranks that have not begun."""
    found = findings(
        "srun: error: n1: task 1: Exited with exit code 137",
        said(0, Kind.STOPPED, "stopped before the first step", 1.0),
    )
    assert not found.stopped()
    assert found.fault().kind is Kind.KILLED


def test_other_exit_codes_that_begin_with_two_are_no_config_errors() -> None:
    for code in (24, 255):
        line = f"srun: error: n1: task 0: Exited with exit code {code}"
        assert findings(line).fault().kind is Kind.UNKNOWN


def test_ranks_that_srun_killed_after_one_had_spoken_are_innocent() -> None:
    fault = findings(
        said(3, Kind.NETWORK, "Connection closed by peer", 1.0),
        "srun: error: n1: task 3: Exited with exit code 1",
        "srun: error: n0: tasks 0-1: Killed",
    ).fault()
    assert (fault.kind, fault.nodes) == (Kind.NETWORK, ())


def test_nccls_own_watchdog_blames_no_node() -> None:
    fault = findings(
        "0: [E] [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)",
        "srun: error: n0: task 0: Aborted",
        "srun: error: n1: task 2: Aborted",
    ).fault()
    assert (fault.kind, fault.nodes) == (Kind.HANG, ())


def test_the_trace_of_one_rank_is_not_lost_among_those_of_others() -> None:
    trace = ["Traceback (most recent call last):", *["  File x"] * 20, "ImportError: y"]
    lines = [f"{rank}: {text}" for rank in range(16) for text in trace]
    fault = findings(*lines, "srun: error: n0: task 0: Exited with exit code 1").fault()
    assert fault.kind is Kind.CODE
    assert fault.what.endswith("ImportError: y")


HANG = Fault(Kind.HANG, "no rank has made progress for 60 s, and none stands out")


@pytest.mark.parametrize("kind", [Kind.DEVICE, Kind.MEMORY, Kind.CODE, Kind.UNKNOWN])
def test_what_a_rank_said_comes_before_a_hang_of_the_others(kind: Kind) -> None:
    found = findings(said(5, kind, "it was me", 1.0))
    found.hang = HANG
    assert (found.fault().kind, found.fault().nodes) == (kind, ("n2",))


def test_a_hang_explains_a_broken_connection() -> None:
    found = findings(said(5, Kind.NETWORK, "Connection closed by peer", 1.0))
    found.hang = HANG
    assert found.fault() is HANG


def test_what_a_rank_said_comes_before_the_silence_of_its_node() -> None:
    found = findings(said(5, Kind.CODE, "KeyError: 'x'", 1.0))
    found.num_nodes, found.lost = 8, ["n2"]
    assert found.fault().kind is Kind.CODE
    found.lost = ["n2", "n3"]
    assert (found.fault().kind, found.fault().nodes) == (Kind.NODE, ("n3",))


def test_what_several_nodes_say_is_not_the_fault_of_one() -> None:
    alike = [said(rank, Kind.UNKNOWN, "RuntimeError: sizes", float(rank)) for rank in (2, 4)]
    assert findings(*alike).fault().nodes == ()
    assert findings(alike[0]).fault().nodes == ("n1",)


def test_an_exit_code_of_0_without_a_word_is_blamed_on_the_rank_and_not_on_its_node() -> None:
    found = Findings(num_nodes=8)
    assert found.read(f"5: {ENDED}n2\n"), "it is not for the log"
    assert found.ended[5][0] == "n2"
    found.gone = {5: "n2"}
    found.read(said(0, Kind.NETWORK, "Connection closed by peer", 1.0))
    fault = found.fault()
    assert (fault.kind, fault.ranks, fault.nodes) == (Kind.UNKNOWN, (5,), ("n2",))
    assert "rank 5 on n2 ended with exit code 0 without reporting an error" in fault.what


def test_of_ranks_that_the_supervisor_ends_only_those_that_were_gone_before_are_believed() -> None:
    found = findings()
    found.gone, found.is_closed = {5: "n2"}, True
    found.read("srun: error: n1: tasks 2-3: Killed")
    assert found.ends == []
    assert "is gone without reporting an error" in found.fault().what
    found.read("srun: error: n2: tasks 4-5: Out Of Memory")
    assert (found.fault().kind, found.fault().ranks) == (Kind.MEMORY, (5,))


def test_a_program_that_cannot_start_anywhere_is_not_blamed_on_a_node() -> None:
    """So that the second time it is the same error at the same place, and ends the chain."""
    found = findings(
        "0: rank: line 1: /env/bin/python: No such file or directory",
        "srun: error: n[1-2]: tasks 0-3: Exited with exit code 127",
    ).fault()
    assert (found.kind, found.nodes) == (Kind.UNKNOWN, ())
    assert "No such file or directory" in found.place


def test_a_folder_that_is_taken_is_nobodys_fault() -> None:
    assert findings(said(0, Kind.TAKEN, "job 7 trains there", 1.0)).fault().nodes == ()


def test_a_collective_that_timed_out_is_blamed_on_the_rank_that_did_not_join_it() -> None:
    found = findings(
        "2: [rank2] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)",
        "srun: error: n1: task 2: Aborted",
    ).fault()
    assert found.ranks == (), "rank 2 is only the first that gave up"
    wait = Wait("nccl:all_reduce number 7 of group tp", (0, 1, 2), (3,))
    named = with_recorded_ranks(found, wait, {2: "n1", 3: "n2"})
    assert (named.kind, named.ranks, named.nodes) == (Kind.HANG, (3,), ("n2",))
    assert "rank 3 did not join ranks 0, 1, 2 in nccl:all_reduce number 7" in named.what
    assert with_recorded_ranks(found, None, {}) == found


def test_what_heartbeats_say_of_a_hang_comes_first() -> None:
    known = Fault(Kind.HANG, "rank 1 on n1 stopped at step 3", (1,), ("n1",))
    wait = Wait("nccl:all_reduce number 7 of group tp", (0,), (3,))
    assert with_recorded_ranks(known, wait, {3: "n2"}) == known
    killed = Fault(Kind.KILLED, "rank 1 on n1: Killed", (1,), ("n1",))
    assert with_recorded_ranks(killed, wait, {3: "n2"}) == killed


@pytest.mark.parametrize(("lost", "kind"), [(2, Kind.NODE), (3, Kind.NETWORK)])
def test_more_than_half_of_the_nodes_are_not_lost_by_themselves(lost: int, kind: Kind) -> None:
    names = [f"n{number}" for number in range(lost)]
    found = Findings(num_nodes=4, lost=names).fault()
    assert found.kind is kind
    assert found.nodes == (tuple(names) if kind is Kind.NODE else ())
