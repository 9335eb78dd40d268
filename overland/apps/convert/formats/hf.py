"""Reads and writes Hugging Face folders: weights (safetensors, or for reading `pytorch_model.bin`),
config.json, tokenizer, and the special tokens in its config and in the generation config.

The tokens that begin, end and pad a text are written where Hugging Face looks for them:
`config.json` and `generation_config.json` have their ids, and `generate` stops at the latter's
`eos_token_id`; `tokenizer_config.json` has them as text, and without that file `AutoTokenizer` does
not know them. A tokenizer that was trained here has no such file, and the config of a model that
was trained here says nothing about a tokenizer that was chosen with the data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from overland.apps.convert.formats.lazy import (
    Config,
    LazyCheckpoint,
    Options,
    config_near,
    copy_files,
    digest,
    is_computed,
    split_by_size,
    write_json,
)
from overland.apps.convert.formats.safetensors import (
    Checksums,
    read_weights,
    write_checksums,
    write_safetensors,
)
from overland.checkpoint.lazy import MODEL, Lazy
from overland.data.tokenizer import Tokenizer
from overland.data.tokenizer_files import GENERATION, is_ranks
from overland.errors import CheckpointError, DataError, ModelError
from overland.files import read_object
from overland.models.config import EMBEDDING, HEAD
from overland.models.flops import built_on_meta, describes_itself, outline_of
from overland.models.hf_config import RMSNORM
from overland.models.init import persistent_buffers
from overland.models.registry import read_hf_config
from overland.models.weights import INDEX, SINGLE, read_index

OLD_INDEX, OLD_SINGLE = "pytorch_model.bin.index.json", "pytorch_model.bin"
TOKENIZER = "tokenizer_config.json"
FILES = ("tokenizer.json", "tokenizer.model")


def detect_hf(path: Path) -> bool:
    return any((path / name).is_file() for name in (INDEX, SINGLE, OLD_INDEX, OLD_SINGLE))


def open_hf(path: Path, config: Config = None) -> LazyCheckpoint:
    config = config or config_near(path)
    weights, own_name = _weights(path), _names(config)
    kept = {MODEL + own_name(name): weights[name] for name in weights if not is_computed(name)}
    return LazyCheckpoint("hf", path, kept, config=config)


def _names(config: Config) -> Callable[[str], str]:
    """Returns a function from a tensor's name in a file to our name: versions of transformers
    differ."""
    try:
        known = read_hf_config(config) if config is not None else None
    except ModelError:
        known = None
    return getattr(known, "own_name", lambda name: name)


def write_hf(source: LazyCheckpoint, folder: Path, options: Options) -> None:
    if source.config is None:
        why = "does not say what model it holds"
        if source.own_model:
            why = f"has a {source.own_model}, which does not define to_hf() (docs/extending.md)"
        raise CheckpointError(
            f"{source.folder} {why}; give its config.json, or a folder with config and tokenizer, "
            "with --config"
        )
    require_known(source.config)
    weights = without_tied_head(source.weights(), source.config)
    if not options.partial and not source.own_model:  # which may have more tensors than its family
        _check_complete(source.config, weights, source.folder)
    shards = split_by_size(weights, options.max_shard_bytes)
    count = len(shards)
    files = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    files = [SINGLE] if count == 1 else files
    sums: Checksums = {}
    for file, shard in zip(files, shards, strict=True):
        sums |= write_safetensors(folder / file, shard)
    write_checksums(folder, sums)
    if count > 1:
        total = sum(lazy.nbytes for lazy in weights.values())
        file_of = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": file_of})
    config = {key: value for key, value in source.config.items() if key != "dtype"}
    dtypes = {lazy.dtype for lazy in weights.values()}
    if len(dtypes) == 1:  # transformers 4 and 5 both read this key
        config["torch_dtype"] = str(dtypes.pop()).removeprefix("torch.")
    copy_files(source.companions, folder)
    if "vocab_size" in config:  # images have none
        config = name_special_tokens(folder, config, trained_here=source.format == "overland")
    write_json(folder / "config.json", config)


def require_known(config: Mapping[str, Any]) -> None:
    """Raises for a config that transformers would silently read as another model."""
    norm = config.get("norm_type", RMSNORM)
    if norm != RMSNORM:
        raise CheckpointError(
            f"a model with norm_type = '{norm}' cannot be exported to Hugging Face, whose "
            f"{config.get('model_type')} uses RMSNorm and would compute something else with these "
            "weights"
        )


def _weights(path: Path) -> dict[str, Lazy]:
    for name in (INDEX, OLD_INDEX):
        index = path / name
        if index.is_file():
            file_of = read_index(index, CheckpointError)
            opened = {file: read_weights(path / file) for file in set(file_of.values())}
            missing = [tensor for tensor, file in file_of.items() if tensor not in opened[file]]
            if missing:
                raise CheckpointError(f"{path}: {missing[0]} is not in the file its index names")
            return {tensor: opened[file][tensor] for tensor, file in file_of.items()}
    return read_weights(path / SINGLE if (path / SINGLE).is_file() else path / OLD_SINGLE)


def without_tied_head(weights: dict[str, Lazy], config: Mapping[str, Any]) -> dict[str, Lazy]:
    """Returns the weights without a tied head; raises if it differs from the embedding and would be
    lost."""
    if config.get("tie_word_embeddings") and HEAD in weights and EMBEDDING in weights:
        head, embedding = weights[HEAD], weights[EMBEDDING]
        if head is not embedding and digest(head.load()) != digest(embedding.load()):
            raise CheckpointError(
                f"the config says that {HEAD} is {EMBEDDING} (tie_word_embeddings), but they "
                "differ; set it to false in the config given with --config"
            )
        return {name: lazy for name, lazy in weights.items() if name != HEAD}
    return weights


def _check_complete(config: dict[str, Any], weights: dict[str, Lazy], where: Path) -> None:
    """Raises if a parameter is missing or has another shape, for families that Overland knows."""
    try:
        known = read_hf_config(config)
        _, shapes = outline_of(known)
        buffers = {} if describes_itself(known) else persistent_buffers(built_on_meta(known))
    except ModelError:
        return
    shapes |= {name: tuple(one.shape) for name, one in buffers.items() if name in weights}
    for name, shape in shapes.items():
        require_weight(where, name, weights.get(name), shape)
    unexpected = [name for name in weights if name not in shapes]
    if unexpected:
        raise CheckpointError(
            f"{where} has {unexpected[0]}, which its config.json does not describe; leave it out "
            f"with --exclude {unexpected[0]}"
        )


def require_weight(where: Path, name: str, lazy: Lazy | None, shape: Sequence[int]) -> Lazy:
    """Returns a weight; raises if it is missing, or has another shape than its config requires."""
    if lazy is None:
        raise CheckpointError(f"{where} lacks {name}, which its config.json requires")
    if lazy.shape != tuple(shape):
        raise CheckpointError(
            f"{where} has {name} with shape {list(lazy.shape)}, but its config.json requires "
            f"{list(shape)}"
        )
    return lazy


def name_special_tokens(folder: Path, config: dict[str, Any], trained_here: bool) -> dict[str, Any]:
    """Completes the tokenizer config and the generation config in `folder`; returns the model's
    config with the ids. For a model from elsewhere only missing values are added; a model that was
    trained here ends its documents as its tokenizer does."""
    tokenizer = _tokenizer_in(folder)
    if tokenizer is None:
        _write_generation(folder, config)
        return config
    known = set(tokenizer.specials.values())
    begins, ends, pads = (
        [i for i in ids_in(config.get(f"{name}_token_id")) if i in known or not trained_here]
        for name in ("bos", "eos", "pad")
    )
    end = tokenizer.eos_id
    if end is not None and end not in ends and (trained_here or not ends):
        ends.insert(0, end)
    ids = {
        "bos_token_id": begins[0] if begins else tokenizer.bos_id,
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "pad_token_id": pads[0] if pads else tokenizer.pad_id,
    }
    _write_tokenizer_config(folder, tokenizer, ids, config)
    _write_generation(folder, ids)
    return {**config, **ids}


def _tokenizer_in(folder: Path) -> Tokenizer | None:
    """Returns the tokenizer; None if there is none, or one that Overland cannot read."""
    if not any((folder / name).is_file() for name in FILES):
        return None
    try:
        return Tokenizer(folder, add_eos=False)  # a tokenizer may have no eos token
    except (DataError, ImportError):
        return None


def _write_tokenizer_config(
    folder: Path, tokenizer: Tokenizer, ids: dict[str, Any], config: dict[str, Any]
) -> None:
    """Adds the class and the special tokens as text, which AutoTokenizer needs; keeps existing
    values."""
    path = folder / TOKENIZER
    given = read_object(path, CheckpointError) if path.is_file() else {}
    names = {i: name for name, i in tokenizer.specials.items()}
    made: dict[str, Any] = {"tokenizer_class": _class_of(tokenizer.path)}
    for key in ("bos_token", "eos_token", "pad_token"):
        number = tokenizer.eos_id if key == "eos_token" else ids[f"{key}_id"]
        if number in names:
            made[key] = names[number]
    if length := config.get("max_position_embeddings"):
        made["model_max_length"] = length
    made["clean_up_tokenization_spaces"] = False
    write_json(path, {**made, **{key: value for key, value in given.items() if value is not None}})


def _class_of(path: Path) -> str:
    """Returns the tokenizer class for transformers, which converts tiktoken's files itself."""
    is_fast = path.suffix == ".json" or is_ranks(path.read_bytes())
    return "PreTrainedTokenizerFast" if is_fast else "LlamaTokenizer"


def _write_generation(folder: Path, ids: dict[str, Any]) -> None:
    """Adds the special token ids; temperatures and the like stay as they came with the model."""
    path = folder / GENERATION
    given = read_object(path, CheckpointError) if path.is_file() else {"_from_model_config": True}
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    found = {name: ids[name] for name in names if ids.get(name) is not None}
    ends = [*ids_in(given.get("eos_token_id")), *ids_in(found.get("eos_token_id"))]
    if ends:
        ends = list(dict.fromkeys(ends))
        found["eos_token_id"] = ends[0] if len(ends) == 1 else ends
        given = {**given, "eos_token_id": found["eos_token_id"]}
    write_json(path, {**found, **given})


def ids_in(value: Any) -> list[int]:
    """Returns a list of ids: `eos_token_id` is a number, a list of numbers, or None."""
    some = value if isinstance(value, list | tuple) else [value]
    return [one for one in some if isinstance(one, int)]
