"""The checks of one task, and the child that does what may hang."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from overland.cluster.preflight import measure
from overland.cluster.preflight.network import backend_for
from overland.cluster.preflight.start import tasks_per_node
from overland.cluster.preflight.task import in_child
from overland.cluster.wire import Wire


@pytest.fixture
def wire() -> Iterator[Wire]:
    here, there = socket.socketpair()
    with here, there:
        yield Wire(here)


def children() -> set[str]:
    """Of this process; other tests may have some too."""
    return {pid for task in Path("/proc/self/task").iterdir()
            for pid in (task / "children").read_text().split()}  # fmt: skip


def test_a_child_answers_fails_crashes_or_is_killed(wire: Wire) -> None:
    before = children()
    assert in_child(lambda stage: {"x": 1}, 10, wire) == {"x": 1}
    assert in_child(lambda stage: {"x": 1 // 0}, 10, wire) == {
        "error": "integer division or modulo by zero"
    }

    def hang(stage: object) -> dict[str, int]:
        stage("the wait")  # type: ignore[operator]
        time.sleep(100)
        return {}

    def crash(stage: object) -> dict[str, int]:
        os.kill(os.getpid(), signal.SIGKILL)
        return {}

    words = "did not finish within 0 s, in the wait"
    assert in_child(hang, 0.3, wire) == {"error": words}
    assert in_child(crash, 10, wire) == {"error": "was ended by SIGKILL in the start"}
    assert children() == before


def test_a_child_ends_when_nobody_waits_for_it(wire: Wire) -> None:
    wire.socket.shutdown(socket.SHUT_RDWR)
    assert "error" in in_child(lambda stage: time.sleep(100) or {}, 100, wire)


def test_a_disk_is_written_and_read_and_nothing_stays(tmp_path: Path) -> None:
    found = measure.measure_disk(tmp_path, 10 * 2**20 + 1)
    assert found["right"]
    assert found["free_gib"] > 0
    assert found["write_gb_per_s"] > 0
    assert list(tmp_path.iterdir()) == []
    assert measure.measure_disk(tmp_path / "none", 10)["error"] == "No such file or directory"
    places = measure.written_folders(str(tmp_path / "runs" / "new"))
    assert places["run folder"] == tmp_path
    assert not (tmp_path / "runs").exists()


def test_interfaces_are_those_that_training_was_told() -> None:
    assert measure.measure_interfaces({}) == {"addresses": {}, "problems": []}
    found = measure.measure_interfaces(
        {"NCCL_SOCKET_IFNAME": "=lo,ib7", "GLOO_SOCKET_IFNAME": "^docker"}
    )
    assert found["addresses"] == {"lo": "127.0.0.1"}
    assert "NCCL_SOCKET_IFNAME" in found["problems"][0]
    assert "no interface ib7" in found["problems"][0]


def test_versions_name_what_runs_here(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("x = 1")
    one = measure.measure_versions(str(tmp_path / "run.toml"), with_torch=False)
    assert {"overland", "Python", "torch", "kernel", "config"} <= one.keys()
    (tmp_path / "run.toml").write_text("x = 2")
    other = measure.measure_versions(str(tmp_path / "run.toml"), with_torch=True)
    assert {name for name in one if one[name] != other[name]} == {"config"}
    gone = measure.measure_versions(str(tmp_path / "no.toml"), with_torch=False)
    assert gone["config"] == "unreadable (No such file or directory)"


def test_a_product_is_near_float64_unless_it_is_wrong() -> None:
    a, b = measure.factors(256)
    c = np.matmul(a, b)
    eps = float(np.finfo(np.float32).eps)
    assert measure.is_near(c, a, b, eps)
    for wrong in (np.nan, c[8, 3] + 0.01):
        bad = c.copy()
        bad[8, 3] = wrong
        assert not measure.is_near(bad, a, b, eps)


def test_a_cpu_is_measured_with_and_without_torch() -> None:
    stages: list[str] = []
    plain = measure.measure_cpu(stages.append)
    through_torch = measure.measure_device(0, stages.append)
    assert "the matmul" in stages
    for facts in (plain, through_torch):
        assert facts["kind"] == "cpu"
        assert facts["matmul_is_near"]
        assert facts["matmul_is_steady"]
        assert facts["matmul_tflops"] > 0
        assert facts["memory_gb_per_s"] > 0
    assert plain["matmul_digest"] == through_torch["matmul_digest"]


def test_links_take_the_backend_of_training() -> None:
    for backend, on_gpu in (
        ("auto", "nccl"),
        ("nvshmem", "nccl"),
        ("gloo", "gloo"),
        ("mpi", "gloo"),
    ):
        assert backend_for(backend, "cuda") == on_gpu
        assert backend_for(backend, "cpu") == "gloo"


@pytest.mark.parametrize(
    ("env", "tasks"),
    [
        ({"SLURM_NTASKS_PER_NODE": "8", "SLURM_GPUS_ON_NODE": "4"}, 8),
        ({"SLURM_GPUS_PER_NODE": "h100:4", "SLURM_TASKS_PER_NODE": "1(x2)"}, 4),
        ({"SLURM_TASKS_PER_NODE": "4(x3),2"}, 2),
        ({}, 1),
    ],
)
def test_an_allocation_says_how_many_tasks_a_node_gets(env: dict[str, str], tasks: int) -> None:
    assert tasks_per_node(env) == tasks


def test_an_allocation_gets_as_many_tasks_as_share_its_devices() -> None:
    assert tasks_per_node({"SLURM_GPUS_ON_NODE": "2"}, ranks_per_device=4) == 8
    assert tasks_per_node({"SLURM_NTASKS_PER_NODE": "2"}, ranks_per_device=4) == 2  # as asked for


def test_a_device_is_known_by_uuid_and_slot_as_far_as_the_driver_tells() -> None:
    slot = {"pci_domain_id": 0, "pci_bus_id": 27, "pci_device_id": 0}
    zero = "00000000-0000"
    assert measure.identity_of(SimpleNamespace(uuid="ab-12", **slot)) == "ab-12 0:27:0"
    assert measure.identity_of(SimpleNamespace(uuid=zero, **slot)) == "0:27:0"
    assert measure.identity_of(SimpleNamespace(uuid="ab-12")) == "ab-12"
    assert measure.identity_of(SimpleNamespace(uuid=zero)) == ""
