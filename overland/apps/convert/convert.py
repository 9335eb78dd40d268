"""Converts any checkpoint to any format, all of it or a part (`--exclude`, weights only), with one
tensor in memory at a time, and refuses what the target cannot store. The output is complete or does
not exist.
"""

from __future__ import annotations

import fnmatch
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from overland.apps.arguments import path_or_none
from overland.apps.convert.formats import FORMATS, open_any, targets
from overland.apps.convert.formats.lazy import (
    Changed,
    Config,
    LazyCheckpoint,
    Options,
    cast_lazily,
    digest,
    given_config,
    given_dtype,
    split_state,
)
from overland.apps.convert.formats.merge import Merged, densify, join, merge
from overland.apps.convert.formats.overland import step_of_export
from overland.apps.convert.formats.peft import has_adapters, trained
from overland.apps.convert.verify import verify_hashes, verify_logits, verify_products
from overland.arguments import path_of, texts
from overland.checkpoint.lazy import MODEL, Lazy
from overland.data.tokenizer_files import companions_in
from overland.errors import CheckpointError
from overland.files import publish, sync
from overland.words import did_you_mean, nearest_name
from overland.world.devices import memory_in_use

CHECKS = ("hash", "logits", "none")
WITHOUT_ADAPTERS = ("hf", "meta", "safetensors")
ALLOWANCE = 256 * 2**20

Advance = Callable[[str, int, int], None]
"""Called with the current activity, the bytes done, and the total bytes."""


@dataclass(frozen=True)
class Conversion:
    """What a conversion did. Sizes are in bytes."""

    source: str
    source_format: str
    target: str
    target_format: str
    num_tensors: int
    num_bytes: int
    verified: int
    logits_difference: float | None
    own_model: str | None
    merged: int
    """Number of matrices that adapters were merged into."""
    products_difference: float | None
    """Their largest error on random vectors, relative to the largest result."""
    note: str
    peak_memory: int
    allowed_memory: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def convert(
    source: str | Path,
    target: str | Path,
    to: str,
    *,
    dtype: str | torch.dtype | None = None,
    exclude: Sequence[str] = (),
    weights_only: bool = False,
    config: str | Path | None = None,
    options: Options | None = None,
    verify: str = "hash",
    advance: Advance = lambda what, done, total: None,
    adapter: str | Path | None = None,
    merge_lora: bool = False,
) -> Conversion:
    """Writes the checkpoint at `source` to `target` in format `to`; see docs/convert.md."""
    for given, valid, option in ((to, targets(), "--to"), (verify, CHECKS, "--verify")):
        if given not in valid:
            raise CheckpointError(f"{option} {given} is unknown{did_you_mean(given, valid)}")
    wanted = given_dtype(dtype) or (torch.float32 if to == "safetensors" else None)
    options, format_ = options or Options(), FORMATS[to]
    source, target = path_of(source, "source"), path_of(target, "target")
    adapter, config = path_or_none(adapter, "adapter"), path_or_none(config, "config")
    exclude = texts(exclude, "exclude")
    if to == "safetensors" and target.suffix != ".safetensors":
        raise CheckpointError(f"--to {to} writes one file: name it {target.name}.safetensors")
    for place in (source, *([adapter] if adapter is not None else [])):
        _check_apart(place, target)
    growth = memory_growth()
    opened = _open(source, given_config(config), to, adapter, merge_lora)
    if config is not None and config.is_dir() and (companions := companions_in(config)):
        opened.companions = companions
    if to != "overland":
        opened = densify(opened)
    with_adapters = opened
    if merge_lora:
        opened = merge(opened, wanted)
    elif to == "peft":
        opened = opened.with_tensors({MODEL + name: one for name, one in trained(opened).items()})
    if not opened.weights():
        raise CheckpointError(f"{opened.folder} contains no model weights")
    kept = _chosen(opened, weights_only or format_.weights_only or merge_lora, exclude)
    chosen = opened.with_tensors(_with_dtype(kept, wanted))
    if exclude:
        options = replace(options, partial=True)

    total = sum(lazy.nbytes for lazy in chosen.tensors.values())
    largest = max((_largest(lazy) for lazy in chosen.tensors.values()), default=0)
    done = 0

    def count(what: str, size: int) -> None:
        nonlocal done
        done = min(total, done + size)
        advance(what, done, total)

    sent: dict[str, tuple[tuple[int, ...], torch.dtype, str]] = {}

    def seen(name: str, tensor: Tensor) -> None:
        hashed = digest(tensor) if verify != "none" else ""
        sent[name] = tuple(tensor.shape), tensor.dtype, hashed
        count("writing", tensor.nbytes)

    watched = chosen.with_tensors(_watched(chosen.tensors, seen))
    verified, products, difference, note = 0, None, None, ""
    with new_target(target, format_.is_file) as beside:
        assert format_.write is not None
        format_.write(watched, beside, options)
        if verify != "none":
            done = 0
            written = format_.open(beside, chosen.config)
            verify_hashes(written, sent, lambda size: count("verifying", size))
            verified = len(sent)
            if merge_lora:
                products = verify_products(chosen, written)
        peak = growth()  # before models are built
        if verify == "logits" or (merge_lora and verify != "none"):
            is_asked = verify == "logits"
            difference, note = verify_logits(with_adapters, written, chosen.config, is_asked)
    num_bytes = sum(chosen.tensors[name].nbytes for name in sent)
    num_merged = sum(isinstance(lazy, Merged) for lazy in chosen.tensors.values())
    return Conversion(
        str(source), opened.format, str(target), to, len(sent), num_bytes, verified, difference,
        opened.own_model, num_merged, products, note, peak, 2 * largest + ALLOWANCE,
    )  # fmt: skip


