import pytest
import torch

from overland.world import World, devices


def test_without_accelerators_there_are_two_ranks_or_one_per_core(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(devices, "may_have_accelerator", lambda: False)
    for cores, expected in ((64, 2), (2, 2), (1, 1), (None, 1)):
        monkeypatch.setattr("os.cpu_count", lambda cores=cores: cores)
        assert devices.num_local_ranks() == expected


def test_the_device_has_a_name_and_its_memory_is_counted() -> None:
    assert devices.device_name()
    assert devices.memory_in_use() > 0.01


def test_ranks_that_share_a_gpu_are_not_counted_as_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "device_type", lambda wanted: "cuda")
    monkeypatch.setattr(devices, "device_name", lambda wanted: "H200")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert devices.devices_in_words(World(0, 8, 0, 4), "auto", 1) == "8 × H200"
    assert devices.devices_in_words(World(0, 8, 0, 8), "auto", 4) == "8 ranks on 4 × H200"
    assert devices.devices_in_words(World(0, 4, 0, 4), "auto", 2) == "4 × H200"  # placed apart
