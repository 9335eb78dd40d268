"""The conductor with 640 nodes: connections that answer immediately, as tasks would."""

from __future__ import annotations

import json
import selectors
import socket
import threading
from collections import Counter
from typing import Any

from overland.cluster.preflight.conduct import PreflightSettings, conduct
from overland.cluster.preflight.start import Started
from overland.cluster.wire import Switchboard, Wire

NODES = [f"n{i:03}" for i in range(640)]
SLOW = {"n017", "n333"}
DISK = {"path": "/", "free_gib": 100, "right": True, "write_gb_per_s": 1.0}
ANSWERS: dict[str, dict[str, Any]] = {
    "versions": {"versions": {"torch": "2.11"}},
    "disk": {"run folder": DISK, "temporary folder": DISK},
    "device": {"kind": "cpu"},
    "listen": {"at": "127.0.0.1:1"},
}


def act(env: dict[str, str]) -> None:
    """All tasks in one loop, until they are told to end."""
    selector = selectors.DefaultSelector()
    for node in NODES:
        wire = Wire.to_first_node(env)
        hello = {"node": node, "local": 0, "step": None, "accelerator": False}
        wire.send({"hello": hello})
        selector.register(wire.socket, selectors.EVENT_READ, node)
    while selector.get_map():
        for ready, _ in selector.select():
            task, node = ready.fileobj, ready.data
            assert isinstance(task, socket.socket)
            for line in task.recv(2**16).splitlines():
                order = json.loads(line)
                if order["do"] == "end":
                    selector.unregister(task)
                    task.close()
                    break
                rate = 0.01 if node in SLOW else 2.0
                link = {"gb_per_s": rate, "latency_us": 5, "right": True}
                facts = {**ANSWERS, "link": link}.get(order["do"], {})
                task.sendall(f"{json.dumps({**facts, 'answer': order['number']})}\n".encode())


def test_640_nodes_take_three_rounds() -> None:
    board = Switchboard([], {})
    tasks = threading.Thread(target=act, args=(board.environment(),))
    tasks.start()
    report = conduct(board, Started(is_all=False), NODES, 1, PreflightSettings(quick=True))
    tasks.join()
    board.close()
    assert report.bad.keys() == SLOW
    assert max(match.round for match in report.matches) == 3
    played = Counter((match.round, node) for match in report.matches for node in match.nodes)
    assert max(played.values()) == 1
    shown = report.table().splitlines()
    assert [line.split()[0] for line in shown if "link with" in line and line[0] == "n"] == sorted(
        SLOW
    )
    assert "638 of 640 nodes are good" in "\n".join(shown)
