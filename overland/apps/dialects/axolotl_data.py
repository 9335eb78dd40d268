"""Translates the data keys of axolotl's YAML: datasets, their types, chat templates, what is
learned, packing, validation and special tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from overland.apps.dialects.axolotl_file import File, listed
from overland.apps.dialects.draft import is_on, is_one_of
from overland.config.source import Entry
from overland.files import read_json
from overland.words import any_of, command

FALLBACK = "tokenizer_default_fallback_"
# Roles, and the names for them that Overland understands (see data/conversations.py).
ROLES = {
    "user": ("user", "human", "prompter"),
    "assistant": ("assistant", "gpt", "model", "bot", "chatgpt"),
    "system": ("system",),
    "tool": ("tool", "function", "observation"),
}
TURNS = ({"role": "role", "content": "content"}, {"role": "from", "content": "value"})
# Keys of a dataset: values that can be ignored, and what to do about any other value.
UNUSED: dict[str, tuple[list[Any], str]] = {
    "ds_type": (
        ["json", "jsonl", "parquet", "arrow", "csv"],
        "supported formats are JSON, CSV, Parquet and Arrow",
    ),
    "trust_remote_code": ([True, False], ""),
    "revision": (["main"], "use --revision of `overland fetch`"),
    "train_on_eos": (["turn"], "the token that ends a turn is learned with the turn"),
    "train_on_eot": (["turn"], "the token that ends a turn is learned with the turn"),
    "roles_to_train": ([["assistant"], ["gpt"]], "only assistant turns can be learned, or all"),
    "message_field_training": (["train", "weight"], "it must be named train or weight"),
    "field_tools": (["tools"], "the column must be named tools"),
    "drop_system_message": ([False], "remove system turns from the files"),
    "field_human": (["human", "user"], "the role must be named human or user"),
    "field_model": (["gpt", "assistant", "model"], "the role must be named gpt or assistant"),
    "field_system": (["system", "system_prompt"], "the column must be named system"),
    **{
        f"field_{name}": ([name], f"the column must be named {name}")
        for name in ("instruction", "input", "output", "chosen", "rejected")
    },
    "preprocess_shards": ([], ""),
}
TEXT_PAIRS = (
    "chosen and rejected answers that are plain text get no chat template; store them as lists of "
    "turns, and set type: chat_template.argilla_chat"
)


class Dataset:
    """A dataset of the file while it is translated: the keys that are left of it."""

    def __init__(self, file: File, list_name: str, entry: Entry, keys: dict[str, Any]) -> None:
        self.file, self.list_name, self.entry, self.keys = file, list_name, entry, keys
        self.section = "training" if list_name == "datasets" else "validation"

    def put(self, today: str, value: Any, key: str) -> None:
        self.file.put(today, value, self.entry, f"{self.list_name}.{key}")

    def refuse(self, reason: str) -> None:
        self.file.refuse("datasets", self.entry, reason)

    def table(self, key: str) -> dict[str, Any]:
        """Takes a key that holds a table."""
        value = self.keys.pop(key, {})
        if not isinstance(value, dict):
            self.refuse(f"{key}: expected a table of keys")
            return {}
        return {str(name): item for name, item in value.items()}


def translate_data(file: File) -> None:
    _tokens(file)
    _length(file)
    datasets = _datasets(file, "datasets")
    if datasets:
        if len(datasets) > 1 and not _has_place(file, "data.sources"):
            datasets[0].refuse(
                "axolotl concatenates several datasets; put their files into one folder and set "
                "training.dataset_path to it, or give each a weight in [data.sources.NAME]"
            )
        _source(datasets[0])
        _records(datasets[0])
    elif not _has_place(file, "training.dataset"):
        file.lacks("datasets", None, "is missing; name the data to train on")
    _packing(file)
    _validation(file)


def _has_place(file: File, other: str) -> bool:
    return file.decided("training.dataset_path") or file.decided(other)


def _length(file: File) -> None:
    """Sets the sequence length; a row holds both answers of a pair, while axolotl counts one."""
    entry, pairs = file.take("sequence_len"), "rl" in file.keys
    length = 512 if entry is None else entry.value
    if pairs and type(length) is int:
        length *= 2
        file.note(entry, f"training.seq_len = {length}, since a row holds both answers of a pair")
    if entry is None:
        file.default("training.seq_len", length)
    else:
        file.put("training.seq_len", length, entry, "sequence_len")


def _datasets(file: File, key: str) -> list[Dataset]:
    entry = file.take(key)
    if entry is None:
        return []
    records = listed(entry.value)
    if not records or not all(isinstance(one, dict) for one in records):
        file.refuse(key, entry, "expected a list of datasets, each with a path and a type")
        return []
    given = [{str(k): v for k, v in one.items() if v not in (None, "", {}, [])} for one in records]
    return [Dataset(file, key, entry, keys) for keys in given]


def _source(data: Dataset) -> None:
    """Translates where a dataset is stored."""
    path, files = str(data.keys.pop("path", "")), listed(data.keys.pop("data_files", []))
    if len(files) > 1:
        data.refuse("has several data_files; put them into one folder, and set path to it")
    name = str(files[0]) if files else path
    if not name:
        data.refuse("a dataset has no path")
        return
    owner, _, last = path.partition("/")
    on_hub = not files and re.fullmatch(r"[\w.-]+/[\w.-]+", path) and owner not in (".", "..")
    has_format = "ds_type" in data.keys or Path(path).suffix
    if on_hub and not has_format and not Path(path).exists():
        data.put(f"{data.section}.dataset", last, "path")
        fetch = command("overland", "fetch", "dataset", path, "--to", f"data/{last}")
        data.file.note(data.entry, f"{path} is read from data/{last}; `{fetch}` downloads it")
    else:
        data.put(f"{data.section}.dataset_path", name, "path")
    subset, split = data.keys.pop("name", None), data.keys.pop("split", None)
    if subset is not None:
        data.put(f"{data.section}.subset", subset, "name")
    if split is None:
        return
    if not re.fullmatch(r"[\w.-]+", str(split)):
        reason = "slices of a split are not supported; write the slice to its own file"
        data.refuse(f"split: {split}: {reason}")
    elif split != "train" or Path(name).is_dir() or on_hub:
        data.put(f"{data.section}.split", split, "split")


def _records(data: Dataset) -> None:
    """Translates the format of the records, and their template."""
    kind = data.keys.pop("type", None)
    data.file.default("sft.skip_unlearned", True)
    if not isinstance(kind, str | None):
        data.refuse("custom prompt formats (type) are not supported; set sft.chat_template instead")
    elif "rl" in data.file.keys:
        _pairs(data, kind or "")
    elif kind in KINDS:
        KINDS[kind](data)
    elif kind is None:
        reason = "so it holds token ids; build these from text with `overland data build`"
        data.refuse(f"has no type, {reason}")
    else:
        data.refuse(f"type: {kind}: expected {any_of(list(KINDS))}")
    _learned(data)
    _too_long(data.file, kind)
    for key, value in data.keys.items():
        harmless, reason = UNUSED.get(key, ([], "unknown key; remove it"))
        if harmless in ([True, False], [False]) and not isinstance(value, bool):
            data.refuse(f"{key}: expected true or false")
        elif not is_one_of(value, harmless):
            data.refuse(f"{key}: {reason}")


def _too_long(file: File, kind: Any) -> None:
    entry = file.take("excess_length_strategy")
    if kind == "completion":  # axolotl splits texts before it checks their length
        file.default("sft.too_long", "split")
    elif entry is None:
        file.default("sft.too_long", "drop")
    else:
        value = "error" if entry.value == "raise" else entry.value
        file.put("sft.too_long", value, entry, "excess_length_strategy")


def _chat(data: Dataset) -> None:
    names = data.table("message_property_mappings")
    for ours in ("role", "content"):
        if (key := f"message_field_{ours}") in data.keys:
            names[ours] = data.keys.pop(key)
    shape = "auto"
    if names:
        full = {"role": names.pop("role", "role"), "content": names.pop("content", "content")}
        if full not in TURNS or any(ours != theirs for ours, theirs in names.items()):
            reason = "expected role and content, or from and value; rename them in the files"
            data.refuse(f"message_property_mappings: {reason}")
        shape = "sharegpt" if full == TURNS[1] else "messages"
    roles = data.keys.get("roles")
    if isinstance(roles, dict) and any(listed(names) != [role] for role, names in roles.items()):
        shape = "sharegpt"  # which renames roles in turns of any form
    data.put("sft.shape", shape, "type")
    if "field_messages" in data.keys:
        data.put("training.column", data.keys.pop("field_messages"), "field_messages")
    _template(data)


def _sharegpt(data: Dataset) -> None:
    """Removed from axolotl, but still found in many files."""
    data.keys.setdefault("field_messages", "conversations")
    data.keys["message_property_mappings"] = dict(TURNS[1])
    if (named := data.keys.pop("conversation", None)) is not None:
        data.keys["chat_template"] = named
    _chat(data)


def _alpaca(data: Dataset) -> None:
    file = data.file
    data.put("sft.shape", "instruction", "type")
    if not file.decided("sft.chat_template"):
        file.put("sft.chat_template", "alpaca", data.entry)
    for key in ("chat_template", "chat_template_jinja"):
        file.ignore(key, "type: alpaca has its own prompt (sft.chat_template = alpaca)")


def _completion(data: Dataset) -> None:
    data.put("sft.shape", "text", "type")
    data.put("training.column", data.keys.pop("field", "text"), "field")
    data.file.put("sft.parse_specials", True, data.entry)
    data.file.ignore("chat_template", "plain texts use no template")


def _pairs(data: Dataset, kind: str) -> None:
    writer, _, form = kind.rpartition(".")
    data.put("sft.shape", "preference", "type")
    lists = ("argilla_chat", "ultra", "default", "argilla", "chat_template")
    if writer == "orpo" or kind in ("chat_template", "orpo.chat_template"):
        writer, form = "chat_template", "default"
    if form not in lists or (form == "argilla" and writer != "chat_template"):
        data.refuse(f"type: {kind}: {TEXT_PAIRS}")
    elif writer in ("chatml", "llama3"):
        data.keys["chat_template"] = writer
    names = data.table("message_property_mappings")
    if names and names not in TURNS:
        data.refuse("expected turns with role and content, or from and value")
    data.keys.pop("field_messages", None)
    _template(data)


KINDS: dict[str, Callable[[Dataset], None]] = {
    "chat_template": _chat,
    "sharegpt": _sharegpt,
    "alpaca": _alpaca,
    "completion": _completion,
}


def _template(data: Dataset) -> None:
    """Translates the chat template; a dataset's own one overrides the one for all datasets."""
    file, place, jinja = data.file, *map(data.file.take, ("chat_template", "chat_template_jinja"))
    name = data.keys.pop("chat_template", place.value if place else None)
    text = data.keys.pop("chat_template_jinja", jinja.value if jinja else None)
    source = place or jinja or data.entry
    if file.decided("sft.chat_template"):
        return
    if text is not None and name in (None, "jinja"):
        if "\n" in str(text) or "{" in str(text):
            reason = "contains the template itself; save it to a file, and set the path to that"
            file.refuse("chat_template_jinja", source, reason)
        else:
            file.put("sft.chat_template", text, source, "chat_template_jinja")
    elif name == "chatml":
        file.put("sft.chat_template", name, source, "chat_template")
    elif str(name).startswith(FALLBACK):
        other = str(name).removeprefix(FALLBACK)
        file.note(
            source,
            f"chat_template: {name} is the tokenizer's own; if it has none, set sft.chat_template"
            + (f" = {other}" if other in ("chatml", "alpaca") else " to a file"),
        )
    elif name not in (None, "tokenizer_default"):
        file.refuse(
            "chat_template",
            source if place else Entry(name, data.entry.where),
            "this template is built into axolotl; remove the key if the tokenizer has its own "
            "template, or set sft.chat_template to a file or to chatml",
        )


