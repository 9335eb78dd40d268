"""One `JobConfig`, one class per TOML section.

Section and key names are torchtitan's, so that its files load unchanged; `[data]` and `[health]`
are ours. A key is here only if something reads it; keys of other trainers that have no use here are
listed in `apps/dialects`, with a note for each. Every field has a description, because `overland
config reference` and the JSON Schema are generated from these files alone: `training.py`, `data.py`
and `run.py`, each with the sections of that kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator

from overland.config.schema.base import HOLDS_A_PATH, Section
from overland.config.schema.data import (
    OLDER_MIXTURES,
    Data,
    DataSource,
    Images,
    Preference,
    Sft,
    Validation,
    ValidationSet,
)
from overland.config.schema.run import (
    NO_DESCRIPTION,
    Checkpoint,
    Comm,
    Debug,
    Health,
    Job,
    Metrics,
    Profiling,
)
from overland.config.schema.training import (
    ActivationCheckpoint,
    Compile,
    Lora,
    LRScheduler,
    Model,
    Optimizer,
    Parallelism,
    ParameterGroup,
    Sparse,
    Training,
)

IN_PLACE_OF = {
    "training.epochs": "training.steps",
    "lr_scheduler.warmup_ratio": "lr_scheduler.warmup_steps",
    "validation.sequences": "validation.steps",
    "lr_scheduler.min_lr": "lr_scheduler.min_lr_factor",
    "training.dataset_path": "training.dataset",
    "validation.dataset_path": "validation.dataset",
}
"""Keys that set the same thing in two ways: only one of the two may be set, and one on the command
line replaces the other in a file."""

OLDER_WORDS = {"data.mixture": OLDER_MIXTURES}
"""Former names of values: today's are used, and a note says so."""

SWITCHES = {
    "sft": ("sft.shape",),
    "lora": ("lora.rank", "lora.adapter"),
    "preference": ("preference.loss",),
}
"""Sections that have no effect until one of these keys is set."""

SFT_DEFAULTS: dict[str, Any] = {"data.packing": "best_fit", "data.document_mask": True}
"""Defaults of these keys with sft.shape: conversations stay separate and whole."""
PAIR_DEFAULTS: dict[str, Any] = {"data.packing": "trunc"}
"""Defaults with preference.loss: each pair is a row."""


class JobConfig(BaseModel):
    """All settings of a run."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    job: Job = Job()
    model: Model = Model()
    training: Training = Training()
    parallelism: Parallelism = Parallelism()
    optimizer: Optimizer = Optimizer()
    lr_scheduler: LRScheduler = LRScheduler()
    data: Data = Data()
    images: Images = Images()
    sft: Sft = Sft()
    lora: Lora = Lora()
    preference: Preference = Preference()
    validation: Validation = Validation()
    checkpoint: Checkpoint = Checkpoint()
    activation_checkpoint: ActivationCheckpoint = ActivationCheckpoint()
    compile: Compile = Compile()
    metrics: Metrics = Metrics()
    profiling: Profiling = Profiling()
    comm: Comm = Comm()
    health: Health = Health()
    debug: Debug = Debug()

    @model_validator(mode="after")
    def _validates_what_is_held_out(self) -> JobConfig:
        if self.data.holdout and self.validation.enable is None:
            self.validation = self.validation.model_copy(update={"enable": True})
        return self

    def value(self, key: str) -> Any:
        """Returns a value, by `section.attribute`, also one in a table below."""
        found: Any = self
        for name in key.split("."):
            found = found[name] if isinstance(found, dict) else getattr(found, name)
        return found

    def having(self, values: Mapping[str, Any]) -> JobConfig:
        """Returns a copy with these values, which are given as `section.attribute`."""
        update: dict[str, Any] = {}
        for key, value in values.items():
            section, _, name = key.partition(".")
            before = update.get(section, getattr(self, section))
            update[section] = before.model_copy(update={name: value})
        return self.model_copy(update=update)
