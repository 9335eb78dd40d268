"""Lines between nodes: only who knows the key is heard, and nothing listens to the world."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator

import pytest

from overland.errors import ClusterError
from overland.tools.wire import ADDRESS, KEY, Switchboard, Wire, own_address


@pytest.fixture
def board() -> Iterator[Switchboard]:
    board = Switchboard(others=[], env={})
    yield board
    board.close()


def test_messages_go_both_ways_in_order(board: Switchboard) -> None:
    wire = Wire.to_first_node(board.environment())
    for number in range(100):
        wire.send({"number": number, "text": "ä" * 1000})
    heard = [board.inbox.get(timeout=60) for _ in range(100)]
    assert [message["number"] for _, message in heard if message] == list(range(100))
    heard[0][0].send({"answer": 1})
    assert wire.receive(10) == [{"answer": 1}]
    assert wire.receive(0.01) == []
    wire.close()
    assert board.inbox.get(timeout=60) == (heard[0][0], None)


def test_a_caller_without_the_key_is_hung_up_on(board: Switchboard) -> None:
    stranger = Wire.to_first_node({**board.environment(), KEY: "guess"})
    assert stranger.receive(10) is None
    noise = socket.create_connection(address_of(board))
    noise.sendall(b"GET / HTTP/1.0\n\n")
    assert noise.recv(10) == b""
    friend = Wire.to_first_node(board.environment())
    friend.send({"hello": 1})
    assert board.inbox.get(timeout=60)[1] == {"hello": 1}
    assert board.inbox.empty()


@pytest.mark.parametrize("noise", [b"[" * 200_000, b"7", b"[1]", b"null", b"\xff\xfe"])
def test_noise_ends_its_own_connection_and_no_other(board: Switchboard, noise: bytes) -> None:
    friend = Wire.to_first_node(board.environment())
    for knows_the_key in (False, True):
        stranger = socket.create_connection(address_of(board), timeout=60)
        if knows_the_key:
            stranger.sendall(json.dumps({"key": board.environment()[KEY]}).encode() + b"\n")
        stranger.sendall(noise + b"\n")
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(10) == b""
    friend.send({"hello": 1})
    while (heard := board.inbox.get(timeout=60)[1]) is None:  # the end of one that knew the key
        pass
    assert heard == {"hello": 1}


def address_of(board: Switchboard) -> tuple[str, int]:
    return "127.0.0.1", int(board.environment()[ADDRESS].split(":")[1])


def test_the_other_end_learns_that_the_first_node_is_gone() -> None:
    board = Switchboard(others=[], env={})
    wire = Wire.to_first_node(board.environment())
    wire.send({"hello": 1})
    board.inbox.get(timeout=60)
    board.close()
    assert wire.receive(10) is None


def test_it_listens_where_the_others_reach_it_and_nowhere_else() -> None:
    assert own_address([], {}) == "127.0.0.1"
    assert own_address(["127.0.0.1"], {}) == "127.0.0.1"
    assert own_address(["x"], {"GLOO_SOCKET_IFNAME": "lo"}) == "127.0.0.1"
    assert own_address([], {"NCCL_SOCKET_IFNAME": "=lo,eth7"}) == "127.0.0.1"
    with pytest.raises(
        ClusterError, match=r"no interface hsn0 with an address; its interfaces are .*lo"
    ):
        own_address([], {"NCCL_SOCKET_IFNAME": "hsn0"})
