"""Chooses the files of a repository to fetch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import PurePosixPath

from overland.errors import HubError

# Many repositories have the same weights in two or three formats. The first of these is taken:
# safetensors come first, because reading them runs no code.
WEIGHTS = ((".safetensors",), (".bin",), (".pth", ".pt", ".ckpt"))
FOREIGN = (".h5", ".msgpack", ".ot", ".onnx", ".onnx_data", ".gguf", ".tflite", ".mlmodel")

TOKENIZER = (
    "tokenizer*.json", "tokenizer*.model*", "tokenizer*.jinja", "special_tokens_map.json",
    "added_tokens.json", "merges.txt", "vocab.json", "vocab.txt", "*.tiktoken", "tekken.json",
    "spiece.model", "sentencepiece*.model", "chat_template*", "additional_chat_templates/*",
    "config.json", "generation_config.json", "original/tokenizer*",
)  # fmt: skip


def choose_model(names: Iterable[str]) -> list[str]:
    """Returns all files except second copies of the weights in another format."""
    names = list(names)
    suffixes = {suffix for name in names if (suffix := _weights(name))}
    kinds = [kind for kind in WEIGHTS if suffixes & set(kind)]
    left_out = {suffix for kind in kinds[1:] for suffix in kind} | set(FOREIGN if kinds else ())
    chosen = [name for name in names if _weights(name) not in left_out]
    return [name for name in chosen if not _is_second_copy(name, chosen)]


def choose_tokenizer(names: Iterable[str]) -> list[str]:
    return [name for name in names if any(_matches(name, pattern) for pattern in TOKENIZER)]


def choose_included(names: Sequence[str], patterns: Sequence[str], where: str) -> list[str]:
    """Returns names that match a pattern; `*` also matches `/`, and `folder/` matches all in it."""
    for pattern in patterns:
        if not any(_included(name, pattern) for name in names):
            some = ", ".join(list(names)[:5]) or "none"
            raise HubError(
                f"--include {pattern!r} matches none of the {len(names)} files in {where}, such as "
                f"{some}"
            )
    return [name for name in names if any(_included(name, pattern) for pattern in patterns)]


def _weights(name: str) -> str:
    """Returns the suffix of a weights file or its index; "" for other files."""
    suffix = PurePosixPath(name.removesuffix(".index.json")).suffix
    return suffix if any(suffix in kind for kind in (*WEIGHTS, FOREIGN)) else ""


def _is_second_copy(name: str, chosen: Sequence[str]) -> bool:
    """Whether a file is a copy in Meta's or Mistral's own format, next to Hugging Face's."""
    has_standard = any(fnmatchcase(other, "model*.safetensors") for other in chosen)
    folder, _, file = name.rpartition("/")
    is_own = folder == "original" or (not folder and file.startswith("consolidated"))
    return has_standard and is_own and bool(_weights(name))


def _matches(name: str, pattern: str) -> bool:
    """Matches folder by folder: `tokenizer*` does not match files in `onnx/`."""
    parts, wanted = name.split("/"), pattern.split("/")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _included(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern + "*" if pattern.endswith("/") else pattern)
