"""Exports the weights of a run as a Hugging Face folder, from any layout.

Each rank writes its part to a temporary folder, as for a checkpoint, and rank 0 assembles the
parts, with one tensor in memory at a time. Adapters are merged into the weights.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from overland.checkpoint.formats.checkpoint import Options, companions_in
from overland.checkpoint.formats.hf import write_hf
from overland.checkpoint.formats.lazy import cast_lazily
from overland.checkpoint.formats.merge import merge
from overland.checkpoint.formats.overland import as_lazy_checkpoint
from overland.checkpoint.formats.sparse import densify
from overland.checkpoint.origin import LEFT_OUT
from overland.checkpoint.plan import broadcast, gather, plan_save
from overland.checkpoint.read import CheckpointReader
from overland.checkpoint.snapshot import Direct, tensors_in_words
from overland.checkpoint.store import Stalled
from overland.checkpoint.write import WrittenFile, build_index, write_files
from overland.errors import CheckpointError, sentence
from overland.files import Disk, Moved, publish
from overland.training.state import learned_names, run_facts, saved_state

if TYPE_CHECKING:
    from overland.training.run import Run


def export_hf(run: Run) -> Path:
    """Writes `hf/` in the run folder, replacing an earlier one."""
    store, shards = run.store, run.folder.root / ".hf.shards"
    group = store.group
    whole = saved_state(run, whole=True)
    state = {name: value for name, value in whole.items() if name.startswith("model.")}
    plan, parts = plan_save(state, group), Direct()
    parts.take(state, learned_names(run))

    def write(moved: Moved) -> tuple[str, list[WrittenFile]]:
        try:
            written = write_files(shards, plan.files, parts.read, Disk(), moved=moved)
            store.pulse.wait()  # for the device or the CPU
            names = parts.not_finite()
            return (
                f"{tensors_in_words(names)} holds values that are not finite" if names else "",
                written,
            )
        except OSError as problem:
            return sentence(problem), []

    def conclude(moved: Moved) -> str:
        if not run.world.is_first:
            return ""
        error = next((text for text, _ in reports if text), "")
        try:
            if not error:
                done = [some for _, some in reports]
                facts = {**run_facts(run), LEFT_OUT: None}  # here everything is written
                index = build_index("shard", plan.files_of_ranks, done, facts)
                with CheckpointReader(shards, index, {}, moved) as checkpoint:
                    _write(checkpoint, run)
        except (OSError, CheckpointError) as problem:
            error = sentence(problem)
        shutil.rmtree(shards, ignore_errors=True)
        return error

    store.pulse.begin(plan.num_bytes)
    try:
        reports = gather(store.together(write), group)
        error = broadcast(store.together(conclude), group)
    except Stalled as problem:
        error = str(problem)
    finally:
        store.pulse.end()
    if error:
        raise CheckpointError(f"{run.folder.hf} was not written: {error}")
    return run.folder.hf


def _write(checkpoint: CheckpointReader, run: Run) -> None:
    dtype = getattr(torch, run.config.checkpoint.export_dtype)
    source = densify(as_lazy_checkpoint(checkpoint))
    if source.adapter is not None:
        source = merge(source, dtype)
    source.tensors = {name: cast_lazily(lazy, dtype) for name, lazy in source.tensors.items()}
    source.companions = companions_in(run.folder.tokenizer)
    beside = run.folder.hf.with_name(".hf.new")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir()
    write_hf(source, beside, Options())
    shutil.rmtree(run.folder.hf, ignore_errors=True)  # an earlier step's weights
    publish(beside, run.folder.hf)
