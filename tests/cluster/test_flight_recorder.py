"""Which rank the others wait for, from records that real ranks wrote."""

from __future__ import annotations

import os
import pickle
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from overland.apps.proofs.pool import RankPool
from overland.world import World
from overland.world.flight_recorder import (
    NAME,
    Wait,
    find_wait,
    forget_records,
    last_wait,
    read_records,
    record_into,
)


def collectives_until(world: World, folder: str, absent: int, writes: list[int]) -> None:
    """All ranks sum twice; `absent` leaves it at that, and the others wait in the next sum."""
    from torch._C import _distributed_c10d as c10d

    value = torch.ones(2)
    group = dist.new_group([0, 1, 2], group_desc="all of them")
    for _ in range(2):
        dist.all_reduce(value, group=group)
    started = None
    if world.rank != absent:
        started = dist.all_reduce(value, group=group, async_op=True)
    dist.barrier()
    if world.rank in writes:
        Path(f"{folder}/{NAME}{world.rank}").write_bytes(c10d._dump_fr_trace())
    dist.barrier()
    if world.rank == absent:
        started = dist.all_reduce(value, group=group, async_op=True)
    assert started is not None
    started.wait()


@pytest.mark.parametrize(
    ("absent", "writes"),
    [(1, [0, 1, 2]), (2, [0, 1, 2]), (1, [0, 2])],
    ids=["behind", "the last one", "no record"],
)
def test_the_rank_that_others_wait_for_is_named(
    ranks: RankPool, tmp_path: Path, absent: int, writes: list[int]
) -> None:
    ranks.run(3, collectives_until, str(tmp_path), absent, writes)
    wait = find_wait(read_records(tmp_path / NAME), 3)
    assert wait is not None
    assert wait.missing == (absent,)
    assert wait.waiting == tuple(rank for rank in range(3) if rank != absent)
    assert "all_reduce number" in last_wait(tmp_path, 3)
    forget_records(tmp_path)
    assert last_wait(tmp_path, 3) == ""


def entry(group: str, number: int, done: bool, what: str = "nccl:all_reduce") -> dict[str, Any]:
    return {
        "process_group": (group, "mesh"),
        "collective_seq_id": number,
        "p2p_seq_id": number,
        "is_p2p": "send" in what or "recv" in what,
        "profiling_name": what,
        "state": "completed" if done else "started",
        "retired": done,
    }


def record(*entries: dict[str, Any], **groups: str) -> dict[str, Any]:
    return {"entries": list(entries), "pg_config": {n: {"ranks": r} for n, r in groups.items()}}


def test_of_a_chain_of_waits_the_end_is_named() -> None:
    """Ranks 0 and 1 wait for each other's group of two, rank 2 for rank 3, which computes."""
    records = {
        0: record(entry("a", 5, False), a="[0, 2]"),
        2: record(entry("a", 4, True), entry("b", 8, False), a="[0, 2]", b="[2, 3]"),
        3: record(entry("b", 7, True), b="[2, 3]"),
        1: record(entry("c", 7, True), c="[1]"),
    }
    assert find_wait(records, 4) == Wait("nccl:all_reduce number 8 of group mesh", (2,), (3,))


def test_a_rank_that_never_called_a_groups_first_collective_is_named() -> None:
    records = {0: record(entry("a", 1, False), a="[0, 1]"), 1: record(a="[0, 1]")}
    found = find_wait(records, 2)
    assert found is not None
    assert (found.waiting, found.missing) == ((0,), (1,))


def test_a_stage_that_sends_nothing_is_named_by_the_one_that_receives() -> None:
    records = {
        4: record(entry("p", 3, False, "nccl:recv 1<-0"), p="[2, 4]"),
        2: record(entry("p", 2, True, "nccl:send 0->1"), p="[2, 4]"),
    }
    found = find_wait(records, 2)
    assert found is not None
    assert (found.waiting, found.missing) == ((4,), (2,))


def test_records_of_ranks_that_are_equally_far_name_nobody() -> None:
    records = {rank: record(entry("a", 5, False)) for rank in range(3)}
    assert find_wait(records, 3) is None
    assert find_wait({}, 3) is None


class Harm:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.kill, (os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    "content",
    [pickle.dumps(Harm()), b"", b"\x80", pickle.dumps({"entries": 3}), pickle.dumps([1])],
    ids=["code", "empty", "torn", "no list", "no record"],
)
def test_a_record_that_is_none_is_left_out(tmp_path: Path, content: bytes) -> None:
    (tmp_path / f"{NAME}0").write_bytes(content)
    (tmp_path / f"{NAME}x").write_text("")
    assert read_records(tmp_path / NAME) == {}


def test_a_users_own_place_of_records_stays(tmp_path: Path) -> None:
    env = {"TORCH_FR_DUMP_TEMP_FILE": "elsewhere"}
    record_into(tmp_path / "logs", env)
    assert env["TORCH_FR_DUMP_TEMP_FILE"] == "elsewhere"
    assert int(env["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"]) * 4 < 10_000, "limit + 10 s"
    assert (tmp_path / "logs").is_dir()
