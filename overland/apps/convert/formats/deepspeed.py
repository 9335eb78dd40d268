"""Reads DeepSpeed's ZeRO folders, stages 0 to 3, without DeepSpeed: weights, Adam's moments and
step counts, put together from the files of all ranks.

Parameters and both Adam moments are stored as pieces of long vectors, one or a few per rank. In
stages 1 and 2, the ranks' vectors of a group, concatenated, hold the group's parameters in order.
In stage 3, each parameter is split into equal pieces, one per rank, at the same position in every
rank's vector. The rest at the end is padding.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from overland.apps.convert.formats.lazy import (
    Config,
    Joined,
    LazyCheckpoint,
    Stored,
    cast_lazily,
    config_near,
    num_updates,
)
from overland.apps.convert.formats.peft import PREFIX, plain_name, plain_names
from overland.apps.convert.formats.pickles import StandIn
from overland.apps.convert.formats.torch_save import read_torch_file, scalar, tensors_in
from overland.apps.dialects.peft import ADAPTER_CONFIG, read_adapter_config
from overland.checkpoint.lazy import MODEL, MOMENTS, OPTIMIZER, Lazy, Shape
from overland.errors import CheckpointError


def detect_deepspeed(path: Path) -> bool:
    return path.is_dir() and _tag_folder(path) is not None


def open_deepspeed(path: Path, config: Config = None) -> LazyCheckpoint:
    folder = _tag_folder(path)
    if folder is None:
        raise CheckpointError(f"{path} is not a DeepSpeed checkpoint")
    models = _by_rank(folder, "model_states.pt")
    states = [read_torch_file(file) for file in models]
    optimizers = [
        read_torch_file(file)["optimizer_state_dict"]
        for file in _by_rank(folder, "optim_states.pt")
        if "zero_pp_rank" in file.name
    ]
    first = states[0]
    if optimizers:
        zero = _Zero(folder, states, optimizers)
        weights, moments, steps = zero.weights(), zero.moments(), zero.steps()
    else:  # stage 0: the weights are whole, in the dtype of training
        weights, moments, steps = dict(tensors_in(first["module"], folder)), {}, []
    for name in first.get("buffer_names") or ():
        buffer = first["module"].get(name)
        if isinstance(buffer, Stored):
            is_float = buffer.dtype.is_floating_point
            weights[name] = cast_lazily(buffer, torch.float32) if is_float else buffer
    for name, shared_with in (first.get("shared_params") or {}).items():
        if shared_with in weights:
            weights[name] = weights[shared_with]
    adapter = None
    if any(name.startswith(PREFIX) for name in weights):  # PEFT had wrapped the model
        weights = plain_names(weights, folder)
        places = [one for one in (path, folder.parent) if (one / ADAPTER_CONFIG).is_file()]
        adapter = read_adapter_config(places[0]) if places else None
    return LazyCheckpoint(
        "deepspeed",
        path,
        {MODEL + name: lazy for name, lazy in weights.items()} | moments | num_updates(steps),
        extras=_extras(first, optimizers),
        config=config or config_near(path, folder),
        adapter=adapter,
    )


def _plain(name: str) -> str:
    return plain_name(name)[0] if name.startswith(PREFIX) else name


class _Zero:
    """The files of all ranks."""

    def __init__(self, folder: Path, states: list[Any], optimizers: list[Any]) -> None:
        self.folder, self.states, self.optimizers = folder, states, optimizers
        self.world, self.stage = len(optimizers), int(optimizers[0].get("zero_stage", 0))
        if self.stage not in (1, 2, 3):
            raise CheckpointError(f"{folder} has the unknown ZeRO stage {self.stage}")
        counts = optimizers[0].get("partition_count", self.world)
        wanted = max(counts) if isinstance(counts, (list, tuple)) else counts
        if wanted != self.world:
            raise CheckpointError(
                f"{folder} was saved by {wanted} ranks, but has {self.world} optimizer files"
            )

    def weights(self) -> dict[str, Lazy]:
        key = "fp32_flat_groups" if self.stage == 3 else "single_partition_of_fp32_groups"
        vectors = [_vectors(one[key]) for one in self.optimizers]
        return dict(self._parameters(vectors)) | dict(self._frozen())

    def moments(self) -> dict[str, Lazy]:
        found: dict[str, Lazy] = {}
        ranks = [self._adam(saved) for saved in self.optimizers]
        for kind in MOMENTS if ranks[0] else ():
            if any(kind not in one for one in ranks[0]):
                continue
            vectors = [_vectors([one[kind] for one in groups]) for groups in ranks]
            for name, lazy in self._parameters(vectors):
                found[f"{OPTIMIZER}{_plain(name)}.{kind}"] = lazy
        return found

    def steps(self) -> list[float]:
        groups = self._adam(self.optimizers[0])
        return [float(scalar(one["step"])) for one in groups if "step" in one]

    def _adam(self, saved: dict[str, Any]) -> list[dict[str, Any]]:
        """Returns a rank's state of each group, or sub-group in stage 3, in the order of the weight
        vectors."""
        base = saved["optimizer_state_dict" if self.stage == 3 else "base_optimizer_state"]
        if isinstance(base, list):  # elastic checkpoints keep only the state
            return base
        return [base["state"][index] for index in sorted(base["state"])]

    def _parameters(self, vectors: list[list[Stored]]) -> Iterator[tuple[str, Lazy]]:
        shapes: list[dict[str, Shape]] = self.states[0]["param_shapes"]
        if self.stage == 3:
            yield from self._across_ranks(shapes, vectors)
            return
        for group, named in enumerate(shapes):
            yield from self._in_order(group, named, [own[group] for own in vectors])

    def _in_order(
        self, group: int, named: dict[str, Shape], own: list[Stored]
    ) -> Iterator[tuple[str, Lazy]]:
        # With DeepSpeed's parameter_alignment there are gaps, and every rank records where each
        # piece is.
        paddings = self.optimizers[0].get("param_alignment_paddings") or []
        has_gaps = any(any(padding) for padding in paddings)
        total, place = sum(piece.numel for piece in own), 0
        for name, shape in named.items():
            count = math.prod(shape)
            parts = self._fragments(group, name, own) if has_gaps else _take(own, place, count)
            place += count
            yield name, Joined(tuple(shape), own[0].dtype, parts)
        if not has_gaps and total - place >= 2 * self.world:
            raise CheckpointError(
                f"{self.folder}: group {group} has {total} elements, but its parameters "
                f"need {place}; the files do not belong together"
            )

    def _fragments(self, group: int, name: str, own: list[Stored]) -> list[Stored]:
        parts = []
        for rank, saved in enumerate(self.optimizers):
            address = saved["param_slice_mappings"][group].get(name)
            if isinstance(address, StandIn):
                parts.append(own[rank].part(address.get("start"), address.get("numel")))
        return parts

    def _across_ranks(
        self, shapes: list[dict[str, Shape]], ranks: list[list[Stored]]
    ) -> Iterator[tuple[str, Lazy]]:
        place = 0
        for name, shape in (one for named in shapes for one in named.items()):
            count = math.prod(shape)
            each = math.ceil(count / self.world)
            parts: list[Stored] = []
            for rank, own in enumerate(ranks):
                parts += _take(own, place, max(0, min(each, count - rank * each)))
            place += each
            yield name, Joined(tuple(shape), ranks[0][0].dtype, parts)

    def _frozen(self) -> Iterator[tuple[str, Lazy]]:
        shapes: dict[str, Shape] = self.states[0].get("frozen_param_shapes") or {}
        for name, shape in shapes.items():
            pieces = [state["frozen_param_fragments"][name] for state in self.states]
            whole: Lazy = pieces[0]
            if self.stage == 3:
                parts = _take(_vectors(pieces), 0, math.prod(shape))
                whole = Joined(tuple(shape), whole.dtype, parts)
            yield name, cast_lazily(whole, torch.float32)


def _take(pieces: Sequence[Stored], start: int, count: int) -> list[Stored]:
    """Returns a range of several stored vectors, seen as one."""
    parts: list[Stored] = []
    for piece in pieces:
        own = min(max(piece.numel - start, 0), count)
        if own:
            parts.append(piece.part(start, own))
        start, count = max(0, start - piece.numel), count - own
    if count:
        raise CheckpointError(
            f"{pieces[0].path.parent} lacks {count} elements of a parameter; the files do not "
            "belong together"
        )
    return parts


def _vectors(saved: Any) -> list[Stored]:
    return [
        Stored((one.numel,), one.dtype, one.path, one.offset)
        for one in (saved if isinstance(saved, (list, tuple)) else [saved])
    ]


def _extras(state: dict[str, Any], optimizers: list[dict[str, Any]]) -> dict[str, Any]:
    extras: dict[str, Any] = {"step": state.get("global_steps", 0)}
    for saved in optimizers[:1]:
        base = saved.get("optimizer_state_dict") or saved.get("base_optimizer_state")
        groups = base.get("param_groups", []) if isinstance(base, dict) else []
        if len(groups) == len(state["param_shapes"]):
            extras["param_groups"] = [
                {k: v for k, v in group.items() if k != "params"}
                | {"names": [_plain(name) for name in named]}
                for group, named in zip(groups, state["param_shapes"], strict=True)
            ]
    return extras


def _tag_folder(path: Path) -> Path | None:
    """Returns the folder with the files: the path itself, or the one that `latest` names."""
    if any(path.glob("*mp_rank_*_model_states.pt")):
        return path
    if (path / "latest").is_file():
        tag = (path / "latest").read_text(encoding="utf-8", errors="replace").strip()
        if Path(tag).name == tag and any((path / tag).glob("*mp_rank_*_model_states.pt")):
            return path / tag
    return None


def _by_rank(folder: Path, ending: str) -> list[Path]:
    """Returns the files of one kind, ordered by data-parallel rank."""
    found: dict[int, Path] = {}
    for file in folder.glob(f"*mp_rank_*_{ending}"):
        match = re.search(r"(?:pp_rank_(\d+)_)?mp_rank_(\d+)_", file.name)
        if match is None:
            continue
        if int(match[2]):
            raise CheckpointError(
                f"{folder} was saved with tensor parallelism ({file.name}), which is not supported"
            )
        found[int(match[1] or 0)] = file
    if sorted(found) != list(range(len(found))):
        raise CheckpointError(
            f"{folder} lacks the {ending} of some rank: only {sorted(found)} found"
        )
    return [found[rank] for rank in sorted(found)]