def _open(
    path: Path, config: Config, to: str, adapter: str | Path | None, merge_lora: bool
) -> LazyCheckpoint:
    """Opens the source, joined with separate adapters, or adapters joined with the weights next to
    them; raises an error for anything that the target format cannot represent."""
    if adapter is not None:
        if not merge_lora:
            raise CheckpointError("--adapter has no effect without --merge-lora: give both")
        base = open_any(path, config)
        if has_adapters(base.weights()):
            raise CheckpointError(f"{path} already has adapters: omit --adapter")
        return join(base, open_any(adapter, whole=False))
    opened = open_any(path, config, whole=to != "peft")
    if opened.format == "peft" and to != "peft":
        step = step_of_export(path) if merge_lora else None
        if step is None:
            said = (opened.adapter or {}).get("base_model_name_or_path")
            whose = f" (it names {said!r:.100}, which is not looked up)" if said else ""
            raise CheckpointError(
                f"{path} contains only adapters: give their base model{whose}: overland convert "
                f"MODEL OUT --to {to} --adapter {path} --merge-lora"
            )
        opened = open_any(step, config)
    if merge_lora and to == "peft":
        raise CheckpointError("--to peft writes unmerged adapters: omit --merge-lora")
    if not merge_lora and to in WITHOUT_ADAPTERS and has_adapters(opened.weights()):
        raise CheckpointError(
            f"{path} has adapters, which {to} cannot store: use --merge-lora to merge them into "
            "the weights, or --to peft to write only the adapters"
        )
    return opened


def _check_apart(source: Path, target: Path) -> None:
    """Raises an error if the target is inside its source, since it would become part of that
    checkpoint or run."""
    whole, new = source.resolve(), target.resolve()
    if new == whole or new in whole.parents:
        raise CheckpointError(f"{target} is or contains {source}: choose a target outside of it")
    if whole in new.parents:
        raise CheckpointError(
            f"{target} is inside {source}, which must not change: choose a target outside of it"
        )


