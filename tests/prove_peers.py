"""Overland compared with other trainers, as far as a CPU allows: runs that are killed and resumed,
and configs with mistakes in them; writes a page of results.

    python -m tests.prove_peers docs/evidence/peers.md [NANOCHAT]

NANOCHAT is a clone of karpathy/nanochat, which is not on the package index; without it, its rows
are left out. What was measured is kept next to the page's scripts, in .venv/peers, one file per
trainer: the next start measures only what is missing there.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from tests.cli.processes import ROOT
from tests.comparison import configs, page, resume

KEPT = ROOT / ".venv" / "peers"


def main(path: Path, nanochat: Path | None) -> int:
    with tempfile.TemporaryDirectory(prefix="overland-peers-") as folder:
        resumed = {
            one.name: kept(f"resume {one.name}", partial(resumed_by, one, Path(folder)))
            for one in resume.trainers(nanochat)
        }
    checks = configs.checkers(nanochat)
    checked = {name: kept(f"configs {name}", check) for name, check in checks.items()}
    torchtitan = kept("data of torchtitan", configs.data_of_torchtitan)
    path.write_text(page.render(resumed, torchtitan, checked, commit_of(nanochat)))
    ours = resumed["Overland"]
    return int(not all(is_exact(ours[key]) for key in ("one", "two")))


def kept(name: str, measure: Callable[[], Any]) -> Any:
    """Returns what was measured by an earlier start, or measures."""
    file = KEPT / f"{name.replace(' ', '-')}.json"
    if not file.exists():
        found = measure()
        print(name, json.dumps(found), flush=True)
        KEPT.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(found))
    return json.loads(file.read_text())


def resumed_by(trainer: resume.Trainer, folder: Path) -> dict[str, Any]:
    if not (folder / "base").exists():
        resume.write_files(folder)
    kill_at = random.SystemRandom().randint(11, 19)
    one, two = resume.prove(trainer, folder, kill_at)
    return {"kill_at": kill_at, "one": asdict(one), "two": asdict(two)}


def commit_of(clone: Path | None) -> str:
    if clone is None:
        return ""
    command = ["git", "-C", str(clone), "rev-parse", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def is_exact(outcome: dict[str, Any]) -> bool:
    return not (outcome["problem"] or outcome["repeated"] or outcome["skipped"])


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None))
