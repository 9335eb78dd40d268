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
import struct
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import overland
from overland.checkpoint.origin import LEFT_OUT, Origin
from overland.checkpoint.plan import State, local_name
from overland.checkpoint.read import (
    CheckpointReader,
    fill,
    fill_local,
    open_together,
    refuse_unused,
)
from overland.checkpoint.snapshot import LargestValues, tensors_in_words
from overland.config.changes import (
    OF_OPTIMIZER,
    fixed_changes,
    is_allowed,
    noted_changes,
    refusal,
    refused_changes,
)
from overland.config.schema import Debug, JobConfig, Optimizer
from overland.data.plan import ChangedSource, Plan, differences, former_names
from overland.errors import CheckpointError, DataError, MismatchError
from overland.models.registry import lacks_hf_form, own_model_name
from overland.models.sparse import is_mask, renew_masks
from overland.models.weights import load_hf
from overland.objectives.registry import AUTO, objective_name
from overland.optimizers.optimizer import PREFIX
from overland.optimizers.registry import same_state
from overland.parallel.comm import all_of, from_first_rank
from overland.parallel.sharding import (
    local_part,
    named_buffers,
    named_parameters,
    shard_of,
    tied_copies,
)
from overland.training.run import Run
from overland.training.schedule import learning_rate
from overland.training.vocabulary import new_rows_of
from overland.words import any_of


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
    buffers = named_buffers(run.model.parts)
    return {
        **{f"model.{name}": run.optimizer.saved_parameter(p) for name, p in parameters.items()},
        **{f"model.{name}": buffer for name, buffer in buffers.items()},
        **run.optimizer.saved(),
        **run.scaler.state_dict(),
        **random_tensors(run),
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


def random_tensors(run: Run) -> dict[str, Tensor]:
    prefix = f"rng.{run.world.rank}."
    return {prefix + name: state for name, state in random_state(run.device).items()}


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


def restore(run: Run, path: Path, skip_optimizer: bool = False) -> list[str]:
    """Restores the run from a checkpoint; returns notes for the user."""
    with open_together(path, run.store.group, run.beat.pulse.moved) as checkpoint:
        changed = check_changes(path, checkpoint.run, run.config, run.model_config)
        with run.optimizer.whole():
            notes = load_tensors(run, checkpoint, skip_optimizer)
            check_finite(run, path, skip_optimizer)
        facts = checkpoint.run
        check_same_start(run, facts, path)
        run.progress.restore(facts["progress"])
        run.saved_step = run.progress.step
        run.resumed_config = facts.get("config") or {}
        if run.guard is not None:
            run.guard.restore(facts.get("spike_guard") or [])
        _restore_random(run, checkpoint)
        notes += changed
        return [*notes, *_find_place_in_data(run, facts)]


def check_changes(
    path: Path, facts: Mapping[str, Any], config: JobConfig, architecture: Any
) -> list[str]:
    """Raises if the config would train another function than the checkpoint holds; returns notes
    about the changes that are allowed."""
    ours = None if lacks_hf_form(architecture) else architecture.to_hf()
    before, after = facts.get("config") or {}, config.model_dump(mode="json")
    auto = config.training.model_copy(update={"objective": AUTO})
    found = refused_changes(
        before,
        after,
        (facts.get("model_config"), ours),
        objective=objective_name(auto, architecture),
        base_is_known=bool(facts.get(LEFT_OUT)),
    )
    allowed = [*config.checkpoint.allow_changes]
    allowed += OF_OPTIMIZER if config.checkpoint.skip_optimizer else ()
    if refused := [one for one in found if not is_allowed(one, allowed)]:
        raise MismatchError(refusal(path, refused))
    changed = [*found, *noted_changes(before, after)]
    return [f"{one} when the checkpoint was saved" for one in changed]


@contextmanager
def naming_keys(facts: Mapping[str, Any], config: JobConfig) -> Iterator[None]:
    """Names the changed keys that may be why a source is not what the run was trained on."""
    try:
        yield
    except ChangedSource as error:
        changes = fixed_changes(facts.get("config") or {}, config.model_dump(mode="json"))
        unnamed = [one for one in changes if one.key not in str(error)]
        if not unnamed:
            raise
        keys = any_of([str(one) for one in unnamed], "and")
        raise DataError(f"{error}. Changed since the checkpoint was saved: {keys}") from None


def check_same_start(run: Run, facts: Mapping[str, Any], path: Path) -> None:
    """Raises if the run would start from other weights than those that the objective saw
    originally."""
    saved = facts.get("start_marks") or {}
    for name, mark in saved.items():
        if run.start_marks and run.start_marks.get(name) != tuple(mark):
            raise MismatchError(
                f"{path} was trained with a reference whose {name} has changed since: restore the "
                "original file (see model.from and lora.adapter), or start a new run with "
                "--resume none"
            )


def load_tensors(run: Run, checkpoint: CheckpointReader, skip_optimizer: bool) -> list[str]:
    """Loads the weights and, unless `skip_optimizer`, the optimizer state; returns notes for the
    user."""
    run.store.wait_on_device()  # what is still being copied must not change
    state = run_tensors(run, skip_optimizer)
    taken: set[str] = set().union(*all_of(set(state)))
    if not (run.scaler.enabled and checkpoint.run.get("loss_scaling")):  # start a new one
        state = {name: value for name, value in state.items() if not name.startswith("scaler.")}
    is_local = checkpoint.index.kind == "local"
    if not is_local:
        refuse_unused(checkpoint.path, checkpoint.tensors, taken)
    if not skip_optimizer:
        check_same_optimizer(checkpoint, run.config.optimizer, state)
    rank = run.world.rank
    chosen = choose_tensors(checkpoint, state, named_buffers(run.model.parts), rank)
    load_left_out(run, checkpoint)
    if is_local:
        same_size = checkpoint.index.world_size == run.world.size
        if same_size and checkpoint.run.get("layout") != asdict(run.mesh.degrees):
            raise MismatchError(
                f"{checkpoint.path} was saved with checkpoint.type = local in another layout: it "
                f"can only be read by the same number of ranks in the same layout"
            )
        fill_local(checkpoint, chosen.tensors, rank, run.world.size)
    else:
        fill(checkpoint, chosen.tensors)
    with torch.no_grad():
        for parameter, copy in tied_copies(run.model.parts):
            copy.copy_(parameter)
            if parameter.requires_grad:
                run.optimizer.copy_state(parameter, copy)
    if chosen.renews_masks:
        renew_masks(run.model.parts)
    return chosen.notes


class Chosen(NamedTuple):
    """The tensors of a run that a checkpoint fills."""

    tensors: dict[str, Tensor]
    notes: list[str]
    renews_masks: bool


def choose_tensors(
    checkpoint: CheckpointReader, state: Mapping[str, Tensor], buffers: Collection[str], rank: int
) -> Chosen:
    """Returns the tensors of `state` that a checkpoint fills on a rank, and why others keep their
    values. They may be on the meta device."""
    is_local = checkpoint.index.kind == "local"
    is_saved = lambda n: (local_name(n, rank) if is_local else n) in checkpoint.tensors
    missing = [n for name in buffers if not is_saved(n := f"model.{name}")]
    masks = [name for name in state if is_mask(name)]
    is_dense = bool(masks) and not any(map(is_saved, masks))
    origin = Origin.from_json(checkpoint.run)
    unread = {*missing, *(masks if is_dense else ())}
    unread |= {f"model.{name}" for name in origin.names} if origin is not None else set()
    notes = []
    if is_dense:
        notes.append("the checkpoint is dense: the masks of model.sparse follow from its weights")
    if missing:
        more = f" and {len(missing) - 1} more buffers" if len(missing) > 1 else ""
        notes.append(f"the checkpoint lacks {missing[0]}{more}, which keep their initial values")
    tensors = {name: value for name, value in state.items() if name not in unread}
    return Chosen(tensors, notes, renews_masks=is_dense)


def load_left_out(run: Run, checkpoint: CheckpointReader) -> None:
    """Loads the frozen weights that the checkpoint leaves out. Those that are still frozen need not
    be saved from now on either. Called by all ranks together."""
    origin = Origin.from_json(checkpoint.run)
    if origin is None:
        return
    folder, problem = origin.folder, ""
    if run.world.is_first:
        try:
            folder = find_left_out(origin, run.config)
        except CheckpointError as error:
            problem = str(error)
    folder, problem = from_first_rank((folder, problem))
    if problem:
        raise MismatchError(problem)
    for part in run.model.parts:
        load_hf(part, folder, local_part, strict=False, moved=run.beat.pulse.moved,
                only=origin.names, new_rows=new_rows_of(run.config))  # fmt: skip
    trained = [n for n, p in named_parameters(run.model.parts).items() if p.requires_grad]
    kept = origin.names - frozenset().union(*all_of(set(trained)))
    run.origin = replace(origin, folder=folder, names=kept) if kept else None


def find_left_out(origin: Origin, config: JobConfig, look_only: bool = False) -> Path:
    """Returns the folder of the weights that a checkpoint leaves out; `look_only` compares only the
    sizes of its files."""
    given = config.checkpoint.initial_load_path
    if given is None:
        return origin.find(look_only=look_only)
    origin.check_given(Path(given).expanduser())
    return origin.find([Path(given).expanduser()], look_only)


def check_same_optimizer(
    checkpoint: CheckpointReader, settings: Optimizer, wanted: Collection[str]
) -> None:
    """Raises if the state belongs to another optimizer, even under the same names."""
    saved = (checkpoint.run.get("config") or {}).get("optimizer") or {}
    before, after = saved.get("name"), settings.name
    if before is None and (found := _of_another(checkpoint, wanted)) is not None:
        raise MismatchError(
            f"{checkpoint.path} holds {found}, which {after} does not use, so it was trained with "
            f"another optimizer; set checkpoint.skip_optimizer = true to start {after} from scratch"
        )
    if before is not None and not same_state(before, after):
        raise MismatchError(
            f"{checkpoint.path} was trained with {before}, but this run uses {after}, which cannot "
            f"use its state; set checkpoint.skip_optimizer = true to start {after} from scratch"
        )


def _of_another(checkpoint: CheckpointReader, wanted: Collection[str]) -> str | None:
    """Returns the name of a state tensor that is not wanted, for a parameter of which other state
    is wanted: a converted checkpoint does not name its optimizer, and Lion's average has the same
    name as AdamW's."""
    parameters = {name.rpartition(".")[0] for name in wanted if name.startswith(PREFIX)}
    return next(
        (
            name
            for name in checkpoint.tensors
            if name.rpartition(".")[0] in parameters and name not in wanted
        ),
        None,
    )


def check_finite(run: Run, path: Path, skip_optimizer: bool) -> None:
    """Raises if weights or optimizer state are not finite."""
    tested = learned_names(run)
    tensors = run_tensors(run, skip_optimizer).items()
    found = LargestValues((name, shard_of(one)) for name, one in tensors if name in tested)
    if names := found.not_finite():
        raise CheckpointError(
            f"{path} holds values that are not finite, in {tensors_in_words(names)}: training "
            f"cannot continue from there"
        )


def _find_place_in_data(run: Run, facts: dict[str, Any]) -> list[str]:
    """Continues with the next batch; changes of the data in the config take effect there."""
    before = facts["data"].get("plan")
    if before is None:  # converted weights, for example
        batch = run.progress.batch
        where = f"continues with its batch {batch + 1:,}" if batch else "is read from its beginning"
        return [f"the checkpoint does not record which data it has seen: the data {where}"]
    plan, asked = Plan.from_json(before), run.dataset.plan
    with naming_keys(facts, run.config):
        run.dataset = run.dataset.continued(before, run.progress.batch)
    former = former_names(plan, asked)
    notes = [
        f"{name} is the source that this run knows as {known}" for name, known in former.items()
    ]
    notes += [
        f"{name} is new to this run: it is read from its beginning"
        for name in asked.sources
        if name not in plan.sources and name not in former
    ]
    segments = run.dataset.plan.segments
    if len(segments) > 1 and segments[-1].first_batch == run.progress.batch:
        what = ", ".join(differences(segments[-2], segments[-1]))
        notes.append(f"from batch {run.progress.batch} on, the data changes: {what}")
    return notes


def _restore_random(run: Run, checkpoint: CheckpointReader) -> None:
    """Restores the random streams of every rank. If the number of ranks has changed, the streams
    start again from the seed."""
    if checkpoint.index.world_size != run.world.size:
        return
    prefix = f"rng.{run.world.rank}."
    local = "" if checkpoint.index.kind != "local" else f"rank_{run.world.rank:05d}/"
    prefix = local + prefix
    names = [name for name in checkpoint.tensors if name.startswith(prefix)]
    if names:
        state = {name.removeprefix(prefix): checkpoint.read(name) for name in names}
        set_random_state(state, run.device)


def random_state(device: torch.device) -> dict[str, Tensor]:
    """Returns the random states of this rank as tensors of a fixed size."""
    version, internal, gauss = random.getstate()
    python = [version, *internal, gauss is not None, _bits(gauss or 0.0)]
    _, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    numpy = [*np.asarray(keys).tolist(), position, has_gauss, _bits(float(cached))]
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
    random.setstate((version, tuple(internal), _number(gauss) if has_gauss else None))
    *keys, position, has_gauss, gauss = state["numpy"].tolist()
    np.random.set_state(
        ("MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, _number(gauss))
    )
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and "device" in state:
        torch.cuda.set_rng_state(state["device"], device)


def _bits(number: float) -> int:
    """Returns the bits of a float64 as an int64."""
    return int(struct.unpack("<q", struct.pack("<d", number))[0])


def _number(bits: int) -> float:
    return float(struct.unpack("<d", struct.pack("<q", bits))[0])


def set_seeds(debug: Debug) -> None:
    """Seeds every random stream, and makes torch deterministic if the config asks for it."""
    random.seed(debug.seed)
    np.random.seed(debug.seed % 2**32)
    torch.manual_seed(debug.seed)
    if debug.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.benchmark = False
        torch.use_deterministic_algorithms(True, warn_only=debug.deterministic_warn_only)
