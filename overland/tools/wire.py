"""Messages between the first node of a job and all others: lines of JSON, one connection per node.

The first node listens only on the address by which the others reach it. A client first sends a key,
which it received through its environment; without it, the connection is closed.
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
from typing import Any

from overland.errors import ClusterError
from overland.world.rendezvous import LOOPBACK, reachable

Message = dict[str, Any]

ADDRESS, KEY = "OVERLAND_WIRE_ADDRESS", "OVERLAND_WIRE_KEY"
CALL_SECONDS = 60.0
UNHEARD_SECONDS = 10.0  # an unacknowledged connection is given up after this time
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
LONGEST_LINE = 64 * 2**20  # enough for the stacks of all ranks of a node; more is rejected
SIOCGIFADDR = 0x8915  # linux/sockios.h


class Wire:
    """One end of a connection."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
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
        wire.send({"key": env[KEY]})
        return wire

    def send(self, message: Message) -> None:
        with self._sending:
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, seconds: float | None = None) -> list[Message] | None:
        """Returns received messages, waiting at most this long; None once the other end is gone."""
        self.socket.settimeout(seconds)
        try:
            data = self.socket.recv(2**16)
        except TimeoutError:
            return []
        except OSError:
            return None
        finally:
            self.socket.settimeout(None)
        if not data:
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > LONGEST_LINE:
            return None
        try:
            messages = [json.loads(line) for line in lines]
        except (ValueError, RecursionError):  # the latter from endless brackets
            return None
        return messages if all(isinstance(message, dict) for message in messages) else None

    def close(self) -> None:
        self.socket.close()


class Switchboard:
    """The first node's end. A thread listens and puts whatever arrives into `inbox` as
    (wire, message), and (wire, None) when a connection has ended."""

    def __init__(
        self, others: Sequence[str], env: Mapping[str, str] = os.environ, key: str = ""
    ) -> None:
        self.inbox: queue.SimpleQueue[tuple[Wire, Message | None]] = queue.SimpleQueue()
        self._key = key or secrets.token_hex(16)
        self._listener = socket.create_server((own_address(others, env), 0), backlog=4096)
        self._wires: dict[socket.socket, tuple[Wire, bool]] = {}  # and whether it sent the key
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
        for connection in [self._listener, *self._wires]:
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
                    self._wires[connection] = Wire(connection), False
                    self._selector.register(connection, selectors.EVENT_READ)
                else:
                    assert isinstance(ready.fileobj, socket.socket)
                    self._hear(ready.fileobj)

    def _hear(self, connection: socket.socket) -> None:
        wire, is_known = self._wires[connection]
        messages = wire.receive()
        if messages and not is_known:
            said = messages.pop(0)
            is_known = hmac.compare_digest(str(said.get("key", "")).encode(), self._key.encode())
            self._wires[connection] = wire, is_known
            messages = messages if is_known else None
        if is_known:
            for message in messages or []:
                self.inbox.put((wire, message))
        if messages is None:
            self._selector.unregister(connection)
            del self._wires[connection]
            wire.close()
            if is_known:
                self.inbox.put((wire, None))


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
