"""Ranks send each other values, never code, and only those of one job understand each other."""

from __future__ import annotations

import ast
import os
import pickle
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist

from overland.apps.proofs.job import proof_job
from overland.apps.proofs.layout import curve
from overland.apps.proofs.layouts import parse
from overland.apps.proofs.pool import RankPool
from overland.config.schema import Comm
from overland.errors import ClusterError
from overland.parallel.comm import process_group
from overland.world import Rendezvous, World, exchange
from overland.world.launch import free_port
from overland.world.records import from_json, record, to_json
from overland.world.rendezvous import SECRET, secret_file, secret_of

PACKAGE = Path(__file__).parents[2] / "overland"
OURS, OTHER = b"the secret of this job", b"the secret of another one"


@record
class Place(NamedTuple):
    name: str
    shape: tuple[int, ...]


@record
@dataclass(frozen=True)
class Found:
    at: Path
    places: list[Place]


VALUES: list[Any] = [
    None,
    [True, 2**80, -0.0, 1e-300, float("inf"), "ä\n\x00\udcff"],
    (1, [2, (3,)], {"a": {1: {2, 3}}}, frozenset({"b"})),
    {(1, "b"): None, 7: [b"\x00\xff", Path("a/b")]},
    {"dict": [["tuple", [1]]]},  # looks like a tag
    Found(Path("/a"), [Place("b", (1, 2))]),
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_value_comes_back_as_it_was_sent(value: Any) -> None:
    read = from_json(to_json(value))
    assert (read, type(read)) == (value, type(value))


def test_arrays_come_back_with_type_and_shape() -> None:
    array = np.arange(6, dtype="<u2").reshape(2, 3)
    read = from_json(to_json(array))
    assert read.dtype == array.dtype
    assert read.tolist() == array.tolist()


class Stranger:
    pass


FIELDS = np.zeros(1, [("a", "i4"), ("b", "i4")])


@pytest.mark.parametrize(
    "value",
    [Stranger(), [np.float64(1)], {"a": object}, torch.zeros(1), FIELDS, np.array([object()])],
)
def test_what_is_no_record_is_refused_by_its_sender(value: Any) -> None:
    with pytest.raises(TypeError, match="cannot send each other"):
        to_json(value)


def test_nothing_but_records_can_be_named() -> None:
    for text in (b'{"os.system": ["true"]}', b'{"Stranger": []}', b'{"a": 1, "b": 2}'):
        with pytest.raises((KeyError, ValueError)):
            from_json(text)


def talk(world: World, secrets: list[bytes]) -> Any:
    exchange.greet(secrets[world.rank])
    try:
        return [
            exchange.all_gather({world.rank}),
            exchange.gather("x" * world.rank),
            exchange.scatter([(i,) for i in range(world.size)] if world.rank == 0 else []),
            exchange.broadcast(Path(str(world.rank)), source=world.size - 1),
        ]
    finally:
        exchange.part()


def test_ranks_that_know_the_secret_exchange_values(ranks: RankPool) -> None:
    first, second, third = ranks.run(3, talk, [OURS] * 3)
    assert first == [[{0}, {1}, {2}], ["", "x", "xx"], (0,), Path("2")]
    assert second == [[{0}, {1}, {2}], [], (1,), Path("2")]
    assert third[2] == (2,)


def problem_of(world: World, secrets: list[bytes]) -> str:
    try:
        talk(world, secrets)
    except ClusterError as error:
        return str(error)
    return ""


def test_a_rank_without_the_secret_is_named_and_nobody_goes_on(ranks: RankPool) -> None:
    problems = ranks.run(3, problem_of, [OURS, OTHER, OURS])
    assert "rank 1 does not know the secret" in problems[0]
    assert "rank 1 does not know the secret" in problems[2]
    assert "rank 0 does not know the secret" in problems[1]


def forge(world: World, bomb: bytes) -> str:
    """Rank 1 knows the secret when the ranks greet each other, and then sends bytes of its own."""
    exchange.greet(OURS)
    size = torch.tensor([len(bomb)])
    if world.rank == 1:
        dist.broadcast(size, 1)
        dist.broadcast(torch.frombuffer(bytearray(bomb), dtype=torch.uint8), 1)
        exchange.part()
        return ""
    try:
        exchange.broadcast(None, source=1)
    except ClusterError as error:
        return str(error)
    finally:
        exchange.part()
    return "accepted"


class Bomb:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (os.mkdir, (self.path,))


def test_forged_bytes_are_refused_and_never_run(ranks: RankPool, tmp_path: Path) -> None:
    bomb = pickle.dumps(Bomb(str(tmp_path / "ran")))
    for forged in (bomb, b"\x00" * 40 + bomb, b"\xff" * 64):
        assert "not signed" in ranks.run(2, forge, forged)[0]
    assert not (tmp_path / "ran").exists()


def refuse(*_: Any) -> Any:
    raise AssertionError("a rank unpickles what another one sent")


def curve_without_pickles(world: World, job: Any) -> Any:
    import torch.distributed.distributed_c10d as c10d

    kept = c10d._tensor_to_object
    c10d._tensor_to_object = refuse
    try:
        return curve(world, job)
    finally:
        c10d._tensor_to_object = kept


@pytest.mark.parametrize("name", ["pp2xtp2", "cp2xshard2+tied"])
def test_no_layout_unpickles_what_a_rank_sends(ranks: RankPool, tmp_path: Path, name: str) -> None:
    job = proof_job(parse(name), "float32", 2, tmp_path)
    assert ranks.run(4, curve_without_pickles, job)


def test_the_package_calls_no_collective_that_unpickles() -> None:
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute | ast.Name):
                name = node.attr if isinstance(node, ast.Attribute) else node.id
                assert not name.endswith(("_object", "_object_list")) or not name.startswith(
                    ("all_gather", "gather", "scatter", "broadcast", "send", "recv")
                ), f"{path}:{node.lineno} calls {name}"


