"""Where a run starts: from a checkpoint of its own, from given weights, or from fresh ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from overland.checkpoint.folder import committed, newest_in, set_later_aside, step_of, uncommitted
from overland.checkpoint.formats import open_any
from overland.checkpoint.formats.lazy import counting
from overland.checkpoint.origin import Origin, mark_files
from overland.config.schema import Checkpoint
from overland.data.tokenizer import UNKNOWN, Policy
from overland.data.tokenizer_choice import kept_policy
from overland.errors import CheckpointError, ModelError
from overland.models.hf import INDEX, SINGLE, load_hf, weight_files
from overland.models.transform import added_rule
from overland.parallel.comm import all_of, first_problem, from_first_rank
from overland.parallel.sharding import local_part, named_buffers, named_parameters, tied_copies
from overland.run_folder import RunFolder
from overland.training.state import check_finite, restore

if TYPE_CHECKING:
    from overland.training.run import Run

Report = Callable[[str], None]


def start_from(run: Run, report: Report) -> None:
    """Resumes a checkpoint or loads weights, as the config asks; else the fresh weights stay."""
    settings = run.config.checkpoint
    if settings.resume not in ("auto", "none"):
        path = Path(settings.resume).expanduser()
        path = from_first_rank(newest_in(path) if run.world.is_first else path)
        if problem := try_to_restore(run, path, report):
            raise CheckpointError(problem)
        put_later_ones_aside(run, report)
    elif settings.enable and settings.resume == "auto" and resume_newest(run, report):
        pass
    elif settings.initial_load_path is not None:
        source = Path(settings.initial_load_path).expanduser()
        problem = ""
        run.beat.pulse.begin()
        try:
            load_weights(run, source)
            check_finite(run, source, skip_optimizer=True)
        except (CheckpointError, ModelError) as error:
            problem = str(error)
        run.beat.pulse.wait()
        problem = first_problem(problem)
        run.beat.pulse.end()
        if problem:
            raise CheckpointError(problem)
        report(f"starting from the weights in {source}")
        run.origin = note_origin(run, source)
        if run.origin is not None:
            report(
                f"{len(run.origin.names):,} frozen tensors stay in {source}: checkpoints leave "
                "them out (checkpoint.type = full holds all)"
            )


def policy_of_the_resumed(settings: Checkpoint, folder: RunFolder) -> Policy:
    """Returns what is put around the documents of the run that is resumed, if one is."""
    if settings.resume == "auto":
        return kept_policy(folder.root) if committed(folder.checkpoints) else UNKNOWN
    if settings.resume == "none":
        return UNKNOWN
    return kept_policy(newest_in(Path(settings.resume).expanduser()).parent.parent)


def note_origin(run: Run, folder: Path) -> Origin | None:
    """Returns which weights need not be saved, since they are frozen and stay where they were read
    from. All ranks together."""
    if run.config.checkpoint.type == "full" or not run.config.checkpoint.enable:
        return None
    if not from_first_rank(any((folder / name).is_file() for name in (INDEX, SINGLE))):
        return None
    mine = {
        name
        for name, parameter in named_parameters(run.model.parts).items()
        if not parameter.requires_grad and not is_added(run, name)
    }
    names: frozenset[str] = frozenset().union(*all_of(mine))
    if not names:
        return None
    place = folder.absolute()
    marks = mark_files(place, weight_files(place)) if run.world.is_first else {}
    return Origin(place, from_first_rank(marks), names)


def is_added(run: Run, name: str) -> bool:
    """Whether a transform has added the parameter, so that no folder of weights has it."""
    return any(added_rule(part, name) is not None for part in run.model.parts)


def load_weights(run: Run, path: Path) -> None:
    """Reads weights alone, from any format that `overland convert` reads."""
    if any((path / name).is_file() for name in (INDEX, SINGLE)):  # reads its own slices only
        for part in run.model.parts:
            load_hf(part, path, local_part, moved=run.beat.pulse.moved)
        return
    with counting(run.beat.pulse.moved):
        _load_foreign(run, path)


def _load_foreign(run: Run, path: Path) -> None:
    describe = getattr(run.model_config, "to_hf", None)
    weights = open_any(path, describe() if describe else None).weights()
    parameters = named_parameters(run.model.parts)
    parameters = {n: p for n, p in parameters.items() if not is_added(run, n)}
    missing = [name for name in parameters if name not in weights]
    if missing:
        raise CheckpointError(f"{path} has no {missing[0]}, which this model needs")
    buffers = {n: b for n, b in named_buffers(run.model.parts).items() if n in weights}
    with torch.no_grad():
        for name, parameter in {**parameters, **buffers}.items():
            shard, offset, shape = local_part(parameter)
            if weights[name].shape != shape:
                raise CheckpointError(
                    f"{path} has {name} in shape {list(weights[name].shape)}, and this model "
                    f"needs {list(shape)}"
                )
            box = tuple(slice(a, a + n) for a, n in zip(offset, shard.shape, strict=True))
            shard.copy_(weights[name].load_slice(box))
        for parameter, copy in tied_copies(run.model.parts):
            copy.copy_(parameter)


def resume_newest(run: Run, report: Report) -> bool:
    """Resumes the newest checkpoint that can be read, and names every damaged one on the way.
    Returns whether there was one."""
    folder = run.store.folder
    names: list[str] = []
    if run.world.is_first:
        elsewhere = committed(run.folder.fallback) if run.folder.fallback is not None else []
        names = [str(path) for path in sorted([*committed(folder), *elsewhere], key=step_of)]
        for path in uncommitted(folder):
            report(f"note: {path} was never committed, so it is no checkpoint")
    names = from_first_rank(names)
    for name in reversed(names):
        problem = try_to_restore(run, Path(name), report)
        if not problem:
            put_later_ones_aside(run, report)
            return True
        report(f"{problem}. Looking for an older checkpoint")
    if names:
        raise CheckpointError(
            f"none of the {len(names)} checkpoints in {folder} can be read; "
            f"`--resume none` starts a new run beside this one"
        )
    return False


def try_to_restore(run: Run, path: Path, report: Report) -> str:
    """Returns an empty string if every rank could restore it; else the problem of the first one
    that could not."""
    notes, problem = [], ""
    run.beat.pulse.begin()
    try:
        notes = restore(run, path, run.config.checkpoint.skip_optimizer)
    except (CheckpointError, OSError) as error:
        problem = str(error)
    except (KeyError, TypeError, ValueError) as error:  # a hand-made one, say
        problem = f"{path} is not what a run saves: {type(error).__name__} {error}"
    run.beat.pulse.wait()
    problem = first_problem(problem)
    run.beat.pulse.end()
    if not problem:
        own = [run.store.folder, *([run.folder.fallback] if run.folder.fallback else [])]
        run.resumed_own = path.parent.resolve() in [folder.resolve() for folder in own]
        fresh = ", with a new optimizer" if run.config.checkpoint.skip_optimizer else ""
        report(f"resumed {path} at step {run.progress.step}{fresh}")
        for note in notes:
            report(f"note: {note}")
    return problem


def put_later_ones_aside(run: Run, report: Report) -> None:
    if run.world.is_first:
        for later in set_later_aside(run.store.folder, run.progress.step, run.store.disk):
            report(f"a later checkpoint is kept as {later}")
