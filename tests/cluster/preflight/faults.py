"""Nodes that really are bad: because of what a node's Python finds when it starts, or how it is
started.

Python imports `sitecustomize` from the path before anything else; each fault is one, and a shell
around the task puts it on the path of the node that is to have it.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

PYTHON = {
    "old version": "import overland; overland.__version__ = '0.0.9'",
    "clock ahead": "import time; now = time.time; time.time = lambda: now() + 5",
    "stale file": """
import pathlib
read = pathlib.Path.read_bytes
pathlib.Path.read_bytes = lambda p: b"old" if p.name == "run.toml" else read(p)
""",
    "wrong bit": """
import numpy
right = numpy.matmul
def matmul(a, b):
    c = right(a, b)
    c.view("int32")[3, 5] ^= 1
    return c
numpy.matmul = matmul
""",
    "slow matmul": """
import numpy, time
right = numpy.matmul
numpy.matmul = lambda a, b: time.sleep(0.2) or right(a, b)
""",
    "hanging matmul": """
import numpy, time
numpy.matmul = lambda a, b: time.sleep(1000)
""",
    "stops when it is to listen": """
import os, signal, socket
socket.create_server = lambda *_, **__: os.kill(os.getpid(), signal.SIGSTOP)
""",
    "slow network": """
import socket, time
sendall = socket.socket.sendall
def slow(self, data):
    if len(data) > 2**20:
        time.sleep(0.5)
    return sendall(self, data)
socket.socket.sendall = slow
""",
}
SHELL = {
    "small files only": "ulimit -f 1024",
    "no such interface": "export GLOO_SOCKET_IFNAME=ib7",
    "ends at once": "echo 'cannot read /env' >&2; exit 3",
    "never starts": "kill -STOP $$",
}


def launch(faults: Mapping[str, str], folder: Path, nodes: list[str], tasks: int) -> list[str]:
    """The command that starts ranks, on nodes of which some have a fault, or `one + another`."""
    cases = [
        f"{node}) {'; '.join(_shell(fault, folder) for fault in names.split(' + '))};;"
        for node, names in faults.items()
    ]
    script = f'case $SLURMD_NODENAME in {" ".join(cases)} esac; "$@"'
    return [
        "srun",
        f"--nodes={len(nodes)}",
        f"--ntasks={len(nodes) * tasks}",
        f"--ntasks-per-node={tasks}",
        f"--nodelist={','.join(nodes)}",
        "--mpi=none",
        "--kill-on-bad-exit=1",
        "--wait=0",
        *["bash", "-c", script if cases else '"$@"', "rank"],
        *[sys.executable, "-m", "overland"],
    ]


def _shell(fault: str, folder: Path) -> str:
    if fault in SHELL:
        return SHELL[fault]
    place = folder / fault.replace(" ", "-")
    place.mkdir(exist_ok=True)
    (place / "sitecustomize.py").write_text(PYTHON[fault])
    return f"export PYTHONPATH={shlex.quote(str(place))}:$PYTHONPATH"
