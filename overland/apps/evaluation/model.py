"""Opens a model for inference, wherever its weights are: a run folder or one of its checkpoints, a
Hugging Face folder, adapters with their base, or any other format that `overland convert` reads.
Nothing is converted on disk: weights go straight from their files into the model.

`find_model` identifies the model at a path without reading weights. Callers `build` and `fill` it:
`open_model` (main.py) on one device, `open_on_ranks` (ranks.py) on several.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from overland.apps.convert.formats import LazyCheckpoint, open_any
from overland.apps.convert.formats.hf import FILES, ids_in, require_weight, without_tied_head
from overland.apps.convert.formats.lazy import Config, given_config, given_dtype, is_computed
from overland.apps.convert.formats.merge import densify, join, merge
from overland.apps.convert.formats.overland import (
    complete,
    require_readable,
    result_of,
    step_of_export,
)
from overland.apps.convert.formats.peft import has_adapters
from overland.apps.dataset import tokenizer_of
from overland.apps.evaluation.results import base_of
from overland.checkpoint.folder import committed, step_of
from overland.checkpoint.lazy import MODEL, Lazy, Origin, counting
from overland.checkpoint.read import fill, open_checkpoint, read_marker
from overland.checks.model import with_custom_import
from overland.config.load import load_config
from overland.config.schema import Checkpoint, Data, JobConfig
from overland.data.tokenizer import Tokenizer
from overland.data.tokenizer_files import GENERATION, companions_in
from overland.errors import CheckpointError, DataError, ModelError
from overland.files import Moved, read_object
from overland.models.build import build_undivided
from overland.models.config import DecoderConfig
from overland.models.flops import sample_fields
from overland.models.init import LocalPart, persistent_buffers, plain_name
from overland.models.registry import build_model, model_config, read_hf_config
from overland.models.structure import ties_of
from overland.models.weights import load_hf
from overland.run_folder import COMMITTED, CONFIG, TOKENIZER
from overland.words import any_of, first_few
from overland.world.devices import device_type


@dataclass(frozen=True)
class OpenModel:
    """A whole model in eval mode on one device, with its tokenizer and metadata."""

    model: nn.Module
    tokenizer: Tokenizer
    """Any use of it is an error if the model has none; then it is false."""
    config: JobConfig | None
    """None if the path does not belong to a run."""
    context: int
    """The longest sequence that it was trained on, or that its config allows."""
    path: Path
    """What was opened; for a run, its checkpoint."""
    step: int | None
    end_ids: tuple[int, ...]
    """Tokens that end a text, from its generation config, its config or its tokenizer."""
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class Found:
    """The model found at a path: how to build it (on the meta device, if the caller wants) and how
    to fill it with its weights."""

    path: Path
    step: int | None
    config: JobConfig | None
    architecture: Any
    build: Callable[[], nn.Module]
    fill: Callable[[nn.Module, LocalPart, Moved], None]
    """Fills an allocated model, or the parts of it that are on this rank."""
    tokenizer: Tokenizer
    context: int
    end_ids: tuple[int, ...]

    @property
    def vocab_size(self) -> int | None:
        return getattr(self.architecture, "vocab_size", None)


@dataclass(frozen=True)
class Given:
    """What a caller gives in addition to the path of a model."""

    base: Path | None = None
    """The base model of adapters, or where to look for frozen weights that a checkpoint omits."""
    tokenizer: Path | None = None
    config: Path | None = None
    """A config.json, or a folder with one."""
    step: int | None = None
    needs_tokenizer: bool = True


def find_model(path: Path, given: Given) -> Found:
    run, checkpoint = find_run(path)
    if run is not None:
        return _in_run(run, checkpoint, given)
    if given.step is not None:
        raise CheckpointError(
            f"--step {given.step} selects a checkpoint of a run, but {path} is not a run folder: "
            "omit it"
        )
    return _in_files(path, given)


def find_run(path: Path) -> tuple[Path | None, Path | None]:
    """Returns (run folder, checkpoint if one was given); (None, None) outside of a run."""
    if (path / CONFIG).is_file():
        return path, None
    path = path.resolve() if path.is_symlink() else path  # such as `latest`
    if (step := step_of_export(path)) is not None:  # exported adapters in PEFT's format
        return path.absolute().parent, step
    for folder in path.absolute().parents[:3]:
        if (folder / CONFIG).is_file() and (path / COMMITTED).is_file():
            return folder, path
    return None, None


def device_of(name: str | None) -> torch.device:
    """Returns the device of that name, or this machine's default."""
    try:
        device = torch.device(name or device_type())
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ModelError(f"--device {name} cannot be used here: {why:.200}") from None
    if device.type == "meta":
        raise ModelError("--device meta stores no values; use cpu or cuda")
    return device


