"""Several checkpoints of a run, one after another."""

from __future__ import annotations

from pathlib import Path

from overland.checkpoint.folder import committed, step_of
from overland.config.load import load_config
from overland.errors import CheckpointError
from overland.run_folder import CONFIG
from overland.tools.evaluation.model import find_run
from overland.words import any_of


def steps_of(path: Path, wanted: str) -> list[int]:
    """The steps that `all`, or `1000,2000`, means of the run at `path`."""
    run, checkpoint = find_run(path)
    if run is None or checkpoint is not None:
        raise CheckpointError(f"--steps goes through the checkpoints of a run, and {path} is none")
    config = load_config(str(run / CONFIG), env={}).config
    there = sorted({step_of(one) for one in committed(run / config.checkpoint.folder)})
    if not there:
        raise CheckpointError(f"{run} holds no checkpoint yet")
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
            f"{run} holds no checkpoint of step {any_of(missing)}; it holds {names:.200}"
        )
    return sorted(set(steps))
