"""`checkpoint.link_by_time`: links to checkpoints, named as the training stub names them.

experiments/chkpts/
  dummy-0.1/                                  the run folder
  dummy-0.1.2026_1117_2031_07                 a link to its checkpoint/step_100
  dummy-0.1.2026_1117_2044_51.preempt         a link to its checkpoint/step_137.preempt

The names depend only on the existing checkpoints, so after a killed session the next one only has
to create or remove links.
"""

from __future__ import annotations

import glob
import os
from datetime import datetime
from pathlib import Path

from overland.checkpoint.folder import list_checkpoints
from overland.files import Disk

TIME = "%Y_%m%d_%H%M_%S"


def follow_links(root: Path, checkpoints: Path, disk: Disk) -> None:
    """Creates a link to every checkpoint of a run, and removes links to deleted ones."""
    root, checkpoints = root.absolute(), checkpoints.absolute()
    wanted = link_names(root, checkpoints)
    for link in sorted(root.parent.glob(f"{glob.escape(root.name)}.*")):
        if link.is_symlink() and _leads_into(link, checkpoints) and link.name not in wanted:
            disk.remove(link)
    for name, path in wanted.items():
        link = root.parent / name
        target = os.path.relpath(path, root.parent)
        is_ours = link.is_symlink() and _leads_into(link, checkpoints)
        if (is_ours and os.readlink(link) != target) or not (is_ours or link.exists()):
            disk.point(link, target)


def link_names(root: Path, checkpoints: Path) -> dict[str, Path]:
    """Returns link names, by the time of each save, and their checkpoints. If two were saved in the
    same second, a number is appended to the later one."""
    names: dict[str, Path] = {}
    for one in list_checkpoints(checkpoints):
        saved = datetime.fromisoformat(one.about["saved"]).astimezone()
        stem, kind = f"{root.name}.{saved.strftime(TIME)}", one.path.name.partition(".")[2]
        end, number = f".{kind}" if kind else "", 1
        name = stem + end
        while name in names:
            number += 1
            name = f"{stem}-{number}{end}"
        names[name] = one.path
    return names


def _leads_into(link: Path, folder: Path) -> bool:
    return Path(os.path.normpath(link.parent / os.readlink(link))).parent == folder
