"""Reads and writes our own checkpoints (the newest of a run folder), adds frozen weights that they
leave out, and makes the adapter_config.json of a run's adapters."""

from __future__ import annotations

import datetime
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from pydantic import ValidationError

import overland
from overland.apps.convert.formats.hf import open_hf
from overland.apps.convert.formats.lazy import Config, LazyCheckpoint, Options, held, split_state
from overland.apps.dialects.peft import KEYS
from overland.checkpoint.folder import committed, latest_checkpoint, step_of
from overland.checkpoint.lazy import LEFT_OUT, MODEL, MOMENTS, Lazy, Origin, counter
from overland.checkpoint.read import CheckpointReader, SavedTensor, open_checkpoint
from overland.checkpoint.write import write_whole_tensors
from overland.config.derived import GroupRates, group_rates
from overland.config.schema import Lora, Optimizer
from overland.data.tokenizer_files import companions_in
from overland.errors import CheckpointError
from overland.files import parse_toml, read_object
from overland.models.lora_targets import is_adapter
from overland.run_folder import ADAPTERS, CHECKPOINTS, COMMITTED, CONFIG, MODEL_CONFIG, TOKENIZER

Section = TypeVar("Section", Lora, Optimizer)

WRITTEN: dict[str, Any] = {
    "bias": "none",
    "inference_mode": True,
    "peft_type": "LORA",
    "peft_version": "0.21.2",
    "task_type": "CAUSAL_LM",
}
"""What is written besides. Keys that are left out have PEFT's defaults, which use nothing more."""


def detect_overland(path: Path) -> bool:
    return (path / COMMITTED).is_file() or (path / CONFIG).is_file()


def open_overland(path: Path, config: Config = None) -> LazyCheckpoint:
    step = path if (path / COMMITTED).is_file() else result_of(path, *_saves(path))
    checkpoint = open_checkpoint(step, counter())
    require_readable(checkpoint)
    source = as_lazy_checkpoint(checkpoint)
    weakref.finalize(source, checkpoint.close)
    source.config = config or source.config
    source.companions = companions_in(step)
    for folder in (path, *step.absolute().parents):
        if (folder / CONFIG).is_file():
            source.companions += companions_in(folder / TOKENIZER)
            if source.config is None and not source.own_model and (folder / MODEL_CONFIG).is_file():
                source.config = read_object(folder / MODEL_CONFIG, CheckpointError)
            break
    return source


def require_readable(checkpoint: CheckpointReader) -> None:
    """Raises for a checkpoint that only the ranks that wrote it can read."""
    if checkpoint.index.kind == "local":
        raise CheckpointError(
            f"{checkpoint.path} was saved with checkpoint.type = local, which only the same ranks "
            "can read; resume the run on these and save it with checkpoint.type = shard"
        )


def as_lazy_checkpoint(
    checkpoint: CheckpointReader, with_random_state: bool = False
) -> LazyCheckpoint:
    """Returns an open checkpoint as a source; random streams are only useful to its own run."""
    run = checkpoint.run
    tensors: dict[str, Lazy] = {
        name: SavedTensor(entry.shape, entry.dtype, checkpoint, name)
        for name, entry in checkpoint.tensors.items()
        if with_random_state or not name.startswith("rng.")
    }
    extras = {**(run.get("progress") or {}), **(run.get("position") or {}), "run": run}
    if groups := _param_groups(run.get("config") or {}, run, tensors):
        extras["param_groups"] = groups
    return LazyCheckpoint(
        "overland",
        checkpoint.path,
        tensors,
        extras,
        run.get("model_config"),
        adapter=_adapter(run, tensors),
        left_out=Origin.from_json(run),
    )


def complete(source: LazyCheckpoint, also: Iterable[Path] = ()) -> LazyCheckpoint:
    """Adds the frozen weights that a checkpoint leaves out, from their folder or one of `also`."""
    origin = source.left_out
    if origin is None:
        return source
    weights = open_hf(origin.find(also)).tensors
    more = {MODEL + name: weights[MODEL + name] for name in sorted(origin.names)}
    run = {name: value for name, value in source.extras["run"].items() if name != LEFT_OUT}
    return replace(
        source,
        tensors={**source.tensors, **more},
        extras={**source.extras, "run": run},
        left_out=None,
    )


def _adapter(run: dict[str, Any], tensors: dict[str, Lazy]) -> Config:
    """Returns the adapter_config.json of a run that trains adapters."""
    names = [name.removeprefix(MODEL) for name in tensors if name.startswith(MODEL)]
    modules = {name.partition(".lora_")[0] for name in names if is_adapter(name)}
    config = run.get("config") or {}
    settings = _section(Lora, config.get("lora"))
    if not modules or settings is None or not settings.rank:
        return None
    base = (config.get("checkpoint") or {}).get("initial_load_path")
    if base and Path(base).is_dir():  # a relative path would be wrong from any other folder
        base = str(Path(base).resolve())
    return adapter_config(settings, sorted(modules), base)


