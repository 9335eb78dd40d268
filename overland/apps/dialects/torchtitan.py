"""torchtitan's TOML: files of v0.2 load unchanged, and older ones too, with notes on what changed.

Works on raw keys, so a file in current keys passes through untouched. Renamed keys are in
`torchtitan_keys`; the few whose values change as well have a function here.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

from overland.apps.dialects.draft import Draft, is_one_of
from overland.apps.dialects.torchtitan_keys import (
    EXPERTS,
    IGNORED,
    IGNORED_SECTIONS,
    MX,
    REFUSED,
    REFUSED_SECTIONS,
    RENAMED,
    UNKNOWN,
)
from overland.config.source import Entries, Entry, KeyPath, Translated

HARMLESS = "torchtitan's default values, so nothing is lost"
SAME = "Overland already works this way"
WEIGHTS_IN_HF = ("checkpoint", "initial_load_in_hf")
INITIAL_WEIGHTS = ("checkpoint", "initial_load_path")
ASSETS = ("model", "hf_assets_path")
MODEL_FROM = ("model", "from")
FLOAT8 = ("training", "float8")
NO_CONVERTER = "there are no converters; set training.float8 for float8"


def translate_torchtitan(
    entries: Entries, shown: str, below: Entries, above: Entries
) -> Translated:
    """Returns entries in current keys, notes and problems. The entries will override `below`, and
    `above` will override them."""
    old = {path: entry for path, entry in entries.items() if _is_old(path, entry)}
    draft = Draft({path: e for path, e in entries.items() if path not in old}, shown)
    for path, entry in old.items():
        dotted = ".".join(path)
        if dotted in SPECIAL:
            SPECIAL[dotted](draft, path, entry)
        elif dotted in RENAMED:
            draft.rename(path, todays_key(path), entry.value, entry)
        elif dotted in REFUSED:
            harmless, reason = REFUSED[dotted]
            if is_one_of(entry.value, harmless):
                at_default = is_one_of(entry.value, harmless[:1])
                draft.without_meaning(path, entry, HARMLESS if at_default else SAME)
            else:
                draft.refuse(path, entry, reason)
        elif dotted in IGNORED:
            default, reason = IGNORED[dotted]
            draft.without_meaning(path, entry, HARMLESS if entry.value == default else reason)
        elif reason := _ignored_section(path):
            draft.without_meaning(path, entry, HARMLESS if entry.value is False else reason)
        elif entry.value != {}:
            draft.refuse(path, entry, UNKNOWN)
    if old.get(WEIGHTS_IN_HF) is not None:
        _weights_from_assets(draft, old[WEIGHTS_IN_HF], {**below, **draft.entries, **above})
    return draft.finish(f"{shown}: has keys of torchtitan")


def todays_key(path: KeyPath) -> KeyPath:
    """Returns the current name of a renamed key; any other key is returned unchanged."""
    new = RENAMED.get(".".join(path))
    return tuple(new.split(".")) if new else path


def _is_old(path: KeyPath, entry: Entry) -> bool:
    dotted = ".".join(path)
    if dotted in SPECIAL:
        return dotted not in BY_VALUE or BY_VALUE[dotted](entry.value)
    listed = dotted in RENAMED or dotted in REFUSED or dotted in IGNORED
    return listed or bool(_ignored_section(path)) or path[0] in REFUSED_SECTIONS


def _ignored_section(path: KeyPath) -> str:
    """Returns why all keys in the section or table of `path` have no effect; empty if they do."""
    tables = (".".join(path[:n]) for n in range(1, len(path) + 1))
    return next((IGNORED_SECTIONS[name] for name in tables if name in IGNORED_SECTIONS), "")


def _flavor(draft: Draft, path: KeyPath, entry: Entry) -> None:
    """Translates 8B_flex and 8B_varlen: 8B with attention within documents."""
    size, _, kind = entry.value.removesuffix("_attn").rpartition("_")
    draft.entries[path] = Entry(size, entry.where, entry.section_where)
    backend = {"flex": "flex", "varlen": "auto"}[kind]
    draft.put(("model", "attention"), backend, entry)
    draft.put(("data", "document_mask"), True, entry)
    draft.became(
        entry,
        f'model.flavor = "{entry.value}" is now model.flavor = "{size}" with model.attention = '
        f'"{backend}" and data.document_mask = true',
    )


def _name(draft: Draft, path: KeyPath, entry: Entry) -> None:
    today = OLD_NAMES[entry.value]
    draft.entries[path] = Entry(today, entry.where, entry.section_where)
    draft.became(entry, f'model.name = "{entry.value}" is now "{today}"')


def _converters(draft: Draft, path: KeyPath, entry: Entry) -> None:
    names = _names(entry.value)
    if not names:
        draft.without_meaning(path, entry, HARMLESS)
    for name in names:
        if name in ("quantize.linear.float8", "float8"):
            _narrow(draft, f'"{name}" in model.converters', entry)
        elif "grouped_mm" in name:
            draft.became(entry, f'"{name}" in model.converters is ignored: {EXPERTS}')
        elif name.endswith("mx"):
            draft.refuse(path, entry, f'"{name}" is not supported: {MX}; {NO_CONVERTER}')
        else:
            draft.refuse(path, entry, f'"{name}" is not known: {NO_CONVERTER}')


def _float8(draft: Draft, path: KeyPath, entry: Entry) -> None:
    if not draft.expect_bool(path, entry):
        return
    if entry.value:
        _narrow(draft, ".".join(path), entry)
    else:
        draft.without_meaning(path, entry, HARMLESS)


def _narrow(draft: Draft, asked: str, entry: Entry) -> None:
    if draft.put(FLOAT8, "tensorwise", entry):
        draft.became(
            entry, f'{asked} is now training.float8 = "tensorwise"; the head is not float8'
        )
    else:
        draft.became(entry, f"{asked} is ignored, since training.float8 is also set")


def _norm_type(draft: Draft, path: KeyPath, entry: Entry) -> None:
    """rmsnorm, fused_rmsnorm and compiled_rmsnorm compute the same. Any other value is passed to
    the model, which refuses norms that it does not have."""
    if str(entry.value).endswith("rmsnorm"):
        draft.without_meaning(path, entry, "RMSNorm is the default norm")
    else:
        draft.rename(path, ("model", "overrides", "norm_type"), entry.value, entry)


def _tokenizer_path(draft: Draft, path: KeyPath, entry: Entry) -> None:
    """Replaces a tokenizer file by its folder; Meta's own file is in `original/`."""
    if not isinstance(entry.value, str):
        draft.without_meaning(path, entry, HARMLESS)
        return
    folder = PurePosixPath(entry.value)
    if folder.suffix in (".model", ".json") or Path(entry.value).is_file():
        folder = folder.parent
    if folder.name == "original":
        folder = folder.parent
    value = str(folder) if not entry.value.startswith("./") else f"./{folder}"
    if draft.put(ASSETS, value, entry):
        draft.became(
            entry,
            f'model.tokenizer_path is now model.hf_assets_path = "{value}", the folder that holds '
            "the tokenizer",
        )
    else:
        draft.became(
            entry, "model.tokenizer_path is ignored, since model.hf_assets_path is also set"
        )


