"""Exports the weights of a run as a Hugging Face folder, from any layout.

Each rank writes its part to a temporary folder, as for a checkpoint, and rank 0 assembles the
parts, with one tensor in memory at a time (apps/convert/exports.py).
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from overland.checkpoint.origin import LEFT_OUT
from overland.checkpoint.plan import broadcast, gather, plan_save
from overland.checkpoint.read import CheckpointReader
from overland.checkpoint.snapshot import Direct, tensors_in_words
from overland.checkpoint.store import Stalled
from overland.checkpoint.write import WrittenFile, build_index, write_files
from overland.errors import CheckpointError, sentence
from overland.files import Disk, Moved
from overland.plugins import plugin
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
    export_dtype = getattr(torch, run.config.checkpoint.export_dtype)
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
                    plugin("exports").write_hf_folder(
                        checkpoint, run.folder.hf, export_dtype, run.folder.tokenizer
                    )
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
