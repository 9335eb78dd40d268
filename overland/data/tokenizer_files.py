"""The files of a tokenizer: the tokenizer itself, and the files next to it that describe it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from overland.errors import CheckpointError, DataError
from overland.files import leads_out, parse_json

# Meta puts its own format in a subfolder of the one with Hugging Face's.
PLACES = ("tokenizer.json", "tokenizer.model", "original/tokenizer.model")

CONFIG, NAMES, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
TEMPLATE = "chat_template.jinja"
BESIDE = (CONFIG, NAMES, ADDED, TEMPLATE)

GENERATION = "generation_config.json"
# Files next to weights that belong to them, besides config.json.
COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    GENERATION,
)

ROLES = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"
)  # fmt: skip
DEFAULT, WITH_TOOLS = "default", "tool_use"  # names of chat templates, if there are several

RANK_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\r?(\n|$)")


def find_file(path: Path) -> Path:
    """Finds the tokenizer file in a folder, or returns the file itself."""
    for file in [path, *(path / place for place in PLACES)]:
        if file.is_file():
            return file
    if not path.exists():
        raise DataError(f"{path} does not exist")
    raise DataError(f"{path} has no tokenizer.json or tokenizer.model, there or in original/")


def read_tokenizer_file(path: Path) -> bytes:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    if data.startswith(b"version https://git-lfs"):
        raise DataError(
            f"{path} is only a pointer to the file, because it was cloned without Git LFS: run "
            "'git lfs pull' in its folder"
        )
    return data


def is_ranks(data: bytes) -> bool:
    """Whether a tokenizer.model is in tiktoken's format: lines with a base64 token and its rank."""
    return RANK_LINE.match(data) is not None


@dataclass(frozen=True)
class Beside:
    """What the files next to a tokenizer say about it."""

    files: list[Path] = field(default_factory=list)
    names: dict[str, str | None] = field(default_factory=dict)
    """Special tokens by their role, such as bos_token, if specified; None if the files say that
    there is none."""
    added: dict[str, int] = field(default_factory=dict)
    """Tokens that a tokenizer.model itself does not contain."""
    adds_bos: bool | None = None
    """Whether a text begins with BOS, if specified (`add_bos_token`)."""
    chat_templates: dict[str, str] = field(default_factory=dict)
    """Templates by name; `default` is the one for conversations without tools."""

    @classmethod
    def of(cls, tokenizer: Path) -> Beside:
        folders = [tokenizer.parent]
        if tokenizer.parent.name == "original":
            folders.append(tokenizer.parent.parent)
        found = (folder / name for name in BESIDE for folder in folders)
        by_name: dict[str, Path] = {}
        for file in found:
            if file.is_file():
                by_name.setdefault(file.name, file)
        config, names, added = (
            read_json(read_tokenizer_file(by_name[name]), by_name[name]) if name in by_name else {}
            for name in (CONFIG, NAMES, ADDED)
        )
        adds_bos = config.get("add_bos_token")
        return cls(
            list(by_name.values()),
            _names(tokenizer.parent, config, names),
            _added(config, added),
            adds_bos if isinstance(adds_bos, bool) else None,
            _chat_templates(tokenizer.parent, config, by_name.get(TEMPLATE)),
        )

    def find(
        self, role: str, token_id: Callable[[str], int | None], otherwise: int | None
    ) -> int | None:
        """Returns the id of `bos_token` or `eos_token`: the one named here, or the tokenizer's."""
        name = self.names.get(role)
        if name is not None:
            found = token_id(name)
            if found is None and role == "eos_token":
                raise DataError(
                    f"{self.files[0].parent} names {name!r} as eos_token, but its tokenizer has no "
                    f"such token; correct {CONFIG} there"
                )
            return found
        # Every document has an end, but a family without BOS sets it to null.
        return None if role in self.names and role == "bos_token" else otherwise


def _names(folder: Path, *said: dict[str, Any]) -> dict[str, str | None]:
    names: dict[str, str | None] = {}
    for role in ROLES:
        values = [_content(words[role]) for words in said if role in words]
        wrong = [value for value in values if not isinstance(value, str | None)]
        if wrong and role in ("bos_token", "eos_token"):
            raise DataError(
                f"{folder}: {CONFIG} or {NAMES} gives {wrong[0]!r:.60} as {role}; expected the "
                "text of a token"
            )
        if values and not wrong:
            names[role] = next((value for value in values if value), None)
    return names


def _chat_templates(folder: Path, config: dict[str, Any], file: Path | None) -> dict[str, str]:
    """Returns the templates that a tokenizer's config lists; a separate template file takes
    precedence."""
    said = config.get("chat_template")
    listed = said if isinstance(said, list) else [{"name": DEFAULT, "template": said}]
    try:
        found = {str(one["name"]): one["template"] for one in listed if one["template"] is not None}
    except (TypeError, KeyError):
        found = {DEFAULT: None}
    if file is not None:
        found[DEFAULT] = read_text(file)
    if any(not isinstance(template, str) for template in found.values()):
        raise DataError(
            f"{folder}: {CONFIG} gives a chat_template that is neither text nor a list of "
            '{"name", "template"}'
        )
    return found


def read_text(path: Path) -> str:
    try:
        return read_tokenizer_file(path).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise DataError(f"{path} is not UTF-8 text") from None


def _added(config: dict[str, Any], added: dict[str, Any]) -> dict[str, int]:
    decoder = config.get("added_tokens_decoder") or {}
    try:
        ids = {name: int(i) for name, i in added.items()}
        return ids | {str(_content(token)): int(i) for i, token in decoder.items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise DataError(f"{CONFIG} or {ADDED} lists tokens without ids: {error}") from None


def _content(token: Any) -> Any:
    """Returns the text of a token, which is given as a string or as an object with `content`."""
    return token.get("content") if isinstance(token, dict) else token


def read_json(data: bytes, path: Path | str) -> dict[str, Any]:
    """Parses a file that contains a JSON object."""
    try:
        value = parse_json(data)
    except ValueError as error:
        raise DataError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise DataError(f"{path} is not a JSON object: download it again")
    return value


def companions_in(folder: Path) -> list[Path]:
    found = [folder / name for name in COMPANIONS if (folder / name).is_file()]
    for path in found:
        refuse_link_out(path)
    return found


def refuse_link_out(path: Path) -> None:
    """Raises for a link that leads out of its folder. Only files of the folder itself may be copied
    with the weights: a folder from somebody else could link to any file on this machine."""
    if leads_out(path, path.parent):
        raise CheckpointError(
            f"{path} is a link that leads out of its folder, to {path.resolve()}: replace it with "
            "a copy if it belongs there, or remove it"
        )
