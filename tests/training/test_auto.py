"""What `auto` becomes on a device, and that the run's own config keeps saying `auto`."""

from __future__ import annotations

import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from overland.apps.proofs.pool import RankPool
from overland.config.derived import resolve_degrees
from overland.config.load import load_config
from overland.config.schema import JobConfig
from overland.models.registry import model_config
from overland.training import fit
from overland.training.fit import resolve_auto
from overland.world import World
from tests.jobs import run_job, tiny_job

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A device with as much memory as an H200, as far as a decision needs one."""
    properties = SimpleNamespace(total_memory=int(139.8 * 2**30))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(fit, "from_first_rank", lambda value: value)
    monkeypatch.setattr(fit, "has_triton", lambda: True)
    return properties


def settled(device: torch.device, **sections: dict[str, Any]) -> tuple[JobConfig, str]:
    base: dict[str, dict[str, Any]] = {
        "model": {"flavor": "8B"},
        "training": {"seq_len": 8192, "local_batch_size": 1},
    }
    config = JobConfig.model_validate({**base, **sections})
    degrees = resolve_degrees(config.parallelism, 1)
    return resolve_auto(config, model_config(config.model), degrees, device)


@pytest.mark.usefixtures("gpu")
def test_a_gpu_compiles_and_recomputes_as_little_as_fits() -> None:
    config, note = settled(GPU)
    assert (config.compile.enable, config.activation_checkpoint.mode) == (True, "none")
    assert note == "blocks are compiled; nothing is recomputed: estimated 127.9 of 139.8 GiB"


def test_less_memory_means_more_recomputation(gpu: SimpleNamespace) -> None:
    gpu.total_memory = 132 * 2**30
    config, note = settled(GPU)
    assert config.activation_checkpoint.mode == "selective"
    assert config.activation_checkpoint.selective_ac_option == "op"
    assert "everything but matrix products and attention is recomputed" in note
    gpu.total_memory = 80 * 2**30
    config, note = settled(GPU)
    assert config.activation_checkpoint.mode == "full"
    assert "every block is recomputed" in note


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("mode", ["none", "selective", "full"])
@pytest.mark.parametrize("enable", [True, False])
def test_what_a_config_says_is_left_alone(mode: str, enable: bool) -> None:
    sections = {
        "compile": {"enable": enable},
        "activation_checkpoint": {"mode": mode, "selective_ac_option": "2"},
    }
    config, note = settled(GPU, **sections)
    assert config.compile.enable is enable
    assert config.activation_checkpoint.mode == mode
    assert config.activation_checkpoint.selective_ac_option == "2"
    assert note == ""


@pytest.mark.usefixtures("gpu")
def test_what_torch_cannot_compile_is_not() -> None:
    every_other = {"mode": "selective", "selective_ac_option": "2"}
    config, _ = settled(GPU, activation_checkpoint=every_other)
    assert config.compile.enable is True
    base = JobConfig.model_validate({
        "activation_checkpoint": every_other, "parallelism": {"tensor_parallel_degree": 2},
    })  # fmt: skip
    assert not fit.compiles(base, GPU)


def test_a_cpu_neither_compiles_nor_recomputes() -> None:
    config, note = settled(CPU)
    assert (config.compile.enable, config.activation_checkpoint.mode) == (False, "none")
    assert note == ""


def test_a_cpu_compiles_what_cannot_do_without() -> None:
    config, _ = settled(CPU, activation_checkpoint={"mode": "memory_budget"})
    assert config.compile.enable is True


@pytest.mark.parametrize(
    ("text", "enable"),
    [
        ("[compile]\nenable = true\n", True),
        ("[compile]\nenable = false\n", False),
        ('[compile]\nenable = "auto"\n', "auto"),
        ("", "auto"),
    ],
)
def test_files_of_torchtitan_load_as_they_are(
    tmp_path: Path, text: str, enable: bool | str
) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text)
    assert load_config(str(path)).config.compile.enable == enable


@pytest.mark.parametrize("words", [["--compile.enable", "auto"], ["compile.enable=auto"]])
def test_auto_can_be_said_on_the_command_line(tmp_path: Path, words: list[str]) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[compile]\nenable = true\n")
    assert load_config(str(path), words).config.compile.enable == "auto"


def run_and_read(world: World, config: JobConfig) -> dict[str, Any]:
    run_job(world, config)
    return tomllib.loads((Path(config.job.dump_folder) / "config.toml").read_text())


def test_the_runs_own_config_still_says_auto(ranks: RankPool, tmp_path: Path) -> None:
    written = ranks.run(1, run_and_read, tiny_job(tmp_path))[0]
    assert written["compile"]["enable"] == "auto"
    assert written["activation_checkpoint"]["mode"] == "auto"
    assert "Compile: off" in (tmp_path / "README.md").read_text()
