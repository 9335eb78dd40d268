"""Which Python values ranks can send each other, and how they are written as JSON: unlike a pickle,
reading it runs no code.

Everything comes back as it was sent, tuples as tuples and sets as sets. Classes of ours are sent if
they are marked with `@record`; anything else is an error on the rank that sends it.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

C = TypeVar("C", bound=type)

SCALARS = (type(None), bool, int, float, str)


def record(cls: C) -> C:
    """Lets ranks send each other instances of this NamedTuple, dataclass, or class whose attributes
    are all plain data."""
    assert cls.__name__ not in MAKERS, f"two records are called {cls.__name__}"
    maker: Any = getattr(cls, "_make", None)  # of a NamedTuple
    MAKERS[cls.__name__] = maker or partial(_rebuilt, cls)
    RECORDS.add(cls)
    return cls


def to_json(value: Any) -> bytes:
    return json.dumps(_tagged(value), separators=(",", ":")).encode()


def from_json(text: bytes) -> Any:
    return json.loads(text, object_hook=_made)


def _tagged(value: Any) -> Any:
    """Returns what JSON can express: lists and scalars as they are, all else as {kind: content}."""
    kind = type(value)
    if kind in SCALARS:
        return value
    if kind is list:
        return list(map(_tagged, value))
    is_record = kind in RECORDS
    if kind in (tuple, set, frozenset) or (is_record and isinstance(value, tuple)):
        return {kind.__name__: list(map(_tagged, value))}
    if kind is dict:
        return {"dict": [[_tagged(key), _tagged(one)] for key, one in value.items()]}
    if is_record:
        return {kind.__name__: [[name, _tagged(one)] for name, one in vars(value).items()]}
    if isinstance(value, Path):
        return {"path": str(value)}
    if kind is bytes:
        return {"bytes": base64.b64encode(value).decode()}
    if kind is np.ndarray and value.dtype.kind not in "OV":  # objects, and records of fields
        return {"array": [value.dtype.str, _tagged(value.shape), _tagged(value.tobytes())]}
    raise TypeError(f"ranks cannot send each other a {kind.__name__}: mark its class with @record")


def _made(tagged: dict[str, Any]) -> Any:
    ((kind, content),) = tagged.items()
    return MAKERS[kind](content)


def _rebuilt(cls: type, attributes: list[list[Any]]) -> Any:
    made: Any = object.__new__(cls)
    vars(made).update(attributes)
    return made


def _array(content: list[Any]) -> npt.NDArray[Any]:
    dtype, shape, data = content
    return np.frombuffer(data, dtype).reshape(shape)


RECORDS: set[type] = set()
MAKERS: dict[str, Callable[[Any], Any]] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "dict": dict,
    "path": Path,
    "bytes": base64.b64decode,
    "array": _array,
}
