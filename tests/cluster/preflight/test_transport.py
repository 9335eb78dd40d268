"""The transport that NCCL uses, read from its log, and TCP on nodes that have a fabric."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from overland.cluster.preflight import judge, network
from overland.cluster.preflight.report import Report
from overland.cluster.site import load_site

# Lines as NCCL and RCCL print them, of several versions.
TCP = """\
nid001:13571:13571 [0] NCCL INFO Bootstrap : Using hsn0:10.249.1.7<0>
nid001:13571:13571 [0] NCCL INFO NET/Plugin : Plugin load (libnccl-net.so) returned 2 : \
libnccl-net.so: cannot open shared object file: No such file or directory
nid001:13571:13571 [0] NCCL INFO NET/Plugin : No plugin found, using internal implementation
nid001:13571:13590 [0] NCCL INFO NET/IB : No device found.
nid001:13571:13590 [0] NCCL INFO NET/Socket : Using [0]hsn0:10.249.1.7<0> [1]hsn1:10.249.1.8<0>
nid001:13571:13590 [0] NCCL INFO Using non-device net plugin version 0
nid001:13571:13590 [0] NCCL INFO Using network Socket
"""
LIBFABRIC = """\
nid001:18057:18130 [0] NCCL INFO NET/OFI Initializing aws-ofi-nccl 1.6.0-hcopy
nid001:18057:18130 [0] NCCL INFO NET/OFI Selected Provider is cxi (found 4 nics)
nid001:18057:18130 [0] NCCL INFO Using network AWS Libfabric
nid001:18057:18130 [0] NCCL INFO Channel 00/0 : 3[3] -> 4[0] [receive] via NET/AWS Libfabric/0
"""
INFINIBAND = """\
gpu01:77:90 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB ib0:10.0.0.4<0>
gpu01:77:90 [0] NCCL INFO Using network IB
"""
NEWER = """\
gpu01:77:90 [0] NCCL INFO NET/IB : No device found.
gpu01:77:90 [0] NCCL INFO Failed to initialize NET plugin IB
gpu01:77:90 [0] NCCL INFO Initialized NET plugin Socket
gpu01:77:90 [0] NCCL INFO Assigned NET plugin Socket to comm
"""
CUT = "x1:9:9 [0] NCCL INFO NET/OFI Selected Provider is cxi (found 4 nics)\n"


@pytest.mark.parametrize(
    ("log", "found"),
    [(TCP, "Socket"), (LIBFABRIC, "AWS Libfabric"), (INFINIBAND, "IB"), (NEWER, "Socket"),
     (CUT, "OFI"), ("", None), ("x:1:1 [0] NCCL INFO NET/IB : No device found.\n", None)],
)  # fmt: skip
def test_the_transport_is_read_from_the_log(log: str, found: str | None) -> None:
    assert network.transport_in(log) == found


def answers(**nodes: tuple[str | None, list[str]]) -> dict[tuple[str, int], dict[str, object]]:
    return {
        (node, local): {"transport": used, "fabrics": fabrics, "right": True, "gb_per_s": 1.0}
        for node, (used, fabrics) in nodes.items()
        for local in (0, 1)
    }


def test_tcp_on_a_high_speed_fabric_is_bad() -> None:
    slow = ("Socket", ["Slingshot"])
    problem = judge.transport(answers(n1=slow, n2=slow))
    assert "2 nodes, such as n1, use TCP (NET/Socket) although there is Slingshot" in problem


@pytest.mark.parametrize(
    "nodes",
    [
        {"n1": ("AWS Libfabric", ["Slingshot"]), "n2": ("AWS Libfabric", ["Slingshot"])},
        {"n1": ("Socket", []), "n2": ("Socket", [])},  # Ethernet has nothing better
        {"n1": ("Socket", ["InfiniBand"])},  # one node needs no network
        {"n1": (None, ["InfiniBand"]), "n2": (None, ["InfiniBand"])},  # gloo has no such log
    ],
)
def test_other_transports_are_good(nodes: dict[str, tuple[str | None, list[str]]]) -> None:
    assert judge.transport(answers(**nodes)) == ""


def test_preflight_takes_tcp_on_a_fabric_for_a_failure() -> None:
    slow = ("Socket", ["Slingshot"])
    found = answers(n1=slow, n2=slow)
    measured, problem = judge.all_reduce(list(found), found)
    assert measured["transport"] == "Socket"
    assert "although there is Slingshot" in problem


def test_the_sum_of_all_reads_its_own_log(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def group(*_: object) -> Iterator[torch.device]:
        Path(os.environ["NCCL_DEBUG_FILE"]).write_text(LIBFABRIC)
        yield torch.device("cpu")

    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(network, "group", group)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor: tensor)
    found = network.measure_all_reduce({"rank": 0, "size": 1}, None, 0, lambda stage: None)
    assert found["right"]
    assert found["transport"] == "AWS Libfabric"


def test_fabrics_are_found_where_linux_lists_them(tmp_path: Path) -> None:
    assert network.fabrics(tmp_path) == []
    (tmp_path / "cxi" / "cxi0").mkdir(parents=True)
    (tmp_path / "infiniband").mkdir()
    assert network.fabrics(tmp_path) == ["Slingshot"]
    port = tmp_path / "infiniband" / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    (port / "link_layer").write_text("Ethernet\n")
    assert network.fabrics(tmp_path) == ["Slingshot"]
    (port / "link_layer").write_text("InfiniBand\n")
    assert network.fabrics(tmp_path) == ["Slingshot", "InfiniBand"]


def test_the_report_names_the_transport() -> None:
    facts = {"gb_per_s": 21.0, "tasks": 8, "transport": "Socket"}
    assert "21 GB/s per task over TCP (NET/Socket)." in Report(all_reduce=facts).summary()


@pytest.mark.parametrize(
    ("site", "module"), [("perlmutter", "nccl"), ("frontier", "rccl-net-plugin")]
)
def test_clusters_with_slingshot_load_the_network_plugin(site: str, module: str) -> None:
    assert module in load_site(site).facts.modules