STRANGER = """
import os, sys, torch.distributed as dist
from datetime import timedelta

class Bomb:
    def __reduce__(self):
        return (os.mkdir, (sys.argv[2],))

tcp = dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False, timeout=timedelta(seconds=60))
store = dist.PrefixStore("job-1", tcp)
dist.init_process_group("gloo", rank=1, world_size=2, store=store, timeout=timedelta(seconds=60))
try:
    dist.all_gather_object([None, None], Bomb())
except Exception:
    pass
"""


def test_a_program_that_takes_the_place_of_a_rank_cannot_run_code(tmp_path: Path) -> None:
    port, ran = free_port(), tmp_path / "ran"
    os.environ[SECRET] = "0123456789abcdef"
    world = World(0, 2, 0, 2, Rendezvous("127.0.0.1", port, "job-1"))
    stranger = subprocess.Popen([sys.executable, "-c", STRANGER, str(port), str(ran)])
    try:
        comm = Comm(init_timeout_seconds=60)
        with (
            pytest.raises((ClusterError, RuntimeError)),  # gloo may notice the sizes first
            process_group(comm, world, "cpu"),
        ):
            raise AssertionError("joined by a stranger")
    finally:
        stranger.kill()
        stranger.wait()
    assert not ran.exists()


def test_the_secret_of_a_user_is_made_once_and_only_for_them(tmp_path: Path) -> None:
    env = {"XDG_CONFIG_HOME": str(tmp_path)}
    made = secret_of(env)
    assert secret_of(env) == made
    assert len(made) == 32
    assert secret_file(env).stat().st_mode & 0o777 == 0o600
    assert [path.name for path in secret_file(env).parent.iterdir()] == ["secret"]
    assert secret_of({**env, SECRET: "another secret, given"}) == b"another secret, given"


def test_a_secret_that_others_know_is_refused(tmp_path: Path) -> None:
    env = {"XDG_CONFIG_HOME": str(tmp_path)}
    secret_of(env)
    secret_file(env).chmod(0o644)
    with pytest.raises(ClusterError, match="can be read by others"):
        secret_of(env)
    secret_file(env).chmod(0o600)
    secret_file(env).write_text("")
    with pytest.raises(ClusterError, match="holds no secret"):
        secret_of(env)
    with pytest.raises(ClusterError, match="too easy to guess"):
        secret_of({SECRET: "hunter2"})


def test_a_secret_file_of_another_user_names_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = {"XDG_CONFIG_HOME": str(tmp_path)}
    secret_of(env)
    monkeypatch.setattr(os, "getuid", lambda: secret_file(env).stat().st_uid + 1)
    with pytest.raises(ClusterError, match=r"belongs to another user.*XDG_CONFIG_HOME"):
        secret_of(env)


def test_a_secret_may_be_random_bytes() -> None:
    drawn = bytes(range(0x80, 0x90))
    assert secret_of({SECRET: os.fsdecode(drawn)}) == drawn


def test_a_home_that_cannot_be_used_names_the_variable(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ClusterError, match=f"set {SECRET}"):
        secret_of({"XDG_CONFIG_HOME": str(tmp_path / "file")})
