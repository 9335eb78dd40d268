"""torchtitan's TOML: files of v0.2 load unchanged, and older ones too, with notes on what changed.

Works on raw keys, so a file in current keys passes through untouched. Renamed keys are in
`torchtitan_keys`; the few whose values change as well have a function here.
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


def translate_torchtitan(
    entries: Entries, shown: str, below: Entries, above: Entries
) -> Translated:
    """Returns entries in current keys, notes and problems. The entries will override `below`, and
    `above` will override them."""
    old = {path: entry for path, entry in entries.items() if _is_old(path, entry)}
    draft = Draft({path: e for path, e in entries.items() if path not in old}, shown)
    for path, entry in old.items():
        key = ".".join(path)
        if key in SPECIAL:
            SPECIAL[key](draft, key, entry)
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
        elif entry.value != {}:
            draft.refuse(key, entry, UNKNOWN)
    if (asked := old.get(path_of(WEIGHTS_IN_HF))) is not None:
        _weights_from_assets(draft, asked, {**below, **draft.entries, **above})
    return draft.finish(f"{shown}: has keys of torchtitan")


def todays_key(path: KeyPath) -> KeyPath:
    """Returns the current name of a renamed key; any other key is returned unchanged."""
    new = RENAMED.get(".".join(path))
    return path_of(new) if new else path


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


def _flavor(draft: Draft, key: str, entry: Entry) -> None:
    """Translates 8B_flex and 8B_varlen: 8B with attention within documents."""
    size, _, kind = entry.value.removesuffix("_attn").rpartition("_")
    draft.put(key, size, entry)
    backend = {"flex": "flex", "varlen": "auto"}[kind]
    draft.put("model.attention", backend, entry)
    draft.put("data.document_mask", True, entry)
    draft.became(
        entry,
        f'model.flavor = "{entry.value}" is now model.flavor = "{size}" with model.attention = '
        f'"{backend}" and data.document_mask = true',
    )


def _name(draft: Draft, key: str, entry: Entry) -> None:
    today = OLD_NAMES[entry.value]
    draft.put(key, today, entry)
    draft.became(entry, f'model.name = "{entry.value}" is now "{today}"')


def _converters(draft: Draft, key: str, entry: Entry) -> None:
    names = _names(entry.value)
    if not names:
        draft.without_meaning(key, entry, HARMLESS)
    for name in names:
        if name in ("quantize.linear.float8", "float8"):
            _narrow(draft, f'"{name}" in model.converters', entry)
        elif "grouped_mm" in name:
            draft.became(entry, f'"{name}" in model.converters is ignored: {EXPERTS}')
        elif name.endswith("mx"):
            draft.refuse(key, entry, f'"{name}" is not supported: {MX}; {NO_CONVERTER}')
        else:
            draft.refuse(key, entry, f'"{name}" is not known: {NO_CONVERTER}')


def _float8(draft: Draft, key: str, entry: Entry) -> None:
    if not draft.expect_bool(key, entry):
        return
    if entry.value:
        _narrow(draft, key, entry)
    else:
        draft.without_meaning(key, entry, HARMLESS)


def _narrow(draft: Draft, asked: str, entry: Entry) -> None:
    text = f'{asked} is now training.float8 = "tensorwise"; the head is not float8'
    draft.move(asked, "training.float8", "tensorwise", entry, text)


def _norm_type(draft: Draft, key: str, entry: Entry) -> None:
    """rmsnorm, fused_rmsnorm and compiled_rmsnorm compute the same. Any other value is passed to
    the model, which refuses norms that it does not have."""
    if str(entry.value).endswith("rmsnorm"):
        draft.without_meaning(key, entry, "RMSNorm is the default norm")
    else:
        draft.move(key, "model.overrides.norm_type", entry.value, entry)


def _tokenizer_path(draft: Draft, key: str, entry: Entry) -> None:
    """Replaces a tokenizer file by its folder; Meta's own file is in `original/`."""
    if not isinstance(entry.value, str):
        draft.without_meaning(key, entry, HARMLESS)
        return
    folder = PurePosixPath(entry.value)
    if folder.suffix in (".model", ".json") or Path(entry.value).is_file():
        folder = folder.parent
    if folder.name == "original":
        folder = folder.parent
    value = str(folder) if not entry.value.startswith("./") else f"./{folder}"
    text = f'{key} is now {ASSETS} = "{value}", the folder that holds the tokenizer'
    draft.move(key, ASSETS, value, entry, text)


def _color(draft: Draft, key: str, entry: Entry) -> None:
    value = not entry.value if isinstance(entry.value, bool) else entry.value
    draft.move(key, "metrics.disable_color_printing", value, entry)


def _checkpoint_folder(draft: Draft, key: str, entry: Entry) -> None:
    """Translates the folder; the first versions saved nothing if it was empty."""
    if entry.value == "":
        draft.move(key, "checkpoint.enable", False, entry)
    else:
        draft.move(key, "checkpoint.folder", entry.value, entry)


def _recompute_option(draft: Draft, key: str, entry: Entry) -> None:
    draft.put(key, str(entry.value), entry)


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


def _async_mode(draft: Draft, key: str, entry: Entry) -> None:
    """Copies always go through pinned memory here."""
    draft.put(key, "async", entry)


def _exclude_from_loading(draft: Draft, key: str, entry: Entry) -> None:
    left_out = _names(entry.value)
    if not left_out:
        draft.without_meaning(key, entry, HARMLESS)
    if "optimizer" in left_out and draft.put("checkpoint.skip_optimizer", True, entry):
        draft.became(entry, f"optimizer in {key} is now checkpoint.skip_optimizer")
    others = [name for name in left_out if name != "optimizer"]
    if others:
        reason = f"only the optimizer can be excluded from loading, not {', '.join(others)}"
        draft.refuse(key, entry, reason)


def _weights_in_hf(draft: Draft, key: str, entry: Entry) -> None:
    """Handled in `_weights_from_assets`, since it depends on other keys."""


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
        draft.put(INITIAL_WEIGHTS, assets.value, asked)
        text = f"without initial_load_path is now {INITIAL_WEIGHTS}"
        draft.became(asked, f'{WEIGHTS_IN_HF} {text} = "{assets.value}"')


def _names(value: Any) -> list[str]:
    """Returns a list of names, which older files write as text with commas."""
    names = value if isinstance(value, list) else str(value).split(",")
    return [str(name).strip() for name in names if str(name).strip()]


OLD_NAMES = {"llama": "llama2", "llama3_ft": "llama3"}

SPECIAL: dict[str, Callable[[Draft, str, Entry], None]] = {
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
