"""Decides where a run starts: from its newest intact checkpoint, given weights (start.py) or
initial ones, and which changes of the config a resumed run accepts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from overland.checkpoint.folder import committed, newest_in, set_later_aside, step_of, uncommitted
from overland.checkpoint.lazy import LEFT_OUT, Origin, counting
from overland.checkpoint.plan import local_name
from overland.checkpoint.read import (
    CheckpointReader,
    fill,
    fill_local,
    open_checkpoint,
    refuse_unused,
)
from overland.config.changes import (
    OF_OPTIMIZER,
    fixed_changes,
    is_allowed,
    noted_changes,
    refusal,
    refused_changes,
)
from overland.config.schema import Checkpoint, JobConfig, Optimizer
from overland.data.corpora import Preparer
from overland.data.holdout import kept_share
from overland.data.plan import ChangedSource, Plan, differences, former_names
from overland.data.prepare import kept_policy
from overland.data.tokenizer import UNKNOWN
from overland.errors import CheckpointError, DataError, MismatchError, ModelError
from overland.models.registry import lacks_hf_form
from overland.models.sparse import is_mask, renew_masks
from overland.objectives.registry import AUTO, objective_name
from overland.optimizers.optimizer import PREFIX
from overland.optimizers.registry import same_state
from overland.parallel.comm import all_of, from_first_rank
from overland.parallel.sharding import named_buffers, tied_copies
from overland.plugins import plugin
from overland.run_folder import CONFIG, RunFolder
from overland.training.run import Run
from overland.training.start import (
    load_left_out,
    load_start,
    mark_start,
    note_origin,
    together,
    try_together,
)
from overland.training.state import check_finite, restore_random, run_tensors
from overland.words import any_of

Report = Callable[[str], None]


def start_from(run: Run, report: Report) -> None:
    """Resumes a checkpoint or loads weights, as configured; otherwise the initial weights stay."""
    settings = run.config.checkpoint
    if run.objective.keeps_start:  # a resumed run is also compared with its original start
        load_start(run)
        run.objective.start(run.model.parts)
        run.start_marks = mark_start(run)
    if settings.resume not in ("auto", "none"):
        path = Path(settings.resume).expanduser().resolve()  # it may be a link named by time
        path = from_first_rank(newest_in(path) if run.world.is_first else path)
        made = adopted(run, path, report)
        if error := try_to_restore(run, made, report):
            if made != path and run.world.is_first:  # nobody can resume it
                run.store.disk.remove_folder(made)
            raise error
        put_later_ones_aside(run, report)
        return
    if settings.enable and settings.resume == "auto" and resume_newest(run, report):
        return
    if not run.objective.keeps_start:
        load_start(run)
    if settings.initial_load_path is not None:
        source = Path(settings.initial_load_path).expanduser()
        report(f"starting from the weights in {source}")
        run.origin = note_origin(run, source)
        if run.origin is not None:
            report(
                f"{len(run.origin.names):,} frozen tensors stay in {source}, and checkpoints omit "
                "them (set checkpoint.type = full to include them)"
            )
    if run.config.lora.adapter is not None:
        report(f"starting from the adapters in {run.config.lora.adapter}")


def adopted(run: Run, path: Path, report: Report) -> Path:
    """Returns a checkpoint that can be resumed: `path`, or one converted from the training stub's
    four files there. Called by all ranks together."""
    four_files = plugin("four_files")
    if not from_first_rank(four_files.is_four_files(path)):
        return path
    made = path

    def adopt() -> None:
        nonlocal made
        if run.world.is_first:
            with counting(run.beat.pulse.moved):
                made = four_files.adopt(path, run.store.folder, run.store.disk)

    together(run, adopt)
    made = from_first_rank(made)
    report(f"{path} holds files written by torch.save; they were converted to {made}")
    return made


def preparer_for(config: JobConfig, folder: RunFolder) -> Preparer:
    """Returns how to prepare the data of a run. A resumed run keeps what it began with: its
    tokenizer, the share that each source holds out, and what is added around documents."""
    own = config.checkpoint.resume == "auto" and committed(folder.checkpoints)
    run = _resumed(config.checkpoint, folder)
    return Preparer(
        tokenizer=folder.tokenizer if own else None,
        holdout=kept_share(run, config.data) if run is not None else None,
        policy=kept_policy(run) if run is not None else UNKNOWN,
    )


def _resumed(settings: Checkpoint, folder: RunFolder) -> Path | None:
    """Returns the folder of the run that is resumed, if any."""
    if settings.resume == "auto":
        return folder.root if committed(folder.checkpoints) else None
    if settings.resume == "none":
        return None
    step = newest_in(Path(settings.resume).expanduser().resolve())
    return step.parent if (step.parent / CONFIG).is_file() else step.parent.parent


def resume_newest(run: Run, report: Report) -> bool:
    """Resumes the newest readable checkpoint, reporting every damaged one on the way. Returns
    whether there was one."""
    folder = run.store.folder
    names: list[str] = []
    if run.world.is_first:
        elsewhere = committed(run.folder.fallback) if run.folder.fallback is not None else []
        names = [str(path) for path in sorted([*committed(folder), *elsewhere], key=step_of)]
        for path in uncommitted(folder):
            report(f"note: {path} was never committed, so it is not a checkpoint")
    names = from_first_rank(names)
    for name in reversed(names):
        error = try_to_restore(run, Path(name), report)
        if error is None:
            put_later_ones_aside(run, report)
            return True
        if isinstance(error, MismatchError):  # older ones do not fit either
            raise error
        report(f"{error}. Trying an older checkpoint")
    if names:
        raise CheckpointError(
            f"none of the {len(names)} checkpoints in {folder} can be read; start a new run "
            f"in another folder with `--resume none`"
        )
    return False


def try_to_restore(run: Run, path: Path, report: Report) -> CheckpointError | None:
    """Restores the checkpoint; returns, on all ranks, the error if any rank could not."""
    notes: list[str] = []

    def load() -> None:
        try:
            notes.extend(restore(run, path, run.config.checkpoint.skip_optimizer))
        except (KeyError, TypeError, ValueError) as error:  # made by hand, for example
            if isinstance(error, ModelError):
                raise
            words = f"{type(error).__name__} {error}"
            raise CheckpointError(
                f"{path} is not a checkpoint that a run has saved: {words}"
            ) from error

    if error := try_together(run, load):
        return error
    own = [run.store.folder, *([run.folder.fallback] if run.folder.fallback else [])]
    run.resumed_own = path.parent.resolve() in [folder.resolve() for folder in own]
    fresh = ", with a new optimizer" if run.config.checkpoint.skip_optimizer else ""
    report(f"resumed {path} at step {run.progress.step}{fresh}")
    for note in notes:
        report(f"note: {note}")
    return None


def put_later_ones_aside(run: Run, report: Report) -> None:
    if run.world.is_first:
        if run.config.lora.rank:
            later_adapters = plugin("exports").set_later_adapters_aside
            later_adapters(run.folder.root, run.progress.step, run.store.disk)
        for later in set_later_aside(run.store.folder, run.progress.step, run.store.disk):
            report(f"a later checkpoint is kept as {later}")


def restore(run: Run, path: Path, skip_optimizer: bool = False) -> list[str]:
    """Restores the run from a checkpoint; returns notes for the user."""
    with open_checkpoint(path, run.beat.pulse.moved, run.store.group) as checkpoint:
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
        restore_random(run, checkpoint)
        notes += changed
        return [*notes, *_find_place_in_data(run, facts)]


def check_changes(
    path: Path, facts: Mapping[str, Any], config: JobConfig, architecture: Any
) -> list[str]:
    """Raises if the config would train something other than the checkpoint holds; returns notes
    about the changes that are allowed."""
    ours = None if lacks_hf_form(architecture) else architecture.to_hf()
    before, after = facts.get("config") or {}, config.model_dump(mode="json")
    found = refused_changes(
        before,
        after,
        (facts.get("model_config"), ours),
        objective=objective_name(
            config.having({"training.objective": AUTO}).training, architecture
        ),
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
    """Raises if the run would start from weights other than those that the objective saw
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
    rank, buffers = run.world.rank, named_buffers(run.model.parts)
    settings = None if skip_optimizer else run.config.optimizer
    chosen = choose_tensors(checkpoint, state, buffers, taken, settings, rank)
    load_left_out(run, checkpoint)
    if checkpoint.index.kind == "local":
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
    checkpoint: CheckpointReader,
    state: Mapping[str, Tensor],
    buffers: Collection[str],
    taken: Collection[str],
    optimizer: Optimizer | None,
    rank: int = 0,
) -> Chosen:
    """Returns the tensors of `state` that a checkpoint fills on a rank, and why others keep their
    values. They may be on the meta device. Raises if weights would be left unused, since no rank
    has `taken` them, or if the state is of another optimizer than this one."""
    is_local = checkpoint.index.kind == "local"
    if not is_local:  # which holds the ranks' own pieces
        refuse_unused(checkpoint.path, checkpoint.tensors, taken)
    if optimizer is not None:
        check_same_optimizer(checkpoint, optimizer, state)
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


def check_same_optimizer(
    checkpoint: CheckpointReader, settings: Optimizer, wanted: Collection[str]
) -> None:
    """Raises if the state belongs to another optimizer, even under the same names."""
    saved = (checkpoint.run.get("config") or {}).get("optimizer") or {}
    before, after, was = saved.get("name"), settings.name, ""
    if before is not None:
        was = "" if same_state(before, after) else f"was trained with {before}"
    else:  # a converted one, and Lion's average has the same name as AdamW's
        parameters = {name.rpartition(".")[0] for name in wanted if name.startswith(PREFIX)}
        foreign = (name for name in checkpoint.tensors if name not in wanted)
        if name := next((one for one in foreign if one.rpartition(".")[0] in parameters), ""):
            was = f"holds {name}, so it was trained with another optimizer"
    if was:
        raise MismatchError(
            f"{checkpoint.path} {was}, and {after}, which this run uses, cannot use its state; set "
            f"checkpoint.skip_optimizer = true to start {after} from scratch"
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
