"""Judging the measurements: which nodes are named, and which are not."""

from __future__ import annotations

from typing import Any

import pytest

from overland.cluster.preflight import judge

GPU: dict[str, Any] = {
    "kind": "cuda",
    "name": "H200",
    "visible": 8,
    "in_use_gib": 1.1,
    "matmul_digest": "a",
    "matmul_is_near": True,
    "matmul_is_steady": True,
    "matmul_tflops": 700.0,
    "memory_gb_per_s": 4000.0,
    "to_device_gb_per_s": 50.0,
    "to_host_gb_per_s": 50.0,
}


def gpus(**changes: dict[str, Any]) -> dict[judge.Place, dict[str, Any]]:
    """Four nodes with two devices each; `n2_1={…}` changes what task 1 of n2 measured."""
    found = {}
    for node in ("n1", "n2", "n3", "n4"):
        for local in (0, 1):
            other = changes.get(f"{node}_{local}", {})
            found[node, local] = {**GPU, "identity": f"{node}-{local}", **other}
    return found


def test_good_devices_are_good() -> None:
    answers = gpus()
    assert list(judge.errors(answers, "device")) == []
    assert list(judge.devices(answers)) == []
    assert list(judge.products(answers)) == []
    assert list(judge.rates(answers, judge.ACCELERATOR)) == []


def test_a_device_that_is_missing_taken_or_shared_is_found() -> None:
    answers = gpus(
        n1_0={"visible": 7},
        n2_1={"in_use_gib": 60.0},
        n3_1={"identity": "n3-0"},
        n4_0={"kind": "cpu", "name": "EPYC"},
    )
    assert list(judge.devices(answers)) == [
        ("n4", "torch shows no accelerator to task 0, but others have one"),
        ("n1", "task 0 sees 7 devices, but most see 8"),
        ("n2", "device of task 1 is in use: 60.0 GiB of memory"),
        ("n3", "tasks 0, 1 have the same device"),
    ]
    no_identities = {place: {**facts, "identity": ""} for place, facts in gpus().items()}
    assert list(judge.devices(no_identities)) == []
    shared = gpus(n3_1={"identity": "n3-0"}, n4_0={"in_use_gib": 6.0})
    assert list(judge.devices(shared, ranks_per_device=2)) == []
    assert list(judge.devices({("n1", 0): {"kind": "cpu"}, ("n2", 0): {"error": "x"}})) == []
    hidden = {("n1", 0): {"kind": "cpu", "driver": "/dev/kfd"}}
    assert list(judge.devices(hidden)) == [
        ("n1", "torch shows no accelerator to task 0, although /dev/kfd exists")
    ]


def test_devices_that_the_config_shares_and_ranks_would_not_are_a_failure() -> None:
    apart = {place: facts for place, facts in gpus().items() if place[0] == "n1"}
    shared = {place: {**facts, "identity": "n1-0"} for place, facts in apart.items()}
    assert judge.sharing(apart, 1) == judge.sharing(shared, 2) == ""
    assert "no two tasks share a GPU" in judge.sharing(apart, 2)
    assert "no task sees one; remove the key" in judge.sharing({("n1", 0): {"kind": "cpu"}}, 2)


def test_the_odd_product_is_wrong_and_so_is_a_majority_that_float64_disproves() -> None:
    assert list(judge.products(gpus(n3_1={"matmul_digest": "b"}))) == [
        ("n3", "matmul of task 1 differs in bits from that of most (H200)")
    ]
    far = {"matmul_digest": "b", "matmul_is_near": False}
    most = {f"{node}_{local}": far for node in ("n1", "n2", "n3") for local in (0, 1)}
    assert {node for node, _ in judge.products(gpus(**most))} == {"n1", "n2", "n3"}
    (found,) = judge.products(gpus(n2_0={"matmul_is_steady": False}))
    assert found == ("n2", "matmul of task 0 is not reproducible")


