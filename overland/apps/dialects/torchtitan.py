"""torchtitan's TOML: files of v0.2 load unchanged, and older ones too, with notes on what changed.

Works on raw keys, so a file in current keys passes through untouched. Renamed keys are in
`torchtitan_keys`; those whose values change as well are in CHANGED, and the few that depend on
other keys, or are lists, have a function here.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

from overland.apps.dialects.draft import SAME, Draft, is_one_of, path_of
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
WEIGHTS_IN_HF = "checkpoint.initial_load_in_hf"
INITIAL_WEIGHTS = "checkpoint.initial_load_path"
ASSETS = "model.hf_assets_path"
NO_CONVERTER = "there are no converters; set training.float8 for float8"
FLOAT8 = {"training.float8": "tensorwise"}


def translate_torchtitan(
    entries: Entries, shown: str, below: Entries, above: Entries
) -> Translated:
    """Returns entries in current keys, notes and problems. The entries will override `below`, and
    `above` will override them."""
    old = {path: entry for path, entry in entries.items() if _is_old(path, entry)}
    draft = Draft({path: e for path, e in entries.items() if path not in old}, shown)
    for path, entry in old.items():
        key = ".".join(path)
        if key in SWITCHES and not draft.expect_bool(key, entry):
            continue
        if key in SPECIAL:
            SPECIAL[key](draft, key, entry)
        elif key in CHANGED:
            draft.change(key, entry, CHANGED[key](entry.value), HARMLESS)
        elif key in RENAMED:
            draft.move(key, RENAMED[key], entry.value, entry)
        elif key in REFUSED:
            harmless, reason = REFUSED[key]
            same = HARMLESS if is_one_of(entry.value, harmless[:1]) else SAME
            draft.expect(key, entry, harmless, reason, same)
        elif key in IGNORED:
            default, reason = IGNORED[key]
            draft.without_meaning(key, entry, HARMLESS if entry.value == default else reason)
        elif reason := _ignored_section(path):
            draft.without_meaning(key, entry, HARMLESS if entry.value is False else reason)
        elif key != WEIGHTS_IN_HF and entry.value != {}:
            draft.refuse(key, entry, UNKNOWN)
    if (asked := old.get(path_of(WEIGHTS_IN_HF))) is not None:
        _weights_from_assets(draft, asked, {**below, **draft.entries, **above})
    return draft.finish(f"{shown}: has keys of torchtitan")


def todays_key(path: KeyPath) -> KeyPath:
    """Returns the current name of a renamed key; any other key is returned unchanged."""
    new = RENAMED.get(".".join(path))
    return path_of(new) if new else path


def _is_old(path: KeyPath, entry: Entry) -> bool:
    key = ".".join(path)
    if key in BY_VALUE:
        return BY_VALUE[key](entry.value)
    tables = (SPECIAL, CHANGED, RENAMED, REFUSED, IGNORED, (WEIGHTS_IN_HF,))
    listed = any(key in table for table in tables) or path[0] in REFUSED_SECTIONS
    return listed or bool(_ignored_section(path))


def _ignored_section(path: KeyPath) -> str:
    """Returns why all keys in the section or table of `path` have no effect; empty if they do."""
    tables = (".".join(path[:n]) for n in range(1, len(path) + 1))
    return next((IGNORED_SECTIONS[name] for name in tables if name in IGNORED_SECTIONS), "")


def _flavor(flavor: str) -> dict[str, Any]:
    """Returns what 8B_flex and 8B_varlen are: 8B with attention within documents."""
    size, _, kind = flavor.removesuffix("_attn").rpartition("_")
    backend = {"flex": "flex", "varlen": "auto"}[kind]
    return {"model.flavor": size, "model.attention": backend, "data.document_mask": True}


def _tokenizer_folder(file: Any) -> dict[str, Any]:
    """Returns the folder of a tokenizer's file; Meta's own file is in `original/`."""
    if not isinstance(file, str):
        return {}
    folder = PurePosixPath(file)
    if folder.suffix in (".model", ".json") or Path(file).is_file():
        folder = folder.parent
    if folder.name == "original":
        folder = folder.parent
    return {ASSETS: f"./{folder}" if file.startswith("./") else str(folder)}


def _converters(draft: Draft, key: str, entry: Entry) -> None:
    names = _names(entry.value)
    if not names:
        draft.without_meaning(key, entry, HARMLESS)
    for name in names:
        if name in ("quantize.linear.float8", "float8"):
            draft.change(key, entry, FLOAT8)
        elif "grouped_mm" in name:
            draft.became(entry, f'"{name}" in model.converters is ignored: {EXPERTS}')
        elif name.endswith("mx"):
            draft.refuse(key, entry, f'"{name}" is not supported: {MX}; {NO_CONVERTER}')
        else:
            draft.refuse(key, entry, f'"{name}" is not known: {NO_CONVERTER}')


def _interval_type(draft: Draft, key: str, entry: Entry) -> None:
    kind, interval = str(entry.value), draft.entries.get(("checkpoint", "interval"))
    if kind.startswith("step"):
        draft.without_meaning(key, entry, HARMLESS)
    elif interval is not None and kind.startswith("second"):
        if type(interval.value) not in (int, float):
            return  # validation refuses it
        del draft.entries["checkpoint", "interval"]
        draft.put("checkpoint.interval_minutes", interval.value / 60, interval)
        draft.became(entry, "checkpoint.interval in seconds is now checkpoint.interval_minutes")
    else:
        draft.note(
            entry,
            f'{key} = "{kind}" is ignored: checkpoint.interval counts steps, so check its value',
        )


def _exclude_from_loading(draft: Draft, key: str, entry: Entry) -> None:
    names = _names(entry.value)
    others = ", ".join(name for name in names if name != "optimizer")
    if others:
        draft.refuse(key, entry, f"only the optimizer can be excluded from loading, not {others}")
    else:
        today = {"checkpoint.skip_optimizer": True} if names else {}
        draft.change(key, entry, today, HARMLESS)


def _weights_from_assets(draft: Draft, asked: Entry, known: Entries) -> None:
    """With initial_load_in_hf and no path, torchtitan starts from the weights in hf_assets_path."""
    assets = known.get(path_of(ASSETS))
    given = path_of(INITIAL_WEIGHTS) in known or path_of("model.from") in known
    if not draft.expect_bool(WEIGHTS_IN_HF, asked):
        return
    if not asked.value or given:
        draft.without_meaning(WEIGHTS_IN_HF, asked, "the format of the weights is detected")
    elif assets is None:
        reason = f"no weights are given; set {INITIAL_WEIGHTS} to their folder"
        draft.refuse(WEIGHTS_IN_HF, asked, reason)
    else:
        draft.change(WEIGHTS_IN_HF, asked, {INITIAL_WEIGHTS: assets.value})


def _names(value: Any) -> list[str]:
    """Returns a list of names, which older files write as text with commas."""
    names = value if isinstance(value, list) else str(value).split(",")
    return [str(name).strip() for name in names if str(name).strip()]


OLD_NAMES = {"llama": "llama2", "llama3_ft": "llama3"}

# Key -> what became of it, from its value; nothing if that is what happens anyway.
CHANGED: dict[str, Callable[[Any], dict[str, Any]]] = {
    "model.flavor": _flavor,
    "model.name": lambda name: {"model.name": OLD_NAMES[name]},
    # rmsnorm, fused_rmsnorm and compiled_rmsnorm compute the same; the model refuses unknown norms.
    "model.norm_type": lambda norm: (
        {} if str(norm).endswith("rmsnorm") else {"model.overrides.norm_type": norm}
    ),
    "model.tokenizer_path": _tokenizer_folder,
    "metrics.enable_color_printing": lambda on: {
        "metrics.disable_color_printing": not on if isinstance(on, bool) else on
    },
    "training.enable_float8_linear": lambda on: FLOAT8 if on else {},
    "training.enable_fp8_linear": lambda on: FLOAT8 if on else {},
    "training.fp8_linear": lambda on: FLOAT8 if on else {},
    "float8.enable_float8_linear": lambda on: FLOAT8 if on else {},
    "training.checkpoint_folder": lambda folder: (  # the first versions saved nothing without one
        {"checkpoint.enable": False} if folder == "" else {"checkpoint.folder": folder}
    ),
    "activation_checkpoint.selective_ac_option": lambda every: {
        "activation_checkpoint.selective_ac_option": str(every)
    },
    # Copies always go through pinned memory here.
    "checkpoint.async_mode": lambda _: {"checkpoint.async_mode": "async"},
}
SWITCHES = frozenset(key for key in CHANGED if key.endswith(("float8_linear", "fp8_linear")))

SPECIAL: dict[str, Callable[[Draft, str, Entry], None]] = {
    "model.converters": _converters,
    "checkpoint.interval_type": _interval_type,
    "checkpoint.exclude_from_loading": _exclude_from_loading,
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