def dtype_of(dtype: str | torch.dtype | None, device: torch.device) -> torch.dtype:
    return given_dtype(dtype) or (torch.float32 if device.type == "cpu" else torch.bfloat16)


def _in_run(run: Path, checkpoint: Path | None, given: Given) -> Found:
    config = with_custom_import(load_config(str(run / CONFIG), env={}))
    checkpoint = _checkpoint_of(run, config.checkpoint, checkpoint, given.step)
    architecture = model_config(config.model)
    _require_text(architecture, run)
    # float8 is only for training, since all rows of a batch share its scales. The caller casts.
    changes = {"training.float8": "off", "training.mixed_precision_param": "float32"}
    if config.lora.base != "nf4":  # so that all weights have one dtype
        changes["lora.base"] = "float32"
    tokenizer = _tokenizer(given, partial(_own_tokenizer, run, config.data))
    context = config.training.seq_len
    if config.checkpoint.initial_load_path is not None:  # maybe trained on longer sequences before
        context = max(context, getattr(architecture, "max_position_embeddings", context))
    return Found(
        checkpoint,
        read_marker(checkpoint)["step"],
        config,
        architecture,
        lambda: build_undivided(architecture, config.having(changes)),
        partial(_fill_from_run, checkpoint, given.base),
        tokenizer,
        context,
        _end_of(tokenizer),
    )


def _checkpoint_of(run: Path, settings: Checkpoint, named: Path | None, step: int | None) -> Path:
    """Returns the given checkpoint, that of the given step, or the newest."""
    folder = run / settings.folder
    if step is None:
        return named or result_of(run, folder, settings.enable)
    if named is not None:
        raise CheckpointError(f"{named} is a single checkpoint: omit --step, or give {run}")
    there = {step_of(one): one for one in committed(folder)}
    _require_steps(run, [step], there)
    return there[step]


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
    _require_steps(run, steps, there)
    return sorted(set(steps))


def _require_steps(run: Path, wanted: Iterable[int], there: Collection[int]) -> None:
    if missing := [str(step) for step in wanted if step not in there]:
        steps = any_of([str(one) for one in sorted(there)], "and") or "none"
        raise CheckpointError(
            f"{run} has no checkpoint of step {any_of(missing)}; it has {steps:.200}"
        )


def _in_files(path: Path, given: Given) -> Found:
    base, config = given.base, given_config(given.config)
    beside: list[Path] = []
    if given.config is not None:
        beside = companions_in(given.config if given.config.is_dir() else given.config.parent)
    source = open_any(path, config, whole=False)
    if source.format == "peft":
        source = _on_base(source, path, base, config)
    elif source.left_out is not None:
        source = complete(source, [base] if base is not None else [])
    elif base is not None:
        raise CheckpointError(f"{path} is a complete model: omit --base")
    if has_adapters(source.weights()):
        source = merge(source, torch.float32)  # so that they are rounded once
    source = densify(source)
    if source.own_model:
        raise CheckpointError(
            f"{path} contains {source.own_model}, a custom model: give its run folder, whose "
            "config.toml defines how it is built"
        )
    if source.config is None:
        raise CheckpointError(
            f"{path} does not specify its model: give its config.json, or a folder with config and "
            "tokenizer, with --config"
        )
    architecture = read_hf_config(source.config)
    _require_text(architecture, path)
    weights = {n: lazy for n, lazy in source.weights().items() if not is_computed(n)}
    weights = without_tied_head(weights, source.config)
    _require_known(weights, architecture, path)
    source = source.with_tensors({MODEL + name: lazy for name, lazy in weights.items()})
    source = replace(source, companions=[*beside, *source.companions])
    tokenizer = _tokenizer(given, partial(_tokenizer_beside, source, path))
    return Found(
        path,
        source.extras.get("step"),
        None,
        architecture,
        lambda: build_model(architecture),
        partial(_fill_from_files, source),
        tokenizer,
        architecture.max_position_embeddings,
        _end_ids(source, tokenizer),
    )


def _on_base(
    adapters: LazyCheckpoint, path: Path, base: Path | None, config: Config
) -> LazyCheckpoint:
    """Returns adapters joined with their base model."""
    base = base or base_of(path)
    if base is None:
        said = (adapters.adapter or {}).get("base_model_name_or_path")
        names = f"names {said!r:.100}, which is not a folder here" if said else "names none"
        raise CheckpointError(
            f"{path} contains adapters, which need their base model: its adapter_config.json "
            f"{names}; give the folder with --base"
        )
    model = open_any(base, config)
    if has_adapters(model.weights()):
        raise CheckpointError(f"--base {base} has adapters itself: give the model without them")
    return join(model, adapters)


