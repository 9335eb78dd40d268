"""Whenever a save is cut off, the newest committed checkpoint loads, and a new save succeeds."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from overland.apps.proofs.checkpoint import verify
from overland.checkpoint.folder import latest_checkpoint, list_checkpoints
from overland.run_folder import LATEST
from tests.checkpoint.states import Killed, MortalDisk, copy, like, load, save, some_state

SETTINGS = {
    "plain": {},
    "two kept": {"keep_latest_k": 2},
    "full": {"type": "full", "keep_latest_k": 2},
    "four files": {"type": "full", "full_format": "torch", "keep_latest_k": 2},
}


def kinds_of_save() -> list[str]:
    return list(SETTINGS)


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders with two good checkpoints, to be copied."""
    folders = {}
    for kind, settings in SETTINGS.items():
        folders[kind] = tmp_path_factory.mktemp(kind.replace(" ", "_")) / "checkpoint"
        for step in (1, 2):
            assert not save(folders[kind], step, async_mode="disabled", **settings).error
    return folders


def operations_of(kind: str, before: dict[str, Path], tmp_path: Path) -> list[str]:
    disk = MortalDisk(None)
    folder = copy(before[kind], tmp_path / "counted")
    assert not save(folder, 3, disk, async_mode="disabled", **SETTINGS[kind]).error
    return disk.operations


@pytest.mark.parametrize("kind", kinds_of_save())
@pytest.mark.parametrize("power_cuts", [0, 3], ids=["killed", "power cut"])
def test_a_kill_at_any_operation_leaves_a_good_checkpoint(
    before: dict[str, Path], tmp_path: Path, kind: str, power_cuts: int
) -> None:
    operations = operations_of(kind, before, tmp_path)
    assert len(operations) > 20
    seen = set()
    for number in range(1, len(operations) + 1):
        for attempt in range(max(1, power_cuts)):
            folder = copy(before[kind], tmp_path / f"{number}-{attempt}")
            disk = MortalDisk(number)
            with pytest.raises(Killed):
                save(folder, 3, disk, async_mode="disabled", **SETTINGS[kind])
            if power_cuts:
                disk.lose(random.Random(1000 * number + attempt))
            seen.add(newest_is_good(folder, operations[number - 1]))
            assert not save(folder, 3, async_mode="disabled", **SETTINGS[kind]).error
            assert newest_is_good(folder, "a new save") == 3
    assert seen == {2, 3}  # before the commit the old one, after it the new one


def newest_is_good(folder: Path, killed_at: str) -> int:
    path = latest_checkpoint(folder)
    assert path is not None, f"killed at {killed_at}: nothing is left"
    step = list_checkpoints(folder)[-1].step
    got = like(some_state(step))
    facts = load(path, got)
    assert facts["progress"]["step"] == step
    for name, tensor in some_state(step).items():
        assert torch.equal(got[name], tensor), f"killed at {killed_at}: {name} differs"
    assert verify(path) == [], f"killed at {killed_at}"
    link = folder / LATEST
    assert (link / "COMMITTED").exists(), f"killed at {killed_at}: `latest` leads nowhere"
    return step


def test_every_operation_of_a_save_can_be_died_at(before: dict[str, Path], tmp_path: Path) -> None:
    """The list that the kills above go through holds every phase."""
    operations = operations_of("two kept", before, tmp_path)
    text = "\n".join(operations)
    for phase in (
        "create rank_00000.safetensors",
        "write rank_00000.safetensors",
        "sync rank_00000.safetensors",
        "write index.json",
        "sync index.json",
        "write COMMITTED",
        "sync COMMITTED",
        "rename .step_3.tmp",
        "link .latest.tmp",
        "remove COMMITTED",
        "rename step_1",
        "remove folder .step_1.deleted",
    ):
        assert phase in text, phase
