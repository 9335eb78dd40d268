"""The result of a preflight: a table for people, JSON for scripts."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from overland.cluster.preflight.judge import Match
from overland.files import replace_file
from overland.plugins import plugin
from overland.words import rounded, visible

FULL_TABLE = 32  # nodes; if there are more, only bad ones are shown
PLAIN_WIDTH = 160
COLUMNS = ("devices", "matmul\nTFLOP/s", "memory\nGB/s", "to device\nGB/s", "to host\nGB/s",
           "disk\nGB/s", "clock\nms", "link\nGB/s")  # fmt: skip
RATES = ("matmul_tflops", "memory_gb_per_s", "to_device_gb_per_s", "to_host_gb_per_s")
IN_WORDS = {"Socket": "TCP (NET/Socket)", "IB": "InfiniBand or RoCE (NET/IB)"}


@dataclass
class Report:
    nodes: list[str] = field(default_factory=list)
    bad: dict[str, str] = field(default_factory=dict)
    """Reason by node."""
    failure: str = ""
    """A failure that is not one node's fault."""
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0
    quick: bool = False
    measured: dict[str, dict[str, dict[int, Any]]] = field(default_factory=dict)
    """By node, phase and local rank."""
    matches: list[Match] = field(default_factory=list)
    all_reduce: dict[str, Any] = field(default_factory=dict)

    @property
    def is_good(self) -> bool:
        return not self.bad and not self.failure

    def to_json(self) -> str:
        """Returns the report as one JSON object."""
        return json.dumps({"good": self.is_good, **asdict(self)}, indent=2)

    def save(self, path: Path | str) -> None:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, self.to_json() + "\n")

    def table(self) -> str:
        """Returns a table with one row per node, and a summary."""
        shown = self.nodes if len(self.nodes) <= FULL_TABLE else list(self.bad)
        is_terminal = sys.stdout.isatty()
        console = plugin("streams").SafeConsole(
            file=io.StringIO(),
            force_terminal=is_terminal,
            width=None if is_terminal else PLAIN_WIDTH,
        )
        with console.capture() as captured:
            if shown:
                console.print(_table(self, shown))
        return captured.get() + visible(self.summary())

    def summary(self) -> str:
        count = len(self.nodes)
        lines = [f"{count - len(self.bad)} of {count} nodes are good ({self.seconds:.0f} s)."]
        lines += [f"bad: {node}: {reason}" for node, reason in self.bad.items()]
        lines += [f"failed: {self.failure}"] if self.failure else []
        lines += [f"note: {note}" for note in self.notes]
        if self.all_reduce:
            rate, tasks = self.all_reduce["gb_per_s"], self.all_reduce["tasks"]
            network = self.all_reduce.get("transport")
            over = f" over {IN_WORDS.get(network, network)}" if network else ""
            lines.append(f"all-reduce of {tasks} tasks: {rounded(rate)} GB/s per task{over}.")
        return "\n".join(lines)


def _table(report: Report, nodes: list[str]) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("node", no_wrap=True)
    for name in COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("verdict", overflow="fold")
    for node in nodes:
        verdict = report.bad.get(node)
        table.add_row(
            node,
            *_numbers(report, node),
            "good" if verdict is None else Text.assemble(("bad", "red"), f": {verdict}"),
        )
    return table


def _numbers(report: Report, node: str) -> list[str]:
    """Returns the worst value of each kind over the tasks of a node."""
    measured = report.measured.get(node, {})
    devices = list(measured.get("device", {}).values())
    disks = [disk for answer in measured.get("disk", {}).values() for disk in answer.values()]
    clocks = [answer for answer in measured.get("clock", {}).values() if "ahead" in answer]
    links = [m.gb_per_s for m in report.matches if node in m.nodes and m.gb_per_s is not None]
    return [
        str(sum("kind" in device for device in devices)),
        *(_worst(devices, rate) for rate in RATES),
        _worst([disk for disk in disks if isinstance(disk, dict)], "write_gb_per_s"),
        f"{clocks[0]['ahead'] * 1000:.1f}" if clocks else "–",
        rounded(min(links)) if links else "–",
    ]


def _worst(answers: list[dict[str, Any]], key: str) -> str:
    values = [answer[key] for answer in answers if key in answer]
    return rounded(min(values)) if values else "–"
