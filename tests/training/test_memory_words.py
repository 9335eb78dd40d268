"""A run that is out of memory ends with one sentence and suggested fixes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from overland.apps.check import planned
from overland.apps.check.planned import PlannedRun
from overland.apps.proofs.pool import RankPool
from overland.cli.check import report
from overland.cluster.error_kinds import error_kind
from overland.config.derived import resolve_degrees
from overland.config.schema import JobConfig
from overland.errors import Kind, TrainingError
from overland.models.registry import model_config
from overland.parallel.comm import process_group
from overland.training import fit
from overland.training.build import build_run
from overland.training.fit import (
    is_out_of_memory,
    out_of_memory,
    rank_killed,
    require_memory,
)
from overland.world import World, devices
from overland.world.devices import MemoryState, machine_memory
from tests.jobs import TINY_MODEL, tiny_job


def test_what_was_held_and_three_ways_out_are_named(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError) as met:  # what this machine's allocator really says
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(met.value)
    assert not is_out_of_memory(RuntimeError("shapes do not fit"))
    # The number format, recomputation and compilation are left to the device, as by default.
    config = tiny_job(tmp_path, training={"dtype": "float32", "mixed_precision_param": "auto"})
    degrees = resolve_degrees(config.parallelism, 1)
    error = out_of_memory(config, degrees, torch.device("cpu"))
    said = str(error)
    assert error_kind(error) is Kind.MEMORY
    for way in ("local_batch_size=4", "activation_checkpoint.mode=full", "bf16_moments=true"):
        assert re.search(rf"{way}[^;]*: about [\d.]+ GiB", said), said


def test_a_way_out_that_frees_nothing_is_not_advised(tmp_path: Path) -> None:
    config = tiny_job(
        tmp_path,
        model={"name": "llama3", "flavor": "8B", "overrides": {}},
        training={"local_batch_size": 1},
        activation_checkpoint={"mode": "full"},
        optimizer={"bf16_moments": True},
    )
    degrees = resolve_degrees(config.parallelism, 1)
    said = str(out_of_memory(config, degrees, torch.device("cpu")))
    assert re.search(r"To use less: sharding over twice as many devices: about [\d.]+ GiB$", said)


def test_a_way_out_that_frees_next_to_nothing_is_not_advised(tmp_path: Path) -> None:
    config = tiny_job(tmp_path, training={"local_batch_size": 4096})
    degrees = resolve_degrees(config.parallelism, 1)
    said = str(out_of_memory(config, degrees, torch.device("cpu")))
    assert "local_batch_size=2048" in said
    assert "bf16_moments" not in said  # kilobytes, where activations take gigabytes


def test_a_rank_that_was_killed_beside_gpus_lacked_the_machines_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_job(tmp_path)
    monkeypatch.setattr(fit, "memory_state", lambda: MemoryState(0.0, 8))
    before = MemoryState(3 * 2**30, 7)
    said = rank_killed(config, 8, "cuda", before)
    assert "this machine had 3.0 GiB free for 8 ranks. To use less: checkpoint.async_mode" in said


def test_a_rank_that_someone_killed_did_not_lack_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_job(tmp_path)
    for kills, words in ((7, "not for lack of memory"), (None, "perhaps because the machine ran")):
        state = MemoryState(18 * 2**30, kills)
        monkeypatch.setattr(fit, "memory_state", lambda state=state: state)
        said = rank_killed(config, 2, "cpu", state)
        assert words in said


@pytest.mark.parametrize("what", ["state", "activations"])
def test_a_run_that_cannot_fit_is_refused_before_anything_is_allocated(
    tmp_path: Path, what: str
) -> None:
    """Of a state, the allocator of this machine would only give virtual memory."""
    changes = {"vocab_size": 2_000_000_000} if what == "state" else {}
    rows = {} if what == "state" else {"local_batch_size": 2**30, "global_batch_size": 2**30}
    config = tiny_job(tmp_path, model={"overrides": {**TINY_MODEL, **changes}}, training=rows)
    with (
        process_group(config.comm, World(), "cpu") as device,
        pytest.raises(
            TrainingError, match=r"this machine, which has .* health\.check_memory=false"
        ),
    ):
        build_run(config, World(), device, log_ranks=())


def test_a_run_that_may_fit_is_not_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The estimate leaves a margin, several ranks share the machine, and a key overrides it."""
    config = tiny_job(tmp_path)
    model, degrees = model_config(config.model), resolve_degrees(config.parallelism, 2)
    cpu = torch.device("cpu")
    peak = fit.estimate(config, model, degrees, cpu).peak
    arguments = config, model, degrees, cpu, 0.0, 2
    monkeypatch.setattr(fit, "machine_memory", lambda: 2 * peak / 1.49)
    require_memory(*arguments)
    monkeypatch.setattr(fit, "machine_memory", lambda: 2 * peak / 1.51)
    with pytest.raises(TrainingError, match="check_memory"):
        require_memory(*arguments)
    off = config.model_copy(
        update={"health": config.health.model_copy(update={"check_memory": False})}
    )
    require_memory(off, *arguments[1:])


