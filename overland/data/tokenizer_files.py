"""Finds and reads the files of a tokenizer and those next to it (special tokens, chat templates),
and refuses rules that would multiply a text or take forever to match it.

`check_rules` refuses a tokenizer.json whose rules would multiply a text, or could take forever to
match it. A file of a few hundred bytes can turn a page into gigabytes, which ends the process
without a word, and an expression such as (a+)+b makes the library panic, with a page of its own
stack. Python's parser of expressions, which has no public name, is close enough to the library's to
measure them; what it cannot read is left to the library, except for expressions that call
themselves.
"""

from __future__ import annotations

import base64
import binascii
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from overland.errors import CheckpointError, DataError
from overland.files import DEEPEST, leads_out, read_object

# Meta puts its own format in a subfolder of the one with Hugging Face's.
PLACES = ("tokenizer.json", "tokenizer.model", "original/tokenizer.model")

CONFIG, NAMES, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
TEMPLATE = "chat_template.jinja"
BESIDE = (CONFIG, NAMES, ADDED, TEMPLATE)

GENERATION = "generation_config.json"
# Files next to weights that belong to them, besides config.json.
COMPANIONS = (
    "tokenizer.json", "tokenizer.model", *BESIDE, "vocab.json", "merges.txt", "chat_template.json",
    GENERATION,
)  # fmt: skip

ROLES = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"
)  # fmt: skip
DEFAULT, WITH_TOOLS = "default", "tool_use"  # names of chat templates, if there are several

RANK_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\r?(\n|$)")
# Real ones stay below 20: U+FDFA becomes 18 letters, 33 bytes.
MOST_GROWTH = 64.0
MANY = 1000  # repeats, as good as endless
MOST_ADDED = 10_000  # tokens that a post-processor adds to a text
TRANSPARENT = ("SUBPATTERN", "BRANCH", "MAX_REPEAT", "MIN_REPEAT")
_UNICODE = re.compile(r"\\[pP](\{[^}]*\}|.)")
_CALL = re.compile(r"\\g[<']")  # `(?<x>a\g<x>*)*b` never ended: the library counts no calls


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
            read_object(path, DataError, text=read_tokenizer_file(path)) if path else {}
            for path in map(by_name.get, (CONFIG, NAMES, ADDED))
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


def check_rules(rules: Mapping[str, Any], path: Path) -> None:
    if why := _what_is_wrong(rules):
        raise DataError(f"{path} cannot be used: its {why}")


def _what_is_wrong(rules: Mapping[str, Any]) -> str:
    """Returns why the rules of a tokenizer cannot be used, if they cannot."""
    for pattern in _patterns({name: one for name, one in rules.items() if name != "model"}):
        tree = _parsed(pattern)
        if _CALL.search(pattern) or (tree is not None and _is_endless(tree)):
            return (
                f"expression {pattern!r:.80} repeats what is repeated already, and could take "
                "forever to match"
            )
    for part in ("normalizer", "decoder"):
        try:
            grows = _growth(rules.get(part))
        except (TypeError, ValueError, KeyError, AttributeError, RecursionError):
            continue  # the library says what is wrong
        if grows > MOST_GROWTH:
            limit = f"{MOST_GROWTH:.0f} is the limit"
            return f"{part} makes a text up to {grows:,.0f} times as long, and {limit}"
    if (copies := _copies(rules.get("post_processor"))) > 1:
        return f"post_processor writes every text {copies:,} times"
    if (added := _num_added(rules.get("post_processor"))) > MOST_ADDED:
        return f"post_processor adds {added:,} tokens to every text"
    return ""


