"""Values of an MDS sample, by the name of their encoding. Pickles are never loaded."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from overland.data.sources.source import TOKEN_DTYPES, Kind

# Codes that a value begins with where the encoding's name leaves the type open.
DTYPES = {
    8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 32: "uint32", 33: "int32", 64: "uint64",
    65: "int64", 18: "float16", 34: "float32", 66: "float64",
}  # fmt: skip
SHAPE_DTYPES = ("<u1", "<u2", "<u4", "<u8")


def kind_of(encoding: str) -> Kind | None:
    """What a column may hold for us; of json only its values tell."""
    name, _, rest = encoding.partition(":")
    if name == "str":
        return "text"
    dtype, *shape = rest.split(":")
    is_ids = name == "ndarray" and dtype in ("", *TOKEN_DTYPES) and len(shape) < 2
    return "tokens" if is_ids or name == "bytes" else None


def decode_value(encoding: str, data: bytes) -> Any:
    """Raises ValueError (UnicodeDecodeError among them) for bytes that are no such value."""
    name, _, rest = encoding.partition(":")
    if name == "str":
        return data.decode("utf-8")
    if name == "bytes":
        return data
    if name == "int":
        return int(_array(data, "int64")[0])
    if name in DTYPES.values():
        return _array(data, name)[0].item()
    if name == "json":
        return _decode_json(data)
    if name == "ndarray":
        return _decode_ndarray(data, *rest.split(":")) if rest else _decode_ndarray(data)
    raise ValueError(f"values of encoding {encoding!r} are not read")


def _decode_json(data: bytes) -> Any:
    try:
        value = json.loads(data.decode("utf-8"))
        if isinstance(value, str):
            value.encode()  # JSON can say half of a surrogate pair, which is no text
        return value
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _decode_ndarray(data: bytes, dtype: str | None = None, shape: str | None = None) -> Any:
    """Type and shape stand in the encoding's name, or else before the values."""
    try:
        if dtype is None:
            dtype, data = DTYPES[data[0]], data[1:]
        if shape is not None:
            sizes = [int(size) for size in shape.split(",")]
        else:
            num_dims, code = data[0] >> 2, data[0] & 3
            end = 1 + num_dims * 2**code
            sizes = np.frombuffer(data[1:end], SHAPE_DTYPES[code]).tolist()
            data = data[end:]
    except (IndexError, KeyError):
        raise ValueError("the array's head is damaged") from None
    return _array(data, dtype).reshape(sizes)


def _array(data: bytes, dtype: str) -> Any:
    return np.frombuffer(data, np.dtype(dtype).newbyteorder("<"))