def _learned(data: Dataset) -> None:
    everything = data.file.take("train_on_inputs")
    if is_on(everything):
        data.file.put("sft.learn", "all", everything, "train_on_inputs")
    else:
        reason = "prompts are not learned (sft.learn)"
        data.file.without_meaning("train_on_inputs", everything, reason)
    for role, names in data.table("roles").items():
        unknown = [str(name) for name in listed(names) if name not in ROLES.get(str(role), ())]
        if unknown:
            data.refuse(f"roles: {any_of(unknown)} is not a known role; rename it in the files")


def _packing(file: File) -> None:
    entry = file.take("sample_packing")
    if file.decided("preference.loss") or "rl" in file.keys:
        file.without_meaning("sample_packing", entry, "pairs are not packed")
    elif is_on(entry):
        file.put("data.packing", "best_fit", entry, "sample_packing")
        file.put("data.document_mask", True, entry)
    else:  # a sample is one row, or several if it is split
        packing = "overflow" if file.set_to("sft.too_long") == "split" else "trunc"
        if entry is not None:
            file.put("data.packing", packing, entry, "sample_packing")
        else:
            file.default("data.packing", packing)


def _validation(file: File) -> None:
    share, others = file.take("val_set_size"), _datasets(file, "test_datasets")
    strategy = file.take("eval_strategy") or file.take("evaluation_strategy")
    is_off = strategy is not None and strategy.value in ("no", False)
    if others:
        first, *more = others
        if more:
            file.refuse("test_datasets", first.entry, "only one validation set is supported")
        _source(first)
        column = first.keys.get("field_messages") or first.keys.get("field")
        if column is not None:
            file.put("validation.column", column, first.entry)
    elif is_on(share):
        size = share.value
        whole = isinstance(size, float) and size > 1 and size.is_integer()
        file.put("data.holdout", int(size) if whole else size, share, "val_set_size")
    source = others[0].entry if others else share
    if is_on(source) and not is_off:
        file.put("validation.enable", True, source)
        file.put("validation.steps", -1, source)
    elif is_off and strategy is not None:
        file.put("validation.enable", False, strategy, "eval_strategy")
    file.every("eval", "validation.freq", "the last step is always validated")
    if not is_off:
        reason = "validation.freq sets how often, in steps"
        file.without_meaning("eval_strategy", strategy, reason)


