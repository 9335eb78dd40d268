"""What may change in the config of a run that resumes, key by key. Does not import torch.

A change is one of four things: *refused*, because it would train something other than what the
checkpoint holds; *fixed*, refused by the data, whose order or contents it would change; *noted*; or
*free*. Every key of the schema is listed here, and docs/train.md shows the same table.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from overland.config.errors import show_value
from overland.config.schema import OLDER_WORDS
from overland.words import any_of

REFUSED = {
    "model": ("from", "name", "flavor", "config", "overrides", "freeze", "transforms", "sparse"),
    "training": ("objective", "objective_options", "z_loss"),
    "optimizer": ("name",),
    "data": ("vocab_size",),
    "images": ("instance_norm",),
    "sft": ("new_tokens", "neftune_alpha"),
    "lora": (
        "rank", "alpha", "dropout", "targets", "exclude", "layers", "rank_pattern",
        "alpha_pattern", "rslora", "dora", "modules_to_save", "base", "adapter",
    ),
    "preference": ("loss", "beta", "label_smoothing", "simpo_gamma"),
    "checkpoint": ("initial_load_path",),
}  # fmt: skip
"""What changes the trained function, or would have no effect on a run that has begun."""

FIXED = {
    "model": ("hf_assets_path",),
    "training": ("column", "subset", "split"),
    "data": ("mixture", "holdout", "window_documents", "add_bos", "add_eos"),
    "images": ("shape", "count", "pad"),
    "sft": (
        "shape", "chat_template", "template_options", "date", "learn", "too_long",
        "parse_specials", "special_tokens_in_content", "skip_unlearned",
    ),
    "preference": ("max_prompt", "prompt_side", "answer_side"),
    "debug": ("seed",),
}  # fmt: skip
"""What changes the order of the data or the contents of a source: the data plan refuses it."""

NOTED = {
    "model": ("attention",),
    "training": (
        "dataset", "dataset_path", "local_batch_size", "global_batch_size", "seq_len", "last_batch",
        "max_norm", "dtype", "mixed_precision_param", "mixed_precision_reduce", "float8",
        "enable_cpu_offload", "kernels",
    ),
    "optimizer": ("lr", "beta1", "beta2", "eps", "weight_decay", "bf16_moments", "options",
                  "groups"),
    "lr_scheduler": (
        "warmup_steps", "warmup_ratio", "total_steps", "decay_ratio", "decay_type",
        "min_lr_factor", "min_lr",
    ),
    "data": ("sources", "packing", "last_block", "document_mask", "group_by_length",
             "bad_documents"),
    "lora": ("lr_ratio",),
    "preference": ("reference",),
    "validation": (
        "dataset", "dataset_path", "column", "subset", "split", "sets", "sequences", "steps",
        "seq_len",
    ),
}  # fmt: skip
"""What a run may continue with from the next step on; it says so."""

BY_THE_PLAN = {
    "training": ("dataset", "dataset_path", "local_batch_size", "global_batch_size", "seq_len"),
    "data": ("sources", "packing", "last_block", "document_mask", "group_by_length"),
}
"""Noted too, but in the words of the data plan."""

# Fields of a config.json that do not change what the model computes.
NO_MATTER = {"max_position_embeddings", "initializer_range", "bos_token_id", "eos_token_id",
             "pad_token_id"}  # fmt: skip
OF_OPTIMIZER = ("optimizer.name", "model.freeze")  # a new optimizer fits any of these
IN_PART = ("lora.base", "model.sparse")  # refused for some values, noted for others
PATHS = ("checkpoint.initial_load_path", "lora.adapter", "validation.dataset_path")
ARCHITECTURE = ("name", "flavor", "config", "overrides")


class Change(NamedTuple):
    """A key whose value has changed since a checkpoint was saved."""

    key: str
    before: Any
    after: Any

    def __str__(self) -> str:
        key, before, after = self.inner()
        return f"{key} is {show_value(after)}; it was {show_value(before)}"

    def inner(self) -> Change:
        """Returns the change inside of a table, if it is a single one: long tables look alike."""
        if isinstance(self.before, Mapping) and isinstance(self.after, Mapping):
            old, new = self.before, self.after
            names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
            if len(names) == 1:
                (name,) = names
                return Change(f"{self.key}.{name}", old.get(name), new.get(name)).inner()
        return self


def rule_of(key: str) -> str:
    """Returns `refused`, `fixed`, `noted` or `free` for a key of the schema."""
    tables = {"refused": REFUSED, "fixed": FIXED, "noted": NOTED}
    return next((rule for rule, table in tables.items() if _is_in(table, key)), "free")


def refused_changes(
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    architecture: tuple[Mapping[str, Any] | None, Mapping[str, Any] | None] = (None, None),
    objective: str = "next_token",
    base_is_known: bool = False,
) -> list[Change]:
    """Returns what a resumed run may not change, or only if `checkpoint.allow_changes` says so.

    Args:
        before: The config that the checkpoint was saved with, as a dictionary.
        after: That of the run.
        architecture: The model's config.json then and now, if it has one: what counts is what the
            keys of [model] resolve to.
        objective: The model's own, which is what `training.objective = "auto"` resolves to.
        base_is_known: Whether the checkpoint knows the frozen weights by their contents.
    """
    found = [
        one
        for one in _changes(REFUSED, before, after)
        if not _same(one.key, one.before, one.after, objective)
        and one.key not in {f"model.{name}" for name in ARCHITECTURE}
        and not (base_is_known and one.key == "checkpoint.initial_load_path" and one.after)
    ]
    model = _model_changes(before.get("model", {}), after.get("model", {}), *architecture)
    return [*model, *found]


def noted_changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Change]:
    """Returns the other changes that a run reports; those of the data plan are in its words."""
    in_part = [one for one in _changes(REFUSED, before, after) if one.key in IN_PART and one.before]
    noted = [
        one
        for one in _changes(NOTED, before, after)
        if not _is_in(BY_THE_PLAN, one.key)
        and not (one.key in PATHS and same_place(one.before, one.after))
        # Which of them auto is depends on the device, which `check` does not know.
        and (one.key, one.after) != ("training.mixed_precision_param", "auto")
    ]
    return noted + [one for one in in_part if _same(one.key, one.before, one.after)]


def fixed_changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Change]:
    """Returns the changed keys that may be why a source is not what it was."""
    return _changes(FIXED, before, after)


def is_allowed(change: Change, allowed: Collection[str]) -> bool:
    parts = change.key.split(".")
    return any(".".join(parts[:n]) in allowed for n in range(2, len(parts) + 1))


def refusal(path: Path, changes: Collection[Change]) -> str:
    """Returns a sentence that names the keys, and the ways out."""
    shown = [one.inner() for one in changes]
    changed = any_of([f"{one.key} = {show_value(one.before)}" for one in shown], "and")
    now = any_of([show_value(one.after) for one in shown], "and")
    keys = json.dumps([one.key for one in changes])
    way_out = "start a new run with `--resume none`"
    if all(one.key in OF_OPTIMIZER for one in changes):
        way_out += ", start a new optimizer with `--skip-optimizer`"
    return (
        f"{path} was trained with {changed}, and this config has {now}, which would train "
        f"something else or have no effect: set {'it' if len(changes) == 1 else 'them'} back, "
        f"{way_out}, or, if the tensors of model and optimizer keep their shapes, set "
        f"checkpoint.allow_changes = {keys} to continue with the change"
    )


def same_place(one: str | None, other: str | None) -> bool:
    """Whether two paths may mean the same place. A run's own config makes relative paths absolute
    when it is loaded from elsewhere."""
    if one is None or other is None:
        return one == other
    a, b = Path(one).expanduser(), Path(other).expanduser()
    if a.resolve() == b.resolve():
        return True
    short, long = sorted((a, b), key=lambda path: path.is_absolute())
    parts = [part for part in short.parts if part not in (".", "..")]
    return not short.is_absolute() and list(long.parts[-len(parts) :]) == parts


def _changes(
    table: Mapping[str, Collection[str]], before: Mapping[str, Any], after: Mapping[str, Any]
) -> list[Change]:
    """Returns the keys of a table that both configs have, with different values; `before` may have
    words of an earlier version."""
    both = [
        (f"{section}.{name}", before[section][name], after[section][name])
        for section, names in table.items()
        for name in names
        if name in before.get(section, {}) and name in after.get(section, {})
    ]
    changes = [
        Change(key, OLDER_WORDS.get(key, {}).get(str(old), old), new) for key, old, new in both
    ]
    return [one for one in changes if one.before != one.after]


def _is_in(table: Mapping[str, Collection[str]], key: str) -> bool:
    section, _, name = key.partition(".")
    return name in table.get(section, ())


def _same(key: str, old: Any, new: Any, objective: str = "") -> bool:
    """Whether two values of a key train the same."""
    if key in PATHS:
        return same_place(old, new)
    if key == "training.objective":
        return {old, new} == {"auto", objective}
    if key == "lora.base":  # the others only round
        return (old == "nf4") == (new == "nf4")
    if key == "model.sparse":  # a dense run may become sparse, and masks be renewed at other steps
        return old is None or {**old, "refresh": 1} == {**(new or {}), "refresh": 1}
    if isinstance(old, list) and isinstance(new, list) and key != "model.transforms":
        return sorted(old, key=str) == sorted(new, key=str)
    return bool(old == new)


def _model_changes(
    old: Mapping[str, Any],
    new: Mapping[str, Any],
    saved: Mapping[str, Any] | None,
    ours: Mapping[str, Any] | None,
) -> list[Change]:
    """Returns the changes of the architecture, under the key that makes them."""
    changed = [name for name in ARCHITECTURE if name in old and old[name] != new.get(name)]
    if saved is None or ours is None:  # a custom model: its keys are all that is known
        return [Change(f"model.{name}", old[name], new.get(name)) for name in changed]
    before, after = json.loads(json.dumps([saved, ours]))
    names = [
        name
        for name in dict.fromkeys((*before, *after))
        if before.get(name) != after.get(name) and name not in NO_MATTER
    ]
    given = {**(old.get("overrides") or {}), **(new.get("overrides") or {})}
    others = [name for name in changed if name != "overrides"]
    if not others and any(name in given for name in names):  # the rest follows from these
        names = [name for name in names if name in given]
    table = dict.fromkeys(given, "overrides")
    default = others[-1] if others else "config"
    return [
        Change(f"model.{table.get(name, default)}.{name}", before.get(name), after.get(name))
        for name in names
    ]
