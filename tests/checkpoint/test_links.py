"""Links to checkpoints, named by the time of the save, follow what exists."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from overland.apps.convert.exports import follow_links
from overland.apps.convert.formats.lazy import held
from overland.checkpoint.folder import delete
from overland.checkpoint.write import write_whole_tensors
from overland.files import Disk

DISK = Disk()


def save(checkpoints: Path, name: str, second: int) -> None:
    about = {
        "step": int(name.partition(".")[0].removeprefix("step_")),
        "saved": f"2026-11-17T20:17:{second:02d}+00:00",
        "validation_loss": None,
    }
    tensors = {"x": held(torch.ones(2))}
    write_whole_tensors(checkpoints / name, tensors, {}, about)


def names(root: Path) -> dict[str, str]:
    """Where each link leads, by what its name has after the run's."""
    found = (path for path in root.parent.iterdir() if path.is_symlink())
    return {
        path.name.removeprefix(f"{root.name}."): os.path.basename(os.readlink(path))
        for path in found
    }


def test_links_follow_what_is_there(tmp_path: Path) -> None:
    root = tmp_path / "dummy-0.1[a]"
    checkpoints = root / "checkpoint"
    other = tmp_path / "dummy-0.1[a].other"  # a run whose name begins alike
    other.mkdir()
    (tmp_path / "dummy-0.1[a].mine").symlink_to("somewhere")
    save(checkpoints, "step_4", 5)
    save(checkpoints, "step_8", 6)
    save(checkpoints, "step_9.preempt", 6)
    save(checkpoints, "step_12", 6)  # in the same second
    follow_links(root, checkpoints, DISK)
    made = {name: to for name, to in names(root).items() if name != "mine"}
    assert sorted(made.values()) == ["step_12", "step_4", "step_8", "step_9.preempt"]
    by_step = {to: name for name, to in made.items()}
    assert by_step["step_12"] == by_step["step_8"] + "-2"
    assert by_step["step_9.preempt"] == by_step["step_8"] + ".preempt"
    assert (tmp_path / f"{root.name}.{by_step['step_4']}" / "COMMITTED").is_file()
    delete(checkpoints / "step_8", DISK)
    follow_links(root, checkpoints, DISK)
    left = {name: to for name, to in names(root).items() if name != "mine"}
    assert sorted(left.values()) == ["step_12", "step_4", "step_9.preempt"]
    assert all((tmp_path / f"{root.name}.{name}").exists() for name in left)
    assert names(root)["mine"] == "somewhere"
    assert other.is_dir()