def _color(draft: Draft, path: KeyPath, entry: Entry) -> None:
    value = not entry.value if isinstance(entry.value, bool) else entry.value
    draft.rename(path, ("metrics", "disable_color_printing"), value, entry)


def _checkpoint_folder(draft: Draft, path: KeyPath, entry: Entry) -> None:
    """Translates the folder; the first versions saved nothing if it was empty."""
    if entry.value == "":
        draft.rename(path, ("checkpoint", "enable"), False, entry)
    else:
        draft.rename(path, ("checkpoint", "folder"), entry.value, entry)


def _recompute_option(draft: Draft, path: KeyPath, entry: Entry) -> None:
    draft.entries[path] = Entry(str(entry.value), entry.where, entry.section_where)


def _interval_type(draft: Draft, path: KeyPath, entry: Entry) -> None:
    if str(entry.value).startswith("step"):
        draft.without_meaning(path, entry, HARMLESS)
    elif (interval := draft.entries.get(("checkpoint", "interval"))) is not None and str(
        entry.value
    ).startswith("second"):
        seconds = interval.value
        if type(seconds) not in (int, float):
            return  # validation refuses it
        del draft.entries["checkpoint", "interval"]
        draft.put(("checkpoint", "interval_minutes"), seconds / 60, interval)
        draft.became(entry, "checkpoint.interval in seconds is now checkpoint.interval_minutes")
    else:
        draft.note(
            entry,
            f'checkpoint.interval_type = "{entry.value}" is ignored: checkpoint.interval counts '
            "steps, so check its value",
        )


