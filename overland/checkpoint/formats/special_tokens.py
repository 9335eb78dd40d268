"""Which tokens begin, end and pad a text, said where Hugging Face looks for it.

`config.json` and `generation_config.json` name them by id, and `generate` stops at the latter's
`eos_token_id`; `tokenizer_config.json` names them as text, and without that file `AutoTokenizer`
does not know them. A tokenizer that was trained here has no such file, and the config of a model
that was trained here says nothing about a tokenizer that was chosen with the data.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from overland.checkpoint.formats.shards import write_json
from overland.checkpoint.formats.source import read_json
from overland.data.tokenizer import Tokenizer
from overland.data.tokenizer_files import is_ranks
from overland.errors import DataError

GENERATION, TOKENIZER = "generation_config.json", "tokenizer_config.json"
PADS = ("<pad>", "[PAD]", "<|pad|>", "<|padding|>", "<|finetune_right_pad_id|>")
FILES = ("tokenizer.json", "tokenizer.model")


def name_special_tokens(folder: Path, config: dict[str, Any], trained_here: bool) -> dict[str, Any]:
    """Completes the tokenizer's and the generation config in `folder`; returns the model's config
    with the ids. What a model from elsewhere says about itself is only completed; a model that was
    trained here ends its documents as its tokenizer does."""
    tokenizer = _tokenizer_in(folder)
    if tokenizer is None:
        _write_generation(folder, config)
        return config
    known = set(tokenizer.specials.values())
    ends = [i for i in _ids(config.get("eos_token_id")) if i in known or not trained_here]
    end = tokenizer.eos_id
    if end is not None and end not in ends and (trained_here or not ends):
        ends.insert(0, end)
    begin = config.get("bos_token_id")
    if begin is None or (trained_here and begin not in known):
        begin = tokenizer.bos_id
    pad = config.get("pad_token_id")
    if pad is None or (trained_here and pad not in known):
        pad = next((tokenizer.specials[name] for name in PADS if name in tokenizer.specials), None)
        pad = end if pad is None else pad
    ids = {
        "bos_token_id": begin,
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "pad_token_id": pad,
    }
    _write_tokenizer_config(folder, tokenizer, ids, config)
    _write_generation(folder, ids)
    return {**config, **ids}


def _tokenizer_in(folder: Path) -> Tokenizer | None:
    """None where there is none, or one of a kind that Overland cannot read."""
    if not any((folder / name).is_file() for name in FILES):
        return None
    try:
        return Tokenizer(folder, add_eos=False)  # which one may do without
    except (DataError, ImportError):
        return None


def _write_tokenizer_config(
    folder: Path, tokenizer: Tokenizer, ids: dict[str, Any], config: dict[str, Any]
) -> None:
    """Keeps what is there. AutoTokenizer needs a class, and the special tokens as text."""
    path = folder / TOKENIZER
    given = read_json(path) if path.is_file() else {}
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
    """transformers' name for the kind of tokenizer; it converts tiktoken's files itself."""
    is_fast = path.suffix == ".json" or is_ranks(path.read_bytes())
    return "PreTrainedTokenizerFast" if is_fast else "LlamaTokenizer"


def _write_generation(folder: Path, ids: dict[str, Any]) -> None:
    """Temperatures and the like stay as they came with the model."""
    path = folder / GENERATION
    given = read_json(path) if path.is_file() else {"_from_model_config": True}
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    found = {name: ids[name] for name in names if ids.get(name) is not None}
    ends = [*_ids(given.get("eos_token_id")), *_ids(found.get("eos_token_id"))]
    if ends:
        ends = list(dict.fromkeys(ends))
        found["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    write_json(path, {**found, **given, **_kept(found, "eos_token_id")})


def _kept(values: dict[str, Any], name: str) -> dict[str, Any]:
    return {name: values[name]} if name in values else {}


def _ids(value: Any) -> list[int]:
    """`eos_token_id` is a number, a list of numbers, or nothing."""
    some = value if isinstance(value, list | tuple) else [value]
    return [one for one in some if isinstance(one, int)]