def test_a_jobs_limit_is_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_MEM_PER_NODE", "SLURM_MEM_PER_CPU", "SLURM_CPUS_ON_NODE"):
        monkeypatch.delenv(name, raising=False)
    both = [(tmp_path / "new", devices._GROUPS), (tmp_path / "old", devices._OLD_GROUPS)]
    monkeypatch.setattr(devices, "_control_groups", lambda: both)
    amounts = {"MemTotal": 100 * 2**30, "SwapTotal": 2**30}
    monkeypatch.setattr(devices, "_meminfo", lambda: amounts)
    assert machine_memory() == 101 * 2**30
    for name, file in (("old", "memory.limit_in_bytes"), ("new", "memory.max")):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text("max\n")
        assert machine_memory() == 101 * 2**30
        (tmp_path / name / file).write_text(f"{9 * 2**30}\n")
        assert machine_memory() == 10 * 2**30
        (tmp_path / name / file).unlink()
    monkeypatch.setenv("SLURM_MEM_PER_NODE", "8192")
    assert machine_memory() == 8 * 2**30
    monkeypatch.setenv("SLURM_MEM_PER_NODE", "0")  # all of it
    monkeypatch.setenv("SLURM_MEM_PER_CPU", "1024")
    monkeypatch.setenv("SLURM_CPUS_ON_NODE", "7")
    assert machine_memory() == 7 * 2**30


@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_check_says_what_train_would_refuse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Of a GPU, only its memory is asked for."""
    config = tiny_job(tmp_path)
    assert PlannedRun(config, 1).lack_of_memory() == []
    monkeypatch.setattr(fit, "machine_memory", lambda: 1000.0)
    gpu = SimpleNamespace(total_memory=1000)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(planned, "device_type", lambda wanted: where)
    (note,) = PlannedRun(config, 1).lack_of_memory()
    assert ("on this GPU, which has" if where == "cuda" else "on this machine, which has") in note


def test_what_check_counts_is_what_ranks_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: RankPool
) -> None:
    """Of adapters on frozen weights, sharded over two ranks."""
    config = tiny_job(tmp_path, lora={"rank": 4}, training={"dtype": "float32"})
    held = sum(ranks.run(2, held_by, config)) / 2
    found: list[float] = []
    monkeypatch.setattr(planned, "require_memory", lambda *given: found.append(given[4]))
    assert PlannedRun(config, 2).lack_of_memory() == []
    assert found == [pytest.approx(held, rel=0.01)]


def held_by(world: World, config: JobConfig) -> float:
    run = build_run(config, world, torch.device("cpu"), log_ranks=())
    return fit.held_bytes(run.model.parts, run.config)


def test_check_says_at_its_end_that_train_would_refuse(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without the fake step too."""
    given = ["model.overrides.vocab_size=2000000000", f"job.dump_folder={tmp_path / 'a'}"]
    for more, is_here in (([], True), (["health.check_memory=false"], True), ([], False)):
        code = report("quickstart", [*given, *more], 1, step=False, is_here=is_here)
        out, err = capsys.readouterr()
        is_refused = is_here and not more
        assert code == 0
        assert ("would refuse to start here: this run needs" in err) == is_refused
        assert ("would refuse to start on this machine" in out.splitlines()[-1]) == is_refused
    report("quickstart", given, 1, step=False, as_json=True)
    assert "this run needs" in json.loads(capsys.readouterr().out)["refused_here"][0]


def test_a_run_elsewhere_is_estimated_as_a_gpu_runs_it() -> None:
    """1B on four ranks: 7.93 and 6.13 GiB were measured (docs/evidence/gpu_memory.md)."""
    sizes = {"dataset": "random", "seq_len": 2048, "local_batch_size": 1}
    config = JobConfig.model_validate({"model": {"flavor": "1B"}, "training": sizes})
    peak, how = PlannedRun(config, 4).estimate_on_gpu()
    assert peak / 2**30 == pytest.approx(7.93, rel=0.01)
    assert "compiled, with our kernels and nothing recomputed" in how
    config = config.having({"compile.enable": False, "activation_checkpoint.mode": "full"})
    peak, how = PlannedRun(config, 4).estimate_on_gpu()
    assert peak / 2**30 == pytest.approx(6.13, rel=0.01)
    assert "not compiled, with our kernels and every block is recomputed" in how
