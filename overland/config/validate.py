"""Turns entries from anywhere into a `JobConfig`, or into one sentence per problem: unknown keys,
wrong types, keys of a section that is off, and expressions in `[lora]` that could take forever.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from overland.config.errors import ConfigError, Problem, show_value
from overland.config.fields import all_keys, find_key, nearest_key, sections
from overland.config.schema import SWITCHES, JobConfig, Lora
from overland.config.source import Entries, Entry, KeyPath, nest
from overland.plugins import plugin
from overland.words import any_of, nearest_name

EXPRESSIONS = ("targets", "exclude", "rank_pattern", "alpha_pattern")
"""The keys of [lora] that may be regular expressions."""
MOST_REPEATS = 6  # each one multiplies the cost of a match by up to the length of a name


def validate_entries(entries: Entries) -> tuple[JobConfig, list[Problem], set[KeyPath]]:
    """Returns the config, the problems, and the paths left out of the config because of them."""
    problems, unknown = _unknown_keys(entries)
    known = {path: entry for path, entry in entries.items() if path not in unknown}
    bad = _bad_paths(known)
    reported: set[tuple[str, int]] = set()
    for path in bad:
        key = find_key(path)
        assert key is not None  # unknown keys were removed above
        inside = {other: known[other] for other in known if other[: len(path)] == path}
        where = next(iter(inside.values())).where
        below = {other[len(path) :]: entry for other, entry in inside.items()}
        value = inside[path].value if path in inside else nest(below)
        if (where, id(value)) in reported:
            continue  # one value of another trainer's file, which sets several keys
        reported.add((where, id(value)))
        is_item = len(path) == 3 and key.dotted != ".".join(path)
        words = key.item_words if is_item else key.type_words
        near = _nearest_choice(value, key.choices)
        near = show_value(near) if near else None
        problems.append(Problem(f"expected {words}", where, ".".join(path), value, near))
    dropped = unknown | {path for path in known if any(path[: len(b)] == b for b in bad)}
    good = {path: entry for path, entry in entries.items() if path not in dropped}
    return JobConfig.model_validate(nest(good)), problems, dropped


def validate_again(config: JobConfig, where: str) -> JobConfig:
    """Returns a config whose values may have been changed since it was loaded, or raises a
    `ConfigError` that names the keys that are no longer valid."""
    tree = config.model_dump(by_alias=True, warnings=False)
    entries: Entries = {}
    for section, keys in tree.items():
        if isinstance(keys, dict):
            entries |= {(section, key): Entry(value, where) for key, value in keys.items()}
        else:
            entries[(section,)] = Entry(keys, where)
    valid, problems, _ = validate_entries(entries)
    if problems:
        raise ConfigError(problems)
    return valid


def check_switches(
    config: JobConfig, entries: Entries, dropped: Collection[KeyPath] = ()
) -> Iterator[Problem]:
    """Refuses keys of a section that is not enabled: they would have no effect. Says nothing if a
    key of the section was dropped because of an error of its own: it may be the one that enables
    it, misspelled."""
    for section, switches in SWITCHES.items():
        if any(path[0] == section for path in dropped):
            continue
        values = getattr(config, section)
        changed = [  # only these: a run folder's config sets all keys
            f"{section}.{name}"
            for name, field in type(values).model_fields.items()
            if getattr(values, name) != field.default
        ]
        if not set(changed).isdisjoint(switches):
            continue
        for key in changed:
            path = tuple(key.split("."))
            where = next((one.where for other, one in entries.items() if other[:2] == path), "")
            message = f"has no effect unless {any_of(switches)} is set"
            yield Problem(message, where, key, getattr(values, path[1]))


def _unknown_keys(entries: Entries) -> tuple[list[Problem], set[KeyPath]]:
    problems: dict[KeyPath, Problem] = {}
    unknown: set[KeyPath] = set()
    for path, entry in entries.items():
        empty_section = len(path) == 1 and path[0] in sections() and entry.value == {}
        if empty_section or find_key(path) is not None:
            continue
        unknown.add(path)
        section, is_section = path[0], path[0] in sections()
        if len(path) == 1 and is_section:
            message = f"is a section; write its keys below [{section}]"
            problems[path] = Problem(message, entry.where, section, entry.value)
        elif len(path) == 1 and not isinstance(entry.value, dict):
            problems[path] = _taught("is not inside a [section]", path, entry)
        elif not is_section:
            near = nearest_name(section, sections())
            near = f"[{near}]" if near else nearest_key(".".join(path[:2]))
            problem = Problem("unknown section", entry.section_where, f"[{section}]", nearest=near)
            problems.setdefault((section,), problem)
        else:
            problems[path] = _taught("unknown key", path, entry)
    return list(problems.values()), unknown


def _taught(message: str, path: KeyPath, entry: Entry) -> Problem:
    """Returns a problem that suggests the nearest key, or what to set for a name from another
    trainer."""
    name = path[-1]
    near = _nearest_inside(path) or nearest_key(".".join(("", *path)[-2:]))
    if path == LOSS and near is not None and entry.value not in all_keys()[near].choices:
        near = "training.objective"
    same_name = near is not None and near.rpartition(".")[2] == name
    if (advice := plugin("dialects").lesson(name)) and not same_name:
        message, near = f"{message}; {advice}", None
    return Problem(message, entry.where, ".".join(path), entry.value, near)


def _bad_paths(known: Entries) -> list[KeyPath]:
    try:
        JobConfig.model_validate(nest(known))
    except ValidationError as error:
        found: dict[KeyPath, None] = {}
        for detail in error.errors(include_url=False, include_context=False):
            location = tuple(str(part) for part in detail["loc"])
            deeper = [p for p in known if len(p) > 2 and p == location[: len(p)]]
            found[deeper[0] if deeper else location[:2]] = None
        return list(found)
    return []


def _nearest_inside(path: KeyPath) -> str | None:
    """Returns the nearest key in the same table, such as one of `data.sources` or
    `model.sparse`."""
    *above, name = path[:4]
    table = find_key(tuple(above)) if len(above) > 1 else None
    near = nearest_name(name, table.inside()) if table else None
    return ".".join((*above, near)) if near else None


def _nearest_choice(value: Any, choices: list[str]) -> str | None:
    words = value if isinstance(value, list) else [value]
    for word in words:
        if isinstance(word, str) and word not in choices:
            return nearest_name(word, choices)
    return None


LOSS = ("training", "loss")  # near to preference.loss, which it means only with a value of that


def check_expressions(
    config: JobConfig, places: Mapping[KeyPath, str]
) -> tuple[JobConfig, list[Problem]]:
    """Returns the config without the regular expressions in `[lora]` that cannot be used, and the
    problems with these."""
    problems: list[Problem] = []
    left: dict[str, Any] = {}
    for key in EXPRESSIONS:
        value = getattr(config.lora, key)
        wrong = next(filter(None, map(wrong_expression, expressions_in(value))), "")
        if wrong:
            where = next((at for path, at in places.items() if path[:2] == ("lora", key)), "")
            problems.append(Problem(wrong, where, f"lora.{key}", value))
            left[f"lora.{key}"] = Lora.model_fields[key].default
    return config.having(left), problems


def expressions_in(value: str | list[str] | dict[str, Any]) -> list[str]:
    """Returns the regular expressions in a value of `[lora]`; lists contain names, not
    expressions."""
    return [value] if isinstance(value, str) else [*value] if isinstance(value, dict) else []


def wrong_expression(text: str) -> str:
    """Returns why a regular expression is refused, or an empty string. Some, such as (.+)+x,
    (.|.)*x or .* many times over, would take years to match a name of 40 letters."""
    try:
        re.compile(text)
    except (re.error, RecursionError, OverflowError):
        return "is not a valid regular expression"
    bare = re.sub(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", "x", text, flags=re.DOTALL)
    if re.search(r"\)[*+{]", bare) or len(re.findall(r"[*+{]", bare)) > MOST_REPEATS:
        return (
            f"repeats a group, or has more than {MOST_REPEATS} of * + {{}}, and could take forever "
            "to match; write it without these"
        )
    return ""
