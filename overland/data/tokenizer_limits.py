"""Refuses a tokenizer.json whose rules would multiply a text, or could take forever to match it.

A file of a few hundred bytes can turn a page into gigabytes, which ends the process without a word,
and an expression such as (a+)+b makes the library panic, with a page of its own stack. Python's
parser of expressions, which has no public name, is close enough to the library's to measure them;
what it cannot read is left to the library, except for expressions that call themselves.
"""

from __future__ import annotations

import base64
import binascii
import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from overland.errors import DataError
from overland.files import DEEPEST

# Real ones stay below 20: U+FDFA becomes 18 letters, 33 bytes.
MOST_GROWTH = 64.0
MANY = 1000  # repeats, as good as endless
MOST_ADDED = 10_000  # tokens that a post-processor adds to a text
TRANSPARENT = ("SUBPATTERN", "BRANCH", "MAX_REPEAT", "MIN_REPEAT")
_UNICODE = re.compile(r"\\[pP](\{[^}]*\}|.)")
_CALL = re.compile(r"\\g[<']")  # `(?<x>a\g<x>*)*b` never ended: the library counts no calls


def check_rules(rules: Mapping[str, Any], path: Path) -> None:
    for pattern in _patterns({name: one for name, one in rules.items() if name != "model"}):
        tree = _parsed(pattern)
        if _CALL.search(pattern) or (tree is not None and _is_endless(tree)):
            raise DataError(
                f"{path} cannot be used: its expression {pattern!r:.80} repeats what is repeated "
                "already, and could take forever to match"
            )
    for part in ("normalizer", "decoder"):
        try:
            grows = _growth(rules.get(part))
        except (TypeError, ValueError, KeyError, AttributeError, RecursionError):
            continue  # the library says what is wrong
        if grows > MOST_GROWTH:
            raise DataError(
                f"{path} cannot be used: its {part} makes a text up to {grows:,.0f} times as long, "
                f"and {MOST_GROWTH:.0f} is the limit"
            )
    if (copies := _copies(rules.get("post_processor"))) > 1:
        raise DataError(
            f"{path} cannot be used: its post_processor writes every text {copies:,} times"
        )
    if (added := _added(rules.get("post_processor"))) > MOST_ADDED:
        raise DataError(
            f"{path} cannot be used: its post_processor adds {added:,} tokens to every text"
        )


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
        grows = 1.0
        for one in rule.get("normalizers") or rule.get("decoders") or []:
            grows *= _growth(one)
        return grows
    if kind == "Replace":
        content, pattern = len(rule["content"]), rule["pattern"]
        shortest = len(pattern["String"]) if "String" in pattern else _shortest(pattern["Regex"])
        return max(1.0, content / shortest) if shortest else 1.0 + content
    if kind == "Prepend":
        return max(1.0, len(rule["prepend"]) / 16)  # once per text, which may be short
    if kind == "Precompiled":
        return max(1.0, float(_longest(rule["precompiled_charsmap"])))
    return 1.0


def _shortest(pattern: str) -> int:
    """Returns the length of the shortest match; 0 if that is not known."""
    tree = _parsed(pattern)
    return 0 if tree is None else int(tree.getwidth()[0])


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


def _is_repeat_alone(parts: Sequence[tuple[Any, Any]]) -> bool:
    for place, (name, value) in enumerate(parts):
        others = [*parts[:place], *parts[place + 1 :]]
        if any(_least(*one) for one in others):
            continue
        if _repeats(name, value):
            return True
        for below in _inside(value) if str(name) in TRANSPARENT else ():
            if any(map(_is_repeat_alone, _alternatives(below))):
                return True
    return False


def _least(name: Any, value: Any) -> int:
    """Returns the smallest number of letters that a part matches."""
    if str(name) in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
        return int(value[0]) * int(value[2].getwidth()[0])
    if str(name) == "BRANCH":
        return min(int(one.getwidth()[0]) for one in value[1])
    if str(name) in ("SUBPATTERN", "ATOMIC_GROUP"):
        return sum(int(one.getwidth()[0]) for one in _inside(value))
    return 0 if str(name) in ("AT", "ASSERT", "ASSERT_NOT", "GROUPREF") else 1


def _alternatives(tree: Any) -> list[list[tuple[Any, Any]]]:
    parts = list(tree)
    if len(parts) == 1 and str(parts[0][0]) == "BRANCH":
        return [list(one) for one in parts[0][1][1]]
    return [parts]


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


def _added(rule: Any) -> int:
    try:
        if rule["type"] == "Sequence":
            return sum(map(_added, rule["processors"]))
        names = [one["SpecialToken"]["id"] for one in rule["single"] if "SpecialToken" in one]
        return sum(len(rule["special_tokens"][name]["ids"]) for name in names)
    except (TypeError, KeyError, AttributeError, RecursionError):
        return 0
