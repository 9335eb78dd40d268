"""What a checkpoint of a run holds: tensors by name, random streams, and everything else, such as
the progress.

Names are those of the unsharded model, so that any layout can read what another one wrote; loading
into the tensors restores the run. Weights and data order use no random stream, since they are pure
functions of the seed; dropout, users' models and libraries do.
"""

from __future__ import annotations

import os
import platform
import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import overland
from overland.checkpoint.lazy import LEFT_OUT
from overland.checkpoint.plan import State, local_name
from overland.checkpoint.read import CheckpointReader
from overland.checkpoint.snapshot import LargestValues
from overland.config.schema import Debug
from overland.errors import CheckpointError
from overland.models.registry import lacks_hf_form, own_model_name
from overland.parallel.sharding import named_buffers, named_parameters, shard_of
from overland.training.run import Run
from overland.training.schedule import learning_rate
from overland.words import first_few


def run_tensors(run: Run, skip_optimizer: bool = False) -> dict[str, Tensor]:
    """Returns weights, persistent buffers, optimizer state and counters: the tensors that a
    checkpoint is loaded into, within `optimizer.whole()`."""
    parameters = named_parameters(run.model.parts)
    state = {f"model.{name}": parameter.detach() for name, parameter in parameters.items()}
    state |= {f"model.{name}": buffer for name, buffer in named_buffers(run.model.parts).items()}
    if skip_optimizer:
        return state
    return {**state, **run.optimizer.tensors(), **run.scaler.state_dict()}


def saved_state(run: Run, whole: bool = False) -> State:
    """Returns the same state in the form in which it is saved, with this rank's random streams
    under their own names; without frozen weights that are stored elsewhere, unless `whole`."""
    parameters = named_parameters(run.model.parts)
    if run.origin is not None and not whole:
        parameters = {n: p for n, p in parameters.items() if n not in run.origin.names}
    buffers, random_states = named_buffers(run.model.parts), random_state(run.device)
    return {
        **{f"model.{name}": run.optimizer.saved_parameter(p) for name, p in parameters.items()},
        **{f"model.{name}": buffer for name, buffer in buffers.items()},
        **run.optimizer.saved(),
        **run.scaler.state_dict(),
        **{f"rng.{run.world.rank}.{name}": one for name, one in random_states.items()},
    }


def save_run(run: Run, preempt: bool = False, validation_loss: float | None = None) -> None:
    """Starts a save; the store reports its outcome when it is done."""
    step, facts = run.progress.step, run_facts(run)
    tested = learned_names(run)
    measured = None
    if validation_loss is not None:
        measured = (validation_loss, run.progress.validated_on)
    run.store.save(step, saved_state(run), facts, preempt, measured, tested)
    run.saved_step = step


def learned_names(run: Run) -> set[str]:
    """Returns the names of the tensors that must be finite: parameters and optimizer state. A
    model's own buffers may hold anything."""
    return {f"model.{name}" for name in named_parameters(run.model.parts)} | {
        *run.optimizer.saved()
    }


def run_facts(run: Run) -> dict[str, Any]:
    """Returns everything except the tensors."""
    return {
        "progress": run.progress.to_json(),
        "learning_rate": learning_rate(max(0, run.progress.step - 1), run.config),
        "data": {
            "batch": run.progress.batch,
            "fingerprint": run.dataset.plan.fingerprint,
            "plan": run.dataset.plan.to_json(),
        },
        "position": position_in_epoch(run),
        "loss_scaling": run.scaler.enabled,
        "spike_guard": run.guard.to_json() if run.guard is not None else None,
        "layout": asdict(run.mesh.degrees),
        "config": run.config.model_dump(mode="json"),
        "model_config": None if lacks_hf_form(run.model_config) else run.model_config.to_hf(),
        "own_model": own_model_name(run.model_config),
        **({LEFT_OUT: run.origin.to_json()} if run.origin is not None else {}),
        "start_marks": run.start_marks,
        "versions": {
            "overland": overland.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "device": run.device.type,
        },
    }


def position_in_epoch(run: Run) -> dict[str, int] | None:
    """Returns the epoch and the segment in which the next batch begins, as iter_state_dict.pt
    stores them; None if epochs are not counted in samples."""
    found = run.dataset.rows.position(run.progress.batch)
    if found is None:
        return None
    epoch, place, size = found
    length = run.config.images.segment_size or size
    start = place // length * length
    end = min(start + length, size)
    return {"epoch": epoch, "seg": place // length, "start_idx": start, "end_idx": end}


def check_finite(run: Run, path: Path, skip_optimizer: bool) -> None:
    """Raises if weights or optimizer state are not finite."""
    tested = learned_names(run)
    tensors = run_tensors(run, skip_optimizer).items()
    found = LargestValues((name, shard_of(one)) for name, one in tensors if name in tested)
    if names := found.not_finite():
        raise CheckpointError(
            f"{path} holds values that are not finite, in {first_few(names)}: training "
            f"cannot continue from there"
        )


def restore_random(run: Run, checkpoint: CheckpointReader) -> None:
    """Restores the random streams of every rank. If the number of ranks has changed, the streams
    start again from the seed."""
    if checkpoint.index.world_size != run.world.size:
        return
    prefix = f"rng.{run.world.rank}."
    if checkpoint.index.kind == "local":
        prefix = local_name(prefix, run.world.rank)
    names = [name for name in checkpoint.tensors if name.startswith(prefix)]
    if names:
        state = {name.removeprefix(prefix): checkpoint.read(name) for name in names}
        set_random_state(state, run.device)


def random_state(device: torch.device) -> dict[str, Tensor]:
    """Returns the random states of this rank as tensors of a fixed size; a number that is kept for
    the next draw is stored as its bits."""
    version, internal, gauss = random.getstate()
    python = [version, *internal, gauss is not None, np.float64(gauss or 0.0).view(np.int64)]
    _, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    numpy = [*np.asarray(keys).tolist(), position, has_gauss, np.float64(cached).view(np.int64)]
    state = {
        "python": torch.tensor(python, dtype=torch.int64),
        "numpy": torch.tensor(numpy, dtype=torch.int64),
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        state["device"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: dict[str, Tensor], device: torch.device) -> None:
    version, *internal, has_gauss, gauss = state["python"].tolist()
    kept = np.int64(gauss).view(np.float64).item() if has_gauss else None
    random.setstate((version, tuple(internal), kept))
    *keys, position, has_gauss, gauss = state["numpy"].tolist()
    cached = np.int64(gauss).view(np.float64).item()
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and "device" in state:
        torch.cuda.set_rng_state(state["device"], device)


def set_seeds(debug: Debug) -> None:
    """Seeds every random stream, and makes torch deterministic if the config asks for it."""
    random.seed(debug.seed)
    np.random.seed(debug.seed % 2**32)
    torch.manual_seed(debug.seed)
    if debug.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.benchmark = False
        torch.use_deterministic_algorithms(True, warn_only=debug.deterministic_warn_only)
