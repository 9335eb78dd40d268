"""Which rank the others wait for, from records that real ranks wrote."""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Mapping
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
    last_wait,
    read_records,
    record_into,
    take_last_wait,
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
    """A group named `world` is that of all ranks."""
    config = {
        name: {"ranks": ranks, "desc": "default_pg" if name == "world" else "mesh"}
        for name, ranks in groups.items()
    }
    return {"entries": list(entries), "pg_config": config}


def write_records(folder: Path, records: Mapping[int, Any]) -> None:
    folder.mkdir(exist_ok=True)
    for rank, one in records.items():
        (folder / f"{NAME}{rank}").write_bytes(pickle.dumps(one))


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


def test_of_two_ranks_the_one_without_a_record_is_named() -> None:
    found = find_wait({0: record(entry("a", 5, False))}, 2)
    assert found is not None
    assert (found.waiting, found.missing) == ((0,), (1,))
    assert find_wait({0: record(entry("a", 5, True))}, 2) is None, "it did not wait"


def test_of_several_ranks_that_wait_the_one_that_called_least_is_named() -> None:
    counts = {0: (7, False), 1: (6, False), 2: (5, True)}
    found = find_wait({rank: record(entry("a", *count)) for rank, count in counts.items()}, 3)
    assert found is not None
    assert (found.waiting, found.missing) == ((0,), (2,))


def test_a_rank_is_not_named_for_a_collective_that_has_ended() -> None:
    """Its own entry may have left the buffer."""
    records = {0: record(entry("a", 5, True), a="[0, 1]"), 1: record(a="[0, 1]")}
    assert find_wait(records, 2) is None


def test_a_session_of_another_size_is_judged_by_its_own_ranks(tmp_path: Path) -> None:
    waiting = record(entry("world", 5, False), world="[0, 1, 2]")
    write_records(tmp_path, dict.fromkeys(range(3), waiting))
    assert take_last_wait(tmp_path) == "", "no rank 3 took part"
    assert list(tmp_path.iterdir()) == [], "records that name nobody are removed, too"
    write_records(tmp_path, {0: waiting, 1: waiting})
    words = take_last_wait(tmp_path)
    assert words.startswith("when this run last ended, rank 2 did not join ranks 0, 1 in")
    assert list(tmp_path.iterdir()) == []


class Harm:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.kill, (os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    "content",
    [
        pickle.dumps(Harm()),
        b"",
        b"\x80",
        pickle.dumps({"entries": 3}),
        pickle.dumps([1]),
        pickle.dumps({"entries": [{}]}),
        pickle.dumps(record(entry("a", 1, False) | {"process_group": ("a",)})),
        pickle.dumps(record(entry("a", 1, False) | {"collective_seq_id": None})),
        pickle.dumps(record(a="")),
        pickle.dumps({"entries": [], "pg_config": ["a"]}),
    ],
    ids=[
        "code", "empty", "torn", "no list", "no record", "empty entry", "half a group",
        "no number", "no ranks", "no config",
    ],
)  # fmt: skip
def test_a_record_that_is_none_is_left_out(tmp_path: Path, content: bytes) -> None:
    (tmp_path / f"{NAME}0").write_bytes(content)
    (tmp_path / f"{NAME}x").write_text("")
    assert read_records(tmp_path / NAME) == {}
    assert last_wait(tmp_path, 2) == ""


def test_a_users_own_place_of_records_stays(tmp_path: Path) -> None:
    env = {"TORCH_FR_DUMP_TEMP_FILE": "elsewhere"}
    record_into(tmp_path / "logs", env)
    assert env["TORCH_FR_DUMP_TEMP_FILE"] == "elsewhere"
    assert int(env["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"]) * 4 < 10_000, "limit + 10 s"
    assert (tmp_path / "logs").is_dir()