def _section(kind: type[Section], saved: Any) -> Section | None:
    """Returns a section of a run's config; None if it has none, or one of a later version."""
    known = {key: value for key, value in (saved or {}).items() if key in kind.model_fields}
    try:
        return kind.model_validate(known) if known else None
    except ValidationError:
        return None


def adapter_config(settings: Lora, modules: Sequence[str], base: str | None) -> dict[str, Any]:
    """Returns the adapter_config.json of a run's adapters. `modules` are the modules that have one;
    `base` is the folder or name of the base model."""
    theirs = {name: getattr(settings, ours) for name, ours in KEYS.items()}
    theirs |= {"lora_alpha": _plain(settings.alpha)}
    theirs |= {"alpha_pattern": {k: _plain(v) for k, v in settings.alpha_pattern.items()}}
    for name in ("exclude_modules", "modules_to_save"):
        theirs[name] = theirs[name] or None
    if settings.targets == "all-linear":  # PEFT also stores the resolved names
        theirs["target_modules"] = sorted(modules)
    return {**WRITTEN, **theirs, "base_model_name_or_path": base}


def _plain(number: float) -> float | int:
    return int(number) if number == int(number) else number


def write_overland(source: LazyCheckpoint, folder: Path, options: Options) -> None:
    """Writes a checkpoint whose progress starts at the source's step. Without a run in the source,
    there is no data plan and no config."""
    extras = source.extras
    step = int(extras.get("step", 0))
    batch = int(extras.get("batch", step))
    progress = {
        "step": step,
        "batch": batch,
        "tokens": int(extras.get("tokens", 0)),
        "best_validation_loss": extras.get("best_validation_loss"),
    }
    run = {
        "progress": progress,
        "data": {"batch": batch, "fingerprint": None},
        "config": {},
        "versions": {"overland": overland.__version__},
        **(extras.get("run") or {}),
    }
    run["model_config"] = source.config or run.get("model_config")
    saved = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    about = {"step": step, "saved": saved, "validation_loss": None}
    tensors = dict(source.tensors)
    if any(True for _ in source.states()):  # a resumed run also needs a loss scale
        tensors = _NO_SCALING | tensors
    write_whole_tensors(folder, tensors, run, about)


_NO_SCALING: dict[str, Lazy] = {
    "scaler.scale": held(torch.ones(())),
    "scaler.good_steps": held(torch.zeros((), dtype=torch.int32)),
}


def step_of_export(path: Path) -> Path | None:
    """Returns the checkpoint whose adapters a run wrote to this `checkpoint-N`."""
    named, run = ADAPTERS.fullmatch(path.absolute().name), path.absolute().parent
    if named is None or not (run / CONFIG).is_file():
        return None
    found = [one for one in committed(_saves(run)[0]) if step_of(one) == int(named[1])]
    return found[-1] if found else None


def _saves(run_folder: Path) -> tuple[Path, bool]:
    """Returns where a run keeps its checkpoints, and whether it saves any."""
    path = run_folder / CONFIG
    try:
        settings = parse_toml(path.read_text(encoding="utf-8")).get("checkpoint")
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid TOML: {error}") from None
    settings = settings if isinstance(settings, dict) else {}
    return run_folder / str(settings.get("folder", CHECKPOINTS)), settings.get(
        "enable"
    ) is not False


def result_of(run: Path, folder: Path, is_saved: bool) -> Path:
    """Returns the newest checkpoint of a run. With `checkpoint.enable = false` (not `is_saved`), it
    has none, and those in its folder are an earlier run's."""
    newest = latest_checkpoint(folder)
    if newest is None:
        raise CheckpointError(f"{run} has no checkpoint yet")
    if not is_saved:
        raise CheckpointError(
            f"the last run in {run} saved nothing (checkpoint.enable = false); {newest} is from an "
            "earlier one: name it if that is the one you mean"
        )
    return newest


def _param_groups(
    config: dict[str, Any], run: dict[str, Any], tensors: dict[str, Lazy]
) -> list[dict[str, Any]]:
    """Returns the run's parameter groups in torch's form, matrices before vectors."""
    settings = _section(Optimizer, config.get("optimizer"))
    if settings is None:  # then all parameters are one group
        return []
    states: dict[str, set[str]] = {}
    for name in tensors:
        if (state := split_state(name, tensors)) is not None:
            states.setdefault(state[0], set()).add(state[1])
    members: dict[tuple[bool, GroupRates, bool], list[str]] = {}
    for name in [name.removeprefix(MODEL) for name in tensors if name.startswith(MODEL)]:
        if name in states:
            num_dims = len(tensors[MODEL + name].shape)
            group = group_rates(name, num_dims, settings)
            key = num_dims < 2, group, states[name] >= {*MOMENTS}
            members.setdefault(key, []).append(name)
    rate = run.get("learning_rate") or settings.lr
    return [
        {
            "lr": rate * group.lr_factor,
            "initial_lr": settings.lr * group.lr_factor,
            **({"betas": (settings.beta1, settings.beta2), "eps": settings.eps} if is_adam else {}),
            "weight_decay": group.weight_decay,
            "names": names,
        }
        for (_, group, is_adam), names in sorted(members.items(), key=lambda item: item[0][0])
    ]
