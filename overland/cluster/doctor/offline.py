"""Checks that a run starts without a network: runs `overland check` with connections refused.

The program that is run is this file: python -m …offline RECORD WORDS. Connections to other machines
are refused and recorded in RECORD, even if the caller catches the error. DNS lookups are treated
like connections, because on a compute node they are what hangs. This covers connections made from
Python, as all of Hugging Face's libraries and W&B's client do, but not sockets that a C library
opens itself.
"""

from __future__ import annotations

import ipaddress
import json
import os
import runpy
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from overland.cluster.doctor import Finding, failure, ok
from overland.processes import PYTHON
from overland.words import command

LOOKUPS = {"socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr"}
SENDS = {"socket.connect", "socket.sendto", "socket.sendmsg"}
DEFAULT = "quickstart"
SECONDS = 600


def check_offline_start(config: str | None, env: Mapping[str, str]) -> Iterator[Finding]:
    words = ["check", config or DEFAULT, "--json"]
    with tempfile.TemporaryDirectory() as place:
        record = Path(place) / "tried"
        program = [*PYTHON, "-m", "overland.cluster.doctor.offline", str(record), *words]
        try:
            done = subprocess.run(
                program, env=dict(env), capture_output=True, text=True, timeout=SECONDS
            )
        except subprocess.TimeoutExpired:
            yield failure("start", f"did not finish in {SECONDS} s", command("overland", *words))
            return
        tried = record.read_text().split("\n")[:-1] if record.is_file() else []
    yield from judge_start(config, done, list(dict.fromkeys(tried)))


def judge_start(
    config: str | None, done: subprocess.CompletedProcess[str], tried: list[str]
) -> Iterator[Finding]:
    what = "start without network"
    shown = f"`{command('overland', 'check', config or DEFAULT)}`"
    described = done.returncode == 0 or done.stdout.startswith("{")  # even if files are missing
    if tried:
        way = "find the cause: your own module, a callback, or a package that calls home"
        yield failure(what, f"{shown} tried to reach {', '.join(tried)}", way)
    elif not described:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        # Our own errors are useful sentences; of a traceback, only the last line is.
        told = "; ".join(lines) if done.returncode == 2 else lines[-1]
        yield failure(what, f"{shown} fails: {told}", f"{shown} says more")
    else:
        yield ok(what, f"{shown} passed without trying to connect")
    if config is not None and described:
        missing = json.loads(done.stdout)["to_fetch"]
        if missing:
            yield failure(
                "files of the config",
                "; ".join(missing),
                "get them with `overland fetch`, or correct their paths",
            )
        else:
            yield ok("files of the config", "all present")


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
