"""Messages between the first node of a job and all others: lines of JSON over authenticated
connections, on the interface that training uses.

The first node listens only on the address by which the others reach it. Both ends know a key, which
the others received through their environment, and prove it to each other without sending it: a
proof is valid for one connection, since it depends on random numbers of both ends. Without it, the
connection is closed.
"""

from __future__ import annotations

import fcntl
import hmac
import json
import os
import queue
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from overland.errors import ClusterError
from overland.world.rendezvous import LOOPBACK, reachable

Message = dict[str, Any]

ADDRESS, KEY = "OVERLAND_WIRE_ADDRESS", "OVERLAND_WIRE_KEY"
CALL_SECONDS = 60.0
UNHEARD_SECONDS = 10.0  # an unacknowledged connection is given up after this time
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
LONGEST_LINE = 64 * 2**20  # enough for the stacks of all ranks of a node; more is rejected
LONGEST_OF_STRANGER = 2**10
SIOCGIFADDR = 0x8915  # linux/sockios.h


class Wire:
    """One end of a connection."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.longest = LONGEST_OF_STRANGER
        self._rest = b""
        self._sending = threading.Lock()

    @classmethod
    def to_first_node(cls, env: Mapping[str, str] = os.environ) -> Wire:
        host, _, port = env[ADDRESS].rpartition(":")
        wire = cls(socket.create_connection((host, int(port)), timeout=CALL_SECONDS))
        wire.socket.settimeout(None)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # a lost route would block us for minutes
            milliseconds = int(1000 * UNHEARD_SECONDS)
            wire.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
        try:
            wire.greet(env[KEY], env[ADDRESS])
        except BaseException:
            wire.close()
            raise
        return wire

    def greet(self, key: str, address: str) -> None:
        """Proves to the first node that this end knows the key, and lets it prove the same."""
        drawn = secrets.token_hex(16)
        self.send({"drawn": drawn})
        deadline = time.monotonic() + CALL_SECONDS
        heard: list[Message] | None = []
        while not heard and heard is not None and time.monotonic() < deadline:
            heard = self.receive(CALL_SECONDS)
        answer = heard[0] if heard else {}
        shared = address, drawn, str(answer.get("drawn", ""))
        if not _is_proof(answer, key, "first", *shared):
            raise ConnectionRefusedError("the process there does not know the key of this job")
        self.send({"proof": _proof(key, "other", *shared)})
        self.longest = LONGEST_LINE

    def send(self, message: Message) -> None:
        with self._sending:
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, seconds: float | None = None) -> list[Message] | None:
        """Returns received messages, waiting at most this long; None once the other end is gone."""
        self.socket.settimeout(seconds)
        try:
            # Of a stranger, little at once: what a friend sends right after its proof is longer.
            data = self.socket.recv(min(2**16, self.longest))
        except TimeoutError:
            return []
        except OSError:
            return None
        finally:
            self.socket.settimeout(None)
        if not data:
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        if max(map(len, [*lines, self._rest])) > self.longest:
            return None
        try:
            messages = [json.loads(line) for line in lines]
        except (ValueError, RecursionError):  # the latter from endless brackets
            return None
        return messages if all(isinstance(message, dict) for message in messages) else None

    def close(self) -> None:
        self.socket.close()


@dataclass
class _Caller:
    """A connection to the first node."""

    wire: Wire
    since: float
    shared: tuple[str, str, str] | None = None
    """The first node's address and the random numbers of both ends, once they are known."""
    is_known: bool = False
    """Whether it has proven that it knows the key."""


