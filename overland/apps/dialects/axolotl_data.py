"""The data keys of axolotl's YAML: datasets, their types, chat templates and special tokens."""

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

TEMPLATES = ("chatml", "alpaca")
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
    "roles_to_train": (
        [["assistant"], ["gpt"]],
        "only assistant turns can be learned, or all tokens",
    ),
    "message_field_training": (
        ["train", "weight"],
        "the field of a turn must be named train or weight",
    ),
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


def translate_data(file: File) -> None:
    _tokens(file)
    _length(file)
    datasets = _datasets(file, "datasets")
    if datasets:
        entry, records = datasets
        given = file.decided("training.dataset_path") or file.decided("data.sources")
        if len(records) > 1 and not given:
            file.refuse(
                "datasets",
                entry,
                "axolotl concatenates several datasets; put their files into one folder and set "
                "training.dataset_path to it, or give each a weight in [data.sources.NAME]",
            )
        _source(file, entry, records[0], "training")
        _type(file, entry, records[0])
    elif not (file.decided("training.dataset_path") or file.decided("training.dataset")):
        file.lacks("datasets", None, "is missing; name the data to train on")
    _packing(file)
    _validation(file)


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


def _datasets(file: File, key: str) -> tuple[Entry, list[dict[str, Any]]] | None:
    entry = file.take(key)
    if entry is None:
        return None
    records = listed(entry.value)
    if not records or not all(isinstance(one, dict) for one in records):
        file.refuse(key, entry, "expected a list of datasets, each with a path and a type")
        return None
    return entry, [
        {str(name): value for name, value in one.items() if value not in (None, "", {}, [])}
        for one in records
    ]


def _source(file: File, entry: Entry, dataset: dict[str, Any], section: str) -> None:
    """Translates where a dataset is stored."""
    path, files = str(dataset.pop("path", "")), dataset.pop("data_files", [])
    files = listed(files)
    kind = dataset.get("ds_type")
    if len(files) > 1:
        reason = "has several data_files; put them into one folder, and set path to it"
        file.refuse("datasets", entry, reason)
    name = str(files[0]) if files else path
    if not name:
        file.refuse("datasets", entry, "a dataset has no path")
        return
    owner, _, last = path.partition("/")
    on_hub = not files and re.fullmatch(r"[\w.-]+/[\w.-]+", path) and owner not in (".", "..")
    if on_hub and kind is None and not Path(path).exists() and not Path(path).suffix:
        file.put(f"{section}.dataset", last, entry, f"{entry_name(section)}.path")
        fetch = command("overland", "fetch", "dataset", path, "--to", f"data/{last}")
        file.note(entry, f"{path} is read from data/{last}; `{fetch}` downloads it")
    else:
        file.put(f"{section}.dataset_path", name, entry, f"{entry_name(section)}.path")
    subset, split = dataset.pop("name", None), dataset.pop("split", None)
    if subset is not None:
        file.put(f"{section}.subset", subset, entry, f"{entry_name(section)}.name")
    if split is not None and re.fullmatch(r"[\w.-]+", str(split)):
        if split != "train" or Path(name).is_dir() or on_hub:
            file.put(f"{section}.split", split, entry, f"{entry_name(section)}.split")
    elif split is not None:
        file.refuse(
            "datasets",
            entry,
            f"split: {split}: slices of a split are not supported; write the slice to its own file",
        )


def entry_name(section: str) -> str:
    return "datasets" if section == "training" else "test_datasets"


