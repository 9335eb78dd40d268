"""Checks that the optimizer, the learning-rate schedule and the objective exist, accept their
options, and fit the run; also epochs, parameter groups, and packing of conversations.
"""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase

from overland.checks.files import C4
from overland.checks.model import nearest_parameters, parameter_names
from overland.config.errors import NO_VALUE, Problem, ProblemKind
from overland.config.fields import all_keys
from overland.config.load import Loaded
from overland.config.schema import IN_PLACE_OF, Optimizer
from overland.data.wanted import WantedSource, sources_of
from overland.errors import DataError, ModelError, ObjectiveError, OptimizerError
from overland.models.flops import trained_parameters
from overland.models.registry import model_config
from overland.objectives import objective_for
from overland.optimizers.elementwise import AdamW
from overland.optimizers.registry import optimizer_names, rules_of
from overland.words import any_of, number_of

ADAMW_KEYS = ("beta1", "beta2", "eps", "bf16_moments")
WARMUP = "lr_scheduler.warmup_steps"


def check_optimizer(loaded: Loaded) -> Iterator[Problem]:
    settings = loaded.config.optimizer
    try:
        rules = rules_of(settings)
    except OptimizerError as error:
        known = settings.name in optimizer_names()
        key = "options" if known and settings.options else "name"
        yield loaded.problem(f"optimizer.{key}", str(error))
        return
    if any(isinstance(rule, AdamW) for rule in rules):
        return
    for name in ADAMW_KEYS:  # a run folder's config sets all of them
        if getattr(settings, name) != Optimizer.model_fields[name].default:
            message = f"is an option of AdamW; {settings.name} takes its own in [optimizer.options]"
            yield loaded.problem(f"optimizer.{name}", message)


def check_moments(loaded: Loaded) -> Iterator[Problem]:
    dtype = loaded.config.training.dtype
    if loaded.config.optimizer.bf16_moments and dtype != "float32":
        message = f"needs training.dtype = float32, not {dtype}"
        yield loaded.problem("optimizer.bf16_moments", message)


def check_groups(loaded: Loaded) -> Iterator[Problem]:
    """Checks that every pattern matches a parameter, and not only parameters of earlier groups."""
    groups = loaded.config.optimizer.groups
    section, lora = loaded.config.model, loaded.config.lora
    if not groups:
        return
    names: list[str] = []
    if section.transforms or not lora.rank:
        names += parameter_names(section, all_names=False)
    if lora.rank:
        names += trained_parameters(model_config(section), lora)
    left = set(names)
    for group in groups:
        matched = {name for name in names if fnmatchcase(name, group.pattern)}
        message = ""
        if not matched:
            near = nearest_parameters(group.pattern, names)
            message = f"matches no parameter; the nearest names are {near}"
        elif all(any(fnmatchcase(name, one) for one in section.freeze) for name in matched):
            message = "matches only parameters that model.freeze freezes"
        elif not matched & left:
            message = (
                "matches only parameters of earlier groups, and the first match counts; put the "
                "narrower pattern first"
            )
        if message:
            yield loaded.problem("optimizer.groups", f"'{group.pattern}' {message}", NO_VALUE)
        left -= matched


def check_units(loaded: Loaded) -> Iterator[Problem]:
    """Checks that a setting with two forms is set in only one of them. torchtitan's files name a
    dataset and its path, and mean the path."""
    for key, other in IN_PLACE_OF.items():
        value, also = loaded.config.value(key), loaded.config.value(other)
        is_path = key.endswith(".dataset_path")
        if value is None or not (loaded.is_set(other) or also != all_keys()[other].default):
            continue
        if is_path and also == loaded.config.images.if_missing:
            continue  # "random", as runs of the training stub recorded it
        message = f"{other} is set too ({loaded.where(other)}): remove one of them"
        kind: ProblemKind = "invalid"
        # The default is what older runs have in their config.toml beside the path.
        unused = (*C4, all_keys()[other].default)
        if is_path and isinstance(also, str) and also in unused:
            message, kind = f"the name in {other} has no effect", "note"
        yield loaded.problem(key, message, kind=kind)


def _is_random_tokens(source: WantedSource) -> bool:
    """Returns whether a source is endless. An epoch of synthetic images has images.count of
    them."""
    try:
        return source.is_made and source.made_images() is None
    except (DataError, ModelError, OSError):  # another check reports it
        return False


def check_epochs(loaded: Loaded) -> Iterator[Problem]:
    """Refuses epochs without a single, finite source."""
    config = loaded.config
    sources, message = sources_of(config), ""
    if config.training.epochs is None:
        return
    names = [name for name, source in sources.items() if source.asked.weight]
    if len(names) > 1:
        message = f"{any_of(names, 'and')} have different epochs; set training.steps"
    elif config.data.mixture == "documents":
        message = 'with data.mixture = "documents", an epoch has no end; set it to "sequences"'
    elif any(_is_random_tokens(sources[name]) for name in names):
        message = "random tokens are endless and have no epochs; set training.steps"
    if message:
        yield loaded.problem("training.epochs", message)