class LacksTokenizer(DataError):
    """Raised for a model without a tokenizer."""


class NoTokenizer:
    """Stands for the tokenizer of a model that has none: false, and any use of it is the error."""

    def __init__(self, error: LacksTokenizer) -> None:
        self.error = error

    def __bool__(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # of Python, as in copies
            raise AttributeError(name)
        raise self.error


def _tokenizer(given: Given, find: Callable[[], Tokenizer]) -> Tokenizer:
    """Returns the given tokenizer, or the model's own."""
    if given.tokenizer is not None:
        try:
            return Tokenizer(given.tokenizer, add_eos=False)  # EOS is optional
        except DataError as error:
            raise DataError(f"--tokenizer: {error}") from None
    try:
        return find()
    except LacksTokenizer as error:
        if given.needs_tokenizer:
            raise
        return cast(Tokenizer, NoTokenizer(error))


def _own_tokenizer(run: Path, data: Data) -> Tokenizer:
    try:
        return tokenizer_of(run, data)
    except DataError:
        if (run / TOKENIZER).exists():
            raise
        raise LacksTokenizer(
            f"{run} has no tokenizer, as after training on token ids: give one with --tokenizer"
        ) from None


def _require_text(architecture: Any, path: Path) -> None:
    if sample_fields(architecture) is not None:
        raise CheckpointError(f"{path} is a model of arrays, not of text: it has no tokenizer")


def _require_known(weights: dict[str, Lazy], architecture: DecoderConfig, path: Path) -> None:
    """Raises an error for weights that do not belong to the model: it would compute something
    else."""
    known = {*architecture.parameter_shapes(), *architecture.structure().ties}
    unexpected = [name for name in weights if name not in known]
    if unexpected:
        raise CheckpointError(
            f"{path} has {first_few(unexpected)}, which its config.json does not include: give the "
            "right one with --config"
        )


def _tokenizer_beside(source: LazyCheckpoint, path: Path) -> Tokenizer:
    for file in source.companions:
        if file.name in FILES:
            return Tokenizer(file, add_eos=False)
    raise LacksTokenizer(
        f"{path} has no {any_of(FILES)}: give a tokenizer file, or the folder that contains it, "
        "with --tokenizer"
    )


def _end_ids(source: LazyCheckpoint, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Returns the tokens that end a text: from generation_config.json or else config.json, as in
    transformers, or else from the tokenizer."""
    files = [file for file in source.companions if file.name == GENERATION]
    for contents in (*(read_object(path, CheckpointError) for path in files), source.config or {}):
        if ids := ids_in(contents.get("eos_token_id")):
            return tuple(ids)
    return _end_of(tokenizer)


def _end_of(tokenizer: Tokenizer) -> tuple[int, ...]:
    return (tokenizer.eos_id,) if tokenizer and tokenizer.eos_id is not None else ()


def _fill_from_run(
    checkpoint: Path, base: Path | None, model: nn.Module, local_part: LocalPart, moved: Moved
) -> None:
    """Fills a model from a run's checkpoint. `base` is where to look for frozen weights that it
    omits."""
    named = {plain_name(name): one.detach() for name, one in model.named_parameters()}
    with open_checkpoint(checkpoint, moved) as saved:
        require_readable(saved)
        origin = Origin.from_json(saved.run)
        if origin is not None:
            folder = origin.find([base] if base is not None else [])
            load_hf(model, folder, local_part, False, moved, only=origin.names)
            named = {name: one for name, one in named.items() if name not in origin.names}
        state = {MODEL + name: one for name, one in named.items()}
        buffers = {MODEL + name: one for name, one in persistent_buffers(model).items()}
        state |= {name: one for name, one in buffers.items() if name in saved.tensors}
        fill(saved, state)


def _fill_from_files(
    source: LazyCheckpoint, model: nn.Module, local_part: LocalPart, moved: Moved
) -> None:
    """Fills a model from files of any format, with adapters merged."""
    weights, ties = source.weights(), ties_of(model)
    buffers = {n: b for n, b in persistent_buffers(model).items() if n in weights}
    named = {plain_name(name): one for name, one in model.named_parameters()} | buffers
    alike = {owner: tied for tied, owner in ties.items()}
    with counting(moved), torch.no_grad():
        for name, tensor in named.items():
            owner = ties.get(name, name)
            found = weights.get(owner) or weights.get(alike.get(owner, ""))
            target, offsets, shape = local_part(tensor)
            lazy = require_weight(source.folder, name, found, shape)
            if target.numel():
                target.copy_(lazy.load_box(offsets, target.shape))