def _async_mode(draft: Draft, path: KeyPath, entry: Entry) -> None:
    """Copies always go through pinned memory here."""
    draft.entries[path] = Entry("async", entry.where, entry.section_where)


def _exclude_from_loading(draft: Draft, path: KeyPath, entry: Entry) -> None:
    left_out = _names(entry.value)
    if not left_out:
        draft.without_meaning(path, entry, HARMLESS)
    if "optimizer" in left_out and draft.put(("checkpoint", "skip_optimizer"), True, entry):
        draft.became(
            entry, "optimizer in checkpoint.exclude_from_loading is now checkpoint.skip_optimizer"
        )
    others = [name for name in left_out if name != "optimizer"]
    if others:
        draft.refuse(
            path, entry, f"only the optimizer can be excluded from loading, not {', '.join(others)}"
        )


def _weights_in_hf(draft: Draft, path: KeyPath, entry: Entry) -> None:
    """Handled in `_weights_from_assets`, since it depends on other keys."""


def _weights_from_assets(draft: Draft, asked: Entry, known: Entries) -> None:
    """With initial_load_in_hf and no path, torchtitan starts from the weights in hf_assets_path."""
    assets = known.get(ASSETS)
    if not draft.expect_bool(WEIGHTS_IN_HF, asked):
        return
    if asked.value is not True or INITIAL_WEIGHTS in known or MODEL_FROM in known:
        draft.without_meaning(WEIGHTS_IN_HF, asked, "the format of the weights is detected")
        return
    if assets is None:
        reason = "no weights are given; set checkpoint.initial_load_path to their folder"
        draft.refuse(WEIGHTS_IN_HF, asked, reason)
        return
    draft.put(INITIAL_WEIGHTS, assets.value, asked)
    text = "without initial_load_path is now checkpoint.initial_load_path"
    draft.became(asked, f'checkpoint.initial_load_in_hf {text} = "{assets.value}"')


def _names(value: Any) -> list[str]:
    """Returns a list of names, which older files write as text with commas."""
    names = value if isinstance(value, list) else str(value).split(",")
    return [str(name).strip() for name in names if str(name).strip()]


OLD_NAMES = {"llama": "llama2", "llama3_ft": "llama3"}

SPECIAL: dict[str, Callable[[Draft, KeyPath, Entry], None]] = {
    "model.flavor": _flavor,
    "model.name": _name,
    "model.converters": _converters,
    "model.norm_type": _norm_type,
    "model.tokenizer_path": _tokenizer_path,
    "metrics.enable_color_printing": _color,
    "training.enable_float8_linear": _float8,
    "training.enable_fp8_linear": _float8,
    "training.fp8_linear": _float8,
    "float8.enable_float8_linear": _float8,
    "training.checkpoint_folder": _checkpoint_folder,
    "activation_checkpoint.selective_ac_option": _recompute_option,
    "checkpoint.interval_type": _interval_type,
    "checkpoint.async_mode": _async_mode,
    "checkpoint.exclude_from_loading": _exclude_from_loading,
    "checkpoint.initial_load_in_hf": _weights_in_hf,
}

# Keys that still exist: only these of their values are old.
BY_VALUE: dict[str, Callable[[Any], bool]] = {
    "model.flavor": lambda v: (
        isinstance(v, str) and v.removesuffix("_attn").endswith(("_flex", "_varlen"))
    ),
    "model.name": lambda v: isinstance(v, str) and v in OLD_NAMES,
    "activation_checkpoint.selective_ac_option": lambda v: type(v) is int,
    "checkpoint.async_mode": lambda v: v == "async_with_pinned_mem",
}