def check_warmup(loaded: Loaded) -> Iterator[Problem]:
    """Notes if warm-up and decay do not fit into the schedule. They are only notes, since a short
    trial run (`training.steps=20`) is meant to end during its warm-up."""
    schedule, training = loaded.config.lr_scheduler, loaded.config.training
    if training.epochs is not None and not schedule.total_steps:
        return  # the number of steps is known only once the data is counted
    spans = "lr_scheduler.total_steps" if schedule.total_steps else "training.steps"
    total = schedule.total_steps or training.steps
    warmup, decay = schedule.warmup(total), round((schedule.decay_ratio or 0) * total)
    if warmup > total:
        default = "" if loaded.is_set(WARMUP) else ", the default,"
        message = f"the warm-up{default} is longer than the schedule ({spans} = {total}), so the "
        message += "learning rate does not reach optimizer.lr"
        yield loaded.problem(WARMUP, message, warmup, "note")
    elif warmup + decay > total:
        message = (
            f"{number_of(warmup, 'step')} of warm-up and {decay:,} of decay are more than "
            f"{spans} = {total}"
        )
        yield loaded.problem("lr_scheduler.decay_ratio", message, kind="note")


def check_lowest_rate(loaded: Loaded) -> Iterator[Problem]:
    lowest, peak = loaded.config.lr_scheduler.min_lr, loaded.config.optimizer.lr
    if lowest is not None and lowest > peak:
        message = f"expected at most the peak learning rate (optimizer.lr = {peak:g})"
        yield loaded.problem("lr_scheduler.min_lr", message)


def check_sft(loaded: Loaded) -> Iterator[Problem]:
    """Checks that packing suits conversations, and what is done to long ones."""
    sft, data = loaded.config.sft, loaded.config.data
    if sft.shape == "off":
        return
    if sft.too_long == "split" and data.packing == "trunc":
        message = 'data.packing = "trunc" drops what does not fit; set it to "best_fit"'
        yield loaded.problem("sft.too_long", message)
    if data.packing == "pack":
        message = (
            "cuts conversations wherever a sequence ends, and the rest is learned without its "
            'context; "best_fit" keeps them whole'
        )
        yield loaded.problem("data.packing", message, kind="note")


def _check_preference(loaded: Loaded) -> Iterator[Problem]:
    """Checks that each pair is a row, and that there is a reference model."""
    config, settings = loaded.config, loaded.config.preference
    if settings.loss == "off":
        return
    if config.sft.shape not in ("auto", "preference"):
        message = 'needs pairs of answers; set sft.shape = "preference"'
        yield loaded.problem("preference.loss", message)
    if config.data.packing != "trunc":
        message = f'with preference.loss = "{settings.loss}" each pair is a row; expected "trunc"'
        yield loaded.problem("data.packing", message)
    if settings.reference == "adapter_off" and not config.lora.rank:
        message = "there are no adapters to switch off; set lora.rank, or remove this key"
        yield loaded.problem("preference.reference", message)
    elif settings.reference == "adapter_off" and config.lora.modules_to_save:
        message = "lora.modules_to_save cannot be switched off; remove this key"
        yield loaded.problem("preference.reference", message)


def check_objective(loaded: Loaded) -> Iterator[Problem]:
    """Checks that the objective exists, and that rows that belong together stay together."""
    training, layout = loaded.config.training, loaded.config.parallelism
    architecture = model_config(loaded.config.model)
    yield from _check_preference(loaded)
    if training.objective == "auto" and not training.z_loss and not training.objective_options:
        return  # valid, without importing torch
    key = "training.objective_options" if training.objective_options else "training.z_loss"
    key = key if training.objective == "auto" else "training.objective"
    try:
        objective = objective_for(loaded.config, architecture)
    except ObjectiveError as error:
        yield loaded.problem(key, str(error))
        return
    sizes = {"training.local_batch_size": training.local_batch_size}
    if training.global_batch_size != -1:
        sizes["training.global_batch_size"] = training.global_batch_size
    if layout.pipeline_parallel_degree > 1:
        name = "parallelism.pipeline_parallel_microbatch_size"
        sizes[name] = layout.pipeline_parallel_microbatch_size
    if loaded.config.validation.enable and loaded.config.validation.local_batch_size is not None:
        sizes["validation.local_batch_size"] = loaded.config.validation.local_batch_size
    for name, size in sizes.items():
        if size % objective.rows_per_sample:
            message = (
                f"{training.objective} takes {objective.rows_per_sample} rows together; expected a "
                f"multiple of {objective.rows_per_sample}"
            )
            yield loaded.problem(name, message)
