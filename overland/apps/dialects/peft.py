"""Reads PEFT's adapter_config.json as our `[lora]` section, and decides which of its settings are
renamed, ignored or refused. Does not import torch.

A file may come from anywhere, so every value is checked: a setting that Overland does not implement
is refused by name, even if a later version of PEFT added it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NoReturn

from pydantic import ValidationError

from overland.config.errors import Problem
from overland.config.schema import JobConfig, Lora
from overland.config.source import KeyPath
from overland.config.validate import EXPRESSIONS, expressions_in, wrong_expression
from overland.errors import CheckpointError
from overland.files import LARGEST_CONFIG, read_object

ADAPTER_CONFIG = "adapter_config.json"

KEYS = {
    "r": "rank",
    "lora_alpha": "alpha",
    "lora_dropout": "dropout",
    "target_modules": "targets",
    "exclude_modules": "exclude",
    "layers_to_transform": "layers",
    "rank_pattern": "rank_pattern",
    "alpha_pattern": "alpha_pattern",
    "use_rslora": "rslora",
    "use_dora": "dora",
    "modules_to_save": "modules_to_save",
}
"""PEFT's names for the keys of [lora]."""

# These record how and where the adapter was made; its outputs do not depend on them.
NO_MATTER = {
    "auto_mapping", "base_model_name_or_path", "corda_config", "eva_config", "inference_mode",
    "loftq_config", "lora_ga_config", "megatron_core", "peft_version", "qalora_group_size",
    "revision", "runtime_config", "task_type",
}  # fmt: skip
# These initializations change the frozen weights, and the adapter's file does not contain the
# change.
CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """Returns the contents of a folder's adapter_config.json."""
    return read_object(folder / ADAPTER_CONFIG, CheckpointError, LARGEST_CONFIG)


def settings_of(contents: Mapping[str, Any], where: Path | str) -> Lora:
    """Returns the `[lora]` settings equivalent to an adapter_config.json."""
    _require_readable(contents, where)
    given = {ours: contents[theirs] for theirs, ours in KEYS.items() if theirs in contents}
    if isinstance(given.get("layers"), int):
        given["layers"] = [given["layers"]]
    if given.get("layers") == []:  # which means all in PEFT
        given["layers"] = None
    for ours in ("exclude", "modules_to_save", "rank_pattern", "alpha_pattern"):
        if ours in given and given[ours] is None:
            del given[ours]
    given.setdefault("rank", 8)
    if not given.get("targets"):
        raise CheckpointError(f"{where}: target_modules is empty")
    try:
        settings = Lora.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        theirs = next(name for name, ours in KEYS.items() if ours == first["loc"][0])
        why = "is not a value that PEFT writes there"
        if first["type"] == "less_than_equal":
            why = f"is more than {first['ctx']['le']:,.0f}, and results would overflow"
        raise CheckpointError(f"{where}: {theirs} = {contents[theirs]!r:.80} {why}") from None
    if settings.rank < 1:
        raise CheckpointError(f"{where}: r = {settings.rank}; expected a rank of 1 or more")
    for key in EXPRESSIONS:
        for text in expressions_in(getattr(settings, key)):
            if wrong := wrong_expression(text):
                raise CheckpointError(f"{where}: {text!r:.80} {wrong}")
    return settings


def expand_adapter(
    config: JobConfig, set_keys: Collection[KeyPath], where: str
) -> tuple[JobConfig, list[Problem]]:
    """Returns the config with the `[lora]` settings of the adapter in `lora.adapter`, and problems.
    A key that is set to a different value contradicts the adapter."""
    name = config.lora.adapter
    assert name is not None
    folder = Path(name)
    if not folder.is_dir() and config.lora.rank:
        return config, []  # a run that has already started; `checks` reports it
    try:
        if not (folder / ADAPTER_CONFIG).is_file():
            what = f"holds no {ADAPTER_CONFIG}" if folder.is_dir() else "no such folder"
            raise CheckpointError(f"{what}; expected the folder of an adapter in PEFT's format")
        found = settings_of(read_adapter_config(folder), folder / ADAPTER_CONFIG)
    except CheckpointError as error:
        return config, [Problem(str(error), where, "lora.adapter", name)]
    problems = []
    for key in KEYS.values():
        ours, theirs = getattr(config.lora, key), getattr(found, key)
        is_set = any(path[:2] == ("lora", key) for path in set_keys)
        if is_set and _comparable(ours) != _comparable(theirs):
            message = f"the adapter in {name} has {theirs!r:.200}; remove one of them"
            problems.append(Problem(message, where, f"lora.{key}", ours))
    return config.having({f"lora.{key}": getattr(found, key) for key in KEYS.values()}), problems


def _require_readable(contents: Mapping[str, Any], where: Path | str) -> None:
    def refuse(name: str, why: str) -> NoReturn:
        raise CheckpointError(f"{where}: {name!s:.80} = {contents.get(name)!r:.80}{why}")

    if contents.get("peft_type") != "LORA":
        refuse("peft_type", "; only LORA is supported")
    start = contents.get("init_lora_weights", True)
    if isinstance(start, str) and start.startswith(CHANGES_BASE):
        refuse(
            "init_lora_weights",
            " changes the frozen weights before training, and the file does not contain these; "
            "save it again with PEFT's path_initial_model_for_weight_conversion, which converts it "
            "to a plain LoRA",
        )
    if contents.get("bias", "none") != "none":
        refuse("bias", "; adapters with biases are not supported")
    pattern = contents.get("layers_pattern")
    if pattern and contents.get("layers_to_transform") and pattern not in ("layers", ["layers"]):
        refuse("layers_pattern", "; only 'layers' is supported")
    checked = {"peft_type", "init_lora_weights", "bias", "layers_pattern"}
    for name, value in contents.items():
        if value and name not in {*KEYS, *NO_MATTER, *checked}:
            refuse(name, " is not supported")
    if not isinstance(contents.get("base_model_name_or_path"), str | None):
        refuse("base_model_name_or_path", " is not a name")


def _comparable(value: Any) -> Any:
    """Sorts lists, since PEFT writes lists of names in any order."""
    return sorted(value) if isinstance(value, list) else value
