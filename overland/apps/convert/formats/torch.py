"""Reads and writes the four files of the training stub, all loadable with
`torch.load(weights_only=True)`, lets a run resume from them, and reads any file with a state dict.

model_state_dict.pt   parameter → tensor
optim_state_dict.pt   torch.optim's own form: {"state": {0: {step, exp_avg, exp_avg_sq}, …},
                      "param_groups": […]}, numbered across the groups, names in param_names;
                      optimizers other than Adam keep their state under its own names
lr_state_dict.pt      torch's schedulers' form: last_epoch, _step_count, base_lrs, _last_lr
iter_state_dict.pt    epoch, seg, start_idx, end_idx, loss_min; and step, batch, tokens; for a run
                      also everything else that it needs to resume (as JSON in `run`)

`checkpoint.type = full` writes them with `checkpoint.full_format = "torch"`, and a run resumes from
them alone, written by us or by the stub: they are first copied into a checkpoint of the run, and
are not changed.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from overland.apps.convert.formats.lazy import (
    Config,
    LazyCheckpoint,
    Options,
    Stored,
    config_near,
    held,
    num_updates,
    write_companions,
)
from overland.apps.convert.formats.meta import has_meta_names, head_dim_of, to_hf_names
from overland.apps.convert.formats.overland import as_lazy_checkpoint, write_overland
from overland.apps.convert.formats.torch_save import (
    read_torch_file,
    scalar,
    tensors_in,
    write_torch_file,
)
from overland.checkpoint.folder import set_aside
from overland.checkpoint.format import BLOCK, FileInfo, Index, Part, TensorEntry, checksum
from overland.checkpoint.lazy import MODEL, MOMENTS, NUM_UPDATES, OPTIMIZER, Lazy
from overland.checkpoint.read import CheckpointReader
from overland.checkpoint.write import commit
from overland.errors import CheckpointError
from overland.files import Disk, Moved, ignore, new_file, read_object
from overland.run_folder import COMMITTED, checkpoint_name

WEIGHTS, STATE = "model_state_dict.pt", "optim_state_dict.pt"
RATES, PROGRESS = "lr_state_dict.pt", "iter_state_dict.pt"

WRAPPED = re.compile(r"((module|_orig_mod)\.)*")

# torch's defaults, for checkpoints that do not record them.
ADAMW: dict[str, Any] = {
    name: one.default
    for name, one in inspect.signature(torch.optim.AdamW).parameters.items()
    if name != "params"
} | {"decoupled_weight_decay": True}


def detect_torch(path: Path) -> bool:
    return (path / WEIGHTS).is_file() or (
        path.is_file() and path.suffix in (".pt", ".pth", ".bin", ".ckpt")
    )


def open_torch(path: Path, config: Config = None) -> LazyCheckpoint:
    """Opens the four files, of which only the first is required, or one file with a state dict."""
    folder = path.parent if path.is_file() else path
    config = config or config_near(folder, folder.parent)
    weights = _named(path if path.is_file() else path / WEIGHTS)
    wrapper = wrapper_of(weights)
    weights = {name.removeprefix(wrapper): lazy for name, lazy in weights.items()}
    order = list(weights)
    if has_meta_names(weights):
        head_dim = head_dim_of(config, f"{path} has Meta's names and")
        weights = to_hf_names(weights, head_dim)
    tensors = {MODEL + name: lazy for name, lazy in weights.items()}
    extras: dict[str, Any] = {}
    if path.is_dir() and (path / STATE).is_file():
        state, extras["param_groups"] = _state(path / STATE, order, wrapper)
        tensors |= state
    if path.is_dir() and (path / PROGRESS).is_file():
        progress = read_torch_file(path / PROGRESS)
        extras |= _progress(progress, path / PROGRESS)
        if isinstance(progress.get("other"), dict):
            tensors |= _others(dict(tensors_in(progress["other"], path / PROGRESS)))
    if path.is_dir() and "step" not in extras and (path / RATES).is_file():
        rates = read_torch_file(path / RATES)
        last = scalar(rates.get("last_epoch")) if isinstance(rates, dict) else None
        extras |= {"step": last} if isinstance(last, int) and last > 0 else {}
    return LazyCheckpoint("torch", folder, tensors, extras, config)


def write_torch(source: LazyCheckpoint, folder: Path, options: Options | None = None) -> None:
    """Writes the four files, as far as the source has their contents. The first two are written
    tensor by tensor."""
    _write(folder / WEIGHTS, source.weights())
    if any(True for _ in source.states()):
        _write(folder / STATE, _torch_state(source))
    extras = source.extras
    step = int(extras.get("step", 0))
    rates = [float(group.get("lr", ADAMW["lr"])) for group in _groups(source)]
    first = [float(group.get("initial_lr", rate))
             for group, rate in zip(_groups(source), rates, strict=True)]  # fmt: skip
    schedule = {"last_epoch": step, "_step_count": step + 1, "base_lrs": first, "_last_lr": rates}
    _write(folder / RATES, schedule)
    best = extras.get("best_validation_loss")
    batch = int(extras.get("batch", step))
    _write(
        folder / PROGRESS,
        {
            "epoch": int(extras.get("epoch", 0)),
            "seg": int(extras.get("seg", 0)),
            "start_idx": int(extras.get("start_idx", batch)),
            "end_idx": int(extras.get("end_idx", batch)),
            "loss_min": float("inf") if best is None else float(best),
            "step": step,
            "batch": batch,
            "tokens": int(extras.get("tokens", 0)),
            "run": json.dumps(extras["run"]) if extras.get("run") else "",
            "other": _others(source.tensors),
        },
    )
    write_companions(source, folder)


def _others(tensors: dict[str, Lazy]) -> dict[str, Lazy]:
    """Returns what does not fit in the other files: the count of updates, the loss scale of a
    run."""
    return {
        name: lazy
        for name, lazy in tensors.items()
        if name == NUM_UPDATES or not name.startswith((MODEL, OPTIMIZER))
    }


def _write(path: Path, saved: Any) -> None:
    with new_file(path) as file:
        write_torch_file(file, saved, root=path.stem)


def _torch_state(source: LazyCheckpoint) -> dict[str, Any]:
    updates = source.tensors.get(NUM_UPDATES)
    steps = updates.load().to(torch.float32) if updates is not None else torch.zeros(())
    states: dict[str, dict[str, Lazy]] = {}
    for name, kind, lazy in source.states():
        states.setdefault(name, {"step": held(steps)})[kind] = lazy
    state: dict[int, dict[str, Lazy]] = {}
    groups, count = [], 0
    for group in _groups(source):
        names = group.pop("names")
        numbers = range(count, count + len(names))
        count += len(names)
        state |= {n: states[name] for n, name in zip(numbers, names, strict=True) if name in states}
        is_adam = any(states.get(name, {}).keys() >= {*MOMENTS} for name in names)
        defaults = ADAMW if is_adam else {}
        groups.append({**defaults, **group, "params": [*numbers], "param_names": names})
    return {"state": state, "param_groups": groups}


def _groups(source: LazyCheckpoint) -> list[dict[str, Any]]:
    """Returns the source's parameter groups; a single group of all parameters if they do not
    match."""
    trained = list(dict.fromkeys(name for name, _, _ in source.states()))
    groups = source.extras.get("param_groups") or []
    named = {name for group in groups for name in group["names"]}
    if groups and named >= set(trained):
        return [dict(group) for group in groups]
    return [{"names": trained}]


def wrapper_of(names: Iterable[str]) -> str:
    """Returns the prefix that DDP and torch.compile add to every name of a wrapped model."""
    found = {WRAPPED.match(name) for name in names}
    prefixes = {match.group() if match else "" for match in found}
    return prefixes.pop() if len(prefixes) == 1 else ""


def _state(
    path: Path, parameters: list[str], wrapper: str
) -> tuple[dict[str, Lazy], list[dict[str, Any]]]:
    saved = read_torch_file(path)
    try:
        state, groups = saved["state"], saved["param_groups"]
        names = _names(groups, parameters, path)
        name_of = {key: name.removeprefix(wrapper) for key, name in names}
        tensors: dict[str, Lazy] = {}
        steps = []
        for key, one in state.items():
            for kind, value in one.items():
                if isinstance(value, Stored) and kind != "step":
                    tensors[f"{OPTIMIZER}{name_of[key]}.{kind}"] = value
            steps.append(float(scalar(one.get("step", 0))))
        named = [
            {k: v for k, v in group.items() if k not in ("params", "param_names")}
            | {"names": [name_of[key] for key in group["params"]]}
            for group in groups
        ]
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is not an optimizer's state: {error!r}") from None
    return tensors | num_updates(steps), named


def _names(groups: Any, parameters: list[str], path: Path) -> Iterator[tuple[Any, str]]:
    """Yields (key in the state, parameter). Keys are names (FSDP's form) or numbers; for numbers,
    names are stored alongside, or the numbers count the model's parameters."""
    keys = [key for group in groups for key in group["params"]]
    given = [name for group in groups for name in group.get("param_names") or ()]
    if all(isinstance(key, str) for key in keys):
        yield from ((key, key) for key in keys)
    elif len(given) == len(keys):
        yield from zip(keys, given, strict=True)
    elif len(groups) == 1 and len(keys) == len(parameters):
        yield from zip(keys, parameters, strict=True)
    else:
        raise CheckpointError(
            f"{path} numbers {len(keys)} parameters in {len(groups)} groups without names, so "
            "their state cannot be assigned; convert with --weights-only"
        )


def _progress(saved: Any, path: Path) -> dict[str, Any]:
    if not isinstance(saved, dict):
        raise CheckpointError(f"{path} holds a {type(saved).__name__}, expected a dict")
    known = ("epoch", "seg", "start_idx", "end_idx", "step", "batch", "tokens")
    extras = {key: scalar(saved[key]) for key in known if key in saved}
    step = extras.get("step", 0)
    if not isinstance(step, int) or step < 0:
        raise CheckpointError(f"{path} has step {step!r:.40}, expected an integer of at least 0")
    best = scalar(saved.get("loss_min"))
    if isinstance(best, (int, float)) and best != float("inf"):
        extras["best_validation_loss"] = float(best)
    if text := saved.get("run"):
        extras["run"] = read_object(path / "run", CheckpointError, text=text.encode())
    return extras


def _named(path: Path) -> dict[str, Lazy]:
    """Reads a state dict, at the top level or under one of the usual keys."""
    saved = read_torch_file(path)
    for key in ("model", "state_dict", "model_state_dict", "module"):
        if isinstance(saved, dict) and isinstance(saved.get(key), dict):
            saved = saved[key]
    tensors = tensors_in(saved, path)
    if not tensors:
        raise CheckpointError(f"{path} holds no named tensors")
    return dict(tensors)


def is_four_files(path: Path) -> bool:
    return (path / WEIGHTS).is_file() and not (path / COMMITTED).is_file()


def adopt(path: Path, checkpoints: Path, disk: Disk) -> Path:
    """Writes the contents of the files as a checkpoint, and returns its path."""
    source = open_torch(path)
    target = checkpoints / checkpoint_name(source.extras.get("step", 0))
    beside = checkpoints / f".{target.name}.tmp"
    disk.make_folder(checkpoints)
    disk.remove_folder(beside)
    write_overland(source, beside, Options())
    if target.exists():
        set_aside(target, disk)
    disk.rename(beside, target)
    return target


def write_four_files(
    parts: CheckpointReader,
    folder: Path,
    about: dict[str, Any],
    disk: Disk,
    moved: Moved = ignore,
) -> None:
    """Writes model_state_dict.pt and its companions. Tensors are plain bytes in such files, so an
    index can point to them, and we read and verify them like our own."""
    disk.make_folder(folder)
    write_torch(as_lazy_checkpoint(parts, with_random_state=True), folder)
    disk.sync_folder(folder)
    tensors: dict[str, TensorEntry] = {}
    for name, lazy in open_torch(folder).tensors.items():
        assert isinstance(lazy, Stored), name
        sums = tuple(_checksums(lazy.path, lazy.offset, lazy.nbytes, moved))
        part = Part(lazy.path.name, lazy.offset, (0,) * len(lazy.shape), lazy.shape, sums)
        tensors[name] = TensorEntry(lazy.dtype, lazy.shape, [part] if lazy.nbytes else [])
    files = {path.name: _file_info(path, moved) for path in sorted(folder.iterdir())}
    index = Index("full", parts.index.world_size, tensors, files, parts.run)
    commit(folder, index, about, disk)


def _file_info(path: Path, moved: Moved) -> FileInfo:
    """Returns the checksums of a whole file: a zip holds more than tensors."""
    size = path.stat().st_size
    return FileInfo(size, 0, checksum(b""), tuple(_checksums(path, 0, size, moved)))


def _checksums(path: Path, offset: int, num_bytes: int, moved: Moved) -> Iterator[int]:
    with path.open("rb") as file:
        file.seek(offset)
        for begin in range(0, num_bytes, BLOCK):
            block = file.read(min(BLOCK, num_bytes - begin))
            moved(len(block))
            yield checksum(block)
