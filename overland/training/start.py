"""Loads what a new run starts from, weights and adapters in any format that is read, and decides
which parameters they must have and which need not be saved again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from overland.checkpoint.lazy import Lazy, Origin, counting, mark_files
from overland.checkpoint.read import CheckpointReader
from overland.config.schema import JobConfig
from overland.data.sft import tokenizer_for_chats
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
from overland.training.run import Run
from overland.training.state import check_finite

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")  # of PEFT


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
            there = shard if new is None else shard[: max(0, lazy.shape[0] - offset[0])]
            if there.numel():
                there.copy_(lazy.load_box(offset, there.shape))
            if new is not None:
                at, n = offset[1:], shard.shape[1:]
                read = lambda a, b, lazy=lazy, at=at, n=n: lazy.load_box((a, *at), (b - a, *n))
                new.fill(shard, offset[0], lazy.shape[0], read)
        for parameter, copy in tied_copies(run.model.parts):
            copy.copy_(parameter)


def is_hf(folder: Path) -> bool:
    """Whether a folder holds safetensors as Hugging Face writes them."""
    return any((folder / name).is_file() for name in (INDEX, SINGLE))


def open_foreign(path: Path, architecture: Any) -> Any:
    """Opens weights in any format that `overland convert` reads, as a `LazyCheckpoint`."""
    describe = getattr(architecture, "to_hf", None)
    return plugin("formats").open_any(path, describe() if describe else None)


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
        weights: dict[str, Lazy] = plugin("formats").open_peft(path).weights()
        named = named_parameters(run.model.parts)
        mine = {n for n, p in named.items() if p.requires_grad and n not in weights}
        if mine:
            raise CheckpointError(f"{path} has no {min(mine)}, which this run trains")
        for name, parameter in named.items():
            if name not in weights:
                continue
            saved, (shard, offset, shape) = weights[name], local_part(parameter)
            if parameter.requires_grad:
                require_shape(path, name, saved.shape, shape)
                with torch.no_grad():
                    shard.copy_(saved.load_box(offset, shard.shape))
            elif saved.shape != shape or not torch.equal(
                saved.load_box(offset, shard.shape).to(shard.dtype), shard.cpu()
            ):
                raise CheckpointError(
                    f"{name} in {path} differs from that of the model that this run starts from"
                )
        with torch.no_grad():
            for parameter, copy in tied_copies(run.model.parts):
                copy.copy_(parameter)
    check_finite(run, path, skip_optimizer=True)


def new_rows_of(config: JobConfig) -> NewRows | None:
    """Returns the rows of those `sft.new_tokens` that the tokenizer did not have."""
    if not config.sft.new_tokens or config.sft.shape == "off":
        return None
    tokenizer = tokenizer_for_chats(config)
    stop = tokenizer.vocab_size
    return NewRows(stop - len(tokenizer.new_tokens), stop) if tokenizer.new_tokens else None


def load_left_out(run: Run, checkpoint: CheckpointReader) -> None:
    """Loads the frozen weights that the checkpoint leaves out. Those that are still frozen need not
    be saved from now on either. Called by all ranks together."""
    origin = Origin.from_json(checkpoint.run)
    if origin is None:
        return
    folder, problem = origin.folder, ""
    if run.world.is_first:
        try:
            folder = find_left_out(origin, run.config)
        except CheckpointError as error:
            problem = str(error)
    folder, problem = from_first_rank((folder, problem))
    if problem:
        raise MismatchError(problem)
    for part in run.model.parts:
        load_hf(part, folder, local_part, strict=False, moved=run.beat.pulse.moved,
                only=origin.names, new_rows=new_rows_of(run.config))  # fmt: skip
    trained = [n for n, p in named_parameters(run.model.parts).items() if p.requires_grad]
    kept = origin.names - frozenset().union(*all_of(set(trained)))
    run.origin = replace(origin, folder=folder, names=kept) if kept else None


def find_left_out(origin: Origin, config: JobConfig, look_only: bool = False) -> Path:
    """Returns the folder of the weights that a checkpoint leaves out; `look_only` compares only the
    sizes of its files."""
    given = config.checkpoint.initial_load_path
    if given is None:
        return origin.find(look_only=look_only)
    origin.check_given(Path(given).expanduser())
    return origin.find([Path(given).expanduser()], look_only)


def together(run: Run, load: Callable[[], None]) -> None:
    """Loads on every rank; an error on one rank is raised on all of them."""
    if error := try_together(run, load):
        raise error


def try_together(run: Run, load: Callable[[], None]) -> CheckpointError | None:
    """Loads on every rank; returns, on all of them, the error of the first one that failed. If what
    was read is intact on any rank and does not fit the run, that is a `MismatchError`."""
    problem, is_final = "", False
    run.beat.pulse.begin()
    try:
        load()
    except (CheckpointError, ModelError, OSError) as error:
        problem, is_final = str(error), isinstance(error, MismatchError)
    run.beat.pulse.wait()
    problem = first_problem(problem)
    is_final = any(all_of(is_final))
    run.beat.pulse.end()
    if not problem:
        return None
    return MismatchError(problem) if is_final else CheckpointError(problem)
