"""Where a run starts: from its own checkpoint, from given weights, or from freshly initialized
ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from overland.checkpoint.folder import committed, newest_in, set_later_aside, step_of, uncommitted
from overland.checkpoint.lazy import Lazy, LazyCheckpoint, counting
from overland.checkpoint.origin import Origin, mark_files
from overland.config.adapter import ADAPTER_CONFIG
from overland.config.schema import Checkpoint, JobConfig
from overland.data.corpora import Preparer
from overland.data.holdout import kept_share
from overland.data.tokenizer import UNKNOWN
from overland.data.tokenizer_choice import kept_policy
from overland.errors import CheckpointError, MismatchError, ModelError
from overland.models.nf4 import narrow_matrices
from overland.models.transform import added_rule, transforms_of
from overland.models.weights import (
    INDEX,
    SINGLE,
    NewRows,
    load_hf,
    vocabulary_matrices,
    weight_files,
)
from overland.parallel.comm import all_of, first_problem, from_first_rank
from overland.parallel.sharding import local_part, named_buffers, named_parameters, tied_copies
from overland.plugins import plugin
from overland.run_folder import CONFIG, RunFolder
from overland.training.state import check_finite, restore
from overland.training.vocabulary import new_rows_of

if TYPE_CHECKING:
    from overland.training.run import Run

Report = Callable[[str], None]
ADAPTER_FILES = (ADAPTER_CONFIG, "adapter_model.safetensors", "adapter_model.bin")  # of PEFT


def start_from(run: Run, report: Report) -> None:
    """Resumes a checkpoint or loads weights, as configured; otherwise the initial weights stay."""
    settings = run.config.checkpoint
    if run.objective.keeps_start:  # a resumed run is also compared with its original start
        load_start(run)
        run.objective.start(run.model.parts)
        run.start_marks = mark_start(run)
    if settings.resume not in ("auto", "none"):
        path = Path(settings.resume).expanduser().resolve()  # it may be a link named by time
        path = from_first_rank(newest_in(path) if run.world.is_first else path)
        made = adopted(run, path, report)
        try:
            if problem := try_to_restore(run, made, report):
                raise CheckpointError(problem)
        except CheckpointError:
            if made != path and run.world.is_first:  # nobody can resume it
                run.store.disk.remove_folder(made)
            raise
        put_later_ones_aside(run, report)
        return
    if settings.enable and settings.resume == "auto" and resume_newest(run, report):
        return
    if not run.objective.keeps_start:
        load_start(run)
    if settings.initial_load_path is not None:
        source = Path(settings.initial_load_path).expanduser()
        report(f"starting from the weights in {source}")
        run.origin = note_origin(run, source)
        if run.origin is not None:
            report(
                f"{len(run.origin.names):,} frozen tensors stay in {source}, and checkpoints omit "
                "them (set checkpoint.type = full to include them)"
            )
    if run.config.lora.adapter is not None:
        report(f"starting from the adapters in {run.config.lora.adapter}")


def adopted(run: Run, path: Path, report: Report) -> Path:
    """Returns a checkpoint that can be resumed: `path`, or one converted from the training stub's
    four files there. Called by all ranks together."""
    four_files = plugin("four_files")
    if not from_first_rank(four_files.is_four_files(path)):
        return path
    made, problem = path, ""
    run.beat.pulse.begin()
    if run.world.is_first:
        try:
            with counting(run.beat.pulse.moved):
                made = four_files.adopt(path, run.store.folder, run.store.disk)
        except (CheckpointError, OSError) as error:
            problem = str(error)
    run.beat.pulse.wait()
    made, problem = from_first_rank((made, problem))
    run.beat.pulse.end()
    if problem:
        raise CheckpointError(problem)
    report(f"{path} holds files written by torch.save; they were converted to {made}")
    return made


def load_start(run: Run) -> None:
    """Loads what a new run starts from."""
    weights, adapter = run.config.checkpoint.initial_load_path, run.config.lora.adapter
    if weights is not None:
        together(run, lambda: load_weights(run, Path(weights).expanduser()))
    with torch.no_grad():
        for part in run.model.parts:
            for transform in transforms_of(part):
                transform.start(part)
    if adapter is not None:
        together(run, lambda: load_adapter(run, Path(adapter)))


def mark_start(run: Run) -> dict[str, tuple[int, str]]:
    """Returns size and digest of the files that a run starts from, if they are safetensors: a
    resumed run that keeps its start must find the same files. Called by all ranks together."""
    marks: dict[str, tuple[int, str]] = {}
    weights, adapter = run.config.checkpoint.initial_load_path, run.config.lora.adapter
    if run.world.is_first:
        if weights is not None:
            folder = Path(weights).expanduser()
            marks |= mark_files(folder, weight_files(folder)) if is_hf(folder) else {}
        if adapter is not None:
            files = [name for name in ADAPTER_FILES if (Path(adapter) / name).is_file()]
            marks |= mark_files(Path(adapter), files)
    return from_first_rank(marks)


def together(run: Run, load: Callable[[], None]) -> None:
    """Loads on every rank; an error on one rank is raised on all of them."""
    problem = ""
    run.beat.pulse.begin()
    try:
        load()
    except (CheckpointError, ModelError, OSError) as error:
        problem = str(error)
    run.beat.pulse.wait()
    problem = first_problem(problem)
    run.beat.pulse.end()
    if problem:
        raise CheckpointError(problem)


def preparer_for(config: JobConfig, folder: RunFolder) -> Preparer:
    """Returns how to prepare the data of a run: as the run that is resumed, if there is one, began
    (its tokenizer, the share that each source holds out, what is added around documents)."""
    own = config.checkpoint.resume == "auto" and committed(folder.checkpoints)
    run = _resumed(config.checkpoint, folder)
    return Preparer(
        tokenizer=folder.tokenizer if own else None,
        holdout=kept_share(run, config.data) if run is not None else None,
        policy=kept_policy(run) if run is not None else UNKNOWN,
    )


def _resumed(settings: Checkpoint, folder: RunFolder) -> Path | None:
    """Returns the folder of the run that is resumed, if any."""
    if settings.resume == "auto":
        return folder.root if committed(folder.checkpoints) else None
    if settings.resume == "none":
        return None
    step = newest_in(Path(settings.resume).expanduser().resolve())
    return step.parent if (step.parent / CONFIG).is_file() else step.parent.parent


def note_origin(run: Run, folder: Path) -> Origin | None:
    """Returns the weights that need not be saved, because they are frozen and stay where they were
    loaded from. Called by all ranks together."""
    if run.config.checkpoint.type == "full" or not run.config.checkpoint.enable:
        return None
    if not from_first_rank(is_hf(folder)):
        return None
    mine = {
        name
        for name, parameter in named_parameters(run.model.parts).items()
        if not parameter.requires_grad and not is_added(run.model.parts, name)
    }
    if new_rows_of(run.config) is not None:  # these then differ from what the folder holds
        mine -= set().union(*map(vocabulary_matrices, run.model.parts))
    names: frozenset[str] = frozenset().union(*all_of(mine))
    if not names:
        return None
    place = folder.absolute()
    marks = mark_files(place, weight_files(place)) if run.world.is_first else {}
    return Origin(place, from_first_rank(marks), names)


def is_added(parts: Sequence[nn.Module], name: str) -> bool:
    """Whether a transform added the parameter, so that no folder of weights has it."""
    return any(added_rule(part, name) is not None for part in parts)


def load_weights(run: Run, path: Path) -> None:
    """Loads only weights, from any format that `overland convert` reads."""
    if is_hf(path):  # reads only its own slices
        for part in run.model.parts:
            load_hf(
                part,
                path,
                local_part,
                moved=run.beat.pulse.moved,
                new_rows=new_rows_of(run.config),
            )
    else:
        with counting(run.beat.pulse.moved):
            _load_foreign(run, path)
    check_finite(run, path, skip_optimizer=True)


def _load_foreign(run: Run, path: Path) -> None:
    if any(map(narrow_matrices, run.model.parts)):
        raise CheckpointError(
            f"{path} is not a folder of Hugging Face safetensors, which lora.base = nf4 needs to "
            "load weights in 4 bits: run `overland convert` with `--to hf` first"
        )
    source = open_foreign(path, run.model_config)
    if run.config.model.sparse is None:
        source = plugin("formats").densify(source)
    weights, new_rows = source.weights(), new_rows_of(run.config)
    parameters = require_weights(path, run.model.parts, weights, new_rows)
    buffers = {n: b for n, b in named_buffers(run.model.parts).items() if n in weights}
    for name, buffer in buffers.items():
        require_shape(path, name, weights[name].shape, tuple(buffer.shape))
    vocabulary: set[str] = set().union(*map(vocabulary_matrices, run.model.parts))
    with torch.no_grad():
        for name, parameter in {**parameters, **buffers}.items():
            shard, offset, _ = local_part(parameter)
            lazy, new = weights[name], new_rows if name in vocabulary else None
            if new is not None:
                shard, whole = shard[: max(0, lazy.shape[0] - offset[0])], shard
            box = tuple(slice(a, a + n) for a, n in zip(offset, shard.shape, strict=True))
            if shard.numel():
                shard.copy_(lazy.load_slice(box))
            if new is not None:
                columns = box[1:]
                read = lambda a, b, lazy=lazy, at=columns: lazy.load_slice((slice(a, b), *at))
                new.fill(whole, offset[0], lazy.shape[0], read)
        for parameter, copy in tied_copies(run.model.parts):
            copy.copy_(parameter)


def is_hf(folder: Path) -> bool:
    """Whether a folder holds safetensors as Hugging Face writes them."""
    return any((folder / name).is_file() for name in (INDEX, SINGLE))


def open_foreign(path: Path, architecture: Any) -> LazyCheckpoint:
    """Opens weights in any format that `overland convert` reads."""
    describe = getattr(architecture, "to_hf", None)
    opened: LazyCheckpoint = plugin("formats").open_any(path, describe() if describe else None)
    return opened


def require_weights(
    path: Path,
    parts: Sequence[nn.Module],
    weights: Mapping[str, Lazy],
    new_rows: NewRows | None,
) -> dict[str, nn.Parameter]:
    """Returns the parameters that a run loads, all but those that transforms add; raises unless
    `weights` has each of them, in its shape or, in the vocabulary, without the new rows. The parts
    may be on the meta device."""
    parameters = {n: p for n, p in named_parameters(parts).items() if not is_added(parts, n)}
    vocabulary: set[str] = set().union(*map(vocabulary_matrices, parts))
    if missing := [name for name in parameters if name not in weights]:
        raise CheckpointError(f"{path} has no {missing[0]}, which this model needs")
    for name, parameter in parameters.items():
        has, needs = tuple(weights[name].shape), tuple(parameter.shape)
        if new_rows is None or name not in vocabulary or not new_rows.fits(has, needs):
            require_shape(path, name, has, needs)
    return parameters


def require_shape(path: Path, name: str, has: tuple[int, ...], needs: tuple[int, ...]) -> None:
    if has != needs:
        raise CheckpointError(
            f"{path} has {name} with shape {list(has)}, but this model needs {list(needs)}"
        )


def load_adapter(run: Run, path: Path) -> None:
    """Loads PEFT adapters, and the modules that are trained in full alongside them. Frozen weights
    in the same folder, such as embeddings stored by PEFT, must equal the loaded ones."""
    with counting(run.beat.pulse.moved):
        opened: LazyCheckpoint = plugin("formats").open_peft(path)
        weights = opened.weights()
        named = named_parameters(run.model.parts)
        wanted = {n: p for n, p in named.items() if p.requires_grad and n in weights}
        mine = {n for n, p in named.items() if p.requires_grad and n not in weights}
        if mine:
            raise CheckpointError(f"{path} has no {min(mine)}, which this run trains")
        for name, parameter in wanted.items():
            shard, box, shape = _box(parameter)
            require_shape(path, name, weights[name].shape, shape)
            with torch.no_grad():
                shard.copy_(weights[name].load_slice(box))
        with torch.no_grad():
            for parameter, copy in tied_copies(run.model.parts):
                copy.copy_(parameter)
        for name, parameter in named.items():
            if name in weights and not parameter.requires_grad:
                shard, box, shape = _box(parameter)
                same = weights[name].shape == shape and torch.equal(
                    weights[name].load_slice(box).to(shard.dtype), shard.cpu()
                )
                if not same:
                    raise CheckpointError(
                        f"{name} in {path} differs from that of the model that this run starts from"
                    )
    check_finite(run, path, skip_optimizer=True)


def _box(tensor: Tensor) -> tuple[Tensor, tuple[slice, ...], tuple[int, ...]]:
    """Returns this rank's part of a tensor, its slices in the full tensor, and the full shape."""
    shard, offset, shape = local_part(tensor)
    box = tuple(slice(a, a + n) for a, n in zip(offset, shard.shape, strict=True))
    return shard, box, tuple(shape)


