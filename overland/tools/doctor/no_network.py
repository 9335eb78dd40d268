"""Runs `overland WORDS` with a network that is not there: python -m …no_network RECORD WORDS

Addresses other than this machine's are refused and written into RECORD, also where the one who
tried catches the refusal. What asks for a name's address is treated as what connects to it: on a
compute node that is where one waits. Sees what goes through Python, as all of Hugging Face's
libraries and W&B's client do; not sockets that a C library opens by itself.
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
            return  # not a socket, or one between processes
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
    # An address needs no lookup, so asking for one opens nothing.
    return event in LOOKUPS or address.is_loopback or address.is_unspecified


if __name__ == "__main__":
    refuse_network(os.path.abspath(sys.argv[1]))
    sys.argv = ["overland", *sys.argv[2:]]
    runpy.run_module("overland", run_name="__main__", alter_sys=True)
