"""Who is to blame when silence says one thing and a rank another: on real (virtual) nodes."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from overland.cluster.supervise.attempt import HANG_UP_SECONDS, Watched
from overland.cluster.supervise.events import Logbook
from overland.cluster.supervise.faults import Findings
from overland.cluster.supervise.roster import Roster
from overland.cluster.supervise.supervised import Supervised
from overland.cluster.supervise.supervisor import Supervisor
from overland.cluster.supervise.watchdog import SILENT_SECONDS, Watchdog
from overland.errors import Kind
from overland.world.heartbeat import Phase, Transfer
from overland.world.signals import say
from tests.cluster.packages import need
from tests.cluster.slurm import PROGRAMS, Slurm
from tests.cluster.supervised import SubmittedRun

FAULTY = """\
import pathlib, time
from overland.training.callbacks import Callback, register_callback

def is_first(name):
    path = pathlib.Path(name)
    return not path.exists() and path.touch() is None

@register_callback
class Faulty(Callback):
    def on_step(self, run):
        step, rank = run.progress.step, run.world.rank
        if step == 6 and is_first(f"waits-{rank}"):
            while not pathlib.Path("controller-stopped").exists():
                time.sleep(0.1)
            if rank == 1:
                raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
            time.sleep(3600)
"""


@pytest.fixture
def nodes() -> Iterator[Slurm]:
    """Of their own, since their controller is stopped."""
    need(*PROGRAMS)
    slurm = Slurm(3)
    yield slurm
    slurm.stop()


@pytest.mark.long
def test_what_a_rank_said_is_believed_before_the_hang_of_the_others(
    nodes: Slurm, tmp_path: Path
) -> None:
    """One says why it fails, the other one hangs, and Slurm's controller does not end it."""
    tmp_path.joinpath("faulty.py").write_text(FAULTY)
    run = SubmittedRun(
        nodes, tmp_path, 8, 2, "--spares", "1", "--time", "00:20:00", "--no-preflight",
        settings=["job.custom_import=faulty", "health.hang_seconds=300"], ranks_per_node=1,
    )  # fmt: skip
    run.wait_until(lambda: all((tmp_path / f"waits-{r}").exists() for r in (0, 1)), "step 6")
    with nodes.controller_stopped():
        (tmp_path / "controller-stopped").touch()
        run.wait_until(lambda: not run.ranks(), "the rank that hangs is ended")
    run.wait()
    assert [end["how"] for end in run.events("end")] == ["finished"], run.log()[-5000:]
    [ecc] = run.events("fault")
    assert (ecc["kind"], ecc["ranks"], len(ecc["excluded"])) == ("device fault", [1], 1)
    assert ecc["excluded"] == ecc["nodes"]


def test_all_nodes_that_are_lost_at_once_are_found_before_the_next_start(tmp_path: Path) -> None:
    """One hung up, which is noticed first; one fell silent; of the others one has spoken since."""
    now = time.monotonic()
    dog = Watchdog(60.0, ["n1", "n2", "n3", "n4"], started=now - 100)
    dog.call("n1", now)
    dog.call("n2", now - HANG_UP_SECONDS - 1)
    dog.call("n3", now - SILENT_SECONDS + 0.5)
    dog.call("n4", now - 1)
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    attempt = SimpleNamespace(findings=Findings(4), listen=lambda: None)
    watched = Watched(attempt, dog, SimpleNamespace(inbox=inbox))  # type: ignore[arg-type]
    watched.hung_up["n2"] = now - HANG_UP_SECONDS - 1
    for node in ("n1", "n4"):
        wire: Any = object()
        watched.wires[wire] = node
        inbox.put((wire, {"beats": []}))
    attempt.findings.lost.extend(watched.lost_nodes())
    assert attempt.findings.lost == ["n2"]
    job = Supervised(tmp_path, tmp_path / "1.toml", 9, ["srun"], num_nodes=4, tasks_per_node=1)
    roster = Roster(dog.nodes, wanted=4, batch_host="n1")
    Supervisor(job, {}, roster, Logbook(tmp_path, "7")).find_all_lost(watched)
    assert attempt.findings.fault().nodes == ("n2", "n3")


def test_ranks_that_the_first_failure_brought_down_are_not_blamed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Rank 1 is gone before anyone says a word, rank 2 after it."""
    dog = Watchdog(60.0, ["n1"], started=time.monotonic())
    findings = Findings(1)
    attempt = SimpleNamespace(findings=findings, listen=lambda: None)
    watched = Watched(attempt, dog, SimpleNamespace())  # type: ignore[arg-type]

    def beat(rank: int, state: str) -> list[float | str]:
        return [rank, 5, Phase.COMPUTING, 0.0, 0.0, 0.0, state, Transfer.NONE, 0.0, 0, 0]

    dog.hear("n1", [beat(0, "S"), beat(1, ""), beat(2, "S")], time.monotonic())
    assert list(watched.gone_ranks()) == [1]
    say(0, Kind.NETWORK, "Connection closed by peer")
    assert findings.read(capsys.readouterr().out.strip())
    dog.hear("n1", [beat(2, "")], time.monotonic())
    assert list(watched.gone_ranks()) == [1]