def _tokens(file: File) -> None:
    """Adds new special tokens; those that the tokenizer already has keep their roles."""
    entry, given = file.table("special_tokens")
    added = listed(given.pop("additional_special_tokens", None))
    if given.pop("pad_token", None) is not None:
        reason = "padding is masked; exports set a pad token"
        file.without_meaning("special_tokens.pad_token", entry, reason)
    own = _named_tokens(file)
    for name, token in given.items():
        if token is None or own.get(name) == token:
            continue
        if name == "eos_token" and token == "<|im_end|>":  # as ChatML ends a turn
            added = [*added, token]
            file.renamed.append("special_tokens.eos_token → sft.new_tokens")
        elif own:
            reason = f"{name}: {token}: the tokenizer uses {own.get(name)}, which cannot be changed"
            file.refuse("special_tokens", entry, reason)
        else:
            file.note(
                entry,
                f"special_tokens.{name}: the tokenizer's own is used; make sure they agree",
            )
    tokens = file.take("tokens")
    wanted = [*listed(tokens.value if tokens else None), *added]
    if wanted:
        names = list(dict.fromkeys(map(str, wanted)))
        file.put("sft.new_tokens", names, tokens or entry or file.first, "tokens")


def _named_tokens(file: File) -> dict[str, str]:
    """Returns the special tokens of the tokenizer, if it has been fetched."""
    folder = file.set_to("model.hf_assets_path") or file.set_to("model.from")
    try:
        named = read_json(Path(str(folder)).expanduser() / "tokenizer_config.json")
    except (OSError, ValueError):
        return {}
    found = {name: named.get(name) for name in ("bos_token", "eos_token", "unk_token")}
    return {
        name: token["content"] if isinstance(token, dict) else token
        for name, token in found.items()
        if token
    }