def _chosen(source: LazyCheckpoint, weights_only: bool, patterns: Sequence[str]) -> dict[str, Lazy]:
    """Returns the weights, and with `weights_only` off all other tensors, such as optimizer state;
    without the parameters (and their optimizer state) and other entries that match a pattern."""
    tensors = {
        name: lazy
        for name, lazy in source.tensors.items()
        if name.startswith(MODEL) or not weights_only
    }
    kept = tensors
    for pattern in patterns:
        matched = {name for name in tensors if _matches(name, pattern, tensors)}
        if not matched:
            plain = [name.removeprefix(MODEL) for name in tensors]
            near = nearest_name(pattern, plain)
            hint = f"did you mean '{near}'?" if near else f"the first is {plain[0]}"
            raise CheckpointError(f"--exclude {pattern} matches no tensor; {hint}")
        kept = {name: lazy for name, lazy in kept.items() if name not in matched}
    if not any(name.startswith(MODEL) for name in kept):
        raise CheckpointError("--exclude leaves no weights to convert")
    return kept


def _matches(name: str, pattern: str, tensors: dict[str, Lazy]) -> bool:
    state = split_state(name, tensors)
    names = (name, name.removeprefix(MODEL), *(state[:1] if state else ()))
    return any(fnmatch.fnmatchcase(one, pattern) for one in names)


def _with_dtype(tensors: dict[str, Lazy], dtype: torch.dtype | None) -> dict[str, Lazy]:
    """Casts floating-point weights; optimizer state is unchanged."""
    if dtype is None:
        return tensors
    weights = {
        name: lazy
        for name, lazy in tensors.items()
        if name.startswith(MODEL) and lazy.dtype.is_floating_point
    }
    return tensors | _changed(weights, lambda lazy: cast_lazily(lazy, dtype))


def _largest(lazy: Lazy) -> int:
    """Returns the size of a tensor in bytes; a cast tensor counts with its wider type."""
    before = getattr(lazy, "before", lazy)
    return max(lazy.nbytes, before.nbytes)


def _watched(tensors: dict[str, Lazy], seen: Callable[[str, Tensor], None]) -> dict[str, Lazy]:
    """Calls `seen` with each tensor that is read, under all of its names."""
    names: dict[int, list[str]] = {}
    for name, lazy in tensors.items():
        names.setdefault(id(lazy), []).append(name)

    def watched(lazy: Lazy) -> Lazy:
        def change(tensor: Tensor) -> Tensor:
            for name in names[id(lazy)]:
                seen(name, tensor)
            return tensor

        return Changed(lazy.shape, lazy.dtype, lazy, change)

    return _changed(tensors, watched)


def _changed(tensors: dict[str, Lazy], change: Callable[[Lazy], Lazy]) -> dict[str, Lazy]:
    """Changes each tensor; names that share one still share it afterwards."""
    made: dict[int, Lazy] = {}
    return {name: made.setdefault(id(lazy), change(lazy)) for name, lazy in tensors.items()}


@contextmanager
def new_target(target: Path, is_file: bool) -> Iterator[Path]:
    """Yields a temporary path next to the target, which is renamed to it once complete."""
    is_empty_folder = not is_file and target.is_dir() and not any(target.iterdir())
    if (target.is_symlink() or target.exists()) and not is_empty_folder:
        raise CheckpointError(f"{target} already exists; choose a new name or remove it")
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = target.with_name(f".{target.name}.partial-{os.getpid()}")
    _remove(beside)
    if not is_file:
        beside.mkdir()
    try:
        yield beside
        sync(beside)
        if target.is_dir():
            target.rmdir()
        publish(beside, target)
    finally:
        _remove(beside)


def _remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def memory_growth() -> Callable[[], int]:
    """Returns a function that returns how far the peak of memory has grown since, in bytes."""
    with suppress(OSError):  # sets the mark to the current usage, since imports have their own peak
        Path("/proc/self/clear_refs").write_text("5")
    base = _highest()
    return lambda: max(0, _highest() - base)


def _highest() -> int:
    """Returns the kernel's high-water mark of memory; without Linux, what is in use now."""
    try:
        marks = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    except OSError:
        marks = []
    return int(marks[0]) * 1024 if marks else int(memory_in_use("cpu") * 2**30)
