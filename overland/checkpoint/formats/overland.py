"""Overland's own checkpoints: a `step_N` folder, or a run folder and its newest one."""

from __future__ import annotations

import datetime
import tomllib
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

import overland
from overland.checkpoint.folder import latest_checkpoint
from overland.checkpoint.formats.checkpoint import (
    MODEL,
    MOMENTS,
    Config,
    LazyCheckpoint,
    Options,
    companions_in,
    read_json_object,
    split_state,
)
from overland.checkpoint.formats.hf import open_hf
from overland.checkpoint.formats.lazy import Lazy, Slices, counter, held
from overland.checkpoint.origin import LEFT_OUT, Origin
from overland.checkpoint.read import CheckpointReader, open_checkpoint
from overland.checkpoint.write import write_whole_tensors
from overland.config.derived import GroupRates, group_rates
from overland.config.schema import Optimizer
from overland.errors import CheckpointError
from overland.run_folder import CHECKPOINTS, COMMITTED, CONFIG, MODEL_CONFIG, TOKENIZER


def detect_overland(path: Path) -> bool:
    return (path / COMMITTED).is_file() or (path / CONFIG).is_file()


def open_overland(path: Path, config: Config = None) -> LazyCheckpoint:
    step = path if (path / COMMITTED).is_file() else _newest(path)
    checkpoint = open_checkpoint(step, counter())
    if checkpoint.index.kind == "local":
        raise CheckpointError(
            f"{step} was saved with checkpoint.type = local, which only the same ranks can read; "
            "resume the run there and save it with checkpoint.type = shard"
        )
    source = as_lazy_checkpoint(checkpoint)
    weakref.finalize(source, checkpoint.close)
    source.config = config or source.config
    source.companions = companions_in(step)
    for folder in (path, *step.absolute().parents):
        if (folder / CONFIG).is_file():
            source.companions += companions_in(folder / TOKENIZER)
            if source.config is None and not source.own_model and (folder / MODEL_CONFIG).is_file():
                source.config = read_json_object(folder / MODEL_CONFIG)
            break
    return source


def as_lazy_checkpoint(
    checkpoint: CheckpointReader, with_random_state: bool = False
) -> LazyCheckpoint:
    """An open checkpoint as a source; random streams are of no use to anyone but its run."""
    run = checkpoint.run
    tensors: dict[str, Lazy] = {
        name: _Kept(tuple(entry.shape), entry.dtype, checkpoint, name)
        for name, entry in checkpoint.tensors.items()
        if with_random_state or not name.startswith("rng.")
    }
    origin = Origin.from_json(run)
    if origin is not None:  # what is read is whole, wherever its parts are
        weights = open_hf(origin.find()).tensors
        tensors |= {MODEL + name: weights[MODEL + name] for name in sorted(origin.names)}
        run = {name: value for name, value in run.items() if name != LEFT_OUT}
    extras = {**(run.get("progress") or {}), "run": run}
    if groups := _param_groups(run.get("config") or {}, run, tensors):
        extras["param_groups"] = groups
    return LazyCheckpoint("overland", checkpoint.path, tensors, extras, run.get("model_config"))


def write_overland(source: LazyCheckpoint, folder: Path, options: Options) -> None:
    """Progress starts at the source's step; the data and the config of a run it never had."""
    extras = source.extras
    step = int(extras.get("step", 0))
    batch = int(extras.get("batch", step))
    run = dict(extras.get("run") or {})
    run.setdefault(
        "progress",
        {
            "step": step,
            "batch": batch,
            "tokens": int(extras.get("tokens", 0)),
            "best_validation_loss": extras.get("best_validation_loss"),
        },
    )
    run.setdefault("data", {"batch": batch, "fingerprint": None})
    run.setdefault("config", {})
    run.setdefault("versions", {"overland": overland.__version__})
    run["model_config"] = source.config or run.get("model_config")
    about = {
        "step": step,
        "saved": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "validation_loss": None,
    }
    tensors = dict(source.tensors)
    if any(True for _ in source.states()):  # a run that resumes asks for a loss scale, too
        tensors = _NO_SCALING | tensors
    listed = ((name, lazy.dtype, lazy.shape, lazy.load) for name, lazy in tensors.items())
    write_whole_tensors(folder, listed, run, about)


_NO_SCALING: dict[str, Lazy] = {
    "scaler.scale": held(torch.ones(())),
    "scaler.good_steps": held(torch.zeros((), dtype=torch.int32)),
}


@dataclass(frozen=True, eq=False)
class _Kept(Lazy):
    """A tensor of a checkpoint, verified as it is read."""

    checkpoint: CheckpointReader
    name: str

    def load(self) -> Tensor:
        return self.checkpoint.read(self.name)

    def load_slice(self, slices: Slices) -> Tensor:
        slices = (*slices, *[slice(None)] * (len(self.shape) - len(slices)))
        ranges = [one.indices(size) for one, size in zip(slices, self.shape, strict=True)]
        if any(step != 1 for _, _, step in ranges):
            return self.load()[slices]
        starts = [start for start, _, _ in ranges]
        shape = [max(0, stop - start) for start, stop, _ in ranges]
        return self.checkpoint.read_slice(self.name, starts, shape)


def _newest(run_folder: Path) -> Path:
    settings = tomllib.loads((run_folder / CONFIG).read_text(encoding="utf-8"))
    folder = run_folder / settings.get("checkpoint", {}).get("folder", CHECKPOINTS)
    newest = latest_checkpoint(folder)
    if newest is None:
        raise CheckpointError(f"{run_folder} holds no checkpoint yet")
    return newest


def _param_groups(
    config: dict[str, Any], run: dict[str, Any], tensors: dict[str, Lazy]
) -> list[dict[str, Any]]:
    """The run's parameter groups as torch writes them, matrices before vectors."""
    saved = config.get("optimizer") or {}
    known = {key: value for key, value in saved.items() if key in Optimizer.model_fields}
    try:
        settings = Optimizer.model_validate(known)
    except ValidationError:  # of a later version, say: then all parameters are one group
        known = {}
    if not known:
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