@contextmanager
def library_errors(path: Path) -> Iterator[None]:
    """Turns a panic of the library, which is no `Exception`, into an error. It panics, say, if a
    regular expression of the file takes too long to match."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        reason = str(error).splitlines()[0] if str(error) else "no reason given"
        raise DataError(
            f"{path} cannot be used: its library failed with it ({reason:.200})"
        ) from None


def _growth(rule: Any) -> float:
    """Returns how many times as long a text can become by a normalizer or a decoder."""
    if rule is None:
        return 1.0
    kind = rule["type"]
    if kind == "Sequence":
        return math.prod(map(_growth, rule.get("normalizers") or rule.get("decoders") or []))
    if kind == "Replace":
        content, pattern = len(rule["content"]), rule["pattern"]
        if "String" in pattern:
            shortest = len(pattern["String"])
        else:  # 0 if that is not known
            tree = _parsed(pattern["Regex"])
            shortest = 0 if tree is None else int(tree.getwidth()[0])
        return max(1.0, content / shortest) if shortest else 1.0 + content
    if kind == "Prepend":
        return max(1.0, len(rule["prepend"]) / 16)  # once per text, which may be short
    if kind == "Precompiled":
        return max(1.0, float(_longest(rule["precompiled_charsmap"])))
    return 1.0


def _patterns(rules: Any, depth: int = 0) -> Iterator[str]:
    """Yields the regular expressions in a part of the file."""
    if isinstance(rules, dict) and isinstance(rules.get("Regex"), str):
        yield rules["Regex"]
    inside = rules.values() if isinstance(rules, dict) else rules
    if isinstance(inside, list) or isinstance(rules, dict):
        for one in inside if depth < DEEPEST else ():
            yield from _patterns(one, depth + 1)


def _parsed(pattern: str) -> Any:
    try:
        from re import _parser  # type: ignore[attr-defined]

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _parser.parse(_UNICODE.sub("x", pattern))
    except Exception:  # the library's expressions have a syntax of their own
        return None


def _is_endless(tree: Any) -> bool:
    """Whether a repeated part can consist of a repeated part alone, so that the number of ways to
    match a text doubles with every letter."""
    for name, value in tree:
        for below in _inside(value):
            if _is_endless(below):
                return True
            if _repeats(name, value) and any(map(_is_repeat_alone, _alternatives(below))):
                return True
    return False


def _repeats(name: Any, value: Any) -> bool:
    """Whether a part may be repeated without a limit, and be tried again with fewer repeats."""
    return str(name) in ("MAX_REPEAT", "MIN_REPEAT") and int(value[1]) >= MANY


def _is_repeat_alone(tree: Any) -> bool:
    for place, (name, value) in enumerate(tree):
        if tree.getwidth()[0] > tree[place : place + 1].getwidth()[0]:
            continue  # the other parts match letters, too
        if _repeats(name, value):
            return True
        for below in _inside(value) if str(name) in TRANSPARENT else ():
            if any(map(_is_repeat_alone, _alternatives(below))):
                return True
    return False


def _alternatives(tree: Any) -> list[Any]:
    is_branch = len(tree) == 1 and str(tree[0][0]) == "BRANCH"
    return list(tree[0][1][1]) if is_branch else [tree]


def _inside(value: Any) -> Iterator[Any]:
    """Yields the expressions inside a part of one."""
    if hasattr(value, "getwidth"):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _inside(one)


def _longest(charsmap: str | None) -> int:
    """Returns the length of the longest text that sentencepiece's map has for a character: behind
    the size of a trie and the trie, these are separated by null bytes."""
    try:
        data = base64.b64decode(charsmap or "")
    except binascii.Error:
        return 0
    texts = data[4 + int.from_bytes(data[:4], "little") :]
    return max((len(one.decode(errors="replace")) for one in texts.split(b"\0")), default=0)


def _copies(rule: Any) -> int:
    """Returns how many times a post-processor writes a text; 0 if it is of a kind that cannot."""
    try:
        if rule["type"] == "Sequence":
            return math.prod(max(1, _copies(one)) for one in rule["processors"])
        return sum("Sequence" in one for one in rule["single"])
    except (TypeError, KeyError, AttributeError, RecursionError):
        return 0


def _num_added(rule: Any) -> int:
    try:
        if rule["type"] == "Sequence":
            return sum(map(_num_added, rule["processors"]))
        names = [one["SpecialToken"]["id"] for one in rule["single"] if "SpecialToken" in one]
        return sum(len(rule["special_tokens"][name]["ids"]) for name in names)
    except (TypeError, KeyError, AttributeError, RecursionError):
        return 0
