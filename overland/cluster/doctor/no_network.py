"""Runs `overland WORDS` without network access: python -m …no_network RECORD WORDS

Connections to other machines are refused and recorded in RECORD, even if the caller catches the
error. DNS lookups are treated like connections, because on a compute node they are what hangs. This
covers connections made from Python, as all of Hugging Face's libraries and W&B's client do, but not
sockets that a C library opens itself.
"""

from __future__ import annotations

import ipaddress
import os
import runpy
import socket
import sys
from typing import Any

LOOKUPS = {"socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr"}
SENDS = {"socket.connect", "socket.sendto", "socket.sendmsg"}


def refuse_network(record: str) -> None:
    own_names = {"", "localhost", socket.gethostname(), socket.gethostname().partition(".")[0]}

    def refuse(event: str, arguments: tuple[Any, ...]) -> None:
        if event in LOOKUPS:
            host, port = arguments[0], arguments[1] if len(arguments) > 1 else None
        elif event in SENDS and isinstance(arguments[-1], tuple):
            host, port = arguments[-1][:2]
        else:
            return  # not a network socket
        host = host.decode() if isinstance(host, bytes) else host
        if host is None or host in own_names or is_own_address(host, event):
            return
        with open(record, "a", encoding="utf-8") as file:
            file.write(f"{host}{f':{port}' if port else ''}\n")
        raise ConnectionRefusedError(f"{host}: the network is refused here")

    sys.addaudithook(refuse)


def is_own_address(host: str, event: str) -> bool:
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    # Looking up a numeric address opens no connection.
    return event in LOOKUPS or address.is_loopback or address.is_unspecified


if __name__ == "__main__":
    refuse_network(os.path.abspath(sys.argv[1]))
    sys.argv = ["overland", *sys.argv[2:]]
    runpy.run_module("overland", run_name="__main__", alter_sys=True)