def _type(file: File, entry: Entry, dataset: dict[str, Any]) -> None:
    """Translates the format of the records, and their template."""
    kind = dataset.pop("type", None)
    pairs = "rl" in file.keys
    file.default("sft.skip_unlearned", True)
    if not isinstance(kind, str | None):
        reason = "custom prompt formats (type) are not supported; set sft.chat_template instead"
        file.refuse("datasets", entry, reason)
    elif pairs:
        _pairs(file, entry, dataset, kind or "")
    elif kind in KINDS:
        KINDS[kind](file, entry, dataset)
    elif kind is None:
        reason = (
            "has no type, so it holds token ids; build these from text with `overland data build`"
        )
        file.refuse("datasets", entry, reason)
    else:
        file.refuse("datasets", entry, f"type: {kind}: expected {any_of(list(KINDS))}")
    _learned(file, entry, dataset)
    _too_long(file, kind)
    _unused(file, entry, dataset)


def _too_long(file: File, kind: Any) -> None:
    entry = file.take("excess_length_strategy")
    if kind == "completion":  # axolotl splits texts before it checks their length
        file.default("sft.too_long", "split")
    elif entry is None:
        file.default("sft.too_long", "drop")
    else:
        value = "error" if entry.value == "raise" else entry.value
        file.put("sft.too_long", value, entry, "excess_length_strategy")


def _chat(file: File, entry: Entry, dataset: dict[str, Any]) -> None:
    names = _table(file, entry, dataset, "message_property_mappings")
    for key, ours in (("message_field_role", "role"), ("message_field_content", "content")):
        if key in dataset:
            names[ours] = dataset.pop(key)
    shape = "auto"
    if names:
        known = {key: names.pop(key) for key in ("role", "content") if key in names}
        full = {"role": known.get("role", "role"), "content": known.get("content", "content")}
        if full not in TURNS or any(ours != theirs for ours, theirs in names.items()):
            reason = "expected role and content, or from and value; rename them in the files"
            file.refuse("datasets", entry, f"message_property_mappings: {reason}")
        shape = "sharegpt" if full == TURNS[1] else "messages"
    roles = dataset.get("roles")
    if isinstance(roles, dict) and any(listed(names) != [role] for role, names in roles.items()):
        shape = "sharegpt"  # which renames roles in turns of any form
    file.put("sft.shape", shape, entry, "datasets.type")
    if "field_messages" in dataset:
        file.put("training.column", dataset.pop("field_messages"), entry, "datasets.field_messages")
    _template(file, entry, dataset)


def _sharegpt(file: File, entry: Entry, dataset: dict[str, Any]) -> None:
    """Removed from axolotl, but still found in many files."""
    dataset.setdefault("field_messages", "conversations")
    dataset["message_property_mappings"] = dict(TURNS[1])
    if (named := dataset.pop("conversation", None)) is not None:
        dataset["chat_template"] = named
    _chat(file, entry, dataset)


def _alpaca(file: File, entry: Entry, dataset: dict[str, Any]) -> None:
    file.put("sft.shape", "instruction", entry, "datasets.type")
    if not file.decided("sft.chat_template"):
        file.put("sft.chat_template", "alpaca", entry)
    file.ignore("chat_template", "type: alpaca has its own prompt (sft.chat_template = alpaca)")
    file.ignore("chat_template_jinja", "type: alpaca has its own prompt")


def _completion(file: File, entry: Entry, dataset: dict[str, Any]) -> None:
    file.put("sft.shape", "text", entry, "datasets.type")
    file.put("training.column", dataset.pop("field", "text"), entry, "datasets.field")
    file.put("sft.parse_specials", True, entry)
    file.ignore("chat_template", "plain texts use no template")


def _pairs(file: File, entry: Entry, dataset: dict[str, Any], kind: str) -> None:
    writer, _, form = kind.rpartition(".")
    file.put("sft.shape", "preference", entry, "datasets.type")
    lists = ("argilla_chat", "ultra", "default", "argilla", "chat_template")
    if writer == "orpo" or kind in ("chat_template", "orpo.chat_template"):
        writer, form = "chat_template", "default"
    if form not in lists or (form == "argilla" and writer != "chat_template"):
        file.refuse("datasets", entry, f"type: {kind}: {TEXT_PAIRS}")
    elif writer in ("chatml", "llama3"):
        dataset["chat_template"] = writer
    names = _table(file, entry, dataset, "message_property_mappings")
    if names and names not in TURNS:
        file.refuse("datasets", entry, "expected turns with role and content, or from and value")
    dataset.pop("field_messages", None)
    _template(file, entry, dataset)


