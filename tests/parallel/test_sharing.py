"""Several ranks on one GPU. That they train as ranks on several do is proven on a GPU (`overland
prove layout --device cuda`); here, what they are given."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from overland.apps.check.planned import PlannedRun
from overland.apps.report.summary import devices_in_words
from overland.checks import load_checked
from overland.checks.machine import check_sharing
from overland.cli.check import devices_here
from overland.config.derived import resolve_degrees
from overland.config.errors import ConfigError
from overland.config.load import Loaded
from overland.config.schema import JobConfig
from overland.errors import TrainingError
from overland.models.registry import model_config
from overland.training import fit, records
from overland.world import World, devices
from overland.world.devices import (
    RANKS_PER_DEVICE,
    mps_note,
    require_intended_devices,
    share_devices,
)


def test_each_rank_is_a_host_of_its_own_to_nccl() -> None:
    env = {"NCCL_NET": "IB"}  # somebody's own choice stays
    share_devices(3, env)
    assert env == {"NCCL_HOSTID": "rank3", "NCCL_NET": "IB", "NCCL_SOCKET_IFNAME": "lo"}


def test_ranks_that_share_a_device_unasked_are_told_the_key() -> None:
    a, b = ("n1", "a"), ("n1", "b")
    require_intended_devices([a, b, ("n2", "a"), ("n2", "b")], 1)
    require_intended_devices([a, a, b, b], 2)
    with pytest.raises(TrainingError, match=rf"2 ranks \(0, 2\) .* {RANKS_PER_DEVICE}=2"):
        require_intended_devices([a, b, a, b], 1)


@pytest.mark.parametrize(
    ("devices", "why"),
    [
        ([("n1", "a"), ("n1", "a"), ("n2", "b"), ("n2", "b")], "and these are on 2"),
        ([("n1", "a"), ("n1", "b")], "no two ranks share a GPU"),
        ([("n1", "a")], "no two ranks share a GPU"),
    ],
)
def test_a_key_left_over_from_a_trial_is_refused(devices: list[tuple[str, str]], why: str) -> None:
    with pytest.raises(TrainingError, match=rf"{RANKS_PER_DEVICE} = 2, .*{why}.*; remove the key"):
        require_intended_devices(devices, 2)


def test_a_machine_has_as_many_ranks_as_share_its_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "may_have_accelerator", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    assert devices.num_local_ranks() == 2
    assert devices.num_local_ranks(4) == 8


def test_a_rank_plans_with_its_part_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = SimpleNamespace(total_memory=80 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: whole)
    assert devices.device_memory(torch.device("cuda", 0)) == 80 * 2**30
    assert devices.device_memory(torch.device("cuda", 0), 4) == 19 * 2**30  # 1 for its context


@pytest.mark.parametrize(
    ("more", "what"),
    [([], "none visible"), (["training.device=cpu"], "NGPU"), (["comm.backend=nvshmem"], "nccl")],
)
def test_cpus_are_not_shared(more: list[str], what: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_checked("llama3_debug", [f"{RANKS_PER_DEVICE}=4", *more], {}, world_size=4)
    assert any(
        problem.key == RANKS_PER_DEVICE and what in problem.message
        for problem in caught.value.problems
    )


def test_without_mps_a_note_says_how_to_start_it(tmp_path: str) -> None:
    env = {"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path)}
    assert "nvidia-cuda-mps-control" in mps_note(env)


def test_ranks_whose_part_holds_nothing_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    small = SimpleNamespace(total_memory=16 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: small)
    config = JobConfig.model_validate({"comm": {"ranks_per_device": 16}})
    [problem] = check_sharing(Loaded(config, [], "run.toml"))
    assert "no memory" in problem.message


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that is looked at, and never used."""
    gpu = SimpleNamespace(total_memory=80 * 2**30)
    monkeypatch.setattr(devices, "device_type", lambda wanted="auto": "cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 18 * 2**30)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 18 * 2**30)


FOUR = JobConfig.model_validate(
    {
        "model": {"name": "llama3", "flavor": "debugmodel"},
        "comm": {"ranks_per_device": 4},
        "training": {"mixed_precision_param": "bfloat16"},
        "compile": {"enable": False},
    }
)


@pytest.mark.usefixtures("one_gpu")
def test_speed_is_that_of_the_devices_which_ranks_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records.time, "perf_counter", iter([0.0, 2.0, 2.0]).__next__)
    progress = SimpleNamespace(tokens=0)
    measure = SimpleNamespace(flops=None, unit="tokens")
    run: Any = SimpleNamespace(
        config=FOUR, world=World(0, 4, 0, 4), progress=progress, measure=measure
    )
    meter = records.Meter(run)
    progress.tokens = 1000
    assert meter.read(run)["tokens_per_second"] == 500
    assert records.devices_of(run) == 1


def test_a_report_counts_the_ranks_that_share_devices() -> None:
    shared = {"devices": 1, "ranks": 4, "nodes": 1}
    assert devices_in_words(shared, " × NVIDIA H200") == "4 ranks on 1 × NVIDIA H200"
    assert devices_in_words({**shared, "ranks": 1}) == devices_in_words({"devices": 1}) == "1"


@pytest.mark.usefixtures("one_gpu")
def test_check_counts_devices_and_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "num_local_ranks", lambda per_device=1: per_device)
    number, words, _ = devices_here(Loaded(FOUR, [], "run.toml"))
    assert number == 4
    assert words.startswith("4 ranks on 1 × NVIDIA H200 (as `overland train` would")
    facts = PlannedRun(FOUR, 8).to_json()
    assert (facts["devices"], facts["ranks"]) == (2, 8)


@pytest.mark.usefixtures("one_gpu")
def test_a_part_of_a_gpu_is_not_called_a_gpu() -> None:
    part = r"on this rank's part of the GPU \(comm.ranks_per_device=4\)"
    gpu, degrees = torch.device("cuda", 0), resolve_degrees(FOUR.parallelism, 4)
    found = str(fit.out_of_memory(FOUR, degrees, gpu))
    assert re.match(f"out of memory {part}: 18.0 GiB of 19.0 GiB were", found)
    assert "GiB per rank" in found
    with pytest.raises(TrainingError, match=f"{part}, which has 19.0 GiB"):
        fit.require_memory(FOUR, model_config(FOUR.model), degrees, gpu, 2.0**40, 4)
