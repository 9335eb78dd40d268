"""Connections between nodes: only peers that know the key are heard, and nothing listens
publicly."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator

import pytest

from overland.cluster import wire
from overland.cluster.wire import (
    ADDRESS,
    KEY,
    LONGEST_OF_STRANGER,
    Message,
    Switchboard,
    Wire,
    own_address,
)
from overland.errors import ClusterError


@pytest.fixture
def board() -> Iterator[Switchboard]:
    board = Switchboard(others=[], env={})
    yield board
    board.close()


def test_messages_go_both_ways_in_order(board: Switchboard) -> None:
    friend = Wire.to_first_node(board.environment())
    for number in range(100):
        friend.send({"number": number, "text": "ä" * 1000})
    heard = [board.inbox.get(timeout=60) for _ in range(100)]
    assert [message["number"] for _, message in heard if message] == list(range(100))
    heard[0][0].send({"answer": 1})
    assert friend.receive(10) == [{"answer": 1}]
    assert friend.receive(0.01) == []
    friend.close()
    assert board.inbox.get(timeout=60) == (heard[0][0], None)


def test_what_follows_a_proof_at_once_is_not_taken_for_a_strangers_flood(
    board: Switchboard,
) -> None:
    letters = [{"number": number, "text": "a" * 2000} for number in range(20)]

    class Eager(Wire):
        def send(self, message: Message) -> None:
            together = [message, *letters] if "proof" in message else [message]
            self.socket.sendall(b"".join(json.dumps(one).encode() + b"\n" for one in together))

    friend = Eager.to_first_node(board.environment())
    assert [board.inbox.get(timeout=60)[1] for _ in letters] == letters
    friend.close()


def test_a_caller_without_the_key_is_hung_up_on(board: Switchboard) -> None:
    with pytest.raises(ConnectionRefusedError):  # it would not even give orders to such a caller
        Wire.to_first_node({**board.environment(), KEY: "guess"})
    stranger = Wire(socket.create_connection(address_of(board)))
    stranger.send({"drawn": "0" * 32})
    assert "proof" in (stranger.receive(10) or [{}])[0]
    stranger.send({"proof": "guess"})
    assert stranger.receive(10) is None
    noise = socket.create_connection(address_of(board))
    noise.sendall(b"GET / HTTP/1.0\n\n")
    assert noise.recv(10) == b""
    friend = Wire.to_first_node(board.environment())
    friend.send({"hello": 1})
    assert board.inbox.get(timeout=60)[1] == {"hello": 1}
    assert board.inbox.empty()


def test_a_proof_is_no_use_at_another_address(board: Switchboard) -> None:
    """A program in between passes everything on, as if it were the first node."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        between = f"127.0.0.1:{listener.getsockname()[1]}"

        def pass_on() -> None:
            victim, first = listener.accept()[0], socket.create_connection(address_of(board))
            first.sendall(victim.recv(1000))
            victim.sendall(first.recv(1000))
            victim.close()
            first.close()

        thread = threading.Thread(target=pass_on)
        thread.start()
        with pytest.raises(ConnectionRefusedError):
            Wire.to_first_node({**board.environment(), ADDRESS: between})
        thread.join()


def test_a_stranger_cannot_send_much_nor_stay(
    board: Switchboard, monkeypatch: pytest.MonkeyPatch
) -> None:
    talker, silent = (socket.create_connection(address_of(board), timeout=60) for _ in range(2))
    friend = Wire.to_first_node(board.environment())
    with contextlib.suppress(ConnectionError):
        talker.sendall(b"x" * (LONGEST_OF_STRANGER + 1))
        assert talker.recv(10) == b""
    monkeypatch.setattr(wire, "CALL_SECONDS", 0.0)
    assert silent.recv(10) == b""
    friend.send({"hello": "x" * LONGEST_OF_STRANGER})
    assert board.inbox.get(timeout=60)[1]


ODD = rb'{"drawn": "\ud800", "proof": "\ud800"}'  # no text that can be encoded


@pytest.mark.parametrize("noise", [b"[" * 200_000, b"7", b"[1]", b"null", b"\xff\xfe", ODD])
def test_noise_ends_its_own_connection_and_no_other(board: Switchboard, noise: bytes) -> None:
    friend = Wire.to_first_node(board.environment())
    for knows_the_key in (False, True):
        if knows_the_key:
            stranger = Wire.to_first_node(board.environment()).socket
            noise = noise.replace(ODD, b"1")
        else:
            stranger = socket.create_connection(address_of(board))
        stranger.settimeout(60)
        with contextlib.suppress(ConnectionError):
            stranger.sendall(noise + b"\n" + noise + b"\n")
            while stranger.recv(1000):
                pass
    friend.send({"hello": 1})
    while (heard := board.inbox.get(timeout=60)[1]) is None:  # the end of one that knew the key
        pass
    assert heard == {"hello": 1}


def address_of(board: Switchboard) -> tuple[str, int]:
    return "127.0.0.1", int(board.environment()[ADDRESS].split(":")[1])


def test_the_other_end_learns_that_the_first_node_is_gone() -> None:
    board = Switchboard(others=[], env={})
    friend = Wire.to_first_node(board.environment())
    friend.send({"hello": 1})
    board.inbox.get(timeout=60)
    board.close()
    assert friend.receive(10) is None


def test_it_listens_where_the_others_reach_it_and_nowhere_else() -> None:
    assert own_address([], {}) == "127.0.0.1"
    assert own_address(["127.0.0.1"], {}) == "127.0.0.1"
    assert own_address(["x"], {"GLOO_SOCKET_IFNAME": "lo"}) == "127.0.0.1"
    assert own_address([], {"NCCL_SOCKET_IFNAME": "=lo,eth7"}) == "127.0.0.1"
    with pytest.raises(
        ClusterError, match=r"no interface hsn0 with an address; its interfaces are .*lo"
    ):
        own_address([], {"NCCL_SOCKET_IFNAME": "hsn0"})