KINDS: dict[str, Callable[[File, Entry, dict[str, Any]], None]] = {
    "chat_template": _chat,
    "sharegpt": _sharegpt,
    "alpaca": _alpaca,
    "completion": _completion,
}


def _template(file: File, entry: Entry, dataset: dict[str, Any]) -> None:
    """Translates the chat template; a dataset's own one overrides the one for all datasets."""
    place = file.take("chat_template")
    jinja = file.take("chat_template_jinja")
    name = dataset.pop("chat_template", place.value if place else None)
    text = dataset.pop("chat_template_jinja", jinja.value if jinja else None)
    source = place or jinja or entry
    if file.decided("sft.chat_template"):
        return
    if text is not None and name in (None, "jinja"):
        if "\n" in str(text) or "{" in str(text):
            reason = (
                "contains the template itself; save it to a file, and set the path of that file"
            )
            file.refuse("chat_template_jinja", source, reason)
        else:
            file.put("sft.chat_template", text, source, "chat_template_jinja")
    elif name in TEMPLATES and name != "alpaca":
        file.put("sft.chat_template", name, source, "chat_template")
    elif str(name).startswith(FALLBACK):
        other = str(name).removeprefix(FALLBACK)
        file.note(
            source,
            f"chat_template: {name} is the tokenizer's own; if it has none, set sft.chat_template"
            + (f" = {other}" if other in TEMPLATES else " to a file"),
        )
    elif name not in (None, "tokenizer_default"):
        file.refuse(
            "chat_template",
            source if place else Entry(name, entry.where),
            "this template is built into axolotl; remove the key if the tokenizer has its own "
            "template, or set sft.chat_template to a file or to chatml",
        )


def _learned(file: File, entry: Entry, dataset: dict[str, Any]) -> None:
    everything = file.take("train_on_inputs")
    if is_on(everything):
        file.put("sft.learn", "all", everything, "train_on_inputs")
    else:
        file.without_meaning("train_on_inputs", everything, "prompts are not learned (sft.learn)")
    for role, names in _table(file, entry, dataset, "roles").items():
        unknown = [str(name) for name in listed(names) if name not in ROLES.get(str(role), ())]
        if unknown:
            reason = f"roles: {any_of(unknown)} is not a known role; rename it in the files"
            file.refuse("datasets", entry, reason)


def _table(file: File, entry: Entry, dataset: dict[str, Any], key: str) -> dict[str, Any]:
    value = dataset.pop(key, {})
    if not isinstance(value, dict):
        file.refuse("datasets", entry, f"{key}: expected a table of keys")
        return {}
    return {str(name): item for name, item in value.items()}


def _unused(file: File, entry: Entry, dataset: dict[str, Any]) -> None:
    for key, value in dataset.items():
        harmless, reason = UNUSED.get(key, ([], "unknown key; remove it"))
        if key in UNUSED and harmless in ([True, False], [False]) and not isinstance(value, bool):
            file.refuse("datasets", entry, f"{key}: expected true or false")
        elif not is_one_of(value, harmless):
            file.refuse("datasets", entry, f"{key}: {reason}")


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
    if others is not None:
        entry, records = others
        if len(records) > 1:
            file.refuse("test_datasets", entry, "only one validation set is supported; name one")
        _source(file, entry, records[0], "validation")
        column = records[0].get("field_messages") or records[0].get("field")
        if column is not None:
            file.put("validation.column", column, entry)
    elif is_on(share):
        size = share.value
        whole = isinstance(size, float) and size > 1 and size.is_integer()
        file.put("data.holdout", int(size) if whole else size, share, "val_set_size")
    source = others[0] if others else share
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
