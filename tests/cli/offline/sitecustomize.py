"""On PYTHONPATH, blocks all network access of every process, and records which ones tried.

Python imports a module of this name at its start, in children as well. What is written in C++ does
not pass here: a network namespace without a way out stops that.
"""

import ipaddress
import os
import socket
import sys

NODES = os.environ.get("OVERLAND_NODES", "").split()
"""Of a cluster that is all on this machine: they speak with one another, and listen everywhere."""
NAMES = ("", "localhost", "ip6-localhost", socket.gethostname(), socket.getfqdn(), *NODES)


def is_local(host: object) -> bool:
    if isinstance(host, bytes):
        host = host.decode()
    if host is None or host in NAMES:
        return True
    try:
        return ipaddress.ip_address(str(host).partition("%")[0]).is_loopback
    except ValueError:
        return False


def guard(event: str, args: tuple[object, ...]) -> None:
    if event in ("socket.connect", "socket.bind", "socket.sendto", "socket.sendmsg"):
        address = args[1]
        # A string is the path of a socket on this machine; an empty host listens everywhere.
        if not isinstance(address, tuple):
            return
        everywhere = event == "socket.bind" and address[0] == "" and not NODES
        inside = is_local(address[0]) and not everywhere
    elif event in ("socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr"):
        address = args[0]
        inside = is_local(address)
    else:
        return
    if not inside:
        with open(os.environ["OVERLAND_ATTEMPTS"], "a") as file:
            file.write(f"{os.getpid()} {event} {address!r}\n")
        raise OSError(f"the test lets nobody out: {event} {address!r}")


sys.addaudithook(guard)
