"""The weights of a run as a Hugging Face folder."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor

from overland.models.hf import save_hf
from overland.parallel.parts import named_parameters

if TYPE_CHECKING:
    from overland.training.run import Run


def export_hf(run: Run) -> Path:
    """Writes `hf/` in the run folder. All ranks gather each tensor; rank 0 writes it."""
    tensors = whole_tensors(run)
    if run.world.is_first:
        dtype = getattr(torch, run.config.checkpoint.export_dtype)
        beside = run.folder.hf.with_name(".hf.new")
        shutil.rmtree(beside, ignore_errors=True)
        save_hf(beside, run.model_config, tensors, dtype=dtype)
        shutil.rmtree(run.folder.hf, ignore_errors=True)  # an earlier step's weights
        beside.rename(run.folder.hf)
        if run.folder.tokenizer.is_dir():
            shutil.copytree(run.folder.tokenizer, run.folder.hf, dirs_exist_ok=True)
    else:
        for _ in tensors:
            pass
    return run.folder.hf


def whole_tensors(run: Run) -> Iterator[tuple[str, torch.Tensor]]:
    with run.optimizer.masters.whole():
        for name, parameter in named_parameters(run.model.parts).items():
            whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            yield name, whole.detach().cpu()
