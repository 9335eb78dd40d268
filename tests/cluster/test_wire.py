"""Lines between nodes: only who knows the key is heard, and nothing listens to the world."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from overland.cluster.errors import ClusterError
from overland.cluster.wire import ADDRESS, KEY, Switchboard, Wire, own_address


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
    noise = socket.create_connection(("127.0.0.1", int(board.environment()[ADDRESS].split(":")[1])))
    noise.sendall(b"GET / HTTP/1.0\n\n")
    assert noise.recv(10) == b""
    friend = Wire.to_first_node(board.environment())
    friend.send({"hello": 1})
    assert board.inbox.get(timeout=60)[1] == {"hello": 1}
    assert board.inbox.empty()


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
    with pytest.raises(ClusterError, match=r"no interface hsn0 with an address; it has .*lo"):
        own_address([], {"NCCL_SOCKET_IFNAME": "hsn0"})
