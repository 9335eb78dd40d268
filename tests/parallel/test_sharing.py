"""Several ranks on one GPU. That they train as ranks on several do is proven on a GPU
(`overland prove layout --device cuda`); here, what they are told."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from overland.checks import load_checked
from overland.checks.machine import check_sharing
from overland.config.errors import ConfigError
from overland.config.load import Loaded
from overland.config.schema import JobConfig
from overland.errors import TrainingError
from overland.world import devices
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
