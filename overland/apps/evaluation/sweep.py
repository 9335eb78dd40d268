"""Selects several checkpoints of a run to evaluate."""

from __future__ import annotations

from pathlib import Path

from overland.apps.evaluation.model import find_run
from overland.checkpoint.folder import committed, step_of
from overland.config.load import load_config
from overland.errors import CheckpointError
from overland.run_folder import CONFIG
from overland.words import any_of


def steps_of(path: Path, wanted: str) -> list[int]:
    """Returns the steps that `all` or `1000,2000` selects from the run at `path`."""
    run, checkpoint = find_run(path)
    if run is None or checkpoint is not None:
        raise CheckpointError(f"--steps needs a run folder, and {path} is not one")
    config = load_config(str(run / CONFIG), env={}).config
    there = sorted({step_of(one) for one in committed(run / config.checkpoint.folder)})
    if not there:
        raise CheckpointError(f"{run} has no checkpoint yet")
    if wanted == "all":
        return there
    try:
        steps = [int(word.replace("_", "")) for word in wanted.split(",")]
    except ValueError:
        raise CheckpointError(
            f"--steps {wanted}: expected all, or steps such as 1000,2000"
        ) from None
    if missing := [str(step) for step in steps if step not in there]:
        names = any_of(list(map(str, there)), "and")
        raise CheckpointError(
            f"{run} has no checkpoint of step {any_of(missing)}; it has {names:.200}"
        )
    return sorted(set(steps))