def test_devices_of_two_models_are_not_compared_and_of_two_both_are_suspects() -> None:
    other = {"name": "A100", "matmul_digest": "b", "matmul_tflops": 250.0}
    answers = gpus(n1_0=other, n1_1=other)
    assert list(judge.products(answers)) == []
    assert list(judge.rates(answers, judge.ACCELERATOR)) == []
    pair = {("n1", 0): GPU, ("n2", 0): {**GPU, "matmul_digest": "b"}}
    assert [node for node, _ in judge.products(pair)] == ["n1", "n2"]


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("matmul_tflops", 500.0, "matmul of task 1 is slow: 500 TFLOP/s, median 700"),
        ("memory_gb_per_s", 3300.0, "memory of task 1 is slow: 3,300 GB/s, median 4,000"),
        ("to_device_gb_per_s", 12.0, "host to device of task 1 is slow: 12 GB/s, median 50"),
        ("to_host_gb_per_s", 12.0, "device to host of task 1 is slow: 12 GB/s, median 50"),
    ],
)
def test_slow_is_far_below_the_median(key: str, value: float, words: str) -> None:
    assert list(judge.rates(gpus(n2_1={key: value}), judge.ACCELERATOR)) == [("n2", words)]
    few = {place: facts for place, facts in gpus(n2_1={key: value}).items() if place[0] == "n2"}
    assert list(judge.rates(few, judge.ACCELERATOR)) == []


def test_too_few_devices_to_compare_are_a_note() -> None:
    one, two = (dict.fromkeys(list(gpus())[:count], GPU) for count in (1, 2))
    assert "(here 1)" in judge.uncompared(one, 1)
    assert "(here 1, shared by 2 tasks each)" in judge.uncompared(two, 2)
    assert judge.uncompared(gpus(), 1) == judge.uncompared({("n1", 0): {"kind": "cpu"}}, 1) == ""


def test_a_local_rank_behind_a_slow_switch_on_every_node_is_not_slow() -> None:
    behind = {f"n{n}_1": {"to_device_gb_per_s": 20.0} for n in (1, 2, 3, 4)}
    assert list(judge.rates(gpus(**behind), judge.ACCELERATOR)) == []


def test_slow_is_what_is_slow_twice() -> None:
    once, twice = {**GPU, "matmul_tflops": 100.0}, {**GPU, "matmul_digest": "b"}
    assert judge.faster(once, twice) == GPU
    assert judge.faster(once, {"error": "hung"}) == {**once, "error": "hung"}


def test_disks_that_are_full_refuse_lie_or_crawl() -> None:
    good = {"path": "/x", "free_gib": 100.0, "right": True, "write_gb_per_s": 1.0}
    answers = {
        (node, 0): {"run folder": {**good, **other}, "temporary folder": good}
        for node, other in {
            "n1": {},
            "n2": {"free_gib": 0.5},
            "n3": {"right": False},
            "n4": {"write_gb_per_s": 0.001},
            "n5": {"write_gb_per_s": 0.03},  # of a file system that all share: no fault of its own
        }.items()
    }
    answers["n6", 0] = {"run folder": {"path": "/x", "error": "Read-only file system"}}
    assert list(judge.disks(answers)) == [
        ("n2", "run folder /x is nearly full: 0.50 GiB are free"),
        ("n3", "run folder /x returns different bytes than were written"),
        ("n6", "run folder /x is not writable: Read-only file system"),
        ("n4", "run folder is slow: 1 MB/s, median 1,000"),
    ]


def test_a_clock_is_wrong_beyond_what_the_round_trip_leaves_open() -> None:
    answers = {
        ("n1", 0): {"ahead": 0.4, "error_bound": 0.001},
        ("n2", 0): {"ahead": -3.0, "error_bound": 0.001},
        ("n3", 0): {"ahead": 3.0, "error_bound": 2.5},
    }
    assert list(judge.clocks(answers)) == [("n2", "clock is 3.0 s behind")]


def versions(**of: str) -> dict[judge.Place, dict[str, Any]]:
    return {(node, 0): {"versions": {"torch": version}} for node, version in of.items()}


def test_versions_follow_the_majority_then_the_conductor() -> None:
    odd = versions(n1="2.11", n2="2.9", n3="2.11")
    assert judge.versions(odd, {}) == ([("n2", "torch is 2.9, but 2.11 on most nodes")], [])
    tie = versions(n1="2.11", n2="2.9")
    assert judge.versions(tie, {"torch": "2.9"})[0] == [
        ("n1", "torch is 2.11, but 2.9 on most nodes")
    ]
    assert judge.versions(tie, {}) == ([], ["torch differs: n1 has 2.11, n2 has 2.9"])
    missing: dict[judge.Place, Any] = {
        **versions(n1="2.11", n2="2.11"),
        ("n3", 0): {"versions": {}},
    }
    assert judge.versions(missing, {})[0] == [("n3", "torch is none, but 2.11 on most nodes")]
