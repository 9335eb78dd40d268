"""Looks up the schema: which keys exist, of which type, how to describe them in words, and which
key a misspelled name most likely meant.
"""

from __future__ import annotations

import re
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from overland.config.errors import show_value
from overland.config.schema import HOLDS_A_PATH, JobConfig, Section
from overland.words import any_of, nearest_name

# Of the names and flavors of models, those that other trainers use for something else.
OLDER_VALUES = re.compile(r"llama|llama3_ft|.*_(flex|varlen)(_attn)?")


@dataclass(frozen=True)
class Key:
    """One key of the schema."""

    section: str
    name: str
    field: FieldInfo

    @property
    def dotted(self) -> str:
        return f"{self.section}.{self.name}"

    @property
    def attribute(self) -> str:
        """The key's name in Python, where some words are reserved."""
        return f"{self.name}_" if self.field.alias else self.name

    @property
    def default(self) -> Any:
        return self.field.get_default(call_default_factory=True)

    @property
    def description(self) -> str:
        return " ".join((self.field.description or "").split())

    @cached_property
    def types(self) -> list[Type]:
        """The types that a value may have."""
        annotation: Any = self.field.annotation
        for bound in self.field.metadata:  # which pydantic stores separately
            annotation = Annotated[annotation, bound]
        return types_of(annotation)

    @property
    def type_words(self) -> str:
        return _any_in_words(self.types)

    @property
    def item_words(self) -> str:
        """The type of the values in a table such as `data.datasets`, in words."""
        return _any_in_words(self.types[0].items)

    @property
    def table(self) -> type[Section] | None:
        """The section class of the values in a table of tables, such as `data.sources`."""
        one = self.types[0]
        return one.items[0].section if one.kind is dict and one.items else None

    @property
    def record(self) -> type[Section] | None:
        """The section class of a table with its own keys, such as `model.sparse`."""
        return next((one.section for one in self.types if one.section), None)

    def inside(self, *names: str) -> dict[str, Key]:
        """Returns the keys of this table (`model.sparse.pattern`), or of the table of this name in
        it (`data.sources.c4.weight`)."""
        table, above = self.table or self.record, ".".join([self.dotted, *names])
        fields = table.model_fields if table else {}
        return {name: Key(above, name, field) for name, field in fields.items()}

    @property
    def has_paths(self) -> bool:
        """Whether variables and `~` in the value are resolved."""
        inner = self.inside().values()
        return any(one.holds_path for one in self.types) or any(key.has_paths for key in inner)

    @property
    def choices(self) -> list[str]:
        """The allowed words, if the key allows only certain words."""
        return [str(word) for one in self.types for word in one.all_words]

    def accepts(self, kind: type) -> bool:
        return any(one.kind is kind for one in self.types)


class Type(NamedTuple):
    """One of the types that a value may have, such as a list of positive numbers."""

    kind: Any
    """The plain type: `list`, `str` also for words, a class of sections."""
    words: tuple[Any, ...]
    """The allowed words, if only certain words are."""
    marks: tuple[Any, ...]
    """Its bounds, and whether it holds a path."""
    items: tuple[Type, ...]
    """The types of the items of a list, or of the values of a table."""

    @property
    def all_words(self) -> tuple[Any, ...]:
        return self.words + sum((item.words for item in self.items if self.kind is list), ())

    @property
    def section(self) -> type[Section] | None:
        is_section = isinstance(self.kind, type) and issubclass(self.kind, Section)
        return self.kind if is_section else None

    @property
    def holds_path(self) -> bool:
        return HOLDS_A_PATH in self.marks or any(item.holds_path for item in self.items)

    def bound(self, name: str) -> Any:
        found = (getattr(mark, name, None) for mark in self.marks)
        return next((value for value in found if value is not None), None)


