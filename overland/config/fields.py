"""Looks up the schema: which keys exist, of which type, and how to describe them in words."""

from __future__ import annotations

import re
import types
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

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

    @property
    def type_words(self) -> str:
        return in_words(self.annotation)

    @property
    def item_words(self) -> str:
        """The type of the values in a table such as `data.datasets`, in words."""
        return in_words(get_args(strip(self.annotation))[1])

    @property
    def table(self) -> type[Section] | None:
        """The section class of the values in a table of tables, such as `data.sources`."""
        kind = strip(self.annotation)
        value = get_args(kind)[1] if get_origin(kind) is dict else None
        return value if isinstance(value, type) and issubclass(value, Section) else None

    @property
    def record(self) -> type[Section] | None:
        """The section class of a table with its own keys, such as `model.sparse`."""
        kinds = [strip(part) for part in members(self.annotation)]
        return next((k for k in kinds if isinstance(k, type) and issubclass(k, Section)), None)

    def inside(self, path: tuple[str, ...]) -> Key | None:
        """Returns a key inside one of those tables: `data.sources.c4.weight`."""
        fields = self.table.model_fields if self.table else {}
        return Key(".".join(path[:3]), path[3], fields[path[3]]) if path[3] in fields else None

    @property
    def has_paths(self) -> bool:
        """Whether variables and `~` in the value are resolved."""
        table = self.table.model_fields if self.table else {}
        inner = [Key(self.dotted, name, field) for name, field in table.items()]
        return _has_paths(self.annotation) or any(key.has_paths for key in inner)

    @property
    def annotation(self) -> Any:
        """The annotation with its bounds, which pydantic stores separately."""
        annotation: Any = self.field.annotation
        for bound in self.field.metadata:
            annotation = Annotated[annotation, bound]
        return annotation

    @property
    def choices(self) -> list[str]:
        """The allowed words, if the key allows only certain words."""
        return [str(word) for part in members(self.annotation) for word in literal_words(part)]

    def accepts(self, kind: type) -> bool:
        return any(is_kind(part, kind) for part in members(self.annotation))


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
        field = key.record.model_fields.get(path[2])
        return Key(key.dotted, path[2], field) if field is not None else None
    if key is None or (len(path) > 2 and not key.accepts(dict)):
        return None
    return key.inside(path) if len(path) > 3 and key.table else key


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


def _has_paths(annotation: Any) -> bool:
    if HOLDS_A_PATH in getattr(annotation, "__metadata__", ()):
        return True
    return any(_has_paths(part) for part in get_args(annotation))


def in_words(annotation: Any) -> str:
    """Describes a type in plain words: `a positive whole number`, `one of "a" or "b"`."""
    parts = [part for part in members(annotation) if strip(part) is not type(None)]
    return " or ".join(_one_in_words(part) for part in parts)


def members(annotation: Any) -> list[Any]:
    """Returns the alternatives of a union; for anything else, the type itself."""
    if get_origin(annotation) is Annotated:
        inner = members(get_args(annotation)[0])
        if len(inner) > 1:
            return inner
    if get_origin(annotation) in (Union, types.UnionType):
        return [part for member in get_args(annotation) for part in members(member)]
    return [annotation]


def strip(annotation: Any) -> Any:
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    return annotation


def literal_words(annotation: Any) -> list[Any]:
    plain = strip(annotation)
    if get_origin(plain) is list:
        return literal_words(get_args(plain)[0])
    return list(get_args(plain)) if get_origin(plain) is Literal else []


def is_kind(annotation: Any, kind: type) -> bool:
    plain = strip(annotation)
    if kind is str and get_origin(plain) is Literal:
        return True
    return plain is kind or get_origin(plain) is kind


def _one_in_words(annotation: Any) -> str:
    plain = strip(annotation)
    if get_origin(plain) is Literal:
        words = [show_value(word) for word in get_args(plain)]
        return "one of " * (len(words) > 1) + any_of(words)
    if get_origin(plain) is list:
        (item,) = get_args(plain)
        if (length := _length(annotation)) is not None:
            return f"a list of {length} ({_one_in_words(item)} each)"
        words = literal_words(item)
        if words:
            return "a list of " + any_of([show_value(word) for word in words], "and")
        if isinstance(item, type) and issubclass(item, Section):
            return f"a list of tables with {any_of([*item.model_fields], 'and')}"
        return "a list of texts" if strip(item) is str else f"a list ({_one_in_words(item)} each)"
    if get_origin(plain) is dict:
        value = get_args(plain)[1]
        kinds = {str: "texts", Any: "values"}
        return "a table of names and " + kinds.get(strip(value), "tables")
    names = {str: "text in quotes", bool: "true or false", dict: "a table", list: "a list"}
    if plain in names:
        return names[plain]
    if isinstance(plain, type) and issubclass(plain, Section):
        return "a table"
    return _number_in_words("whole number" if plain is int else "number", _bounds(annotation))


def _number_in_words(noun: str, bounds: dict[str, float]) -> str:
    low, high = bounds.get("ge"), bounds.get("le")
    if bounds.get("gt") == 0:
        return f"a positive {noun}" + (f", at most {high:,}" if high is not None else "")
    if low is not None and high is not None:
        return f"a {noun} from {low:g} to {high:g}"
    if low is not None and "lt" in bounds:
        return f"a {noun} from {low:g} to below {bounds['lt']:g}"
    return f"a {noun}" if low is None else f"a {noun}, {low:g} or more"


def _length(annotation: Any) -> int | None:
    """Returns the length that a list must have, if it is fixed."""
    bounds = _bounds(annotation, ("min_length", "max_length"))
    least, most = bounds.get("min_length"), bounds.get("max_length")
    return int(least) if least is not None and least == most else None


def _bounds(annotation: Any, names: tuple[str, ...] = ("gt", "ge", "lt", "le")) -> dict[str, float]:
    found: dict[str, float] = {}
    while get_origin(annotation) is Annotated:
        for extra in annotation.__metadata__:
            for item in extra.metadata if isinstance(extra, FieldInfo) else [extra]:
                for name in names:
                    if getattr(item, name, None) is not None:
                        found[name] = getattr(item, name)
        annotation = get_args(annotation)[0]
    return found


def _walk() -> Iterator[Key]:
    for section, outer in JobConfig.model_fields.items():
        assert outer.annotation is not None
        for name, field in outer.annotation.model_fields.items():
            yield Key(section, field.alias or name, field)