class Switchboard:
    """The first node's end. A thread listens and puts whatever arrives into `inbox` as
    (wire, message), and (wire, None) when a connection has ended."""

    def __init__(
        self, others: Sequence[str], env: Mapping[str, str] = os.environ, key: str = ""
    ) -> None:
        self.inbox: queue.SimpleQueue[tuple[Wire, Message | None]] = queue.SimpleQueue()
        self._key = key or secrets.token_hex(16)
        self._listener = socket.create_server((own_address(others, env), 0), backlog=4096)
        self._callers: dict[socket.socket, _Caller] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._open = True
        self._thread = threading.Thread(target=self._listen, name="switchboard", daemon=True)
        self._thread.start()

    def environment(self) -> dict[str, str]:
        """Returns variables for the processes that connect; command lines would be visible to all
        users."""
        host, port = self._listener.getsockname()
        return {ADDRESS: f"{host}:{port}", KEY: self._key}

    def close(self) -> None:
        self._open = False
        self._thread.join()
        for connection in [self._listener, *self._callers]:
            connection.close()
        self._selector.close()

    def _listen(self) -> None:
        while self._open:
            for ready, _ in self._selector.select(timeout=0.2):
                if ready.fileobj is self._listener:
                    try:
                        connection, _ = self._listener.accept()
                    except OSError:  # the client is gone again, or too many files are open
                        time.sleep(0.1)
                        continue
                    self._callers[connection] = _Caller(Wire(connection), time.monotonic())
                    self._selector.register(connection, selectors.EVENT_READ)
                else:
                    assert isinstance(ready.fileobj, socket.socket)
                    self._hear(ready.fileobj)
            self._hang_up_on_silent_strangers()

    def _hear(self, connection: socket.socket) -> None:
        caller = self._callers[connection]
        messages = caller.wire.receive()
        if messages and not caller.is_known:
            messages = self._greet(caller, messages)
        if caller.is_known:
            for message in messages or []:
                self.inbox.put((caller.wire, message))
        if messages is None:
            self._hang_up(connection)

    def _greet(self, caller: _Caller, messages: list[Message]) -> list[Message] | None:
        """Returns what follows the greeting; None if the caller does not know the key."""
        said, *rest = messages
        if caller.shared is None:
            drawn = secrets.token_hex(16)
            caller.shared = self.environment()[ADDRESS], str(said.get("drawn", "")), drawn
            proof = _proof(self._key, "first", *caller.shared)
            try:
                caller.wire.send({"drawn": drawn, "proof": proof})
            except OSError:
                return None
            return None if rest else []
        if not _is_proof(said, self._key, "other", *caller.shared):
            return None
        caller.is_known, caller.wire.longest = True, LONGEST_LINE
        return rest

    def _hang_up(self, connection: socket.socket) -> None:
        caller = self._callers.pop(connection)
        self._selector.unregister(connection)
        caller.wire.close()
        if caller.is_known:
            self.inbox.put((caller.wire, None))

    def _hang_up_on_silent_strangers(self) -> None:
        latest = time.monotonic() - CALL_SECONDS
        for connection, caller in list(self._callers.items()):
            if not caller.is_known and caller.since < latest:
                self._hang_up(connection)


def _proof(key: str, end: str, *shared: str) -> str:
    words = json.dumps([end, *shared])  # unlike plain text, JSON of any message can be encoded
    return hmac.new(key.encode(), words.encode(), "sha256").hexdigest()


def _is_proof(message: Message, key: str, end: str, *shared: str) -> bool:
    given = json.dumps(message.get("proof"))
    return hmac.compare_digest(given, json.dumps(_proof(key, end, *shared)))


def own_address(others: Sequence[str], env: Mapping[str, str] = os.environ) -> str:
    """Returns the address of the interface that training uses, if it is set; otherwise of the one
    that leads to the other nodes, or loopback if there are none."""
    for variable in INTERFACES:
        name = env.get(variable, "").split(",")[0].lstrip("=")
        if name and not name.startswith("^"):
            return address_of_interface(name, variable)
    if not others:
        return LOOPBACK
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((reachable(others[0]), 9))  # sends nothing: it only looks up the route
        return str(probe.getsockname()[0])


def address_of_interface(name: str, variable: str) -> str:
    """Returns the address of the first interface with this prefix, like NCCL and gloo."""
    present = sorted(interface for _, interface in socket.if_nameindex())
    for interface in present:
        if interface.startswith(name):
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
                request = struct.pack("256s", interface.encode()[:15])
                try:
                    answer = fcntl.ioctl(asker.fileno(), SIOCGIFADDR, request)
                except OSError:
                    continue
                return socket.inet_ntoa(answer[20:24])
    raise ClusterError(
        f"environment {variable}: {socket.gethostname()} has no interface {name} with an address; "
        f"its interfaces are {', '.join(present)}"
    )
