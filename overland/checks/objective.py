"""What is trained on, and what changes the model: known by name, and fitting the batch."""

from __future__ import annotations

from collections.abc import Iterator

from overland.config.errors import Problem
from overland.config.load import Loaded
from overland.errors import ModelError, ObjectiveError
from overland.models.registry import model_config
from overland.models.transform import make_transforms
from overland.objectives import objective_for


def check_objective(loaded: Loaded) -> Iterator[Problem]:
    """The objective exists, and rows that belong together stay together."""
    training, layout = loaded.config.training, loaded.config.parallelism
    try:
        architecture = model_config(loaded.config.model)
    except (ModelError, OSError):
        return
    if training.objective == "auto" and not training.z_loss and not training.objective_options:
        return  # it needs no torch to know that this is fine
    key = "training.objective_options" if training.objective_options else "training.z_loss"
    key = key if training.objective == "auto" else "training.objective"
    try:
        objective = objective_for(training, architecture)
    except ObjectiveError as error:
        value = getattr(training, key.partition(".")[2])
        yield Problem(str(error), loaded.where(key), key, value)
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
                f"{training.objective} takes {objective.rows_per_sample} rows together: expected a "
                f"multiple of {objective.rows_per_sample}"
            )
            yield Problem(message, loaded.where(name), name, size)


def check_transforms(loaded: Loaded) -> Iterator[Problem]:
    for name, options in loaded.config.model.transforms.items():
        key = f"model.transforms.{name}"
        try:
            make_transforms({name: options})
        except ModelError as error:
            yield Problem(str(error), loaded.where(key), key, options)