def resume_newest(run: Run, report: Report) -> bool:
    """Resumes the newest readable checkpoint, reporting every damaged one on the way. Returns
    whether there was one."""
    folder = run.store.folder
    names: list[str] = []
    if run.world.is_first:
        elsewhere = committed(run.folder.fallback) if run.folder.fallback is not None else []
        names = [str(path) for path in sorted([*committed(folder), *elsewhere], key=step_of)]
        for path in uncommitted(folder):
            report(f"note: {path} was never committed, so it is not a checkpoint")
    names = from_first_rank(names)
    for name in reversed(names):
        problem = try_to_restore(run, Path(name), report)  # raises if no other one would fit
        if not problem:
            put_later_ones_aside(run, report)
            return True
        report(f"{problem}. Trying an older checkpoint")
    if names:
        raise CheckpointError(
            f"none of the {len(names)} checkpoints in {folder} can be read; start a new run "
            f"in another folder with `--resume none`"
        )
    return False


def try_to_restore(run: Run, path: Path, report: Report) -> str:
    """Restores the checkpoint. Returns an empty string if every rank could, otherwise the problem
    of the first rank that could not. Raises if the checkpoint is intact and does not fit the run:
    older ones do not fit either."""
    notes, problem, is_final = [], "", False
    run.beat.pulse.begin()
    try:
        notes = restore(run, path, run.config.checkpoint.skip_optimizer)
    except (CheckpointError, OSError) as error:
        problem, is_final = str(error), isinstance(error, MismatchError)
    except (KeyError, TypeError, ValueError) as error:  # made by hand, for example
        problem = f"{path} is not a checkpoint that a run has saved: {type(error).__name__} {error}"
    run.beat.pulse.wait()
    problem = first_problem(problem)
    is_final = any(all_of(is_final))
    run.beat.pulse.end()
    if is_final:
        raise MismatchError(problem)
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
        if run.config.lora.rank:
            later_adapters = plugin("exports").set_later_adapters_aside
            later_adapters(run.folder.root, run.progress.step, run.store.disk)
        for later in set_later_aside(run.store.folder, run.progress.step, run.store.disk):
            report(f"a later checkpoint is kept as {later}")