def types_of(annotation: Any, marks: tuple[Any, ...] = ()) -> list[Type]:
    """Returns the alternatives of a union; for anything else, the type itself."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        for extra in arguments[1:]:
            marks += tuple(extra.metadata) if isinstance(extra, FieldInfo) else (extra,)
        return types_of(arguments[0], marks)
    if origin in (Union, types.UnionType):
        return [one for part in arguments for one in types_of(part)]
    if origin is Literal:
        return [Type(str, arguments, marks, ())]
    items = tuple(types_of(arguments[-1])) if arguments else ()
    return [Type(origin or annotation, (), marks, items)]


@cache
def all_keys() -> dict[str, Key]:
    """Returns every key by its dotted name, in the order of the schema."""
    return {key.dotted: key for key in _walk()}


@cache
def sections() -> dict[str, str]:
    """Returns every section with its description."""
    return {
        name: " ".join((field.annotation.__doc__ or "").split())
        for name, field in JobConfig.model_fields.items()
    }


def find_key(path: tuple[str, ...]) -> Key | None:
    """Returns the key that a path leads to or into (`model.overrides.hidden_size` →
    `model.overrides`), or to a key of a table that has its own (`model.sparse.pattern`)."""
    key = all_keys().get(".".join(path[:2]))
    if key is not None and key.record and len(path) == 3:
        return key.inside().get(path[2])
    if key is None or (len(path) > 2 and not key.accepts(dict)):
        return None
    return key.inside(path[2]).get(path[3]) if len(path) > 3 and key.table else key


def is_current(path: tuple[str, ...], value: Any) -> bool:
    """Whether a key and its value are ours, so that no dialect needs to be asked about them."""
    key = find_key(path)
    if key is None:
        return False
    if key.dotted in ("model.name", "model.flavor"):
        return not (isinstance(value, str) and OLDER_VALUES.fullmatch(value))
    if isinstance(value, str) and key.choices:
        return value in key.choices
    return type(value) is not int or not key.accepts(str) or key.accepts(int)


def nearest_key(dotted: str) -> str | None:
    """Returns the key that was most likely meant, in the same section or in another."""
    section, _, name = dotted.partition(".")
    keys = list(all_keys().values())
    same_name = [key.dotted for key in keys if key.name == name]
    if f"training.{name}" in same_name and section == "data":  # the data of training
        return f"training.{name}"
    if same_name:
        return nearest_name(dotted, same_name, cutoff=0.0)
    own = {key.name: key.dotted for key in keys if key.section == section}
    other = {key.name: key.dotted for key in keys}
    for names in (own, other):
        found = nearest_name(name, names, cutoff=0.7)
        if found:
            return names[found]
    return None if section in sections() else nearest_name(dotted, all_keys(), cutoff=0.75)


def in_words(annotation: Any) -> str:
    """Describes a type in plain words: `a positive whole number`, `one of "a" or "b"`."""
    return _any_in_words(types_of(annotation))


def _any_in_words(found: Iterable[Type]) -> str:
    return " or ".join(_one_in_words(one) for one in found if one.kind is not type(None))


def _one_in_words(one: Type) -> str:
    if one.words:
        return "one of " * (len(one.words) > 1) + any_of([show_value(word) for word in one.words])
    if one.kind is list and one.items:
        (item,) = one.items
        each = f"({_one_in_words(item)} each)"
        length = one.bound("min_length")
        if length is not None and length == one.bound("max_length"):
            return f"a list of {length} {each}"
        if item.words:
            return "a list of " + any_of([show_value(word) for word in item.words], "and")
        if item.section:
            return f"a list of tables with {any_of([*item.section.model_fields], 'and')}"
        return "a list of strings" if item.kind is str else f"a list {each}"
    if one.kind is dict and one.items:
        kinds = {str: "strings", Any: "values"}
        return "a table of names and " + kinds.get(one.items[0].kind, "tables")
    names = {str: "text in quotes", bool: "true or false", dict: "a table", list: "a list"}
    if one.kind in names:
        return names[one.kind]
    return "a table" if one.section else _number_in_words(one)


def _number_in_words(one: Type) -> str:
    noun = "whole number" if one.kind is int else "number"
    low, high, below = one.bound("ge"), one.bound("le"), one.bound("lt")
    if one.bound("gt") == 0:
        return f"a positive {noun}" + (f", at most {high:,}" if high is not None else "")
    if low is not None and high is not None:
        return f"a {noun} from {low:g} to {high:g}"
    if low is not None and below is not None:
        return f"a {noun} from {low:g} to below {below:g}"
    return f"a {noun}" if low is None else f"a {noun}, {low:g} or more"


def _walk() -> Iterator[Key]:
    for section, outer in JobConfig.model_fields.items():
        assert outer.annotation is not None
        for name, field in outer.annotation.model_fields.items():
            yield Key(section, field.alias or name, field)
