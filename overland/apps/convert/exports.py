"""What a run writes for other programs: `hf/`, its weights with adapters merged; `checkpoint-N/`,
PEFT adapters with a README (model card) for every `step_N`; and links named by time. With
`checkpoint.link_by_time`, links to its checkpoints have the names that the training stub gives
them:

experiments/chkpts/
  dummy-0.1/                                  the run folder
  dummy-0.1.2026_1117_2031_07                 a link to its checkpoint/step_100
  dummy-0.1.2026_1117_2044_51.preempt         a link to its checkpoint/step_137.preempt

Adapters are made from committed checkpoints, so the layout does not matter and no rank waits; rank
0 writes each of them atomically. Adapters and links are created and deleted with their checkpoints,
which alone determine them: following these also repairs what a killed session left undone.
"""

from __future__ import annotations

import glob
import os
import shutil
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import torch

from overland.apps.convert.formats.hf import write_hf
from overland.apps.convert.formats.lazy import Options, cast_lazily
from overland.apps.convert.formats.merge import densify, merge
from overland.apps.convert.formats.overland import as_lazy_checkpoint
from overland.apps.convert.formats.peft import write_peft
from overland.checkpoint.folder import delete, list_checkpoints, set_aside, step_of
from overland.checkpoint.lazy import LEFT_OUT, counting
from overland.checkpoint.plan import broadcast, gather, plan_save
from overland.checkpoint.read import CheckpointReader, open_checkpoint
from overland.checkpoint.snapshot import Direct
from overland.checkpoint.store import Stalled
from overland.checkpoint.write import WrittenFile, build_index, write_files
from overland.data.tokenizer_files import companions_in
from overland.errors import CheckpointError, sentence
from overland.files import Disk, Moved, ignore, publish
from overland.run_folder import ADAPTERS, README, TOKENIZER, WRITTEN_BY, adapters_name
from overland.training.run import Run
from overland.training.state import learned_names, run_facts, saved_state
from overland.words import first_few

LINK_TIME = "%Y_%m%d_%H%M_%S"
CARD = """---
base_model: {base}
library_name: peft
---

{written_by}: the adapters of step {step}, in PEFT's format.

    from peft import PeftModel
    model = PeftModel.from_pretrained(base_model, "{name}")
"""


def export_hf(run: Run) -> Path:
    """Writes the weights as `hf/` in the run folder, from any layout, replacing an earlier one.

    Each rank writes its part to a temporary folder, as for a checkpoint, and rank 0 assembles the
    parts, with one tensor in memory at a time. Adapters are merged into the weights.
    """
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
                f"{first_few(names)} holds values that are not finite" if names else "",
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
                    _write_hf(checkpoint, run)
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


def _write_hf(checkpoint: CheckpointReader, run: Run) -> None:
    folder, dtype = run.folder.hf, getattr(torch, run.config.checkpoint.export_dtype)
    source = densify(as_lazy_checkpoint(checkpoint))
    if source.adapter is not None:
        source = merge(source, dtype)
    source.tensors = {name: cast_lazily(lazy, dtype) for name, lazy in source.tensors.items()}
    source.companions = companions_in(run.folder.tokenizer)
    beside = folder.with_name(f".{folder.name}.new")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir()
    write_hf(source, beside, Options())
    shutil.rmtree(folder, ignore_errors=True)  # an earlier step's weights
    publish(beside, folder)


def follow(
    root: Path,
    checkpoints: Path,
    newest: Path | None = None,
    disk: Disk | None = None,
    moved: Moved = ignore,
) -> None:
    """Writes to `root` the adapters of every checkpoint that has none yet, and those of `newest`
    again; removes those whose checkpoint is gone."""
    disk = disk or Disk()
    for pattern in (".checkpoint-*.tmp", ".checkpoint-*.deleted"):
        for path in root.glob(pattern):
            disk.remove_folder(path)
    steps = {one.step: one.path for one in list_checkpoints(checkpoints)}
    for step, path in sorted(steps.items(), key=lambda one: one[1] != newest):
        if path == newest or not (root / adapters_name(step)).exists():
            _write(path, root / adapters_name(step), root / TOKENIZER, disk, moved)
    for path, step in _written(root):
        if step not in steps:
            delete(path, disk)


def set_later_adapters_aside(root: Path, after_step: int, disk: Disk) -> None:
    """Sets adapters of later steps aside, as is done with their checkpoints."""
    for path, step in _written(root):
        if step > after_step:
            set_aside(path, disk)


def _write(step: Path, target: Path, tokenizer: Path, disk: Disk, moved: Moved) -> None:
    if target.exists() and not _is_ours(target):
        raise CheckpointError(f"{target} was not written by this run, so it is not overwritten")
    beside = target.with_name(f".{target.name}.tmp")
    disk.remove_folder(beside)
    disk.make_folder(beside)
    with open_checkpoint(step, moved) as checkpoint, counting(moved):
        source = as_lazy_checkpoint(checkpoint)
        if tokenizer.is_dir():
            source.companions = companions_in(tokenizer)
        write_peft(source, beside, Options())
    base = (source.adapter or {}).get("base_model_name_or_path") or "unknown"
    about = {"base": base, "written_by": WRITTEN_BY, "step": step_of(step), "name": target.name}
    disk.write_file(beside / README, CARD.format(**about).encode())
    disk.sync_folder(beside)
    moved(0)
    if target.exists():  # from before the run went back to an earlier step
        delete(target, disk)
    disk.rename(beside, target)


def _written(root: Path) -> Iterator[tuple[Path, int]]:
    for path in sorted(root.glob("checkpoint-*")):
        named = ADAPTERS.fullmatch(path.name)
        if named is not None and _is_ours(path):
            yield path, int(named[1])


def _is_ours(path: Path) -> bool:
    """Whether we wrote it: other trainers give their checkpoints the same names."""
    readme = path / README
    return readme.is_file() and WRITTEN_BY in readme.read_text(encoding="utf-8", errors="replace")


def follow_links(root: Path, checkpoints: Path, disk: Disk) -> None:
    """Creates a link to every checkpoint of a run, and removes links to deleted ones."""
    root, checkpoints = root.absolute(), checkpoints.absolute()
    wanted = link_names(root, checkpoints)
    for link in sorted(root.parent.glob(f"{glob.escape(root.name)}.*")):
        if link.is_symlink() and _leads_into(link, checkpoints) and link.name not in wanted:
            disk.remove(link)
    for name, path in wanted.items():
        link = root.parent / name
        target = os.path.relpath(path, root.parent)
        is_ours = link.is_symlink() and _leads_into(link, checkpoints)
        if (is_ours and os.readlink(link) != target) or not (is_ours or link.exists()):
            disk.point(link, target)


def link_names(root: Path, checkpoints: Path) -> dict[str, Path]:
    """Returns link names, by the time of each save, and their checkpoints. If two were saved in the
    same second, a number is appended to the later one."""
    names: dict[str, Path] = {}
    for one in list_checkpoints(checkpoints):
        saved = datetime.fromisoformat(one.about["saved"]).astimezone()
        stem, kind = f"{root.name}.{saved.strftime(LINK_TIME)}", one.path.name.partition(".")[2]
        end, number = f".{kind}" if kind else "", 1
        name = stem + end
        while name in names:
            number += 1
            name = f"{stem}-{number}{end}"
        names[name] = one.path
    return names


def _leads_into(link: Path, folder: Path) -> bool:
    return Path(os.path.normpath(link.parent / os.readlink(link))).parent == folder
