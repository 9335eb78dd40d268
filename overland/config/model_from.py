"""`model.from = FOLDER`: architecture, tokenizer and weights of a model, by one key.

It stands for three other keys, and is replaced by them when a config is loaded: one mechanism
underneath, and a run folder's config.toml says in full what was taken from where.
"""

from __future__ import annotations

from pathlib import Path

from overland.config import foreign
from overland.config.commands import command
from overland.config.errors import Problem
from overland.config.schema import JobConfig
from overland.run_folder import COMMITTED, CONFIG, MODEL_CONFIG, TOKENIZER

WEIGHTS = ("*.safetensors", "pytorch_model*.bin", "model_state_dict.pt")
TOKENIZERS = ("tokenizer.json", "tokenizer.model")


def expand_from(config: JobConfig, where: str) -> tuple[JobConfig, list[Problem]]:
    """The config with `model.from` replaced by the keys it stands for, and what is wrong with it.
    A tokenizer may be given beside it; another architecture or other weights contradict it."""
    if config.model.from_ is None:
        return config, []
    folder = Path(config.model.from_)
    parts, problem = parts_of(folder)
    if problem:
        return config, [Problem(problem, where, "model.from", config.model.from_)]
    given = {
        "model.config": config.model.config,
        "model.hf_assets_path": config.model.hf_assets_path,
        "checkpoint.initial_load_path": config.checkpoint.initial_load_path,
    }
    for key in ("model.config", "checkpoint.initial_load_path"):
        if given[key] is not None and Path(given[key] or "") != Path(parts[key]):
            message = f"stands beside model.from = {config.model.from_}: take one of them out"
            return config, [Problem(message, where, key, given[key])]
    taken = {**parts, **{key: value for key, value in given.items() if value is not None}}
    if "model.hf_assets_path" not in taken and takes_tokens(Path(parts["model.config"])):
        message = "holds no tokenizer: set model.hf_assets_path to one that fits the weights"
        return config, [Problem(message, where, "model.from", config.model.from_)]
    update: dict[str, dict[str, str | None]] = {"model": {"from_": None}, "checkpoint": {}}
    for key, value in taken.items():
        section, _, name = key.partition(".")
        update[section][name] = value
    model = config.model.model_copy(update=update["model"])
    checkpoint = config.checkpoint.model_copy(update=update["checkpoint"])
    return config.model_copy(update={"model": model, "checkpoint": checkpoint}), []


def parts_of(folder: Path) -> tuple[dict[str, str], str]:
    """What a folder gives, by key; or what it lacks."""
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "no such folder"
        fetch = command("overland", "fetch", "model", "NAME")
        return {}, f"{what}; expected a folder, as `{fetch}` brings one"
    if (folder / MODEL_CONFIG).is_file() and (folder / CONFIG).is_file():  # a run
        architecture, tokenizer = folder / MODEL_CONFIG, folder / TOKENIZER
    elif (folder / COMMITTED).is_file():
        message = (
            "is one checkpoint of a run: name the run's folder, whose newest checkpoint is taken"
        )
        return {}, message
    elif not (folder / "config.json").is_file():
        return {}, "holds no config.json, which says what model it is"
    elif not has_weights(folder):
        return {}, "holds no weights (*.safetensors); model.config takes its architecture alone"
    else:
        architecture, tokenizer = folder, folder
    parts = {"model.config": str(architecture), "checkpoint.initial_load_path": str(folder)}
    if has_tokenizer(tokenizer):
        parts["model.hf_assets_path"] = str(tokenizer)
    return parts, ""


def takes_tokens(architecture: Path) -> bool:
    """Whether the model has a vocabulary; one of images has none. A file that cannot be read is
    reported where the model is built."""
    path = architecture / "config.json" if architecture.is_dir() else architecture
    try:
        keys = foreign.read_json(path)
        return "vocab_size" in keys or "image_size" not in keys
    except (OSError, ValueError, TypeError):
        return True


def has_weights(folder: Path) -> bool:
    return any(True for pattern in WEIGHTS for _ in folder.glob(pattern))


def has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in TOKENIZERS)
